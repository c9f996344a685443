"""The files of a loop: text in any usual encoding, and locks on the files that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

# A forked process inherits the lock, and keeps it if the loop that forked it is killed.
IN_USE = "another loop is writing it, or a process that such a loop started still runs"


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Return the text of a JSON or JSONL file, in UTF-8 or UTF-16, with or without a byte order mark.

    Raise ValueError with the file if it cannot be read, and with the line if it is not text there; ``errors`` is
    that of ``bytes.decode``.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    encoding = json.detect_encoding(content)  # as json.loads itself does
    try:
        return content.decode(encoding, errors)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: {error}") from None


def lock(file: IO[Any]) -> bool:
    """Hold the file as long as it is open here or in a forked process. Return False if another loop holds it.

    Return True on a platform or file system without such locks: there nothing can be known.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
