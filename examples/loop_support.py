"""What the loops of this folder share: where they train, how they end, and what they say."""

from __future__ import annotations

import _thread
import argparse
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from loop_journal import JournalError, JournalLost, clear_the_way, kept_journal
from whitney_loop import (
    LOSS_SUPPORT,
    ConfigurationError,
    LoopContext,
    WhitneyClient,
    WhitneyError,
    adamw_optimizer,
    lora_run,
    training_session,
)
from whitney_loop.errors import keep_out_of_errors, redacted
from whitney_loop.local import serve

EMBEDDED_MODEL = "byte-lm"
SEED_BITS = 31  # of the seeds that are drawn or derived: what a service keeps as int32 holds them
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

keep_out_of_errors(os.environ.get("WHITNEY_API_KEY", ""))  # from the first line on, before there is a client

TOGETHER: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}  # NAME:sum of several parts

Summary = dict[str, Any]
Payload = dict[str, Any]


class UsageError(Exception):
    """The command can not be run as given. Nothing was created; exit code 2."""


class CallableError(Exception):
    """The user's callable raised; the cause is what it raised."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, or SIGHUP (the terminal is gone): ends the loop, cleaned up, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Place:
    """Where a loop trains."""

    client: WhitneyClient
    embedded: bool
    name: str  # as the user is told


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where and what to train, the same in every loop."""
    parser.add_argument("--provider", choices=sorted(LOSS_SUPPORT), default="modal", help="default: modal")
    parser.add_argument("--model", help=f"required away from the embedded service; on it {EMBEDDED_MODEL}")
    parser.add_argument("--lora-rank", type=int, default=32, help="default: 32")
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="default: 1e-6")
    parser.add_argument("--seed", type=int, help="of adapter, sampling and order of the data (default: drawn)")
    parser.add_argument("--base-url", help="the service to train on (default: WHITNEY_BASE_URL)")
    parser.add_argument("--ca-file", metavar="FILE", help="certificates (PEM) to trust in place of the system's")
    parser.add_argument("--local", action="store_true", help="rehearse on the embedded service, whatever is set")
    parser.add_argument("--storage", type=Path, help="folder of the embedded service (default: .whitney_local)")
    parser.add_argument("--journal", type=Path, metavar="PATH", help="file to clean up by after a kill (default: none)")
    parser.add_argument("--recover", action="store_true", help="first close what the journal of a killed loop names")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one operation (default: 3600)")


def checked_optimizer(options: argparse.Namespace, *counts: str) -> Payload:
    """The optimizer that the options mean; UsageError where a common option, or one of ``counts``, is out of range."""
    for name in ("lora_rank", *counts):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(options, name)}, expected at least 1")
    if not options.timeout > 0:
        raise UsageError(f"--timeout is {options.timeout}, expected seconds above 0")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed is {options.seed}, expected 0 to 2^63 − 1")
    if options.recover and not options.journal:
        raise UsageError("--recover needs --journal PATH")
    if is_embedded(options):
        options.model = options.model or EMBEDDED_MODEL
    if not options.model:
        raise UsageError("--model is required away from the embedded service (--local rehearses)")
    try:
        return adamw_optimizer(options.learning_rate)
    except ValueError as error:
        raise UsageError(f"--learning-rate: {error}") from None


def is_embedded(options: argparse.Namespace) -> bool:
    """Whether these options and the environment mean the embedded service. Raises UsageError where they contradict."""
    if options.local and options.base_url is not None:
        raise UsageError("--local and --base-url contradict each other: leave one out")
    if options.base_url == "":
        raise UsageError("--base-url is empty: give a URL, or leave it out")
    if options.local:
        return True
    if options.base_url or os.environ.get("WHITNEY_BASE_URL"):
        return False
    if os.environ.get("WHITNEY_API_KEY"):
        raise UsageError(
            "WHITNEY_API_KEY is set, but no base URL: set WHITNEY_BASE_URL or pass --base-url to train there, "
            "or pass --local to rehearse on the embedded service"
        )
    return True


def settle_seed(options: argparse.Namespace) -> None:
    """Draw the seed where none is given, and say it."""
    if options.seed is None:
        options.seed = random.SystemRandom().getrandbits(SEED_BITS)
        say(f"seed {options.seed} was drawn: --seed {options.seed} repeats this run")


