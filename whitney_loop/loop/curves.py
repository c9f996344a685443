"""The data of the page of ``plot``, read from the files of ``--metrics`` and ``--samples``."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from whitney_loop.loop.lines import parsed_lines, read_lines

Points = list[tuple[float, float]]  # (cycle, value)
Sample = tuple[float, str]  # (reward, text)

GAP = 50  # times the usual distance of two points; a curve is broken at a longer gap
LARGEST = 1e300  # beyond it a difference would overflow
LONGEST_TEXT = 400  # characters of a prompt's end and of a completion
UNCOMPARED_OPTIONS = frozenset(  # they change no curve: run length, paths, ids
    {"cycles", "first_cycle", "resume_from", "started", "session_id", "run_id", "save_every", "metrics", "storage"}
    | {"stop_at", "token_budget", "max_minutes", "show_every", "samples", "samples_per_group", "reward_threads", "log"}
    | {"save_best"}
    | {"journal", "recover", "timeout", "base_url", "ca_file", "local", "optimizer learning_rate"}
)


@dataclass
class Run:
    name: str
    configs: list[dict[str, Any]]  # of its start and of each resumption
    cycles: list[dict[str, Any]]
    samples: dict[int, tuple[Sample, Sample]] = field(default_factory=dict)  # the best and the worst by cycle

    def points(self, key: str) -> Points:
        """Return the cycles in which the metric was measured."""
        return [(entry["cycle"], entry[key]) for entry in self.cycles if _can_be_drawn(entry.get(key))]

    def option(self, name: str) -> str:
        """Return its value, and each new value that a resumption gave it."""
        held = groupby(self.configs, lambda config: str(config.get(name)))
        (first, _), *later = [(value, next(configs).get("first_cycle")) for value, configs in held]
        return " → ".join([first, *(f"{value} (cycle {cycle})" for value, cycle in later)])

    def resumed_at(self) -> list[int]:
        """Return the cycles at which the run was resumed."""
        return [config.get("first_cycle", 0) for config in self.configs[1:]]


def read_run(path: Path, samples: Path | None = None) -> Run:
    """Return the configurations of a run, its cycles in order, and its samples.

    Without ``samples`` the file that the run wrote is taken, if it still exists or lies beside the metrics.
    """
    entries = [line.entry for line in read_lines(path)]
    if any("stop_reason" in entry for entry in entries):
        raise ValueError(f"{path} is a file of --samples: give the run's file of --metrics, and this one by --samples")
    by_cycle: dict[float, dict[str, Any]] = {}
    for entry in entries:
        if _can_be_drawn(entry.get("cycle")):  # an evaluation and its cycle are two lines
            by_cycle[entry["cycle"]] = by_cycle.get(entry["cycle"], {}) | entry
    configs = [_flat(entry["config"]) for entry in entries if isinstance(entry.get("config"), dict)] or [{}]
    if samples is None and (written := configs[-1].get("samples")):
        places = (Path(str(written)), path.parent / Path(str(written)).name)
        samples = next((place for place in places if place.is_file()), None)
    cycles = [by_cycle[cycle] for cycle in sorted(by_cycle)]
    return Run(str(path), configs, cycles, read_samples(samples) if samples else {})


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with those of the optimizer beside the others."""
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict):
        return config
    rest = {name: value for name, value in config.items() if name != "optimizer"}
    return rest | {f"optimizer {name}": value for name, value in optimizer.items()}


def read_samples(path: Path) -> dict[int, tuple[Sample, Sample]]:
    """Return the best and the worst completion of each cycle. Raise ValueError if the file does not hold samples."""
    found: dict[int, tuple[Sample, Sample]] = {}
    with path.open("rb") as file:
        for line in parsed_lines(path, file):
            try:
                cycle, sample = line.entry["cycle"], _sample(line.entry)
            except (KeyError, TypeError):
                raise ValueError(f"{path} is not a file of samples") from None
            best, worst = found.get(cycle, (sample, sample))
            found[cycle] = (sample if sample[0] > best[0] else best, sample if sample[0] < worst[0] else worst)
    return found


def _sample(entry: dict[str, Any]) -> Sample:
    """Return (reward, text), with the advantage if no reward is known, and token ids if there is no text."""
    value = entry["advantage"] if entry["reward"] is None else entry["reward"]
    prompt, text = (
        " ".join(map(str, entry[tokens])) if entry[decoded] is None else entry[decoded]
        for tokens, decoded in (("prompt", "prompt_text"), ("tokens", "text"))
    )
    return value or 0.0, f"{prompt[-LONGEST_TEXT:]} → {text[:LONGEST_TEXT]}"


def segments(curve: Points, cycles: int) -> list[Points]:
    """Return the curve in means of ``cycles`` cycles each, broken at its gaps."""
    groups = [list(group) for _, group in groupby(curve, lambda point: point[0] // cycles)]
    means = [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]
    usual = median([after[0] - before[0] for before, after in pairwise(means)] or [0])  # more than 1 of an evaluation
    pieces: list[Points] = []
    for point in means:
        if not pieces or point[0] - pieces[-1][-1][0] > GAP * usual:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def _can_be_drawn(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
