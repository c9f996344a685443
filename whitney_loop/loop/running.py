"""Opening and ending a training: everything that is created is closed, on every exit, and the summary says how it went.

Exit codes: 0 trained; 1 failed, or every cycle was skipped; 2 usage; 130 Ctrl-C; 143 SIGTERM; 129 SIGHUP.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import whitney_loop
from whitney_loop.build_loss import LoopContext
from whitney_loop.client import WhitneyClient
from whitney_loop.errors import keep_out_of_errors
from whitney_loop.lifecycle import lora_run, stop_waiting, training_session
from whitney_loop.loop.cost import Cost, cost_line, saving_cost
from whitney_loop.loop.history import History, open_history
from whitney_loop.loop.journal import check_journal, kept_journal, recover_session
from whitney_loop.loop.log import load_log
from whitney_loop.loop.options import LEARNING_RATE, LoopOptions, Options, UsageError, check_ranges
from whitney_loop.loop.place import Place, load_engine, open_place, require_within_limits
from whitney_loop.loop.prompts import SEED_BITS
from whitney_loop.loop.report import CallableError, Summary, log_on_stderr, print_summary, say, show_error
from whitney_loop.loop.schedule import check_warmup, full_optimizer
from whitney_loop.loop.signals import EndedBySignal, handle_signals, ignore_signals, restore_default_signals
from whitney_loop.loop.training import LAST_SAVE_S, Training
from whitney_loop.loop.warnings import Warnings

if TYPE_CHECKING:
    from whitney_loop.local import Backend

EMBEDDED = "the embedded service"  # as Summary.where


@dataclass(frozen=True)
class Work:
    """The plan of a loop, checked before anything is created."""

    cycles: range
    operations: Sequence[str]  # the service must offer them
    data: Mapping[str, Any]  # facts of the data set, kept in the metrics file; data_sha256 must stay on a resumption
    train: Callable[[Training], None]
    cost: Cost  # at most, without saved states and the adapter
    saved_runs: int = 1  # each saved state holds: the trained one, and the runs beside it
    requests: Sequence[Mapping[str, Any]] = field(default_factory=list)  # will be sampled
    loss_function: str | None = None  # if it is known now
    notes: Sequence[str] = ()  # are printed before the training


def run_training(options: Options, prepare: Callable[[Options, int], Work]) -> int:
    """Train as the options say, clean up on every exit, print the summary and return the exit code.

    ``prepare`` gets the settled options (with a seed and a model) and the number of the first cycle; it checks what the
    user gave and raises UsageError. This is the last thing that a process does: afterwards signals have their default
    actions.
    """
    keep_out_of_errors(os.environ.get("WHITNEY_API_KEY", ""))  # errors may come before there is a client
    summary = Summary()
    with log_on_stderr():
        try:
            try:
                handle_signals()
                _prepare_and_train(options, prepare, summary)
            finally:
                ignore_signals()
            code = _judge(summary, is_byte_lm=summary.where == EMBEDDED and options.engine is None)
        except UsageError as error:
            for line in f"error: {error}".splitlines():  # an error at import comes with its traceback
                say(line)
            code = 2
        except BaseException as error:  # also one that is no Exception, such as asyncio.CancelledError
            code = _report_end(error, summary)
    if summary.where and code != 2:
        print_summary(summary)
    restore_default_signals()
    return code


def _prepare_and_train(options: Options, prepare: Callable[[Options, int], Work], summary: Summary) -> None:
    check_ranges(options)
    with open_history(options) as history:
        options = _with_absolute_paths(options)
        backend = load_engine(options)
        given, options = options, _settled(options, history, backend)
        work = prepare(options, history.first_cycle)
        config = _config(options, work)
        history.require_same(config)
        warnings = Warnings(summary.warnings)
        history.log = load_log(options.log, warnings) if options.log else None
        if backend:
            require_within_limits(backend, options, work.loss_function)
        with open_place(options, backend) as place:
            if not options.dry_run:
                summary.where = EMBEDDED if place.embedded else "the service of the base URL"
                summary.base_url, summary.provider = place.client.base_url, options.provider
                summary.model, summary.seed = options.model or "", options.seed
            start_notes = _start_notes(given, options, history, config, backend)
            for note in [f"training on {place.description}", *start_notes, *work.notes]:
                say(note)
            warnings.learning_rate(options.learning_rate, rehearsal=bool(backend and backend.stands_in))
            warnings.sampling(work.requests, work.loss_function)
            operations = [*work.operations, *(["save_state"] if options.save_every else [])]
            place.client.require_operations(options.provider, operations)
            journal_note = check_journal(options.journal, recover=options.recover)
            if options.dry_run:
                say(f"{journal_note}; the service takes the key and offers {', '.join(operations)}")
                say(cost_line(work.cost + saving_cost(work.cycles, options.save_every, work.saved_runs)))
                say("dry run: everything that needs no session was checked; none was created")
                return
            history.claim()
            if options.journal and options.journal.exists():
                say(recover_session(options.journal, place.client))
            try:
                _open_and_train(options, work, history, place, summary)
            except BaseException:
                _say_how_to_resume(options, summary, work.cycles.stop)
                raise
            finally:
                summary.operations = dict(place.client.accepted)
                if not place.embedded:
                    _close_if_left_open(place.client, summary.session_id)


def _close_if_left_open(client: WhitneyClient, session_id: str | None) -> None:
    """Close the session if an interrupt fell between two clean-ups, so that none of them did."""
    ignore_signals()
    if session_id and session_id not in client.closed_sessions:
        with contextlib.suppress(Exception):  # a clean-up that was tried has said what may be open
            client.close_session(session_id, timeout_s=LAST_SAVE_S)


def _open_and_train(options: LoopOptions, work: Work, history: History, place: Place, summary: Summary) -> None:
    """Open a session and a run in it, train, and close both."""
    client, provider, model = place.client, options.provider, options.model or ""
    with (
        kept_journal(options.journal, place, provider) as journal,
        training_session(client, provider=provider, idempotency_key=journal.session_key) as session_id,
    ):
        summary.session_id = session_id
        journal.note_session(session_id)
        new_run = lora_run(
            client, session_id, model=model, rank=options.lora_rank, seed=options.seed, resume_from=history.state_id
        )
        with new_run as run_id, contextlib.ExitStack() as resources:
            summary.run_id = run_id
            if note := client.run(run_id).get("note"):
                say(f"{note}")
            started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            where = {"where": summary.where, "base_url": summary.base_url, "session_id": session_id, "run_id": run_id}
            history.begin(_config(options, work) | where | {"first_cycle": work.cycles.start, "started": started})
            ctx = LoopContext(client, run_id, "", provider, session_id, model, resources=resources)
            training, process = Training(options, ctx, work.cycles, history, summary, place.decode), os.getpid()
            try:
                work.train(training)
            except BaseException as error:
                if os.getpid() != process:
                    _end_forked_process(error)
                try:
                    if isinstance(error, EndedBySignal):
                        say(f"{error}: closing what is open; one more stops the waiting")
                    training.save_before_end()
                except KeyboardInterrupt:
                    stop_waiting(error)
                raise


def _with_absolute_paths(options: Options) -> Options:
    """Return the options with absolute paths: the user's module may change the current folder."""
    paths = {name: getattr(options, name, None) for name in ("metrics", "samples", "journal", "storage")}
    return replace(options, **{name: path.absolute() for name, path in paths.items() if path})