@contextmanager
def place_to_train(options: argparse.Namespace) -> Iterator[Place]:
    """The client to train with; the embedded service is started where that is meant, and ended with the block."""
    if not is_embedded(options):
        try:
            client = WhitneyClient(options.base_url, operation_timeout_s=options.timeout, ca_file=options.ca_file)
        except ConfigurationError as error:
            raise UsageError(error.message) from None
        yield Place(client, False, f"{client.base_url} (as {options.provider}): what runs there may be billed")
        return
    with ExitStack() as stack:
        try:
            service = stack.enter_context(serve(options.storage))
        except OSError as error:
            raise UsageError(f"the embedded service can not start: {error}") from None
        client = WhitneyClient(service.base_url, service.api_key, operation_timeout_s=options.timeout)
        where = f"the embedded service at {client.base_url} (as {options.provider}): nothing is billed"
        yield Place(client, True, where)


@contextmanager
def open_run(
    options: argparse.Namespace,
    place: Place,
    summary: Summary,
    operations: Collection[str],
    resume_from: str | None = None,
    save: Callable[[LoopContext], None] | None = None,
) -> Iterator[LoopContext]:
    """A session and a LoRA run in it, once the service offers ``operations``; both ended with the block.

    A block that ends well leaves a saved state (by ``save``, where the loop has more to note of it) and an exported
    adapter behind, named in the summary.
    """
    client, provider = place.client, options.provider
    summary |= {"state_id": None, "artifact": None}
    client.require_operations(provider, operations)
    with (
        kept_journal(options.journal, client, embedded=place.embedded, provider=provider) as journal,
        training_session(client, provider=provider, idempotency_key=journal.session_key) as session_id,
    ):
        journal.session_id = summary["session_id"] = session_id
        journal.write(options.journal)
        new_run = lora_run(
            client,
            session_id,
            model=options.model,
            rank=options.lora_rank,
            seed=options.seed,
            resume_from=resume_from,
        )
        with new_run as run_id, ExitStack() as resources:
            summary["run_id"] = run_id
            journal.run_ids.append(run_id)
            journal.write(options.journal)
            if note := client.run(run_id).get("note"):
                say(note)
            ctx = LoopContext(client, run_id, "", provider, session_id, options.model, resources=resources)
            yield ctx
            if save is not None:
                save(ctx)
            else:
                summary["state_id"] = saved_state(ctx)
            summary["artifact"] = client.run_operation(run_id, "export_lora", {})


def saved_state(ctx: LoopContext) -> str | None:
    state_id: str | None = ctx.client.run_operation(ctx.run_id, "save_state", {}).get("state_id")
    if state_id is None:
        say("warning: save_state gave no state_id: this run can not be gone on with")
    return state_id


def train_on(
    ctx: LoopContext, payload: Payload, optimizer: Payload, summary: Summary, max_datums: int | None = None
) -> dict[str, Any]:
    """One update: forward_backward, of at most ``max_datums`` data each, and one optim_step.

    ``payload`` has passed check_payload: once is enough, however many updates are made on it. The result of the first
    as if it had been one, with the ``grad_norm`` of the second.
    """
    parts = split_payload(payload, max_datums)
    # All must have succeeded before the step: it would apply the gradients of the others alone.
    backward = merged_results(ctx.client.run_operations(ctx.run_id, "forward_backward", parts), parts)
    step = ctx.client.run_operation(ctx.run_id, "optim_step", {"optimizer": optimizer})
    summary["tokens_trained"] = summary.get("tokens_trained", 0) + trained_tokens(payload)
    return backward | {"grad_norm": step.get("grad_norm")}


def split_payload(payload: Payload, max_datums: int | None) -> list[Payload]:
    """The payload in parts of at most ``max_datums`` data, in their order."""
    data = payload["data"]
    size = max_datums or len(data)
    return [payload | {"data": data[start : start + size]} for start in range(0, len(data), size)]


def merged_results(results: list[Payload], parts: list[Payload]) -> dict[str, Any]:
    """The results of the parts of a payload as one: sums added up, maxima and minima kept, else the tokens' mean."""
    if len(results) == 1:
        return results[0]
    merged: dict[str, Any] = {}
    losses: list[Any] = [result.get("loss") for result in results]
    if all(isinstance(loss, (int, float)) for loss in losses):
        merged["loss"] = sum(losses)
    outputs: list[Any] = [result.get("outputs") for result in results]
    if all(isinstance(output, list) for output in outputs):
        merged["outputs"] = [output for of_part in outputs for output in of_part]
    tokens = [trained_tokens(part) for part in parts]
    merged["metrics"] = {}
    for name in results[0].get("metrics") or {}:
        values: list[Any] = [(result.get("metrics") or {}).get(name) for result in results]
        if all(isinstance(value, (int, float)) for value in values):
            together = TOGETHER.get(name.rpartition(":")[2])
            merged["metrics"][name] = together(values) if together else weighted_mean(values, tokens)
    return merged


