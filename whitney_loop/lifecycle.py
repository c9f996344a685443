"""Context managers that leave nothing open: a training session, and a LoRA run in it.

On failure, Ctrl-C and SIGTERM (where a handler raises, as the loops' does): cancel, poll until terminal, close. A
clean-up that fails is logged and never hides the error that came first. An interrupt during clean-up ends the waiting.
"""

from __future__ import annotations

import logging
import shlex
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from whitney_loop.client import WhitneyClient, Wire, is_id
from whitney_loop.errors import RequestRejected, WhitneyError, redacted

logger = logging.getLogger("whitney_loop")

_LAST_TRY_S = 5.0  # for the one request that closes everything, after the user has said to stop waiting


def training_session(
    client: WhitneyClient, *, provider: str, idempotency_key: str | None = None
) -> AbstractContextManager[str]:
    """Open a session, give its id, and close it on every exit. Raises what ``create_session`` raises.

    Who notes the ``idempotency_key`` (default: a new one) beforehand can find the session after a crash: the same key
    opens it once only.
    """
    key = idempotency_key or str(uuid.uuid4())
    return _held(
        _Held(
            what="session",
            command=lambda session_id: f"to close it: {close_command(client, session_id)}",
            key=key,
            create=lambda timeout_s: client.create_session(provider, idempotency_key=key, timeout_s=timeout_s),
            finish=client.close_session,
            give_up=lambda session_id, timeout_s: client.close_session(session_id, timeout_s=timeout_s),
            ends_with_another=False,
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
    """Start a LoRA run, give its id; finish it when the block ends, cancel it when the block raises.

    Either way it is polled until it is terminal. A run that the block itself finished or cancelled is left so. What
    it should leave behind (``save_state``, ``export_lora``) is the block's business. Raises what ``create_lora_run``
    raises.
    """
    key = str(uuid.uuid4())
    return _held(
        _Held(
            what="run",
            command=lambda _: f"to close its session: {close_command(client, session_id)}",
            key=key,
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
            ends_with_another=True,
        )
    )


def close_everything(client: WhitneyClient, session_id: str) -> list[str]:
    """Cancel what runs in a session, close it, and wait until its runs have ended; the ids of those that still ran.

    A run that can not be cancelled stops nothing: closing cancels it too, and so it does one whose id is none. Raises
    what closing and waiting raise.
    """
    runs = client.session(session_id).get(Wire.RUN_LIST)
    listed = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    open_runs = [
        run[Wire.RUN_ID]
        for run in listed
        if is_id(run.get(Wire.RUN_ID)) and str(run.get(Wire.STATUS)) not in Wire.ENDED_RUN
    ]
    for run_id in open_runs:
        try:
            client.cancel(run_id)
        except WhitneyError as error:
            logger.error("run %s could not be cancelled: %s", redacted(run_id), error)
    client.close_session(session_id)
    for run_id in open_runs:
        try:
            client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s)
        except RequestRejected as error:
            if error.status not in Wire.GONE:
                raise
    return open_runs


def first_error(error: BaseException, *kinds: type[BaseException]) -> BaseException:
    """What ended the block of a session or a run, where an interrupt has come out in its place.

    That happens between two managers only: each of them gives the first error itself. ``kinds`` are errors that count
    as the first one even where the interrupt came before they had reached a manager.
    """
    first = error
    while not isinstance(first, Exception) and error.__context__ is not None:
        error = error.__context__
        if isinstance(error, kinds) or "_whitney_ended_a_block" in error.__dict__:
            first = error
    return first


def close_command(client: WhitneyClient, session_id: str) -> str:
    """The command that does the same from a shell."""
    words = ["python", "-m", "whitney_loop", "close", session_id, "--base-url", client.base_url]
    words += [] if client.ca_file is None else ["--ca-file", client.ca_file]
    return shlex.join(map(redacted, words))  # before they are quoted: that takes a key apart


def _finish(client: WhitneyClient, run_id: str) -> None:
    try:
        client.finish(run_id)
    except RequestRejected as error:
        if error.code != Wire.RUN_NOT_ACTIVE or str(client.run(run_id).get(Wire.STATUS)) not in Wire.CANCELLED_RUN:
            raise
    client.wait_until_terminal(run_id)


def _cancel(client: WhitneyClient, run_id: str, timeout_s: float | None = None) -> None:
    client.cancel(run_id, timeout_s=timeout_s)
    client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s if timeout_s is None else timeout_s)