def _settled(options: Options, history: History, backend: Backend | None) -> Options:
    """Return the options with a model, a learning rate and a seed: given, or of the engine or the resumed run."""
    model = options.model or (backend.model if backend else None)
    if not model:
        raise UsageError("--model is required unless the embedded service is used (--local rehearses)")
    rate = options.learning_rate
    if rate is None:
        rate = (backend and backend.suggested_learning_rate) or LEARNING_RATE
    seed = options.seed
    if seed is None and history.configs:
        seed = history.configs[0].get("seed")
    if seed is None:
        seed = random.SystemRandom().getrandbits(SEED_BITS)
    return replace(options, local=backend is not None, model=model, learning_rate=rate, seed=seed)


def _config(options: LoopOptions, work: Work) -> dict[str, Any]:
    """Return the first line of the metrics file: the options, and the facts of the data set."""
    check_warmup(options, work.cycles.stop)
    schedule = options.schedule + ("" if options.schedule == "constant" else f" to cycle {work.cycles.stop}")
    derived = {"optimizer": full_optimizer(options), "schedule": schedule, "whitney_loop": whitney_loop.__version__}
    return asdict(options) | derived | dict(work.data)


def _start_notes(
    given: Options, options: Options, history: History, config: Mapping[str, Any], backend: Backend | None
) -> list[str]:
    """Return lines that tell which seed and learning rate were chosen, and how a training is resumed."""
    notes = []
    if given.seed is None and not history.configs:
        notes.append(f"seed {options.seed} was drawn: --seed {options.seed} repeats this run")
    if given.learning_rate is None:
        origin = f"which {backend.name} suggests" if backend and backend.suggested_learning_rate else "the default"
        notes.append(f"learning rate {options.learning_rate:g}, {origin}; --learning-rate changes it")
    if history.state_id:
        notes.append(f"resuming from {history.state_id} at cycle {history.first_cycle}")
    if changes := history.changes(config):
        notes.append(f"from here on with other options than before: {changes}")
    for file in (history.metrics, history.samples):
        if file.superseded:
            notes.append(f"what {file.path} holds after that state is moved to {file.path}.superseded")
    return notes


