"""Context managers that leave nothing open: a training session, and a LoRA run in it.

On failure, Ctrl-C and SIGTERM (if a handler raises, as the loops' does): cancel, poll until terminal, close. A clean-up
that fails is logged and never hides the error that came first. A second Ctrl-C ends the waiting.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from whitney_loop import wire
from whitney_loop.client import WhitneyClient
from whitney_loop.errors import RequestRejected, WhitneyError, log, redacted

_LAST_TRY_S = 5.0  # for each request of a clean-up after the user has asked to stop waiting


def training_session(
    client: WhitneyClient, *, provider: str, idempotency_key: str | None = None
) -> AbstractContextManager[str]:
    """Open a session, give its id, and close the session on every exit. Raise what ``create_session`` raises.

    To find the session after a crash, choose an ``idempotency_key`` and save it first: a second call with the same key
    returns the same session.
    """
    key = idempotency_key or os.urandom(16).hex()

    def create(timeout_s: float | None, *, wait: bool) -> str:
        return client.create_session(provider, idempotency_key=key, timeout_s=timeout_s)

    def give_up(session_id: str, timeout_s: float | None) -> None:
        client.close_session(session_id, timeout_s=timeout_s)

    return _cleaned_up(_Resource(client, key, create, finish=client.close_session, give_up=give_up))


def lora_run(
    client: WhitneyClient,
    session_id: str,
    *,
    model: str,
    rank: int = 32,
    seed: int | None = None,
    resume_from: str | None = None,
) -> AbstractContextManager[str]:
    """Start a LoRA run and give its id. Finish it when the block ends, cancel it if the block raises.

    Then poll until the run is terminal. The block itself may finish or cancel the run. The block must save what should
    outlive the run (``save_state``, ``export_lora``). Raise what ``create_lora_run`` raises.
    """
    key = os.urandom(16).hex()

    def create(timeout_s: float | None, *, wait: bool) -> str:
        options: dict[str, Any] = {"rank": rank, "seed": seed, "resume_from": resume_from, "idempotency_key": key}
        return client.create_lora_run(session_id, model=model, **options, timeout_s=timeout_s, wait=wait)

    def finish(run_id: str) -> None:
        try:
            client.finish(run_id)
        except RequestRejected as error:
            if error.code != wire.RUN_NOT_ACTIVE or str(client.run(run_id).get(wire.STATUS)) not in wire.CANCELLED_RUN:
                raise
        client.wait_until_terminal(run_id)

    def give_up(run_id: str, timeout_s: float | None) -> None:
        client.cancel(run_id, timeout_s=timeout_s)
        client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s if timeout_s is None else timeout_s)

    return _cleaned_up(_Resource(client, key, create, finish=finish, give_up=give_up, session_id=session_id))


def close_everything(client: WhitneyClient, session_id: str) -> list[str]:
    """Cancel the runs of a session, close it, and wait until its runs have ended. Return the ids of those that ran.

    If a run cannot be cancelled, the session is closed all the same. That cancels its runs too, also those with an
    unusable id. Raise what closing and waiting raise.
    """
    runs = client.session(session_id).get(wire.RUN_LIST)
    open_runs = [
        run[wire.RUN_ID]
        for run in (runs if isinstance(runs, list) else [])
        if isinstance(run, dict) and wire.is_id(run.get(wire.RUN_ID))
        if str(run.get(wire.STATUS)) not in wire.ENDED_RUN
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
    return shlex.join(map(redacted, words))  # redacted before they are quoted, because quoting changes a key


@dataclass
class _Resource:
    """A session or a run: something on the service that must not outlive its block."""

    client: WhitneyClient
    idempotency_key: str
    create: Callable[..., str]  # takes a time limit; a second call returns the same id as the first one
    finish: Callable[[str], object]
    give_up: Callable[[str, float | None], object]  # takes the id and a time limit
    session_id: str | None = None  # the session of a run; closing it ends the run too
    id: str | None = None

    def end(self, timeout_s: float | None) -> None:
        if self.id is None:
            self.id = self.create(timeout_s, wait=False)
        self.give_up(self.id, timeout_s)

    def __str__(self) -> str:
        kind = "run" if self.session_id else "session"
        if self.id is None:
            return f"{kind} (its id did not arrive; Idempotency-Key {self.idempotency_key})"
        command = close_command(self.client, self.session_id or self.id)
        return f"{kind} {self.id} (to close {'its session' if self.session_id else 'it'}: {command})"


@contextmanager
def _cleaned_up(resource: _Resource) -> Iterator[str]:
    process = os.getpid()
    try:
        resource.id = resource.create(None, wait=True)
        yield resource.id
        if os.getpid() == process:  # a child that the block forked leaves its parent's session alone
            resource.finish(resource.id)
    except BaseException as error:
        if os.getpid() == process and (resource.id is not None or _may_have_been_made(error)):
            _clean_up(resource, error)
        raise


def _clean_up(resource: _Resource, error: BaseException) -> None:
    """End the resource because of ``error``. Log every problem, so that the user sees ``error``."""
    try:
        try:
            resource.end(_LAST_TRY_S if _has_stopped_waiting(error) else None)
        except (KeyboardInterrupt, SystemExit):  # the user asks again
            stop_waiting(error)
            if resource.session_id:  # a run: its session is closed next, and the run with it
                raise
            resource.end(_LAST_TRY_S)
    except BaseException as problem:
        log(logging.ERROR, f"may still be open: {resource}: {str(problem) or repr(problem)}")


def _may_have_been_made(error: BaseException) -> bool:
    """Return whether a creation that gave no id may have succeeded: it was interrupted, or its outcome is unknown."""
    return error.outcome == "unknown" if isinstance(error, WhitneyError) else not isinstance(error, ValueError)


def stop_waiting(error: BaseException) -> None:
    """Give each block that ``error`` passes only a few seconds to clean up: the user has asked for the end again."""
    # The mark is on the error itself, because the blocks around this one see nothing else.
    error.__dict__["_whitney_stopped_waiting"] = True


def _has_stopped_waiting(error: BaseException) -> bool:
    """Return whether the user asked for the end twice: the second time during a clean-up, or just before it."""
    interrupted_again = isinstance(error, KeyboardInterrupt) and isinstance(error.__context__, KeyboardInterrupt)
    return interrupted_again or "_whitney_stopped_waiting" in error.__dict__
