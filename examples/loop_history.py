"""The file of ``--metrics``: written a line at a time, read to plot it and to find where a run goes on.

It is JSONL, in the order of what happened, of three kinds of lines: ``{"config": …}`` when a run begins or is resumed,
``{"cycle": …, …}`` with the metrics of a cycle, and ``{"state_id": …, "next_cycle": …}`` when a state was saved. A
state's line comes after those of the cycles that it holds: what follows it in the file is not part of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

LAST = "last"  # of --resume-from: the newest state of the metrics file

_ORDER = "the order of the data would not go on where it was"
_STATE = "a state fits only what it was saved from"
MUST_STAY = {"seed": _ORDER, "batch_size": _ORDER, "requests_sha256": _ORDER, "lora_rank": _STATE, "model": _STATE}
MAY_CHANGE = ("build_loss", "provider", "learning_rate", "updates", "max_datums")  # and is said


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    first_cycle: int = 0
    state_id: str | None = None
    kept_bytes: int = 0  # of the metrics file: up to the state's line
    superseded: bool = False  # whether cycles follow it that the state does not hold


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
        if path is not None and exists:
            goes_on = any(line.entry.get("state_id") for line in read_lines(path))
            instead = f"--resume-from {LAST} to go on with it" if goes_on else "remove it: no state was saved in it"
            raise ValueError(f"--metrics {path} exists: give another name, or {instead}")
        return Start()
    if path is None or not exists:
        if first_cycle is None or resume_from == LAST:
            raise ValueError(
                "--resume-from: which cycle comes next is not known; give --metrics the file of the run to go on with"
                + ("" if resume_from == LAST else ", or --first-cycle N (0 for a training of its own)")
            )
        return Start(first_cycle, resume_from)
    saved = [line for line in read_lines(path) if line.entry.get("state_id") in _wanted(resume_from, line)]
    if not saved and resume_from == LAST:
        raise ValueError(
            f"--resume-from {LAST}: no state was saved in {path}; remove it, or give another name, and start"
        )
    if not saved:
        raise ValueError(f"--resume-from {resume_from}: {path} holds no such state; give the file of its own run")
    next_cycle = saved[-1].entry.get("next_cycle")
    if type(next_cycle) is not int or first_cycle not in (None, next_cycle):
        raise ValueError(f"--first-cycle is {first_cycle}, but by {path} the next cycle is {next_cycle}: leave it out")
    rest = path.read_bytes()[saved[-1].end :]
    return Start(next_cycle, saved[-1].entry["state_id"], saved[-1].end, bool(rest.strip()))


def _wanted(resume_from: str, line: Line) -> tuple[object, ...]:
    return (resume_from,) if resume_from != LAST else (line.entry.get("state_id") or "",)


def recorded_configs(path: Path) -> list[dict[str, Any]]:
    """The configurations in the metrics file: of the run's beginning, and of each time that it was resumed."""
    return [line.entry["config"] for line in read_lines(path) if isinstance(line.entry.get("config"), dict)]


def require_same(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError where ``config`` is not that of the run to go on with, in what must stay the same."""
    before, *_ = [*recorded_configs(path), {}]
    for name, why in MUST_STAY.items():
        if name in before and before[name] != config[name]:
            what = "the data set is not the one" if name == "requests_sha256" else (
                f"--{name.replace('_', '-')} is {config[name]}, but {before[name]} in the run"
            )  # fmt: skip
            raise ValueError(f"{what} that {path} began with: {why}")


def changed_options(path: Path, config: Mapping[str, Any]) -> str:
    """What trains otherwise than the run did until now; empty where nothing does."""
    *_, before = [{}, *recorded_configs(path)]
    changed = [name for name in MAY_CHANGE if name in before and before[name] != config[name]]
    return ", ".join(f"--{name.replace('_', '-')} {before[name]} → {config[name]}" for name in changed)


class MetricsFile:
    """Writes the lines, each flushed; does nothing where there is no path.

    Raises OSError where the file can not be opened or another loop is writing it: each would repeat the other's cycles.
    """

    def __init__(self, path: Path | None, start: Start, redacted: Callable[[str], str] = str) -> None:
        self._start = start
        self._redacted = redacted  # takes out what must not be kept
        self._path = path
        self._file: IO[str] | None = None if path is None else path.open("a", encoding="utf-8")
        if self._file is not None:
            _claim(self._file)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written was said by write
                self._file.close()

    def begin(self, config: Mapping[str, Any]) -> None:
        """The first line; where a run goes on, what the state does not hold is moved to a file beside this one."""
        if self._file is not None and self._path is not None:
            content = self._path.read_bytes()
            kept, rest = content[: self._start.kept_bytes], content[self._start.kept_bytes :]
            if rest.strip():
                with Path(f"{self._path}.superseded").open("ab") as beside:
                    beside.write(rest)
                self._file.truncate(len(kept))
            if kept and not kept.endswith(b"\n"):  # a file whose end was edited must not swallow what comes now
                self._file.write("\n")
        self.write({"config": config})

    def state(self, state_id: str | None, next_cycle: int) -> None:
        if state_id is not None:
            self.write({"state_id": state_id, "next_cycle": next_cycle})

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(self._redacted(json.dumps(_storable(entry))) + "\n")
                self._file.flush()
            except OSError as error:
                raise ValueError(f"--metrics {self._path} can not be written: {error.strerror}") from None


def _claim(file: IO[str]) -> None:
    """Hold the file as long as it is open; where the platform or the file system has no such locks, do without."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OSError("another loop is writing it") from None
    except OSError:
        pass


def _storable(value: Any) -> Any:
    """What JSON can hold: null for a number that is not finite, text for an object that it does not know."""
    if isinstance(value, Mapping):
        return {str(name): _storable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