@dataclass
class _Held:
    """Something on the service that must not outlive its block."""

    what: str
    command: Callable[[str], str]
    key: str  # its Idempotency-Key
    create: Callable[[float | None], str]  # within seconds; asked again, it gives what was made the first time
    finish: Callable[[str], object]
    give_up: Callable[[str, float | None], object]  # id and seconds
    ends_with_another: bool  # a run ends with its session
    id: str | None = None
    first: BaseException | None = None  # what ended the block
    settled: bool = False  # given up, or said to be open

    def name(self) -> str:
        unknown = f"{self.what} (its id did not come; Idempotency-Key {self.key})"
        return unknown if self.id is None else redacted(f"{self.what} {self.id}")

    def how_to_close(self) -> str:
        return "" if self.id is None else f" ({self.command(self.id)})"

    def clean_up(self, first: BaseException) -> None:
        """Give it up; a failure is logged, so that ``first`` stays the error that is seen."""
        if self.id is None and not _may_have_been_made(first):
            return
        logger.warning("%s: cleaning up %s%s", type(first).__name__, self.name(), self.how_to_close())
        try:
            self.end(_LAST_TRY_S if _has_stopped_waiting(first) else None)
        except Exception as error:
            logger.error("may still be open: %s%s: %s", self.name(), self.how_to_close(), error)

    def last_try(self, interrupt: BaseException) -> None:
        """The same after an interrupt of ``clean_up``: say first what may be open, for there may be one more."""
        cause = type(interrupt).__name__
        logger.error("may still be open: %s%s: %s during clean-up", self.name(), self.how_to_close(), cause)
        if self.ends_with_another:
            return
        try:
            self.end(_LAST_TRY_S)
            logger.warning("closed after all: %s", self.name())
        except Exception as error:
            logger.error("may still be open: %s%s: %s", self.name(), self.how_to_close(), error)

    def end(self, timeout_s: float | None) -> None:
        if self.id is None:
            self.id = self.create(timeout_s)
        self.give_up(self.id, timeout_s)


@contextmanager
def _held(thing: _Held) -> Iterator[str]:
    """Two handlers, one within the other: an interrupt can come between any two lines, those of clean-up included."""
    try:
        try:
            thing.id = thing.create(None)
            yield thing.id
            thing.finish(thing.id)
        except BaseException as error:
            thing.first = error
            error.__dict__["_whitney_ended_a_block"] = True
            thing.clean_up(error)
            thing.settled = True
            raise
    except BaseException as error:
        thing.first = thing.first or error
        if thing.first is not error:  # the clean-up was interrupted
            _stop_waiting(thing.first)
        if not thing.settled:
            thing.last_try(error)
    else:
        return
    try:
        raise thing.first
    finally:
        thing.first = None  # else it refers to itself by its own traceback


def _may_have_been_made(error: BaseException) -> bool:
    """Whether something may exist of which no id came: an interrupt, or an outcome that is unknown."""
    return error.outcome == "unknown" if isinstance(error, WhitneyError) else not isinstance(error, ValueError)


def _stop_waiting(first: BaseException) -> None:
    # The error itself tells the managers outside this one, which see nothing else of what happened here.
    first.__dict__["_whitney_stopped_waiting"] = True


def _has_stopped_waiting(error: BaseException) -> bool:
    return "_whitney_stopped_waiting" in error.__dict__
