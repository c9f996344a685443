"""The reference RL loop: you own the prompt, the reward and the loss; a Whitney service samples and trains.

    python examples/rl_loop.py --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1

Without a base URL it trains on the embedded service, and says so. Each cycle: save_weights_for_sampler → sample →
your ``build_loss`` → forward_backward → optim_step; then save_state, export_lora, finish, close.
Exit codes: 0; 1 failed, or every cycle skipped; 2 usage; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from loop_support import (
    CallableError,
    Payload,
    Place,
    Summary,
    UsageError,
    add_common_options,
    checked_optimizer,
    formatted,
    open_run,
    run_loop,
    sample_request_of,
    say,
    train_on,
)
from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    check_payload,
    require_advertised_loss,
    result_sampler_id,
    result_sequences,
)

NEEDED_OPERATIONS = ("forward_backward", "optim_step", "save_weights_for_sampler", "sample")

BuildLoss = Callable[..., Any]  # what it returns is not trusted: check_payload judges it


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        build_loss = load_build_loss(options.build_loss, options.provider)
        optimizer = checked_optimizer(options, "cycles", "updates")
        request = sample_request_of(options)
    except UsageError as error:
        say(f"error: {error}")
        return 2
    return run_loop(options, lambda place, summary: train(options, place, summary, build_loss, request, optimizer))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with your own build_loss.")
    parser.add_argument("--build-loss", required=True, metavar="MODULE:CALLABLE", help="your function")
    add_common_options(parser)
    parser.add_argument("--sample-json", type=Path, help="file with the payload of sample (embedded: sample.json here)")
    parser.add_argument("--cycles", type=int, default=2, help="how many samples (default 2)")
    parser.add_argument(
        "--updates", type=int, default=1, help="forward_backward + optim_step, on each sample (default 1)"
    )
    return parser.parse_args(arguments)


def load_build_loss(spec: str, provider: str) -> BuildLoss:
    """The callable that ``MODULE:CALLABLE`` names, from the current folder or from this one.

    Where its module says ``LOSS_FUNCTION``, the provider must have that loss: no session is opened otherwise.
    """
    sys.path.insert(0, str(Path.cwd()))
    module_name, _, name = spec.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise UsageError(f"--build-loss is {spec!r}, expected MODULE:CALLABLE")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"--build-loss: no module {module_name!r} in the current folder or in examples/") from None
        raise UsageError(f"--build-loss: importing {module_name!r} raised {type(error).__name__}: {error}") from None
    build_loss = getattr(module, name, None)
    if build_loss is None:
        raise UsageError(f"--build-loss: module {module_name!r} has no {name!r}")
    if not callable(build_loss):
        kind = type(build_loss).__name__
        raise UsageError(f"--build-loss: {name!r} of {module_name!r} is of type {kind}, not callable")
    loss_function = getattr(module, "LOSS_FUNCTION", None)
    if loss_function is not None:
        try:
            require_advertised_loss(provider, loss_function)
        except ValueError as error:
            raise UsageError(f"--build-loss: {module_name}.LOSS_FUNCTION: {error}") from None
    return cast(BuildLoss, build_loss)


def train(
    options: argparse.Namespace,
    place: Place,
    summary: Summary,
    build_loss: BuildLoss,
    request: Payload,
    optimizer: Payload,
) -> int:
    summary |= {"cycles_done": 0, "cycles_skipped": 0, "tokens_sampled": 0, "tokens_trained": 0}
    with open_run(options, place, summary, NEEDED_OPERATIONS) as ctx:
        for cycle in range(options.cycles):
            train_one_cycle(cycle, ctx, request, build_loss, optimizer, options.updates, summary)
    if not summary["cycles_done"]:
        say("error: every cycle was skipped: no build_loss found a gradient signal")
        return 1
    return 0


def train_one_cycle(
    cycle: int,
    ctx: LoopContext,
    request: Payload,
    build_loss: BuildLoss,
    optimizer: Payload,
    updates: int,
    summary: Summary,
) -> None:
    started = time.monotonic()
    saved = ctx.client.run_operation(ctx.run_id, "save_weights_for_sampler", {})
    ctx.sampler_id = result_sampler_id(saved)
    sample = ctx.client.sampler_operation(ctx.run_id, ctx.sampler_id, "sample", request)
    tokens = sum(len(sequence["tokens"]) for sequence in result_sequences(sample))
    summary["tokens_sampled"] += tokens
    ctx.metrics.clear()
    head = formatted({"cycle": cycle, "version": saved.get("version")})
    try:
        payload = call_build_loss(build_loss, sample, cycle, request, ctx)
    except NoGradientSignal as reason:
        summary["cycles_skipped"] += 1
        trained = f"skipped: {reason}"
    else:
        for _ in range(updates):
            backward = train_on(ctx, payload, optimizer, summary)
        summary["cycles_done"] += 1
        told = {"loss": backward.get("loss"), "clip_frac": (backward.get("metrics") or {}).get("clip_frac")}
        trained = formatted({name: value for name, value in told.items() if value is not None})
    seconds = time.monotonic() - started
    say("  ".join(filter(None, [head, formatted(ctx.metrics), trained, f"tokens {tokens}", f"{seconds:.2f} s"])))


def call_build_loss(build_loss: BuildLoss, sample: Payload, cycle: int, request: Payload, ctx: LoopContext) -> Payload:
    """The payload of the user's function, checked whole: one that the provider would refuse is not sent."""
    try:
        payload: Payload = build_loss(sample, cycle, copy.deepcopy(request), ctx)
    except NoGradientSignal:
        raise
    except (Exception, SystemExit) as error:  # a sys.exit() of the user's would otherwise end a failed loop with 0
        raise CallableError(f"build_loss raised {type(error).__name__} in cycle {cycle}: {error}") from error
    try:
        check_payload(payload, ctx.provider)
    except ValueError as error:
        raise ValueError(f"build_loss returned, in cycle {cycle}, what {ctx.provider} would refuse: {error}") from None
    return payload


if __name__ == "__main__":
    sys.exit(main())
