"""The results that a loop builds on: read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from whitney_loop import wire
from whitney_loop.errors import UnexpectedResponse, shortened


def result_sampler_id(result: Mapping[str, Any]) -> str:
    """Return the ``sampler_id`` of a ``save_weights_for_sampler`` result. Raise UnexpectedResponse without one."""
    sampler_id = result.get(wire.SAMPLER_ID) if isinstance(result, Mapping) else None
    if not wire.is_id(sampler_id):
        message = f"save_weights_for_sampler: result.sampler_id is {shortened(sampler_id)}, expected an id"
        raise UnexpectedResponse(message)
    return sampler_id


def result_sequences(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ``sequences`` in the result of ``sample``: each has ``tokens``, and as many finite ``logprobs``.

    Raise UnexpectedResponse, with the field, if one does not: such a completion cannot be trained on.
    """
    sequences = result.get(wire.SEQUENCES) if isinstance(result, Mapping) else None
    if not isinstance(sequences, list) or not sequences:
        raise _bad_sample("sequences", sequences, "a list of at least one sequence")
    for index, sequence in enumerate(sequences):
        where = f"sequences[{index}]"
        if not isinstance(sequence, dict):
            raise _bad_sample(where, sequence, "an object")
        tokens, logprobs = sequence.get(wire.TOKENS), sequence.get(wire.LOGPROBS)
        if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int} or min(tokens, default=0) < 0:
            raise _bad_sample(f"{where}.tokens", tokens, "a list of token ids")
        if not isinstance(logprobs, list):
            raise _bad_sample(f"{where}.logprobs", logprobs, "a list of finite numbers, one per token")
        # First check the whole list at once, which is fast: if one entry is not finite, their sum is not either.
        if not (set(map(type, logprobs)) <= {float} and math.isfinite(sum(logprobs))):
            for position, logprob in enumerate(logprobs):
                if not _is_finite(logprob):
                    raise _bad_sample(f"{where}.logprobs[{position}]", logprob, "a finite number")
        if len(logprobs) != len(tokens):
            raise _bad_sample(
                f"{where}.logprobs", logprobs, f"{len(tokens)} numbers, one per token, not {len(logprobs)}"
            )
    return sequences


def _bad_sample(where: str, found: object, expected: str) -> UnexpectedResponse:
    return UnexpectedResponse(f"sample: result.{where} is {shortened(found)}, expected {expected}")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
