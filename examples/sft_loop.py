"""Supervised fine-tuning: passes over a data set of prompts and completions, without sampling.

    python examples/sft_loop.py --learning-rate 0.1 --epochs 3

A line of ``--data`` is ``{"prompt": …, "completion": …}``, each a list of token ids, or on the embedded service a text
(its bytes; a completion that is text gets the end token, 256). The loss is ``cross_entropy`` on the completions. Where
it trains, how it ends and the exit codes are those of ``rl_loop.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loop_support import (
    Payload,
    Place,
    Summary,
    UsageError,
    add_common_options,
    checked_optimizer,
    formatted,
    is_embedded,
    open_run,
    run_loop,
    say,
    train_on,
    trained_tokens,
)
from loop_warnings import Warnings
from whitney_loop import Datum, LoopContext, check_payload, forward_backward_payload, sft_datum

EXAMPLE_DATA = Path(__file__).with_name("sft_train.jsonl")
EXAMPLE_EVAL_DATA = Path(__file__).with_name("sft_eval.jsonl")
END = 256  # the embedded model's end of a text


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        optimizer = checked_optimizer(options, "batch_size", "epochs")
        data, eval_data = read_both(options)
    except UsageError as error:
        say(f"error: {error}")
        return 2
    return run_loop(options, lambda place, summary: train(options, place, summary, data, eval_data, optimizer))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune on prompts and completions.")
    parser.add_argument("--data", type=Path, metavar="FILE.jsonl", help="to train on (embedded: sft_train.jsonl here)")
    parser.add_argument("--eval-data", type=Path, metavar="FILE.jsonl", help="its loss is told before and after")
    parser.add_argument("--batch-size", type=int, default=8, help="examples per optimizer step (default 8)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data, each in its own order (default 1)")
    add_common_options(parser)
    return parser.parse_args(arguments)


def read_both(options: argparse.Namespace) -> tuple[list[Datum], list[Datum]]:
    """The data to train on, and the data to evaluate on, which may be none away from the embedded service."""
    embedded = is_embedded(options)
    path = options.data or (EXAMPLE_DATA if embedded else None)
    eval_path = options.eval_data or (EXAMPLE_EVAL_DATA if embedded and not options.data else None)
    if path is None:
        raise UsageError("--data is required away from the embedded service (--local rehearses)")
    return read_data(path, text=embedded), read_data(eval_path, text=embedded) if eval_path else []


def read_data(path: Path, *, text: bool) -> list[Datum]:
    """One datum per line of a JSONL file; UsageError names the file and the line that is wrong."""
    try:
        lines = path.read_bytes().split(b"\n")  # and not splitlines, which knows line ends that may stand in a text
    except OSError as error:
        raise UsageError(f"{path}: {error}") from None
    data = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line.decode())
            if not isinstance(example, dict) or example.keys() != {"prompt", "completion"}:
                raise ValueError('expected {"prompt": …, "completion": …}')
            prompt, completion = (token_ids(example[name], name, text=text) for name in ("prompt", "completion"))
            if not completion:
                raise ValueError("completion is empty: there is nothing to learn from it")
            data.append(sft_datum(prompt, completion))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: {error}") from None
    if not data:
        raise UsageError(f"{path}: no examples in it")
    return data


def token_ids(value: Any, name: str, *, text: bool) -> list[int]:
    if not isinstance(value, (str, list)):
        raise ValueError(f"{name} is a {type(value).__name__}, expected text or a list of token ids")
    if isinstance(value, list):
        return value
    if not text:
        raise ValueError(f"{name} is text, which only the embedded service's model reads; give token ids")
    return [*value.encode(), *([END] if name == "completion" else [])]


def train(
    options: argparse.Namespace,
    place: Place,
    summary: Summary,
    data: list[Datum],
    eval_data: list[Datum],
    optimizer: Payload,
) -> int:
    summary |= {"steps": 0, "tokens_trained": 0, "eval_loss_before": None, "eval_loss_after": None}
    Warnings(summary).learning_rate(options.learning_rate, embedded=place.embedded)
    needed = ["forward_backward", "optim_step", *(["forward"] if eval_data else [])]
    with open_run(options, place, summary, needed) as ctx:
        summary["eval_loss_before"] = evaluate(ctx, eval_data, options.batch_size, "before")
        train_epochs(ctx, data, options, optimizer, summary)
        summary["eval_loss_after"] = evaluate(ctx, eval_data, options.batch_size, "after")
    return 0


def train_epochs(
    ctx: LoopContext, data: list[Datum], options: argparse.Namespace, optimizer: Payload, summary: Summary
) -> None:
    for epoch, payload in batches(data, options.epochs, options.batch_size, options.seed):
        started = time.monotonic()
        check_payload(payload, ctx.provider)
        backward = train_on(ctx, payload, optimizer, summary)
        line = {"step": summary["steps"], "epoch": epoch, "loss/token": mean_loss([backward], [payload])}
        summary["steps"] += 1
        say(f"{formatted(line)}  tokens {trained_tokens(payload)}  {time.monotonic() - started:.2f} s")


def batches(data: list[Datum], epochs: int, batch_size: int, seed: int | None) -> Iterator[tuple[int, Payload]]:
    """(epoch, payload) for every optimizer step; each epoch has all data, in an order that ``seed`` decides."""
    for epoch in range(epochs):
        order = random.Random(f"{seed}:{epoch}").sample(data, len(data))
        for start in range(0, len(order), batch_size):
            yield epoch, forward_backward_payload(order[start : start + batch_size], "cross_entropy")


def evaluate(ctx: LoopContext, data: list[Datum], batch_size: int, when: str) -> float | None:
    """The loss per token on data that is not trained on; None where there is none."""
    if not data:
        return None
    slices = [data[start : start + batch_size] for start in range(0, len(data), batch_size)]
    payloads = [forward_backward_payload(some, "cross_entropy") for some in slices]
    for payload in payloads:
        check_payload(payload, ctx.provider, kind="forward")
    loss = mean_loss([ctx.client.run_operation(ctx.run_id, "forward", payload) for payload in payloads], payloads)
    say(f"evaluation {when} training: {formatted({'loss/token': loss})}")
    return loss


def mean_loss(results: list[dict[str, Any]], payloads: list[Payload]) -> float | None:
    """Mean of −logprob over the tokens that count, from the outputs: it does not depend on how a provider reduces.

    None where a provider gives no outputs of that form.
    """
    total = 0.0
    for result, payload in zip(results, payloads, strict=True):
        outputs = result.get("outputs")
        if not isinstance(outputs, list) or len(outputs) != len(payload["data"]):
            return None
        for output, datum in zip(outputs, payload["data"], strict=True):
            weights = datum["loss_inputs"]["weights"]["values"]
            logprobs = output.get("logprobs") if isinstance(output, dict) else None
            if not isinstance(logprobs, list) or len(logprobs) != len(weights):
                return None
            for weight, logprob in zip(weights, logprobs, strict=True):
                if weight and not isinstance(logprob, (int, float)):
                    return None
                total -= weight * logprob if weight else 0.0
    return total / sum(map(trained_tokens, payloads))


if __name__ == "__main__":
    sys.exit(main())
