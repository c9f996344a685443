"""The file of ``--metrics``: written a line at a time, read to plot it and to find where a run goes on.

It is JSONL, in the order of what happened, of three kinds of lines: ``{"config": …}`` when a run begins or is resumed,
``{"cycle": …, …}`` with the metrics of a cycle, and ``{"state_id": …, "next_cycle": …}`` when a state was saved. A
state's line comes after those of the cycles that it holds: what follows it in the file is not part of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LAST = "last"  # of --resume-from: the newest state of the metrics file


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    first_cycle: int = 0
    state_id: str | None = None
    kept_bytes: int = 0  # of the metrics file: up to the state's line
    superseded: str = ""  # what follows it: cycles that the state does not hold


@dataclass(frozen=True)
class Line:
    entry: dict[str, Any]
    end: int  # the offset in bytes of what follows


def read_lines(path: Path) -> list[Line]:
    """The lines of a metrics file. A last one that was cut off, by a kill or a full disk, is left out.

    Raises ValueError with file and line where another one is no JSON object, OSError where it can not be read.
    """
    lines = []
    end = 0
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        end += len(raw) + 1
        try:
            entry = json.loads(raw) if raw.strip() else None
            if entry is not None and not isinstance(entry, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            if end > path.stat().st_size:  # no newline at its end
                break
            raise ValueError(f"{path}:{number} is not a line of a metrics file: {error}") from None
        if entry is not None:
            lines.append(Line(entry, min(end, path.stat().st_size)))
    return lines


def find_start(path: Path | None, resume_from: str | None, first_cycle: int | None) -> Start:
    """Where to begin, by the metrics file or by ``--first-cycle``. Raises ValueError that says what is missing."""
    exists = path is not None and path.exists() and path.stat().st_size > 0
    if resume_from is None:
        if first_cycle is not None:
            raise ValueError("--first-cycle belongs to --resume-from")
        if exists:
            raise ValueError(f"--metrics {path} exists: give another name, or --resume-from {LAST} to go on with it")
        return Start()
    if path is None or not exists:
        if first_cycle is None or resume_from == LAST:
            raise ValueError(
                "--resume-from: which cycle comes next is not known; give --metrics the file of the run to go on with"
                + ("" if resume_from == LAST else ", or --first-cycle N (0 for a training of its own)")
            )
        return Start(first_cycle, resume_from)
    saved = [line for line in read_lines(path) if line.entry.get("state_id") in _wanted(resume_from, line)]
    if not saved:
        raise ValueError(f"--resume-from {resume_from}: {path} holds no such state; give the file of its own run")
    next_cycle = saved[-1].entry.get("next_cycle")
    if type(next_cycle) is not int or first_cycle not in (None, next_cycle):
        raise ValueError(f"--first-cycle is {first_cycle}, but by {path} the next cycle is {next_cycle}: leave it out")
    content = path.read_bytes()[saved[-1].end :].decode("utf-8", "replace")
    return Start(next_cycle, saved[-1].entry["state_id"], saved[-1].end, content)


def _wanted(resume_from: str, line: Line) -> tuple[object, ...]:
    return (resume_from,) if resume_from != LAST else (line.entry.get("state_id") or "",)


def recorded_config(path: Path | None) -> dict[str, Any]:
    """The configuration that the metrics file begins with; empty where there is none."""
    if path is None or not path.exists():
        return {}
    configs = [line.entry["config"] for line in read_lines(path) if isinstance(line.entry.get("config"), dict)]
    return configs[0] if configs else {}


def require_same_data(path: Path | None, **config: Any) -> None:
    """Raise ValueError where ``config``, which decides the order of the data, is not that of the run to go on with."""
    before = recorded_config(path)
    for name, value in config.items():
        if name in before and before[name] != value:
            what = "the data set is not the one" if name == "requests_sha256" else (
                f"--{name.replace('_', '-')} is {value}, but {before[name]} in the run"
            )  # fmt: skip
            raise ValueError(f"{what} that {path} began with: the order of the data would not go on where it was")


class MetricsFile:
    """Writes the lines, each flushed; does nothing where there is no path."""

    def __init__(self, path: Path | None, start: Start, redacted: Callable[[str], str] = str) -> None:
        self._start = start
        self._redacted = redacted  # takes out what must not be kept
        self._path = path
        self._file: IO[str] | None = None if path is None else path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self, config: Mapping[str, Any]) -> None:
        """The first line; where a run goes on, what the state does not hold is moved to a file beside this one."""
        if self._file is not None and self._path is not None and self._start.superseded:
            with Path(f"{self._path}.superseded").open("a", encoding="utf-8") as beside:
                beside.write(self._start.superseded)
            self._file.truncate(self._start.kept_bytes)
        if self._path is not None and self._path.read_bytes()[-1:] not in (b"", b"\n"):
            self._newline()  # a file whose end was cut off, or edited, must not swallow what comes now
        self.write({"config": config})

    def state(self, state_id: str | None, next_cycle: int) -> None:
        if state_id is not None:
            self.write({"state_id": state_id, "next_cycle": next_cycle})

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(self._redacted(json.dumps(_storable(entry))) + "\n")
            self._file.flush()

    def _newline(self) -> None:
        if self._file is not None:
            self._file.write("\n")


def _storable(value: Any) -> Any:
    """What JSON can hold: null for a number that is not finite, text for an object that it does not know."""
    if isinstance(value, Mapping):
        return {str(name): _storable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
