"""Context managers that leave nothing open: a training session, and a LoRA run in it.

On failure, Ctrl-C and SIGTERM (if a handler raises, as the loops' does): cancel, poll until terminal, close. A clean-up
that fails is logged and never hides the error that came first. A second Ctrl-C ends the waiting.
"""

from __future__ import annotations

import logging
import os
import shlex
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from whitney_loop import wire
from whitney_loop.client import WhitneyClient
from whitney_loop.errors import RequestRejected, WhitneyError, log, redacted

_LAST_TRY_S = 5.0  # for each request that still closes something after the user has said to stop waiting


def training_session(
    client: WhitneyClient, *, provider: str, idempotency_key: str | None = None
) -> AbstractContextManager[str]:
    """Open a session, give its id, and close it on every exit. Raises what ``create_session`` raises.

    Save the ``idempotency_key`` (default: a new one) first and you can find the session after a crash: a second call
    with the same key returns the same session.
    """
    key = idempotency_key or str(uuid.uuid4())
    return _cleaned_up(
        _Resource(
            kind="session",
            idempotency_key=key,
            create=lambda timeout_s: client.create_session(provider, idempotency_key=key, timeout_s=timeout_s),
            finish=client.close_session,
            give_up=lambda session_id, timeout_s: client.close_session(session_id, timeout_s=timeout_s),
            how_to_close=lambda session_id: f"to close it: {close_command(client, session_id)}",
            ends_with_its_session=False,
        )
    )


def lora_run(
    client: WhitneyClient,
    session_id: str,
    *,
    model: str,
    rank: int = 32,
    seed: int | None = None,
    resume_from: str | None = None,
) -> AbstractContextManager[str]:
    """Start a LoRA run, give its id; finish it when the block ends, cancel it if the block raises.

    Either way it is polled until it is terminal. A run that the block itself finished or cancelled is left so. Saving
    what should outlive the run (``save_state``, ``export_lora``) is up to the block. Raises what ``create_lora_run``
    raises.
    """
    key = str(uuid.uuid4())
    return _cleaned_up(
        _Resource(
            kind="run",
            idempotency_key=key,
            create=lambda timeout_s: client.create_lora_run(
                session_id,
                model=model,
                rank=rank,
                seed=seed,
                resume_from=resume_from,
                idempotency_key=key,
                timeout_s=timeout_s,
            ),
            finish=lambda run_id: _finish(client, run_id),
            give_up=lambda run_id, timeout_s: _cancel(client, run_id, timeout_s),
            how_to_close=lambda _: f"to close its session: {close_command(client, session_id)}",
            ends_with_its_session=True,
        )
    )


def close_everything(client: WhitneyClient, session_id: str) -> list[str]:
    """Cancel the runs of a session, close it, and wait until they have ended. Return the ids of those that still ran.

    If a run cannot be cancelled, the session is closed all the same; that cancels its runs too, also those with an
    unusable id. Raises what closing and waiting raise.
    """
    runs = client.session(session_id).get(wire.RUN_LIST)
    listed = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    open_runs = [
        run[wire.RUN_ID]
        for run in listed
        if wire.is_id(run.get(wire.RUN_ID)) and str(run.get(wire.STATUS)) not in wire.ENDED_RUN
    ]
    for run_id in open_runs:
        try:
            client.cancel(run_id)
        except WhitneyError as error:
            log(logging.ERROR, f"run {run_id} could not be cancelled: {error}")
    client.close_session(session_id)
    for run_id in open_runs:
        try:
            client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s)
        except RequestRejected as error:
            if error.status not in wire.GONE:
                raise
    return open_runs


def close_command(client: WhitneyClient, session_id: str) -> str:
    """Return the shell command that closes a session and all that runs in it."""
    words = ["python", "-m", "whitney_loop", "close", session_id, "--base-url", client.base_url]
    words += [] if client.ca_file is None else ["--ca-file", client.ca_file]
    return shlex.join(map(redacted, words))  # before they are quoted: quoting changes how a key looks


