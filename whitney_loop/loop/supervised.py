"""Prompts and completions to learn from, as supervised fine-tuning takes them: read, and put into payloads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from whitney_loop.datums import Datum, sft_datum
from whitney_loop.loop.files import read_text
from whitney_loop.loop.metrics import Payload, trained_tokens
from whitney_loop.loop.options import UsageError
from whitney_loop.loop.training import Training
from whitney_loop.payloads import check_payload, forward_backward_payload

END = 256  # the embedded model's end of a text


def read_examples(path: Path, option: str, *, text: bool) -> list[Datum]:
    """Return a datum per line of a JSONL file of ``{"prompt": …, "completion": …}``: token ids, or with ``text`` texts.

    A text becomes its bytes, and the end token after a completion: the tokens of the embedded model. Raise UsageError
    with option, file and line if one is wrong.
    """
    try:
        text_of_file = read_text(path)
    except ValueError as error:
        raise UsageError(f"{option} {error}") from None
    data = []
    # Not splitlines: it splits at characters that may stand in a text.
    for number, line in enumerate(text_of_file.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            if not isinstance(example, dict) or example.keys() != {"prompt", "completion"}:
                raise ValueError('expected {"prompt": …, "completion": …}')
            prompt, completion = (_token_ids(example[name], name, text=text) for name in ("prompt", "completion"))
            if not completion:
                raise ValueError("completion is empty: there is nothing to learn from it")
            data.append(sft_datum(prompt, completion))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{option} {path}:{number}: {error}") from None
    if not data:
        raise UsageError(f"{option} {path}: holds no examples")
    return data


def _token_ids(value: Any, name: str, *, text: bool) -> list[int]:
    if not isinstance(value, (str, list)):
        raise ValueError(f"{name} is a {type(value).__name__}, expected text or a list of token ids")
    if isinstance(value, list):
        return value
    if not text:
        raise ValueError(
            f"{name} is text, which only the embedded model reads: tokenize it first, and give the token ids"
        )
    return [*value.encode(), *([END] if name == "completion" else [])]


def steps_in(data: Sequence[Datum], epochs: int, batch_size: int) -> int:
    """Return how many optimizer steps ``epochs`` passes over the data take."""
    return epochs * -(-len(data) // batch_size)


def batch_of_step(data: Sequence[Datum], batch_size: int, seed: int, step: int, provider: str) -> tuple[int, Payload]:
    """Return (epoch, checked ``cross_entropy`` payload) of a step; ``seed`` decides the order in each epoch."""
    epoch, index = divmod(step, steps_in(data, 1, batch_size))
    order = random.Random(f"{seed}:{epoch}").sample(data, len(data))
    payload = forward_backward_payload(order[index * batch_size : (index + 1) * batch_size], "cross_entropy")
    check_payload(payload, provider)
    return epoch, payload


def train_on_examples(training: Training, run_id: str, data: Sequence[Datum], epochs: int, batch_size: int) -> int:
    """Fine-tune a second run, such as a teacher, with the options of the first; return the number of trained tokens."""
    client, tokens = training.client, 0
    for step in range(steps_in(data, epochs, batch_size)):
        _, payload = batch_of_step(data, batch_size, training.seed, step, training.ctx.provider)
        client.run_operation(run_id, "forward_backward", payload)
        client.run_operation(run_id, "optim_step", {"optimizer": training.optimizer})
        tokens += trained_tokens(payload)
    return tokens


def evaluation_payloads(data: Sequence[Datum], batch_size: int, provider: str) -> Iterator[Payload]:
    """Checked payloads of ``forward`` that hold all data in their order."""
    for start in range(0, len(data), batch_size):
        payload = forward_backward_payload(data[start : start + batch_size], "cross_entropy")
        check_payload(payload, provider, kind="forward")
        yield payload
