"""The file of ``--metrics``: it records a run, and tells a resumption where to continue.

It is JSONL with four kinds of lines, in the order in which things happened:

- ``{"config": …}``: a run begins, or is resumed;
- ``{"cycle": …, "eval/…": …}``: the metrics of an evaluation before a cycle;
- ``{"cycle": …, …}``: the metrics of a cycle;
- ``{"state_id": …, "next_cycle": …}``: a saved state of all cycles above it, with ``second_runs``, the states of the
  runs beside it by name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import IO, Any

from whitney_loop.loop.lines import (
    LinesFile,
    as_json,
    closed_on_error,
    opened,
    parsed_lines,
    require_writable,
    superseded_path,
)
from whitney_loop.loop.options import LAST, LoopOptions, UsageError, flag_of

_ORDER = "the order of the data would not continue where it was"
_STATE = "a state fits only what it was saved from"
MUST_STAY = {"seed": _ORDER, "batch_size": _ORDER, "data_sha256": _ORDER, "lora_rank": _STATE, "model": _STATE}
# Changes of these are printed.
MAY_CHANGE = ["build_loss", "reward", "eval_json", "provider", "learning_rate", "schedule", "warmup", "updates"]
MAY_CHANGE += ["minibatches", "max_datums", "teacher_state", "teacher_epochs"]


@dataclass
class History:
    """The run that the metrics file holds, read once, and the open files for the lines to come."""

    first_cycle: int = 0
    state_id: str | None = None  # to resume from; None: a new run
    second_runs: Mapping[str, str | None] = field(default_factory=dict)  # their states by name, at that state
    configs: tuple[dict[str, Any], ...] = ()  # of the run's start and of each resumption
    cycles: tuple[dict[str, Any], ...] = ()  # the records of the cycles before the state
    metrics: LinesFile = field(default_factory=lambda: LinesFile("--metrics"))
    samples: LinesFile = field(default_factory=lambda: LinesFile("--samples"))  # cut back at the same cycle
    log: Callable[[dict[str, Any]], None] | None = None  # of --log; it is called with each line

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.metrics, self.samples):
            file.close()

    def require_same(self, config: Mapping[str, Any]) -> None:
        """Raise UsageError if ``config`` differs from the run's in something that must stay the same."""
        before = self.configs[0] if self.configs else {}
        for name, why in MUST_STAY.items():
            if name in before and before[name] != config.get(name):
                differs = f"{flag_of(name)} is {config.get(name)}, but {before[name]} in the run"
                if name == "data_sha256":
                    differs = "the data set is not the one"
                raise UsageError(f"{differs} that {self.metrics.path} began with: {why}")

    def changes(self, config: Mapping[str, Any]) -> str:
        """Return the options that differ from those of the run until now; empty if none does."""
        before = self.configs[-1] if self.configs else {}
        # As text: the file holds a path as text.
        changed = [name for name in MAY_CHANGE if name in before and str(before[name]) != str(config.get(name))]
        told = [f"{flag_of(name)} {before[name]} → {config.get(name)}" for name in changed]
        for name, value in before.get("optimizer", {}).items():
            now = config["optimizer"].get(name)
            if name != "learning_rate" and value != now:
                told.append(f"--optimizer {name}={value} → {now}")
        return ", ".join(told)

    def claim(self) -> None:
        """Create the files, if they are new ones. Raise UsageError if one cannot be, or another loop writes it."""
        for file in (self.metrics, self.samples):
            file.claim()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write the first line; first move the lines that a resumed state does not hold to FILE.superseded."""
        for file in (self.metrics, self.samples):
            file.cut_back()
        self.write({"config": config})

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add one line to the metrics, and call the user's logger with it. Raise ValueError if it cannot be written."""
        self.metrics.write(entry)
        if self.log is not None:
            self.log(json.loads(as_json(entry)))


def open_history(options: LoopOptions) -> History:
    """Read the metrics file and claim it until the History is closed. Raise UsageError if it does not fit the options.

    Creates nothing.
    """
    path, samples = options.metrics, getattr(options, "samples", None)  # not every loop samples
    _require_different_names({"--metrics": path, "--journal": options.journal, "--samples": samples})
    if options.resume_from is None and options.first_cycle is not None:
        raise UsageError("--first-cycle belongs to --resume-from")
    file = opened("--metrics", path) if path else None
    if path is None or file is None:
        history = _without_lines(options)
    else:
        with closed_on_error("--metrics", path, file):
            history = _continued(options, path, file)
    if samples:
        try:
            history.samples = _open_samples(samples, history)
        except BaseException:
            history.metrics.close()
            raise
    return history


def _require_different_names(paths: Mapping[str, Path | None]) -> None:
    for (one, path), (other, other_path) in combinations(paths.items(), 2):
        if path and other_path and path.absolute() == other_path.absolute():
            raise UsageError(f"{one} and {other} are both {other_path}: give them different names")


def _open_samples(path: Path, history: History) -> LinesFile:
    """Return the file of samples, to be cut back to the cycles before the first one that will be trained."""
    file = opened("--samples", path)
    lines = LinesFile("--samples", path.absolute(), file=file)
    if file is None:
        return lines
    if history.state_id is None:
        file.close()
        raise UsageError(f"--samples {path} exists: give another name, or remove it")
    with closed_on_error("--samples", path, file):
        for line in parsed_lines(path, file):
            if type(line.entry.get("cycle")) is not int or "tokens" not in line.entry:
                raise ValueError("it is not a file of samples")
            if line.entry["cycle"] >= history.first_cycle:
                break
            lines.kept_bytes = line.end
        file.seek(lines.kept_bytes)
        lines.superseded = file.read()
        if lines.superseded:
            require_writable("--samples", superseded_path(path))
    return lines


def _without_lines(options: LoopOptions) -> History:
    """Return the History of a run without a metrics file: a new run, or one that begins at ``--first-cycle``."""
    path = options.metrics and options.metrics.absolute()  # the user's module may change the current folder
    if options.resume_from is None:
        return History(metrics=LinesFile("--metrics", path))
    if options.first_cycle is None or options.resume_from == LAST:
        or_first = "" if options.resume_from == LAST else ", or --first-cycle N (0 for a training of its own)"
        raise UsageError(
            "--resume-from: which cycle comes next is not known; give --metrics the file of the run to continue"
            + or_first
        )
    if options.first_cycle and options.seed is None:
        raise UsageError("--first-cycle: give the --seed of that run too; its data are ordered by it")
    return History(options.first_cycle, options.resume_from, metrics=LinesFile("--metrics", path))


def _continued(options: LoopOptions, path: Path, file: IO[bytes]) -> History:
    """Return the run in the file, to be continued at one of its states."""
    content = file.read()
    if not json.detect_encoding(content).startswith("utf-8"):
        raise UsageError(f"--metrics {path} is not in UTF-8, in which the next lines are written: save it in UTF-8")
    lines = list(parsed_lines(path, io.BytesIO(content)))
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
        require_writable("--metrics", superseded_path(path))
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
        metrics=LinesFile("--metrics", path.absolute(), end, rest if rest.strip() else b"", file),
    )