def _finish(client: WhitneyClient, run_id: str) -> None:
    try:
        client.finish(run_id)
    except RequestRejected as error:
        if error.code != wire.RUN_NOT_ACTIVE or str(client.run(run_id).get(wire.STATUS)) not in wire.CANCELLED_RUN:
            raise
    client.wait_until_terminal(run_id)


def _cancel(client: WhitneyClient, run_id: str, timeout_s: float | None) -> None:
    client.cancel(run_id, timeout_s=timeout_s)
    client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s if timeout_s is None else timeout_s)


@dataclass
class _Resource:
    """A session or a run: something on the service that must not outlive its block."""

    kind: str
    idempotency_key: str
    create: Callable[[float | None], str]  # takes seconds; a second call returns the id of what the first one made
    finish: Callable[[str], object]
    give_up: Callable[[str, float | None], object]  # takes the id and seconds
    how_to_close: Callable[[str], str]  # by hand
    ends_with_its_session: bool
    id: str | None = None

    def name(self) -> str:
        if self.id is None:
            return f"{self.kind} (its id did not come; Idempotency-Key {self.idempotency_key})"
        return f"{self.kind} {self.id} ({self.how_to_close(self.id)})"

    def end(self, timeout_s: float | None) -> None:
        if self.id is None:
            self.id = self.create(timeout_s)
        self.give_up(self.id, timeout_s)


@contextmanager
def _cleaned_up(resource: _Resource) -> Iterator[str]:
    process = os.getpid()
    try:
        resource.id = resource.create(None)
        yield resource.id
        if os.getpid() == process:  # a child that the block forked leaves its parent's session alone
            resource.finish(resource.id)
    except BaseException as error:
        if os.getpid() == process and (resource.id is not None or _may_have_been_made(error)):
            _clean_up(resource, error)
        raise


def _clean_up(resource: _Resource, error: BaseException) -> None:
    """End the resource because of ``error``. What goes wrong is logged, so that ``error`` is what the user sees."""
    try:
        log(logging.INFO, f"cleaning up {resource.name()}")
        resource.end(_LAST_TRY_S if _has_stopped_waiting(error) else None)
    except Exception as failure:
        _log_as_open(resource, failure)
    except BaseException as interrupt:
        stop_waiting(error)
        _last_try(resource, interrupt)


def _last_try(resource: _Resource, interrupt: BaseException) -> None:
    """After a second Ctrl-C, close a session quickly or not at all. Its runs end with it."""
    problem: BaseException | str = f"{type(interrupt).__name__} during clean-up"
    try:
        if not resource.ends_with_its_session:
            resource.end(_LAST_TRY_S)
            problem = ""
    except Exception as failure:
        problem = failure
    finally:  # after a third Ctrl-C too
        if problem:
            _log_as_open(resource, problem)


def _log_as_open(resource: _Resource, problem: BaseException | str) -> None:
    log(logging.ERROR, f"may still be open: {resource.name()}: {problem}")


def _may_have_been_made(error: BaseException) -> bool:
    """Return whether a creation that gave no id may have succeeded: it was interrupted, or its outcome is unknown."""
    return error.outcome == "unknown" if isinstance(error, WhitneyError) else not isinstance(error, ValueError)


def stop_waiting(error: BaseException) -> None:
    """Give the blocks that ``error`` passes a few seconds each to clean up: the user has asked for the end again."""
    # The error itself tells the blocks around this one, since they see nothing else of what happened here.
    error.__dict__["_whitney_stopped_waiting"] = True


def _has_stopped_waiting(error: BaseException) -> bool:
    """Return whether the user asked for the end twice: during a clean-up, or between the first time and a clean-up."""
    interrupted_again = isinstance(error, KeyboardInterrupt) and isinstance(error.__context__, KeyboardInterrupt)
    return interrupted_again or "_whitney_stopped_waiting" in error.__dict__