def weighted_mean(values: list[float], weights: list[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(sum(weights), 1)


def trained_tokens(payload: Payload) -> int:
    """Tokens with a weight: those that the loss is summed over."""
    return sum(weight != 0 for datum in payload["data"] for weight in datum["loss_inputs"]["weights"]["values"])


def run_loop(options: argparse.Namespace, train: Callable[[Place, Summary], int]) -> int:
    """Run ``train`` where the options say, with every exit cleaned up; print the summary; the exit code.

    It is the last thing that a process does: afterwards signals are ignored, so that none changes the exit code.
    """
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup
            signal.signal(number, _end)
    with shown_log():
        return run_and_report(options, train)


def run_and_report(options: argparse.Namespace, train: Callable[[Place, Summary], int]) -> int:
    summary: Summary = {}
    try:
        try:
            with place_to_train(options) as place:
                say(f"training on {place.name}")
                settle_seed(options)
                where = "the embedded service" if place.embedded else "the service of the base URL"
                summary |= {"status": "failed", "where": where, "base_url": place.client.base_url}
                summary |= {"provider": options.provider, "model": options.model, "session_id": None, "run_id": None}
                summary["seed"] = options.seed
                clear_journal(options, place)
                try:
                    code = train(place, summary)
                finally:
                    summary["operations"] = dict(place.client.accepted)
        finally:
            for number in ENDING_SIGNALS:  # all is closed, or said to be open: what is left is to report it
                signal.signal(number, signal.SIG_IGN)
        summary["status"] = "succeeded" if code == 0 else "failed"
    except (UsageError, JournalError) as error:
        say(f"error: {error}")
        return 2
    except BaseException as last:  # such as asyncio.CancelledError, which is no Exception
        code = report_the_end(last, summary)
    # A manager that an interrupt cut off before its block began is cleaned up when it is freed: now, not at some time.
    gc.collect()
    if summary:  # also where a session was opened whose id did not come
        print(redacted(json.dumps(summary)), flush=True)
    return code


def report_the_end(error: BaseException, summary: Summary) -> int:
    """Say what ended the loop, on stderr and in the summary; the exit code."""
    if not isinstance(error, KeyboardInterrupt):
        summary["error"] = show_error(error)
        return 1
    number = error.number if isinstance(error, Terminated) else signal.SIGINT
    name, code = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, 128 + number
    summary["status"] = f"ended by {name}"
    gone = summary.get("where") == "the embedded service"
    say(f"ended by {name}" + (", and with it the embedded service and all that was open on it" if gone else ""))
    return code


def clear_journal(options: argparse.Namespace, place: Place) -> None:
    """See to what the journal of a killed loop names. Raises JournalError where it stands in the way."""
    if found := clear_the_way(options.journal, place.client, recover=options.recover):
        say(found)


def show_error(error: BaseException) -> str:
    """Say on stderr what ended the loop; the same in one line. Only the user's own code and bugs get a traceback."""
    cause, telling = error.__cause__, (WhitneyError, ValueError, JournalLost)
    if isinstance(error, CallableError) and cause is not None:
        own = cause.__traceback__.tb_next if cause.__traceback__ else None  # without this file's own frame
        say("".join(traceback.format_exception(type(cause), cause, own)).rstrip())
    elif not isinstance(error, telling):
        say("".join(traceback.format_exception(error)).rstrip())
    message = redacted(f"{error}" if isinstance(error, (*telling, CallableError)) else repr(error))
    say(f"error: {message}")
    return message


def say(line: str) -> None:
    """One line of progress, on stderr: stdout holds the summary only."""
    print(redacted(line), file=sys.stderr, flush=True)  # whatever a service echoes


def formatted(metrics: dict[str, Any]) -> str:
    """``name value`` pairs for a progress line."""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
    return "  ".join(" ".join(f"{name} {text}".split()) for name, text in shown.items())


@contextmanager
def shown_log() -> Iterator[None]:
    """Retries, and the ids that may be open, are seen whatever the user's module does to logging."""
    log, handler = logging.getLogger("whitney_loop"), logging.StreamHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _end(number: int, _: object) -> NoReturn:
    sys.unraisablehook = _raised_in_a_finalizer
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def _raised_in_a_finalizer(what: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised there. An interrupt is sent again; the rest is of objects that one left half made."""
    if isinstance(what.exc_value, KeyboardInterrupt):
        number = what.exc_value.number if isinstance(what.exc_value, Terminated) else signal.SIGINT
        # From another thread, which first runs when this function has returned: here it would be dropped again.
        _thread.start_new_thread(signal.pthread_kill, (threading.get_ident(), number))
