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
from whitney_loop import Datum, LoopContext, forward_backward_payload, sft_datum

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
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    data = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            if not isinstance(example, dict) or example.keys() != {"prompt", "completion"}:
                raise ValueError('expected {"prompt": …, "completion": …}')
            prompt, completion = (token_ids(example[name], name, text=text) for name in ("prompt", "completion"))
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
    needed = ["forward_backward", "optim_step", *(["forward"] if eval_data else [])]
    with open_run(options, place, summary, needed) as ctx:
        summary["eval_loss_before"] = evaluate(ctx, eval_data, "before")
        train_epochs(ctx, data, options, optimizer, summary)
        summary["eval_loss_after"] = evaluate(ctx, eval_data, "after")
    return 0


def train_epochs(
    ctx: LoopContext, data: list[Datum], options: argparse.Namespace, optimizer: Payload, summary: Summary
) -> None:
    for epoch in range(options.epochs):
        order = random.Random(f"{options.seed}:{epoch}").sample(data, len(data))
        for start in range(0, len(order), options.batch_size):
            started = time.monotonic()
            payload = forward_backward_payload(order[start : start + options.batch_size], "cross_entropy")
            backward = train_on(ctx, payload, optimizer, summary)
            summary["steps"] = summary.get("steps", 0) + 1
            line = {"step": summary["steps"] - 1, "epoch": epoch, "loss/token": loss_per_token(backward, payload)}
            say(f"{formatted(line)}  tokens {trained_tokens(payload)}  {time.monotonic() - started:.2f} s")


def evaluate(ctx: LoopContext, data: list[Datum], when: str) -> float | None:
    """The loss per token on data that is not trained on; None where there is none."""
    if not data:
        return None
    payload = forward_backward_payload(data, "cross_entropy")
    loss = loss_per_token(ctx.client.run_operation(ctx.run_id, "forward", payload), payload)
    say(f"evaluation {when} training: {formatted({'loss/token': loss})}")
    return loss


def loss_per_token(result: dict[str, Any], payload: Payload) -> float | None:
    """Mean of −logprob over the tokens that count, from the outputs: it does not depend on how a provider reduces.

    Where a provider gives no outputs, its own ``loss``, as it reduces it.
    """
    logprobs = [output.get("logprobs") for output in result.get("outputs") or []]
    tokens = trained_tokens(payload)
    if not tokens or len(logprobs) != len(payload["data"]) or None in logprobs:
        loss: float | None = result.get("loss")
        return loss
    weights = [datum["loss_inputs"]["weights"]["values"] for datum in payload["data"]]
    total: float = sum(w * p for row in zip(weights, logprobs, strict=True) for w, p in zip(*row, strict=True) if w)
    return -total / tokens


if __name__ == "__main__":
    sys.exit(main())
