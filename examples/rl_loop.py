"""The reference RL loop: you own the prompts, the reward and the loss; a Whitney service samples and trains.

    python examples/rl_loop.py --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1

Without a base URL it trains on the embedded service, and says so. Each cycle: save_weights_for_sampler → sample, for
each request of its batch → your ``build_loss`` → forward_backward → optim_step; then save_state, export_lora, finish,
close. Exit codes: 0; 1 failed, or every cycle skipped; 2 usage; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_build import UserLoss, build, load_build_loss
from loop_data import Batches, drawn_seed, requests_of
from loop_metrics import user_metrics
from loop_support import (
    Payload,
    Place,
    Summary,
    UsageError,
    add_common_options,
    checked_optimizer,
    formatted,
    open_run,
    run_loop,
    say,
    train_on,
)
from whitney_loop import LoopContext, PendingOperation, result_sampler_id, result_sequences

NEEDED_OPERATIONS = ("forward_backward", "optim_step", "save_weights_for_sampler", "sample")
MOST_IN_FLIGHT = 256  # a service keeps the results of so many operations; more wait until the oldest was collected


@dataclass
class Plan:
    """What the options mean, checked before anything is created."""

    loss: UserLoss
    optimizer: Payload
    batches: Batches
    seed_was_drawn: bool


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        plan = make_plan(options)
    except UsageError as error:
        say(f"error: {error}")
        return 2
    return run_loop(options, lambda place, summary: train(options, place, summary, plan))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with your own build_loss.")
    parser.add_argument("--build-loss", required=True, metavar="MODULE:CALLABLE", help="your function")
    add_common_options(parser)
    parser.add_argument(
        "--sample-json",
        type=Path,
        metavar="FILE",
        help="payloads of sample: one, an array, or a JSONL (embedded: sample.json here)",
    )
    parser.add_argument("--batch-size", type=int, default=1, help="requests that a cycle takes from it (default 1)")
    parser.add_argument("--cycles", type=int, default=2, help="how many cycles to run (default 2)")
    parser.add_argument(
        "--updates", type=int, default=1, help="forward_backward + optim_step, on each cycle's samples (default 1)"
    )
    parser.add_argument(
        "--max-datums",
        type=int,
        metavar="N",
        help="at most N data in one forward_backward, several before the one optim_step (default: all in one). On a "
        "service that sums over tokens the gradient is the same within rounding; on one that averages, each part "
        "counts the same however many tokens it has, and the gradient is as many times larger as there are parts",
    )
    return parser.parse_args(arguments)


def make_plan(options: argparse.Namespace) -> Plan:
    loss = load_build_loss(options.build_loss, options.provider)
    counts = ["cycles", "updates", "batch_size", *(["max_datums"] if options.max_datums is not None else [])]
    optimizer = checked_optimizer(options, *counts)
    requests = requests_of(options)
    drawn = options.seed is None
    options.seed = drawn_seed() if drawn else options.seed
    return Plan(loss, optimizer, Batches(requests, options.batch_size, options.seed), drawn)


def train(options: argparse.Namespace, place: Place, summary: Summary, plan: Plan) -> int:
    summary |= {"seed": options.seed}
    summary |= {"cycles_done": 0, "cycles_skipped": 0, "tokens_sampled": 0, "tokens_trained": 0}
    if plan.seed_was_drawn:
        say(f"seed {options.seed} was drawn: --seed {options.seed} repeats this run")
    if plan.loss.build_batch_loss is not None:
        say(f"build_batch_loss of {options.build_loss.partition(':')[0]} is called once a cycle, for all requests")
    with open_run(options, place, summary, [*NEEDED_OPERATIONS, *plan.loss.operations]) as ctx:
        for cycle in range(options.cycles):
            train_one_cycle(cycle, ctx, plan, options, summary)
    if not summary["cycles_done"]:
        say("error: every cycle was skipped: no build_loss found a gradient signal")
        return 1
    return 0


def train_one_cycle(cycle: int, ctx: LoopContext, plan: Plan, options: argparse.Namespace, summary: Summary) -> None:
    started = time.monotonic()
    requests = plan.batches.of_cycle(cycle)
    saved = ctx.client.run_operation(ctx.run_id, "save_weights_for_sampler", {})
    ctx.sampler_id = result_sampler_id(saved)
    samples = sample_all(ctx, requests)
    tokens = sum(len(sequence["tokens"]) for sample in samples for sequence in result_sequences(sample))
    summary["tokens_sampled"] += tokens
    head = formatted({"cycle": cycle, "version": saved.get("version")})
    built = build(plan.loss, samples, cycle, requests, ctx)
    if built.payload is None:
        summary["cycles_skipped"] += 1
        trained = f"skipped: {built.reason}"
    else:
        for _ in range(options.updates):
            backward = train_on(ctx, built.payload, plan.optimizer, summary, options.max_datums)
        summary["cycles_done"] += 1
        told = {"loss": backward.get("loss"), "clip_frac": (backward.get("metrics") or {}).get("clip_frac")}
        trained = formatted({name: value for name, value in told.items() if value is not None})
    seconds = time.monotonic() - started
    of_user = {name: value for name, value in user_metrics(built.groups).items() if not name.endswith("/std")}
    say("  ".join(filter(None, [head, formatted(of_user), trained, f"tokens {tokens}", f"{seconds:.2f} s"])))


def sample_all(ctx: LoopContext, requests: list[Payload]) -> list[dict[str, Any]]:
    """The sample of each request, in order: all are submitted before the first is awaited, so that they may overlap."""
    samples: list[dict[str, Any]] = []
    in_flight: deque[PendingOperation] = deque()
    for request in requests:
        if len(in_flight) == MOST_IN_FLIGHT:
            samples.append(in_flight.popleft().result())
        in_flight.append(ctx.client.submit_sampler_operation(ctx.run_id, ctx.sampler_id, "sample", request))
    return samples + [operation.result() for operation in in_flight]


if __name__ == "__main__":
    sys.exit(main())
