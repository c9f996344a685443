"""``--journal PATH``: a small file that names the session, so that it can be closed after the loop was killed.

It is written before the session is created, locked as long as its loop lives, and removed once the session is closed.
It holds no API key. Its first line holds the service and the Idempotency-Key, the second the id of the session.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from whitney_loop import wire
from whitney_loop.client import WhitneyClient
from whitney_loop.errors import RequestRejected, WhitneyError, redacted
from whitney_loop.lifecycle import close_everything
from whitney_loop.loop.files import lock
from whitney_loop.loop.options import UsageError
from whitney_loop.loop.place import Place
from whitney_loop.loop.report import say


@dataclass(frozen=True)
class Entry:
    """The content of a journal."""

    base_url: str
    embedded: bool
    provider: str
    session_key: str  # the Idempotency-Key that creates the session: asked again with it, a service gives the same one
    session_id: str | None = None  # None: the loop was killed before the answer came

    def __str__(self) -> str:
        where = f"the embedded service at {self.base_url}" if self.embedded else self.base_url
        session = f"session {self.session_id}" if self.session_id else "a session whose id is not known"
        return f"{session} on {where}"


@dataclass
class Journal:
    """The open journal of this loop; without a file it writes nothing."""

    session_key: str
    file: IO[bytes] | None = None
    session_id: str | None = None

    def note_session(self, session_id: str) -> None:
        """Add the session's id. The key is enough to recover, so a failure is only reported."""
        self.session_id = session_id
        if self.file is not None and redacted(session_id) == session_id:  # a service may echo the API key
            try:
                _write(self.file, {"session_id": session_id})
            except OSError as error:
                say(f"warning: --journal {self.file.name} could not be written: {error.strerror}")


@contextmanager
def kept_journal(path: Path | None, place: Place, provider: str) -> Iterator[Journal]:
    """Keep a journal while the block runs, and remove it afterwards unless the session may still be open.

    Raise UsageError if the file exists or cannot be written.
    """
    entry = Entry(place.client.base_url, place.embedded, provider, str(uuid.uuid4()))
    if path is None:
        yield Journal(entry.session_key)
        return
    with _created(path) as file:
        try:
            _write(file, asdict(entry))
        except OSError as error:
            _remove(path, file)
            raise UsageError(f"--journal {path} cannot be written: {error.strerror}") from None
        journal = Journal(entry.session_key, file)
        closed_before = set(place.client.closed_sessions)  # such as one that was recovered
        refused = False
        try:
            yield journal
        except WhitneyError as error:
            refused = journal.session_id is None and error.outcome != "unknown"
            raise
        finally:
            closed = place.client.closed_sessions - closed_before
            if refused or (closed if journal.session_id is None else journal.session_id in closed):
                _remove(path, file)


def check_journal(path: Path | None, *, recover: bool) -> str:
    """Return a line on the journal for ``--dry-run``. Raise UsageError if a start would stop at it. Changes nothing."""
    if path is None:
        return "no journal is kept"
    if not path.exists():
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"--journal {path} cannot be written: there is no such folder to write in")
        return f"journal {path} can be written"
    with _opened(path) as file:
        entry = _read(path, file)
    found = f"names {entry}" if entry else "is empty: its loop had created nothing"
    if not recover:
        raise UsageError(
            f"--journal {path} was left by a loop that was killed, and {found}. Start again with --recover, which "
            "cancels and closes that first"
        )
    return f"journal {path} {found}; that is cleaned up first"


def recover_session(path: Path, client: WhitneyClient) -> str:
    """Close the session in the journal of a killed loop, remove the journal, and return a line to print.

    Raise UsageError if the journal is not of this service, WhitneyError if closing fails; the journal is kept then.
    """
    with _opened(path) as file:
        entry = _read(path, file)
        if entry is None:
            done = "it was empty: nothing had been created, so there is nothing to recover"
        elif entry.embedded:
            done = f"{entry}, which ended with its process: there is nothing to recover"
        elif entry.base_url != client.base_url:
            raise UsageError(
                f"--journal {path} names {entry}; this loop trains on {client.base_url}, and its key is sent nowhere "
                f"else. Recover with --base-url {entry.base_url}"
            )
        else:
            done = f"{entry}: {_close(entry, client)}"
        _remove(path, file)
    return f"journal {path}: {done}"


def _close(entry: Entry, client: WhitneyClient) -> str:
    """Cancel the runs of the session, poll and close it; return a few words to print."""
    # If the id never came: the same key gives the session that was created with it, or a new one, which is closed.
    session_id = entry.session_id or client.create_session(entry.provider, idempotency_key=entry.session_key)
    try:
        cancelled = close_everything(client, session_id)
    except RequestRejected as error:
        if error.status not in wire.GONE:
            raise
        return "the service no longer knows it"
    return f"closed; runs cancelled: {', '.join(cancelled) or 'none'}"


def _created(path: Path) -> IO[bytes]:
    """Create and lock the file. Raise UsageError if it exists or cannot be created."""
    try:
        file = path.open("xb", buffering=0)
    except FileExistsError:
        raise UsageError(f"--journal {path} exists: another loop has just written it") from None
    except OSError as error:
        raise UsageError(f"--journal {path} cannot be written: {error.strerror}") from None
    if not lock(file) or not _is_at(path, file):  # a start with --recover may have found it between these two lines
        file.close()
        raise UsageError(f"--journal {path} was taken by another loop that started at the same time")
    return file


def _opened(path: Path) -> IO[bytes]:
    """Open and lock the journal of a loop that has ended. Raise UsageError if its loop still runs, or it is no file."""
    if not path.is_file():
        raise UsageError(f"--journal {path} is not a regular file; give another PATH")
    try:
        file = path.open("r+b")
    except OSError as error:
        raise UsageError(f"--journal {path} cannot be read: {error.strerror}") from None
    if not lock(file):
        file.close()
        raise UsageError(
            f"--journal {path} is held by a loop that still runs, or by a process that it started: end that first, "
            "or give another PATH"
        )
    return file


def _read(path: Path, file: IO[bytes]) -> Entry | None:
    """Return the entry in the journal; None if it is empty. Raise UsageError if it is not a journal."""
    try:
        text = file.read().decode()
        if not text:
            return None
        *lines, _cut_off = text.split("\n")
        facts: dict[str, Any] = {}
        for line in lines:
            facts |= json.loads(line)
        entry = Entry(**facts)
        texts = [entry.base_url, entry.provider, entry.session_key, entry.session_id or ""]
        if all(isinstance(value, str) for value in texts):
            return entry
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    raise UsageError(f"--journal {path} is not a journal of a loop; give another PATH")


def _write(file: IO[bytes], facts: dict[str, Any]) -> None:
    line = json.dumps(facts).encode() + b"\n"
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())  # it must outlive a loss of power


def _remove(path: Path, file: IO[bytes]) -> None:
    """Remove the open file, and no other that took its name."""
    try:
        if _is_at(path, file):
            path.unlink()
    except OSError as error:
        say(f"warning: --journal {path} could not be removed: {error.strerror}. Remove it by hand")


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Return whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
