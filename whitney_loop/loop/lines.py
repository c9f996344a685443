"""JSONL files that a run adds to, such as the metrics. A resumption first moves away the lines after its state."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from whitney_loop.errors import redacted_json
from whitney_loop.loop.files import IN_USE, lock, read_text
from whitney_loop.loop.options import UsageError


@dataclass(frozen=True)
class Line:
    """One line of a file; ``end`` is the offset in bytes of the next."""

    entry: dict[str, Any]
    end: int


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file in UTF-8 or UTF-16. Raise ValueError as ``parsed_lines``, or if it cannot be read."""
    return list(parsed_lines(path, io.BytesIO(read_text(path, errors="replace").encode())))


def parsed_lines(path: Path, lines: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines of a file in UTF-8. A last line that was cut off, by a kill or a full disk, is left out.

    Raise ValueError with the file, and the line number if another one is no JSON object.
    """
    end = 0
    for number, raw in enumerate(lines, start=1):
        end += len(raw)
        try:
            entry = json.loads(raw) if raw.strip() else None
            if entry is not None and not isinstance(entry, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:
            if not raw.endswith(b"\n"):
                return
            raise ValueError(f"{path}:{number} is not one of the lines that a loop writes: {error}") from None
        if entry is not None:
            yield Line(entry, end)


@dataclass
class LinesFile:
    """A file of lines, written by one loop at a time. Without a path nothing is written."""

    option: str  # that named it, for messages
    path: Path | None = None
    kept_bytes: int = 0  # of the file: the lines up to the state to resume
    superseded: bytes = b""  # the bytes after them
    file: IO[bytes] | None = None  # open and locked

    def claim(self) -> None:
        """Create the file, if it is a new one. Raise UsageError if it cannot be written, or another loop writes it."""
        if self.path is None or self.file is not None:
            return
        try:
            file = self.path.open("a+b")  # it may exist without a line in it
        except OSError as error:
            raise UsageError(f"{self.option} {self.path}: {error}") from None
        if not lock(file) or self.path.stat().st_size:
            file.close()
            raise UsageError(f"{self.option} {self.path}: {IN_USE}")
        self.file = file

    def cut_back(self) -> None:
        """Move the lines after the state to resume to FILE.superseded. Raise ValueError if that is not possible."""
        if self.path is None or self.file is None:
            return
        if self.superseded:
            try:
                with superseded_path(self.path).open("ab") as beside:
                    beside.write(self.superseded)
            except OSError as error:
                raise ValueError(f"{superseded_path(self.path)} cannot be written: {error.strerror}") from None
        self.file.truncate(self.kept_bytes)
        self.file.seek(max(self.kept_bytes - 1, 0))
        if self.file.read() not in (b"\n", b""):  # a file whose end was edited must not swallow the next line
            self.file.write(b"\n")

    def write(self, *entries: Mapping[str, Any]) -> None:
        """Add lines. Raise ValueError if they cannot be written."""
        if self.file is None:
            return
        try:
            for entry in entries:
                self.file.write(as_json(entry).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise ValueError(f"{self.option} {self.path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # write has already reported what could not be written
                self.file.close()


def opened(option: str, path: Path) -> IO[bytes] | None:
    """Open and lock the file of an earlier run. Return None if it does not exist or is empty: ``claim`` creates it.

    Raise UsageError if it cannot be written, or another loop writes it.
    """
    require_writable(option, path)
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        file = path.open("r+b")
    except OSError as error:
        raise UsageError(f"{option} {path}: {error}") from None
    if not lock(file):
        file.close()
        raise UsageError(f"{option} {path}: {IN_USE}")
    return file


@contextlib.contextmanager
def closed_on_error(option: str, path: Path, file: IO[bytes]) -> Iterator[None]:
    """Close the file if the block raises; its OSError or ValueError becomes a UsageError that names the file."""
    try:
        yield
    except BaseException as error:
        file.close()
        if isinstance(error, (OSError, ValueError)):
            raise UsageError(f"{option} {path}: {error}") from None
        raise


def require_writable(option: str, path: Path) -> None:
    """Raise UsageError if the file, or another one beside it, cannot be written. Creates nothing."""
    folder = path.absolute().parent
    if not folder.is_dir():
        problem = f"there is no folder {path.parent}"
    elif path.exists() and not path.is_file():
        problem = "it is not a regular file"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "it cannot be written"
    else:
        return
    raise UsageError(f"{option} {path}: {problem}")


def superseded_path(path: Path) -> Path:
    """Return the path of the file for the lines that the resumed state does not hold."""
    return path.with_name(f"{path.name}.superseded")


def as_json(entry: Mapping[str, Any]) -> str:
    """Return the entry as JSON: null for a number that is not finite, text for an object that JSON cannot hold."""
    try:
        return json.dumps(redacted_json(entry), allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(redacted_json(_storable(entry)))


def _storable(value: Any) -> Any:
    """Return the value with null for each number that is not finite, and text for each object JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(name): _storable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
