"""The file of ``--metrics``: what a run has done so far, and where it goes on.

It is JSONL, in the order of what happened, of four kinds of lines: ``{"config": …}`` when a run begins or is resumed,
``{"cycle": …, "eval/…": …}`` with the metrics of an evaluation before a cycle, ``{"cycle": …, …}`` with those of the
cycle, and ``{"state_id": …, "next_cycle": …}`` when a state was saved, with
``second_runs``, the states of the runs beside it by name. A state's line comes after those of the cycles that it
holds; what follows it in the file is not part of the state.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from whitney_loop.errors import redacted
from whitney_loop.loop.files import IN_USE, lock, read_text
from whitney_loop.loop.options import LAST, LoopOptions, UsageError, flag_of

_ORDER = "the order of the data would not continue where it was"
_STATE = "a state fits only what it was saved from"
MUST_STAY = {"seed": _ORDER, "batch_size": _ORDER, "data_sha256": _ORDER, "lora_rank": _STATE, "model": _STATE}
# Changes of these are printed.
MAY_CHANGE = ["build_loss", "reward", "eval_json", "provider", "learning_rate", "schedule", "warmup", "updates"]
MAY_CHANGE += ["minibatches", "max_datums", "teacher_state", "teacher_epochs"]


@dataclass(frozen=True)
class Line:
    """One line of a metrics file; ``end`` is the offset in bytes of the next."""

    entry: dict[str, Any]
    end: int


def read_lines(path: Path) -> list[Line]:
    """The lines of a metrics file. A last line that was cut off, by a kill or a full disk, is left out.

    Raise ValueError with the file, and the line number if another one is no JSON object.
    """
    return _parsed(path, read_text(path, errors="replace").encode())


def _parsed(path: Path, content: bytes) -> list[Line]:
    lines = []
    end = 0
    for number, raw in enumerate(content.split(b"\n"), start=1):
        end += len(raw) + 1
        try:
            entry = json.loads(raw) if raw.strip() else None
            if entry is not None and not isinstance(entry, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:
            if end > len(content):  # no newline at its end
                break
            raise ValueError(f"{path}:{number} is not a line of a metrics file: {error}") from None
        if entry is not None:
            lines.append(Line(entry, min(end, len(content))))
    return lines


@dataclass
class History:
    """The run that the metrics file holds, read once, and the open file for the lines to come.

    Without ``--metrics`` nothing is written.
    """

    first_cycle: int = 0
    state_id: str | None = None  # to resume from; None: a new run
    second_runs: Mapping[str, str | None] = field(default_factory=dict)  # their states by name, at that state
    configs: tuple[dict[str, Any], ...] = ()  # of the run's beginning, and of each time that it was resumed
    cycles: tuple[dict[str, Any], ...] = ()  # the records of those that the state holds
    path: Path | None = None
    kept_bytes: int = 0  # of the file: up to the state's line
    superseded: bytes = b""  # what follows: cycles that the state does not hold
    _file: IO[bytes] | None = None  # open and locked

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # write has already reported what could not be written
                self._file.close()

    def require_same(self, config: Mapping[str, Any]) -> None:
        """Raise UsageError if ``config`` differs from the run's in something that must stay the same."""
        before = self.configs[0] if self.configs else {}
        for name, why in MUST_STAY.items():
            if name in before and before[name] != config.get(name):
                what = "the data set is not the one" if name == "data_sha256" else (
                    f"{flag_of(name)} is {config.get(name)}, but {before[name]} in the run"
                )  # fmt: skip
                raise UsageError(f"{what} that {self.path} began with: {why}")

    def changes(self, config: Mapping[str, Any]) -> str:
        """The options that differ from those of the run until now; empty if none does."""
        before = self.configs[-1] if self.configs else {}
        changed = [name for name in MAY_CHANGE if name in before and before[name] != config.get(name)]
        told = [f"{flag_of(name)} {before[name]} → {config.get(name)}" for name in changed]
        for name, value in before.get("optimizer", {}).items():
            now = config["optimizer"].get(name)
            if name != "learning_rate" and value != now:
                told.append(f"--optimizer {name}={value} → {now}")
        return ", ".join(told)

    def claim(self) -> None:
        """Create the file, if it is a new one. Raise UsageError if it cannot be written, or another loop writes it."""
        if self.path is not None and self._file is None:
            self._file = _created(self.path)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write the first line; if a run is resumed, first move what its state does not hold to FILE.superseded."""
        if self.path is None or self._file is None:
            return
        if self.superseded:
            try:
                with _superseded(self.path).open("ab") as beside:
                    beside.write(self.superseded)
            except OSError as error:
                raise ValueError(f"{_superseded(self.path)} cannot be written: {error.strerror}") from None
        self._file.truncate(self.kept_bytes)
        self._file.seek(max(self.kept_bytes - 1, 0))
        if self._file.read() not in (b"\n", b""):  # a file whose end was edited must not swallow the next line
            self._file.write(b"\n")
        self.write({"config": config})

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add one line. Raise ValueError if it cannot be written."""
        if self._file is None:
            return
        try:
            self._file.write(redacted(json.dumps(_storable(entry))).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise ValueError(f"--metrics {self.path} cannot be written: {error.strerror}") from None


def open_history(options: LoopOptions) -> History:
    """Read the metrics file and claim it until the History is closed. Raise UsageError that says what is missing.

    Creates nothing.
    """
    path = options.metrics
    if path and options.journal and path.absolute() == options.journal.absolute():
        raise UsageError(f"--metrics and --journal are both {path}: give them different names")
    if path:
        _require_writable(path)
    if options.resume_from is None and options.first_cycle is not None:
        raise UsageError("--first-cycle belongs to --resume-from")
    if path is None or not path.exists() or not path.stat().st_size:
        return _without_lines(options)
    file = None
    try:
        file = path.open("r+b")
        if not lock(file):
            raise UsageError(f"--metrics {path}: {IN_USE}")
        return _continued(options, path, file)
    except BaseException as error:
        if file is not None:
            file.close()
        if isinstance(error, (OSError, ValueError)):
            raise UsageError(f"--metrics {path}: {error}") from None
        raise


def _require_writable(path: Path) -> None:
    """Raise UsageError if the metrics file, or another one beside it, cannot be written. Creates nothing."""
    folder = path.absolute().parent
    if not folder.is_dir():
        problem = f"there is no folder {path.parent}"
    elif path.exists() and not path.is_file():
        problem = "it is not a regular file"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "it cannot be written"
    else:
        return
    raise UsageError(f"--metrics {path}: {problem}")


def _without_lines(options: LoopOptions) -> History:
    """No file says which cycle comes next: a new run, or one that ``--first-cycle`` places."""
    path = options.metrics and options.metrics.absolute()  # the user's module may change the current folder
    if options.resume_from is None:
        return History(path=path)
    if options.first_cycle is None or options.resume_from == LAST:
        or_first = "" if options.resume_from == LAST else ", or --first-cycle N (0 for a training of its own)"
        raise UsageError(
            "--resume-from: which cycle comes next is not known; give --metrics the file of the run to continue"
            + or_first
        )
    if options.first_cycle and options.seed is None:
        raise UsageError("--first-cycle: give the --seed of that run too; its data are ordered by it")
    return History(options.first_cycle, options.resume_from, path=path)


def _continued(options: LoopOptions, path: Path, file: IO[bytes]) -> History:
    """The run in the file, to be continued at one of its states."""
    content = file.read()
    if not json.detect_encoding(content).startswith("utf-8"):
        raise UsageError(f"--metrics {path} is not in UTF-8, in which the next lines are written: save it in UTF-8")
    lines = _parsed(path, content)
    states = [line for line in lines if isinstance(line.entry.get("state_id"), str)]
    if options.resume_from is None:
        instead = f"--resume-from {LAST} to continue it" if states else "remove it: no state was saved in it"
        raise UsageError(f"--metrics {path} exists: give another name, or {instead}")
    if options.resume_from == LAST and not states:
        raise UsageError(
            f"--resume-from {LAST}: no state was saved in {path}; remove it, or give another name, and start"
        )
    wanted = [line for line in states if options.resume_from in (LAST, line.entry["state_id"])]
    if not wanted:
        raise UsageError(
            f"--resume-from {options.resume_from}: {path} holds no such state; give the file of its own run"
        )
    state, end = wanted[-1].entry, wanted[-1].end
    next_cycle = state.get("next_cycle")
    if type(next_cycle) is not int or options.first_cycle not in (None, next_cycle):
        raise UsageError(
            f"--first-cycle is {options.first_cycle}, but by {path} the next cycle is {next_cycle}: leave it out"
        )
    rest = content[end:]
    if rest.strip():
        _require_writable(_superseded(path))
    configs = tuple(line.entry["config"] for line in lines if isinstance(line.entry.get("config"), dict))
    if not configs:
        raise UsageError(
            f"--metrics {path} has lost its first line, the options of the run: resume without this file, by "
            f"--resume-from {state['state_id']} --first-cycle {next_cycle} --seed SEED"
        )
    return History(
        first_cycle=next_cycle,
        state_id=state["state_id"],
        second_runs=state.get("second_runs", {}),
        configs=configs,
        cycles=tuple(line.entry for line in lines if "cycle" in line.entry and line.end <= end),
        path=path.absolute(),
        kept_bytes=end,
        superseded=rest if rest.strip() else b"",
        _file=file,
    )


def _created(path: Path) -> IO[bytes]:
    """The new metrics file, claimed. Raise UsageError if another loop has begun one of this name meanwhile."""
    try:
        file = path.open("a+b")  # it may exist without a line in it
    except OSError as error:
        raise UsageError(f"--metrics {path}: {error}") from None
    if not lock(file) or path.stat().st_size:
        file.close()
        raise UsageError(f"--metrics {path}: {IN_USE}")
    return file


def _superseded(path: Path) -> Path:
    """The file beside a metrics file that gets the cycles which a resumed state does not hold."""
    return path.with_name(f"{path.name}.superseded")


def _storable(value: Any) -> Any:
    """What JSON can hold: null for a number that is not finite, text for an object that it does not know."""
    if isinstance(value, Mapping):
        return {str(name): _storable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
