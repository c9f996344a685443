"""Tensors and datums: the form of one training example on the wire.

A datum made of P prompt tokens and T completion tokens has N = P + T − 1 input tokens. Its targets are the same tokens
shifted by one, and every tensor has N entries. All tensors are 0 at positions whose target is a prompt token. Numbers
may be Python's, or scalars and arrays of numpy or torch; the result is plain Python, ready for JSON.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict


class Tensor(TypedDict):
    """One dense tensor. ``dtype`` is ``int64`` or ``float32``, ``shape`` is ``[len(values)]``."""

    dtype: str
    shape: list[int]
    values: list[int] | list[float]


class Datum(TypedDict):
    """One training example: ``input`` is ``{"token_ids": [N ints]}``, ``loss_inputs`` maps a name to its tensor."""

    input: dict[str, list[int]]
    loss_inputs: dict[str, Tensor]


def tensor(dtype: str, values: Iterable[Any]) -> Tensor:
    """Return a tensor of one dimension: integers ≥ 0 for ``int64``, finite numbers for ``float32``.

    Raise ValueError, with the position, if a value does not fit the dtype, and for any other dtype.
    Source: Whitney, "Datum helpers".
    """
    if dtype not in ("int64", "float32"):
        raise ValueError(f"dtype is {_show(dtype)}, expected 'int64' (token ids) or 'float32' (everything else)")
    numbers = _token_ids(values, "values") if dtype == "int64" else _numbers(values, "values")
    return _tensor(dtype, numbers)


def sft_datum(prompt_tokens: Iterable[int], completion_tokens: Iterable[int]) -> Datum:
    """Return a ``cross_entropy`` datum that trains on the completion: weight 0 on the prompt, 1 on the completion.

    An empty completion gives a datum whose weights are all 0. Raise ValueError if the prompt is empty, or if both
    together have fewer than two tokens. Source: Whitney, "Datum helpers".
    """
    prompt = _prompt(prompt_tokens)
    completion = _token_ids(completion_tokens, "completion_tokens")
    return _shifted(prompt + completion, {"weights": [0.0] * len(prompt) + [1.0] * len(completion)})


def rl_datum(
    prompt_tokens: Iterable[int],
    sampled_tokens: Iterable[int],
    sampled_logprobs: Iterable[float],
    advantage: float | Iterable[float],
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> Datum:
    """Return a datum for ``importance_sampling`` and its family, from one sampled completion.

    ``sampled_logprobs`` has one entry (in nats) per sampled token. ``advantage`` is one number for the whole
    completion, or one per sampled token. 0 ≤ ``clip_low`` ≤ 1 ≤ ``clip_high`` are probability *ratios* (0.8 and 1.2),
    sent as per-token tensors, which only Tinker takes; on Modal leave both out and use ``loss_config``.
    Raise ValueError, with the position, if a number is not finite, a logprob is above 0 by more than rounding, lengths
    do not match, the prompt is empty, there are fewer than two tokens, or an epsilon is given for a ratio.
    Source: Whitney, "Datum helpers".
    """
    prompt = _prompt(prompt_tokens)
    completion = _token_ids(sampled_tokens, "sampled_tokens")
    logprobs = _logprobs(sampled_logprobs, "sampled_logprobs", len(completion))
    return _policy_datum([(prompt, None), (completion, logprobs)], advantage, clip_low, clip_high)


def trajectory_datum(
    spans: Iterable[tuple[Iterable[int], Iterable[float] | None]],
    advantage: float | Iterable[float],
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> Datum:
    """Return such a datum for a trajectory of several turns: only sampled tokens are trained on.

    ``spans`` is a list of ``(tokens, logprobs)`` in order. ``logprobs`` has one entry per token for a sampled span, and
    is None for an observation (the prompt, the answer of a tool). The first span is an observation with at least one
    token. ``advantage`` is one number, or one per sampled token of all spans together. Raise what ``rl_datum`` raises.
    """
    read = []
    for index, span in enumerate(_listed(spans, "spans")):
        if not isinstance(span, (tuple, list)) or len(span) != 2:
            raise ValueError(f"spans[{index}] is {_show(span)}, expected (tokens, logprobs or None)")
        tokens, logprobs = _token_ids(span[0], f"spans[{index}].tokens"), span[1]
        if logprobs is not None:
            logprobs = _logprobs(logprobs, f"spans[{index}].logprobs", len(tokens))
        read.append((tokens, logprobs))
    if not read or not read[0][0] or read[0][1] is not None:
        raise ValueError("spans[0] must be an observation (logprobs None) of at least one token: the prompt")
    return _policy_datum(read, advantage, clip_low, clip_high)


def critic_datum(
    prompt_tokens: Iterable[int], sampled_tokens: Iterable[int], values: Iterable[float], returns: Iterable[float]
) -> Datum:
    """Return a ``ppo_critic`` datum: the ``values`` that the critic gave before, and the ``returns`` it should learn.

    Both have one entry per sampled token, for the state before that token (see ``completion_values``). Raise
    ValueError, with the position, if a number is not finite, and if lengths do not match.
    """
    prompt = _prompt(prompt_tokens)
    completion = _token_ids(sampled_tokens, "sampled_tokens")
    zeros = [0.0] * len(prompt)
    per_token = {
        "weights": zeros + [1.0] * len(completion),
        "values": zeros + _numbers(values, "values", len(completion)),
        "returns": zeros + _numbers(returns, "returns", len(completion)),
    }
    return _shifted(prompt + completion, per_token)


def completion_logprobs(result: Mapping[str, Any], prompt_tokens: Iterable[int]) -> list[float]:
    """Return the logprobs of the completion, from a ``logprobs`` result for prompt and completion together.

    One logprob (in nats) per completion token. Raise ValueError if the result has no logprobs, fewer than the prompt
    has tokens, or one that is not a finite number, or above 0 by more than rounding.
    """
    start = len(_prompt(prompt_tokens))
    return _logprobs(_completion_part(result, "logprobs", start), "result.logprobs", first=start)


def completion_values(output: Mapping[str, Any], prompt_tokens: Iterable[int]) -> list[float]:
    """Return the values of the completion, from one of the ``outputs`` of a ``ppo_critic`` forward.

    One value per completion token, for the state before it. Raise ValueError if the output has no values, too few for
    the prompt, or one that is not a finite number.
    """
    # Value i is that of the prefix that ends at input i. The state before the first completion token ends at the last
    # prompt token.
    start = len(_prompt(prompt_tokens)) - 1
    return _numbers(_completion_part(output, "values", start), "result.values", first=start)


def _completion_part(result: Mapping[str, Any], name: str, start: int) -> list[Any]:
    numbers: Any = result.get(name) if isinstance(result, Mapping) else None
    numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    if not isinstance(numbers, list) or len(numbers) < start:
        raise ValueError(f"result.{name} is {_show(numbers)}, expected a list of at least {start}, one per token")
    return numbers[start:]


def _policy_datum(
    spans: Sequence[tuple[list[int], list[float] | None]], advantage: Any, clip_low: Any, clip_high: Any
) -> Datum:
    """Return a datum of the importance_sampling family; its tensors are 0 at tokens that were not sampled."""
    length = sum(len(tokens) for tokens, logprobs in spans if logprobs is not None)
    advantages = _one_per_token(advantage, "advantage", length)
    ratios: dict[str, float] = {}
    if clip_low is not None:
        ratios["clip_low_threshold"] = _ratio(clip_low, "clip_low", 0, 1)
    if clip_high is not None:
        ratios["clip_high_threshold"] = _ratio(clip_high, "clip_high", 1, math.inf)
    token_ids: list[int] = []
    per_token: dict[str, list[float]] = {name: [] for name in ("weights", "logprobs", "advantages", *ratios)}
    start = 0  # of the span among all sampled tokens
    for tokens, logprobs in spans:
        token_ids += tokens
        if logprobs is None:
            for numbers in per_token.values():
                numbers += [0.0] * len(tokens)
            continue
        per_token["weights"] += [1.0] * len(tokens)
        per_token["logprobs"] += logprobs
        per_token["advantages"] += advantages[start : start + len(tokens)]
        for name, ratio in ratios.items():
            per_token[name] += [ratio] * len(tokens)
        start += len(tokens)
    return _shifted(token_ids, per_token)


def _shifted(tokens: list[int], per_token: Mapping[str, list[float]]) -> Datum:
    """Return the datum of a sequence; a number of ``per_token`` is put at the position whose target is its token."""
    if len(tokens) < 2:
        raise ValueError("prompt and completion have one token in all; a datum needs at least two")
    loss_inputs = {"target_tokens": _tensor("int64", tokens[1:])}
    loss_inputs |= {name: _tensor("float32", numbers[1:]) for name, numbers in per_token.items()}
    return {"input": {"token_ids": tokens[:-1]}, "loss_inputs": loss_inputs}


def _tensor(dtype: str, values: list[int] | list[float]) -> Tensor:
    return {"dtype": dtype, "shape": [len(values)], "values": values}


def _prompt(prompt_tokens: Any) -> list[int]:
    prompt = _token_ids(prompt_tokens, "prompt_tokens")
    if not prompt:
        raise ValueError("prompt_tokens is empty; a datum needs at least one prompt token (a BOS token will do)")
    return prompt


def _one_per_token(value: Any, where: str, length: int) -> list[float]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return _numbers(value, where, length)
    return [_number(value, where)] * length


def _ratio(value: Any, where: str, low: float, high: float) -> float:
    ratio = _number(value, where)
    if not low <= ratio <= high:
        raise ValueError(
            f"{where} is {ratio!r}, expected {low} to {high}: clip thresholds are probability ratios, not epsilons "
            "(for an epsilon of 0.2 pass clip_low=0.8, clip_high=1.2)"
        )
    return ratio


def _numbers(values: Any, where: str, length: int | None = None, first: int = 0) -> list[float]:
    """Return plain floats; ``first`` is the position of the first one in the list that a message names."""
    numbers = _listed(values, where)
    # First check the whole list at once, which is fast: if one entry is not finite, their sum is not either.
    if not (set(map(type, numbers)) <= {float} and math.isfinite(sum(numbers))):
        numbers = [_number(value, f"{where}[{first + index}]") for index, value in enumerate(numbers)]
    if length is not None and len(numbers) != length:
        raise ValueError(f"{where} has {len(numbers)} entries, expected one each for {length} sampled tokens")
    return numbers


def _logprobs(values: Any, where: str, length: int | None = None, first: int = 0) -> list[float]:
    logprobs = _numbers(values, where, length, first)
    largest = max(logprobs, default=0.0)
    if largest > 1e-3:  # rounding may leave it a little above 0
        index = first + logprobs.index(largest)
        raise ValueError(f"{where}[{index}] is {largest!r}, but a logprob is at most 0: is its sign flipped?")
    return logprobs


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} is {_show(value)}, expected a finite number")
    return number


def _token_ids(values: Any, where: str) -> list[int]:
    tokens = _listed(values, where)
    if set(map(type, tokens)) <= {int} and min(tokens, default=0) >= 0 and max(tokens, default=0) < 2**63:
        return tokens  # the whole list is checked at once first, which is fast
    return [_token_id(value, f"{where}[{index}]") for index, value in enumerate(tokens)]


def _token_id(value: Any, where: str) -> int:
    try:
        plain = value.item() if hasattr(value, "item") else value
        token = -1 if isinstance(plain, bool) else operator.index(plain)
    except (TypeError, ValueError, RuntimeError):
        token = -1
    if not 0 <= token < 2**63:  # the wire's dtype is int64
        raise ValueError(f"{where} is {_show(value)}, expected a token id: an integer of at least 0, within int64")
    return token


def _listed(values: Any, where: str) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str):
        raise ValueError(f"{where} is the text {_show(values)}, expected a sequence of numbers: tokenize it first")
    if not isinstance(values, Iterable):
        raise ValueError(f"{where} is {_show(values)}, expected a sequence")
    return list(values)


def _show(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print an integer of thousands of digits, alone or in a list
        return f"of type {type(value).__name__}"
