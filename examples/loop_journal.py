"""``--journal PATH``: a small file by which a loop that was killed outright can be cleaned up after.

It is written before the session is asked for, and removed once the session is closed. It holds no key. Of loops that
start at once, one makes the file, empty. Every write replaces it whole, so that it is never read half written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from whitney_loop import RequestRejected, WhitneyClient, WhitneyError
from whitney_loop.errors import redacted
from whitney_loop.lifecycle import close_everything

logger = logging.getLogger("whitney_loop")

_FORGOTTEN = frozenset({404, 410})  # the service has no such thing any more


class JournalError(Exception):
    """A journal that is in the way, or can not be used; the message says what it holds and what to do."""


class JournalLost(Exception):
    """The journal can not be written any more while a loop runs."""


@dataclass
class Journal:
    """What was opened, and where. ``session_key`` is the Idempotency-Key that opens the session once only."""

    base_url: str
    embedded: bool
    provider: str
    session_key: str = field(default_factory=lambda: str(uuid.uuid4()))
    session_id: str | None = None
    run_ids: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = f"the embedded service at {self.base_url}" if self.embedded else self.base_url
        session = f"session {self.session_id}" if self.session_id else "a session whose id had not come yet"
        return f"{session}, {' and '.join(f'run {run_id}' for run_id in self.run_ids) or 'no run'}, on {where}"

    def claim(self, path: Path | None) -> None:
        """Make the file, empty, or raise JournalError: of two loops only one can. Nothing without a path."""
        if path is None:
            return
        try:
            path.open("x").close()
        except FileExistsError:
            raise JournalError(_in_the_way(path, read_journal(path))) from None
        except OSError as error:
            raise JournalError(f"--journal {path} can not be written: {error.strerror}") from None

    def write(self, path: Path | None) -> None:
        """Replace the file, or do nothing without one. Raises JournalLost; the file is as it was then."""
        if path is None:
            return
        draft = _draft_of(path)
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(redacted(json.dumps(asdict(self))))
                file.flush()
                os.fsync(file.fileno())  # it must outlive a loss of power
            draft.replace(path)
            _sync_folder(path)
        except OSError as error:
            raise JournalLost(
                f"journal {path} could not be written: {error.strerror}. A kill could not be cleaned up after: "
                "make it writable, or give another PATH"
            ) from None


@contextlib.contextmanager
def kept_journal(path: Path | None, client: WhitneyClient, *, embedded: bool, provider: str) -> Iterator[Journal]:
    """The journal of one session; its file is removed with the block where nothing is open any more.

    Raises JournalError where there is such a file, or can be none.
    """
    journal = Journal(client.base_url, embedded, provider)
    journal.claim(path)
    closed_before = set(client.closed_sessions)  # such as one that was recovered
    was_written = False
    error: BaseException | None = None
    try:
        journal.write(path)
        was_written = True  # from here on a session may be asked for
        yield journal
    except BaseException as raised:
        error = raised
        raise
    finally:
        is_open = was_written and not _nothing_is_open(journal, client.closed_sessions - closed_before, error)
        if path is not None and not is_open:
            try:
                _remove(path)
            except JournalError as failure:  # it must not hide the first error
                logger.error("%s", failure)
        error = None


def clear_the_way(path: Path | None, client: WhitneyClient, *, recover: bool) -> str | None:
    """Raise JournalError where a journal stands at ``path``; with ``recover``, close what it names and remove it.

    What was found and done, to be said; None where there is no journal. Raises WhitneyError where closing fails; the
    journal is kept then.
    """
    if path is None or not path.exists():
        return None
    journal = read_journal(path)
    if not recover:
        raise JournalError(_in_the_way(path, journal))
    if journal is None:
        _remove(path)
        return f"journal {path} was empty: nothing had been opened, so there is nothing to recover"
    if journal.embedded:
        _remove(path)
        return f"journal {path}: {journal}, which ended with its process: there is nothing to recover"
    if journal.base_url != client.base_url:
        raise JournalError(
            f"--journal {path} names {journal}; this loop trains on {client.base_url}, and its key is sent nowhere "
            f"else. Recover with --base-url {journal.base_url}"
        )
    done = _recover(journal, client)
    _remove(path)
    return f"journal {path}: {journal}: {done}"


def foreseen(path: Path | None, *, recover: bool) -> str:
    """What a start would do about the journal; JournalError where it would stop. Changes nothing."""
    if path is None:
        return "none is kept"
    if path.exists():
        journal = read_journal(path)
        if not recover:
            raise JournalError(_in_the_way(path, journal))
        return f"{path} names {journal or 'nothing'}: that would be closed first"
    if not os.access(path.absolute().parent, os.W_OK):
        raise JournalError(f"--journal {path} can not be written: no folder to write in")
    return f"{path} can be written"


def read_journal(path: Path) -> Journal | None:
    """The journal in a file, None where that is empty; JournalError where it is none."""
    try:
        if not (text := path.read_text(encoding="utf-8")):
            return None
        journal = Journal(**json.loads(text))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise JournalError(f"--journal {path} is no journal of a loop ({error}); give another PATH") from None
    texts = [journal.base_url, journal.provider, journal.session_key, journal.session_id or ""]
    if not isinstance(journal.run_ids, list) or not all(isinstance(text, str) for text in texts + journal.run_ids):
        raise JournalError(f"--journal {path} is no journal of a loop (a field is of another type); give another PATH")
    return journal


def _recover(journal: Journal, client: WhitneyClient) -> str:
    """Cancel, poll and close; what was done."""
    # Where the id never came: the same key gives the session that was opened with it, or opens one to be closed.
    session_id = journal.session_id or client.create_session(journal.provider, idempotency_key=journal.session_key)
    try:
        cancelled = close_everything(client, session_id)
    except RequestRejected as error:
        if error.status not in _FORGOTTEN:
            raise
        return "the service knows no such session any more"
    for run_id in journal.run_ids:
        client.wait_until_terminal(run_id, timeout_s=client.submit_timeout_s)
    return f"session {session_id} is closed; cancelled: {', '.join(cancelled) or 'no run'}"


def _nothing_is_open(journal: Journal, closed: set[str], error: BaseException | None) -> bool:
    if journal.session_id is not None:
        return journal.session_id in closed
    was_refused = isinstance(error, WhitneyError) and error.outcome != "unknown"
    return was_refused or bool(closed)


def _in_the_way(path: Path, journal: Journal | None) -> str:
    found = journal or "it is empty, so nothing was opened yet"
    return (
        f"--journal {path} is there already, of a loop that still runs or was killed: {found}. If none runs, start "
        "again with --recover, which cancels and closes that first"
    )


def _sync_folder(path: Path) -> None:
    """Have the file's name outlive a loss of power too, where one can open a folder (not on Windows)."""
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove(path: Path) -> None:
    try:
        for file in (path, _draft_of(path)):  # a write that failed may have left a draft
            file.unlink(missing_ok=True)
    except OSError as error:
        raise JournalError(f"journal {path} could not be removed: {error.strerror}. Remove it by hand") from None


def _draft_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.draft")