def _end_forked_process(error: BaseException) -> NoReturn:
    """End a process that the user's code forked and that raised ``error``. The open session belongs to its parent."""
    cause = error.__cause__ if isinstance(error, CallableError) else error
    code = 1
    if isinstance(cause, SystemExit):
        code = cause.code if isinstance(cause.code, int) else int(cause.code is not None)
    else:
        show_error(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _say_how_to_resume(options: LoopOptions, summary: Summary, end: int) -> None:
    """Print the options that continue a training which ended early."""
    state_id, cycle = summary.state_id, summary.next_cycle
    if state_id and cycle is not None and cycle < end:
        known = "" if options.metrics else f" --first-cycle {cycle} --seed {options.seed}"
        left = f" --cycles {end - cycle}" if hasattr(options, "cycles") else ""
        say(f"to resume at cycle {cycle}, the same command with: --resume-from {state_id}{known}{left}")
    elif summary.session_id and not state_id:
        say("no state was saved, so there is none to resume from (--save-every N saves them on the way)")


def _judge(summary: Summary, *, is_byte_lm: bool) -> int:
    """Return the exit code of a training that ended by itself, or of a dry run."""
    goal_reached = summary.ended_by is not None and summary.ended_by.startswith("--stop-at")
    if summary.cycles_skipped and not summary.cycles_done and not goal_reached:
        summary.error = "every cycle was skipped: no build_loss found a gradient signal"
        say(f"error: {summary.error}")
        if is_byte_lm:
            say(
                "exercised: sampling, your functions, save_state, export_lora and the clean-up; not exercised: what "
                "build_loss returns, forward_backward and optim_step"
            )
            say(
                "to go on: the completions of each prompt had equal rewards. The embedded model writes random letters, "
                "so give part marks, such as for each right letter; or rehearse on a real model by --engine"
            )
        return 1
    summary.status = "succeeded"
    return 0


def _report_end(error: BaseException, summary: Summary) -> int:
    """Report the error that ended the loop, on stderr and in the summary; return the exit code."""
    end: BaseException | None = error
    while end and not isinstance(end, KeyboardInterrupt):  # within a lock of threading it comes out as a RuntimeError
        end = end.__context__
    if end is None:
        summary.error = show_error(error)
        return 1
    end = end if isinstance(end, EndedBySignal) else EndedBySignal(signal.SIGINT)
    summary.status = f"ended by {end}"
    gone = summary.where == EMBEDDED
    say(f"ended by {end}" + (", and with it the embedded service and all that was open on it" if gone else ""))
    return 128 + end.number
