"""The reference RL loop: you own the prompts, the reward and the loss; a Whitney service samples and trains.

    python examples/rl_loop.py --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1

Without a base URL it trains on the embedded service, and says so. Each cycle: save_weights_for_sampler → sample, for
each request of its batch → your ``build_loss`` → forward_backward → optim_step; then save_state, export_lora, finish,
close. Exit codes: 0; 1 failed, or every cycle skipped; 2 usage; 130 Ctrl-C; 143 SIGTERM; 129 SIGHUP.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_build import BATCH_NAME, Built, UserLoss, build, load_build_loss
from loop_data import Batches, fingerprint, requests_of
from loop_history import LAST, MetricsFile, Start, changed_options, find_start, recorded_configs, require_same
from loop_journal import JournalError, foreseen
from loop_metrics import Metrics, Stopwatch, largest_gap, loss_metrics, rate_and_time_left, sample_metrics, user_metrics
from loop_support import (
    Payload,
    Place,
    Summary,
    UsageError,
    add_common_options,
    checked_optimizer,
    formatted,
    open_run,
    place_to_train,
    run_loop,
    saved_state,
    say,
    train_on,
)
from loop_warnings import Warnings
from whitney_loop import LoopContext, WhitneyError, __version__, result_sampler_id, result_sequences
from whitney_loop.errors import redacted

OWN_NAMES = frozenset({"skipped", "state_id", "next_cycle", "config"})  # of metrics, beside those that a cycle has
NEEDED_OPERATIONS = ("forward_backward", "optim_step", "save_weights_for_sampler", "sample")


@dataclass(init=False)
class Plan:
    """What the options mean. The steps of ``PREPARATION`` fill it, before anything is created."""

    optimizer: Payload
    loss: UserLoss
    loss_function: str | None  # what the user's module says that it uses
    operations: list[str]  # those that Whitney's page names, and those that the user's module says it needs
    requests: list[Payload]
    start: Start
    changed: str = ""  # what trains otherwise than before, where a run is resumed


def main(arguments: list[str] | None = None) -> int:
    options, plan = parse_options(arguments), Plan()
    if options.dry_run:
        return dry_run(options, plan)
    try:
        for _, prepare in PREPARATION:
            prepare(options, plan)
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
    parser.add_argument("--metrics", type=Path, metavar="FILE.jsonl", help="a line per cycle (see plot_metrics.py)")
    parser.add_argument("--save-every", type=int, metavar="N", help="save_state after every N cycles, and at the end")
    parser.add_argument(
        "--resume-from",
        metavar="STATE_ID",
        help=f"go on from a saved state, at its next cycle; {LAST!r}: from the newest one in the file of --metrics",
    )
    parser.add_argument(
        "--first-cycle", type=int, metavar="N", help="the next cycle, where no metrics file tells it (--resume-from)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check all that can be without creating a session")
    return parser.parse_args(arguments)


# Before anything is created: each step says what it found, or raises UsageError


def check_options(options: argparse.Namespace, plan: Plan) -> str:
    given = [name for name in ("max_datums", "save_every") if getattr(options, name) is not None]
    plan.optimizer = checked_optimizer(options, "cycles", "updates", "batch_size", *given)
    if options.first_cycle is not None and options.first_cycle < 0:
        raise UsageError(f"--first-cycle is {options.first_cycle}, expected at least 0")
    return f"{options.cycles} cycles of {options.batch_size} requests, learning rate {options.learning_rate:g}"


def find_build_loss(options: argparse.Namespace, plan: Plan) -> str:
    plan.loss = load_build_loss(options.build_loss, options.provider)
    plan.operations = [*NEEDED_OPERATIONS, *plan.loss.operations, *(["save_state"] if options.save_every else [])]
    found = options.build_loss + (f", with a {BATCH_NAME}" if plan.loss.build_batch_loss else "")
    loss = plan.loss_function = plan.loss.loss_function
    table = (
        f"{options.provider} has its loss {loss}" if loss else "no LOSS_FUNCTION in it: its loss is judged as it comes"
    )
    return f"{found}; {table}"


def read_requests(options: argparse.Namespace, plan: Plan) -> str:
    plan.requests = requests_of(options)
    found = f"{len(plan.requests)} in {options.sample_json or 'the example'}"
    if options.batch_size > len(plan.requests):
        often = "num_samples of a request is how often one prompt is sampled"
        raise UsageError(f"--batch-size is {options.batch_size}, but there are {found} ({often})")
    return found


def settle_start(options: argparse.Namespace, plan: Plan) -> str:
    path = options.metrics
    if path and options.journal and path.absolute() == options.journal.absolute():
        raise UsageError(f"--metrics and --journal are both {path}: give them different names")
    try:
        if path and not (path.is_file() if path.exists() else path.absolute().parent.is_dir()):
            raise ValueError(f"--metrics {path}: not a file in a folder that exists")
        plan.start = find_start(path, options.resume_from, options.first_cycle)
        if plan.start.kept_bytes:
            if options.seed is None:
                options.seed = recorded_configs(path)[0].get("seed")
            require_same(path, configuration(options, plan))
            plan.changed = changed_options(path, configuration(options, plan))
        elif plan.start.first_cycle and options.seed is None:
            raise ValueError("--first-cycle: give the --seed of that run too, by which its data are ordered")
    except (OSError, ValueError) as error:
        raise UsageError(f"{error}") from None
    state = f"from state {plan.start.state_id}" if plan.start.state_id else "a new run"
    state += f" with {plan.changed}" if plan.changed else ""
    return f"{state}, first cycle {plan.start.first_cycle}, metrics to {path or 'no file'}"


PREPARATION: tuple[tuple[str, Callable[[argparse.Namespace, Plan], str]], ...] = (
    ("build_loss and loss table", find_build_loss),
    ("options", check_options),
    ("sample requests", read_requests),
    ("start and metrics file", settle_start),
)


def dry_run(options: argparse.Namespace, plan: Plan) -> int:
    """Say what was checked, a line each; 2 where something does not hold."""
    failed = False
    # Where they are wrong, the rest is checked still.
    plan.requests, plan.operations, plan.optimizer, plan.loss_function = [], [*NEEDED_OPERATIONS], {}, None
    for name, check in (*PREPARATION, ("journal", look_at_journal), ("service, key and capabilities", ask_service)):
        try:
            tell(f"ok      {name}: {check(options, plan)}")
        except (UsageError, JournalError, WhitneyError) as error:
            failed = True
            tell(f"FAILED  {name}: {error}")
    say("dry run: no session was created")
    return 2 if failed else 0


def tell(line: str) -> None:
    """On stdout, whatever its encoding can not hold."""
    print(redacted(line).encode(errors="backslashreplace").decode(), flush=True)


def look_at_journal(options: argparse.Namespace, plan: Plan) -> str:
    return foreseen(options.journal, recover=options.recover)


def ask_service(options: argparse.Namespace, plan: Plan) -> str:
    with place_to_train(options) as place:
        warn_beforehand(options, plan, place, Warnings({}))
        operations = plan.operations
        place.client.require_operations(options.provider, operations)
        return f"takes the key and offers {', '.join(operations)} for {options.provider}: {place.name}"


def configuration(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What the metrics file begins with: all options, and the data set. The key is none of them."""
    chosen = {name: value for name, value in vars(options).items() if name != "dry_run"}
    data = {"requests": len(plan.requests), "requests_sha256": fingerprint(plan.requests)}
    return chosen | {"optimizer": plan.optimizer, **data, "whitney_loop": __version__}


