"""Context managers that leave nothing open: a training session, and a LoRA run in it.

On failure, Ctrl-C and SIGTERM (where a handler raises, as the loops' does): cancel, poll until terminal, close. A
clean-up that fails is logged and never hides the error that came first. An interrupt during clean-up ends the waiting.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whitney_loop.client import WhitneyClient, Wire
from whitney_loop.errors import RequestRejected, WhitneyError

logger = logging.getLogger("whitney_loop")

_LAST_TRY_S = 5.0  # for the one request that closes everything, after the user has said to stop waiting
_AFTERTHOUGHT_S = 30.0  # for ending what may have been made although no answer came


@contextmanager
def training_session(client: WhitneyClient, *, provider: str) -> Iterator[str]:
    """Open a session, give its id, and close it on every exit. Raises what ``create_session`` raises."""
    session_id = _created(
        lambda key: client.create_session(provider, idempotency_key=key),
        lambda made: client.close_session(made, timeout_s=_AFTERTHOUGHT_S),
        "session",
    )
    try:
        yield session_id
        client.close_session(session_id)
    except BaseException as error:
        timeout_s = _LAST_TRY_S if _has_stopped_waiting(error) else None
        what = f"session {session_id} (to close it: {close_command(client, session_id)})"
        _clean_up(error, what, lambda: client.close_session(session_id, timeout_s=timeout_s))
        raise


@contextmanager
def lora_run(
    client: WhitneyClient,
    session_id: str,
    *,
    model: str,
    rank: int = 32,
    seed: int | None = None,
    resume_from: str | None = None,
) -> Iterator[str]:
    """Start a LoRA run, give its id; finish it when the block ends, cancel it when the block raises.

    Either way it is polled until it is terminal. A run that the block itself finished or cancelled is left so. What
    it should leave behind (``save_state``, ``export_lora``) is the block's business. Raises what ``create_lora_run``
    raises.
    """
    run_id = _created(
        lambda key: client.create_lora_run(
            session_id, model=model, rank=rank, seed=seed, resume_from=resume_from, idempotency_key=key
        ),
        lambda made: client.cancel(made, timeout_s=_AFTERTHOUGHT_S),
        "run",
    )
    try:
        yield run_id
        _finish(client, run_id)
    except BaseException as error:
        timeout_s = _LAST_TRY_S if _has_stopped_waiting(error) else None
        what = f"run {run_id} (to close its session: {close_command(client, session_id)})"
        _clean_up(error, what, lambda: _cancel(client, run_id, timeout_s))
        raise


def close_everything(client: WhitneyClient, session_id: str) -> list[str]:
    """Cancel what runs in a session, close it, and wait until its runs have ended; the ids of those that still ran.

    A run that can not be cancelled stops nothing: closing cancels it too. Raises what closing and waiting raise.
    """
    runs = client.session(session_id).get(Wire.RUN_LIST)
    listed = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    open_runs = [
        run[Wire.RUN_ID]
        for run in listed
        if isinstance(run.get(Wire.RUN_ID), str) and str(run.get(Wire.STATUS)) not in Wire.ENDED_RUN
    ]
    for run_id in open_runs:
        try:
            client.cancel(run_id)
        except WhitneyError as error:
            logger.error("run %s could not be cancelled: %s", run_id, error)
    client.close_session(session_id)
    for run_id in open_runs:
        client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s)
    return open_runs


def close_command(client: WhitneyClient, session_id: str) -> str:
    """The command that does the same from a shell."""
    return f"python -m whitney_loop close {session_id} --base-url {client.base_url}"


def _finish(client: WhitneyClient, run_id: str) -> None:
    try:
        client.finish(run_id)
    except RequestRejected as error:
        if error.code != Wire.RUN_NOT_ACTIVE or client.run(run_id).get(Wire.STATUS) not in Wire.CANCELLED_RUN:
            raise
    client.wait_until_terminal(run_id)


def _cancel(client: WhitneyClient, run_id: str, timeout_s: float | None = None) -> None:
    client.cancel(run_id, timeout_s=timeout_s)
    client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s if timeout_s is None else timeout_s)


def _created(create: Callable[[str], str], end: Callable[[str], object], what: str) -> str:
    """The id that ``create`` gives for a new Idempotency-Key; what may exist without a known id is ended."""
    key = str(uuid.uuid4())
    try:
        return create(key)
    except BaseException as error:
        if not isinstance(error, WhitneyError) or error.outcome == "unknown":
            # The same key gives what was made, if anything was.
            _clean_up(error, f"{what} (its id did not come)", lambda: end(create(key)))
        raise


def _clean_up(first: BaseException, what: str, action: Callable[[], object]) -> None:
    """Do ``action``; whatever it raises is logged, so that ``first`` stays the error that is seen."""
    logger.warning("%s: cleaning up %s", type(first).__name__, what)
    try:
        action()
    except BaseException as error:
        logger.error("may still be open: %s: %s", what, str(error) or type(error).__name__)
        if not isinstance(error, Exception):  # a second Ctrl-C
            _stop_waiting(first)


def _stop_waiting(first: BaseException) -> None:
    # The error itself tells the managers outside this one, which see nothing else of what happened here.
    first.__dict__["_whitney_stopped_waiting"] = True


def _has_stopped_waiting(error: BaseException) -> bool:
    return "_whitney_stopped_waiting" in error.__dict__
