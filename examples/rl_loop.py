"""The reference RL loop: you own the prompt, the reward and the loss; a Whitney service samples and trains.

    python examples/rl_loop.py --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1

Without a base URL it trains on the embedded service, and says so. Each cycle: save_weights_for_sampler → sample →
your ``build_loss`` → forward_backward → optim_step; then save_state, export_lora, finish, close.
Exit codes: 0; 1 failed, or every cycle skipped; 2 usage; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from loop_support import (
    EMBEDDED_MODEL,
    CallableError,
    Place,
    Summary,
    UsageError,
    add_common_options,
    formatted,
    is_embedded,
    run_loop,
    say,
)

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    adamw_optimizer,
    check_payload,
    lora_run,
    require_advertised_loss,
    result_sampler_id,
    result_sequences,
    training_session,
)
from whitney_loop.payloads import check_sample_request

NEEDED_OPERATIONS = ("forward_backward", "optim_step", "save_weights_for_sampler", "sample")
EXAMPLE_REQUEST = Path(__file__).with_name("sample.json")

Payload = dict[str, Any]
BuildLoss = Callable[..., Any]  # what it returns is not trusted: check_payload judges it


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        build_loss = load_build_loss(options.build_loss, options.provider)
        request, optimizer = prepare(options)
    except UsageError as error:
        say(f"error: {error}")
        return 2
    return run_loop(options, lambda place, summary: train(options, place, summary, build_loss, request, optimizer))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with your own build_loss.")
    parser.add_argument("--build-loss", required=True, metavar="MODULE:CALLABLE", help="your function")
    add_common_options(parser)
    parser.add_argument("--sample-json", type=Path, help="file with the payload of sample (embedded: sample.json here)")
    parser.add_argument("--cycles", type=int, default=2)
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
    if not module_name or not name:
        raise UsageError(f"--build-loss is {spec!r}, expected MODULE:CALLABLE")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"--build-loss: no module {module_name!r} in the current folder or in {EXAMPLE_REQUEST.parent.name}/"
            ) from None
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


def prepare(options: argparse.Namespace) -> tuple[Payload, Payload]:
    """The sample request and the optimizer that the options mean, checked before anything is created."""
    for name in ("cycles", "updates", "lora_rank"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(options, name)}, expected at least 1")
    if not options.timeout > 0:
        raise UsageError(f"--timeout is {options.timeout}, expected seconds above 0")
    if options.seed is not None and options.seed < 0:
        raise UsageError(f"--seed is {options.seed}, expected at least 0")
    if is_embedded(options):
        options.model = options.model or EMBEDDED_MODEL
        options.sample_json = options.sample_json or EXAMPLE_REQUEST
    if not options.model or not options.sample_json:
        raise UsageError("--model and --sample-json are required away from the embedded service (--local rehearses)")
    try:
        request = json.loads(options.sample_json.read_text(encoding="utf-8"))
        check_sample_request(request)
    except (OSError, ValueError) as error:
        raise UsageError(f"--sample-json {options.sample_json}: {error}") from None
    try:
        return request, adamw_optimizer(options.learning_rate)
    except ValueError as error:
        raise UsageError(f"--learning-rate: {error}") from None


def train(
    options: argparse.Namespace,
    place: Place,
    summary: Summary,
    build_loss: BuildLoss,
    request: Payload,
    optimizer: Payload,
) -> int:
    client, provider, model = place.client, options.provider, options.model
    summary |= {"cycles_done": 0, "cycles_skipped": 0, "tokens_sampled": 0, "tokens_trained": 0}
    summary |= {"state_id": None, "artifact": None}
    client.require_operations(provider, NEEDED_OPERATIONS)
    with training_session(client, provider=provider) as session_id:
        summary["session_id"] = session_id
        new_run = lora_run(client, session_id, model=model, rank=options.lora_rank, seed=options.seed)
        with new_run as run_id, ExitStack() as resources:
            summary["run_id"] = run_id
            if note := client.run(run_id).get("note"):
                say(note)
            ctx = LoopContext(client, run_id, "", provider, session_id, model, resources=resources)
            for cycle in range(options.cycles):
                train_one_cycle(cycle, ctx, request, build_loss, optimizer, options.updates, summary)
            summary["state_id"] = client.run_operation(run_id, "save_state", {}).get("state_id")
            summary["artifact"] = client.run_operation(run_id, "export_lora", {})
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
    client, started = ctx.client, time.monotonic()
    saved = client.run_operation(ctx.run_id, "save_weights_for_sampler", {})
    ctx.sampler_id = result_sampler_id(saved)
    sample = client.sampler_operation(ctx.run_id, ctx.sampler_id, "sample", request)
    tokens = sum(len(sequence["tokens"]) for sequence in result_sequences(sample))
    summary["tokens_sampled"] += tokens
    ctx.metrics.clear()
    line: dict[str, Any] = {"cycle": cycle, "version": saved.get("version")}
    try:
        payload = call_build_loss(build_loss, sample, cycle, request, ctx)
    except NoGradientSignal as reason:
        summary["cycles_skipped"] += 1
        say(f"{formatted(line | ctx.metrics)}  skipped: {reason}")
        return
    for _ in range(updates):
        backward = client.run_operation(ctx.run_id, "forward_backward", payload)
        client.run_operation(ctx.run_id, "optim_step", {"optimizer": optimizer})
        summary["tokens_trained"] += trained_tokens(payload)
    summary["cycles_done"] += 1
    line |= ctx.metrics | {"loss": backward.get("loss"), "tokens": tokens}
    say(f"{formatted(line)}  {time.monotonic() - started:.2f} s")


def call_build_loss(build_loss: BuildLoss, sample: Payload, cycle: int, request: Payload, ctx: LoopContext) -> Payload:
    """The payload of the user's function, checked whole: one that the provider would refuse is not sent."""
    try:
        payload: Payload = build_loss(sample, cycle, request, ctx)
    except NoGradientSignal:
        raise
    except Exception as error:
        raise CallableError(f"build_loss raised {type(error).__name__} in cycle {cycle}: {error}") from error
    try:
        check_payload(payload, ctx.provider)
    except ValueError as error:
        raise ValueError(f"build_loss returned, in cycle {cycle}, what {ctx.provider} would refuse: {error}") from None
    return payload


def trained_tokens(payload: Payload) -> int:
    """Tokens with a weight: those that the loss is summed over."""
    return sum(weight != 0 for datum in payload["data"] for weight in datum["loss_inputs"]["weights"]["values"])


if __name__ == "__main__":
    sys.exit(main())