# The training


def train(options: argparse.Namespace, place: Place, summary: Summary, plan: Plan) -> int:
    first, end = plan.start.first_cycle, plan.start.first_cycle + options.cycles
    summary |= {"next_cycle": None, "cycles_done": 0, "cycles_skipped": 0, "tokens_sampled": 0, "tokens_trained": 0}
    warnings = Warnings(summary)
    say_what_is_special(options, plan)
    warn_beforehand(options, plan, place, warnings)
    with opened_metrics(options, plan) as metrics:
        try:
            save = functools.partial(note_state, next_cycle=end, summary=summary, metrics=metrics)
            with open_run(options, place, summary, plan.operations, plan.start.state_id, save) as ctx:
                began = {"first_cycle": first, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                where = {name: summary[name] for name in ("where", "base_url", "session_id", "run_id")}
                metrics.begin(configuration(options, plan) | where | began)
                run_cycles(range(first, end), ctx, plan, options, summary, warnings, metrics)
        except BaseException:
            say_how_to_go_on(options, summary, end)
            raise
    if not summary["cycles_done"]:
        summary["error"] = "every cycle was skipped: no build_loss found a gradient signal"
        say(f"error: {summary['error']}")
        return 1
    return 0


def run_cycles(
    cycles: range,
    ctx: LoopContext,
    plan: Plan,
    options: argparse.Namespace,
    summary: Summary,
    warnings: Warnings,
    metrics: MetricsFile,
) -> None:
    batches = Batches(plan.requests, options.batch_size, options.seed)
    started = time.monotonic()
    for done, cycle in enumerate(cycles, start=1):
        record, line = train_one_cycle(cycle, batches.of_cycle(cycle), ctx, plan, options, summary, warnings)
        metrics.write(record)
        if sys.stderr.isatty():
            line += "  " + rate_and_time_left(time.monotonic() - started, done, len(cycles) - done)
        say(line)
        if plan.start.state_id and done == 1:
            warnings.state_of_build_loss(sorted(map(str, ctx.state)))
        is_last = done == len(cycles)  # the end saves a state anyway
        if options.save_every and (cycle + 1) % options.save_every == 0 and not is_last:
            note_state(ctx, cycle + 1, summary, metrics)
            say(f"saved {summary['state_id']}: the next cycle is {cycle + 1}")


def opened_metrics(options: argparse.Namespace, plan: Plan) -> MetricsFile:
    try:
        return MetricsFile(options.metrics, plan.start, redacted)
    except OSError as error:
        raise UsageError(f"--metrics {options.metrics}: {error}") from None


def say_what_is_special(options: argparse.Namespace, plan: Plan) -> None:
    start = plan.start
    if plan.loss.build_batch_loss is not None:
        say(f"{BATCH_NAME} of {options.build_loss.partition(':')[0]} is called once a cycle, for all requests")
    if start.state_id:
        say(f"resuming from {start.state_id} at cycle {start.first_cycle}")
    if plan.changed:
        say(f"from here on with other options than before: {plan.changed}")
    if start.superseded:
        say(f"what {options.metrics} holds after that state is moved to {options.metrics}.superseded")


def warn_beforehand(options: argparse.Namespace, plan: Plan, place: Place, warnings: Warnings) -> None:
    """Of what can be known before a session exists."""
    warnings.learning_rate(options.learning_rate, embedded=place.embedded)
    if plan.loss_function:
        warnings.sampling(plan.requests, plan.loss_function)


def say_how_to_go_on(options: argparse.Namespace, summary: Summary, end: int) -> None:
    state_id, cycle = summary.get("state_id"), summary.get("next_cycle")
    if state_id and cycle is not None and cycle < end:
        known = "" if options.metrics else f" --first-cycle {cycle} --seed {options.seed}"
        say(f"to go on at cycle {cycle}, the same command with: --resume-from {state_id}{known} --cycles {end - cycle}")
    elif summary["session_id"] and not state_id:
        say("no state was saved, so there is none to go on from (--save-every N saves them on the way)")


def note_state(ctx: LoopContext, next_cycle: int, summary: Summary, metrics: MetricsFile) -> None:
    """Save, and name the state where it can be found only once the service has confirmed it, and then at once."""
    state_id = saved_state(ctx)
    summary |= {"state_id": state_id, "next_cycle": next_cycle}
    metrics.state(state_id, next_cycle)


def train_one_cycle(
    cycle: int,
    requests: list[Payload],
    ctx: LoopContext,
    plan: Plan,
    options: argparse.Namespace,
    summary: Summary,
    warnings: Warnings,
) -> tuple[Metrics, str]:
    """One cycle; its metrics, and its line of progress."""
    clock = Stopwatch()
    saved = ctx.client.run_operation(ctx.run_id, "save_weights_for_sampler", {})
    ctx.sampler_id = result_sampler_id(saved)
    samples = sample_all(ctx, requests)
    of_samples = sample_metrics(samples)  # before build_loss, which may change what it is given
    clock.lap("sample")
    built = build(plan.loss, samples, cycle, requests, ctx)
    clock.lap("build_loss")
    trained = train_on_all(built, cycle, ctx, plan, options, summary, warnings)
    clock.lap("train")

    head = {"cycle": cycle, "version": saved.get("version")}
    if built.uniform is not None:
        trained["groups/uniform_frac"] = built.uniform / len(requests)
    skipped = {"skipped": built.reason} if built.payload is None else {}
    summary["cycles_skipped" if skipped else "cycles_done"] += 1
    summary["tokens_sampled"] += of_samples["completions/tokens"]
    if built.payload is not None:
        warnings.sampling(requests, built.payload["loss_function"])
    own = trained | of_samples | clock.laps | {"time/total": clock.total()} | skipped
    taken = head.keys() | own.keys() | OWN_NAMES
    of_user = {f"user/{name}" if name in taken else name: value for name, value in user_metrics(built.groups).items()}
    warnings.completions(of_samples, cycle)
    warnings.signal(bool(skipped), of_user.get("reward/mean", of_user.get("reward")))
    record = head | of_user | own
    return record, progress_line(head, of_user, trained, built, of_samples["completions/tokens"], clock.total())


def sample_all(ctx: LoopContext, requests: list[Payload]) -> list[dict[str, Any]]:
    """The sample of each request, in order and overlapping, checked."""
    samples = ctx.client.sampler_operations(ctx.run_id, ctx.sampler_id, "sample", requests)
    for sample in samples:
        result_sequences(sample)  # raises where one can not be trained on
    return samples


def train_on_all(
    built: Built,
    cycle: int,
    ctx: LoopContext,
    plan: Plan,
    options: argparse.Namespace,
    summary: Summary,
    warnings: Warnings,
) -> Metrics:
    """The updates on what was built; the metrics of the last one, where the trainer is farthest from the sampler."""
    metrics: Metrics = {}
    for update in range(options.updates if built.payload is not None else 0):
        assert built.payload is not None
        result = train_on(ctx, built.payload, plan.optimizer, summary, options.max_datums)
        metrics = loss_metrics(built.payload, result)
        if update == 0:
            warnings.gap(largest_gap(built.payload, result), cycle)
    return metrics


def progress_line(head: Metrics, of_user: Metrics, trained: Metrics, built: Built, tokens: int, seconds: float) -> str:
    shown = {name: value for name, value in of_user.items() if not name.endswith("/std")}
    loss = {"loss": trained.get("loss/sum"), "clip_frac": trained.get("clip_frac")}
    told = formatted({name: value for name, value in loss.items() if value is not None})
    result = f"skipped: {' '.join(built.reason.split())}" if built.payload is None else told
    parts = [formatted(head), formatted(shown), result, f"tokens {tokens}", f"{seconds:.2f} s"]
    return "  ".join(filter(None, parts))


if __name__ == "__main__":
    sys.exit(main())
