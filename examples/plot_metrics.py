"""Curves of one or several runs, from the files of ``--metrics``, in one HTML page that needs nothing else.

    python examples/plot_metrics.py a.jsonl b.jsonl --output runs.html

One chart per metric, all runs in it. A run is named by its file. Where runs were configured differently, or one was
resumed with other options, a table says how. Open the page with any browser, also offline.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from loop_history import read_lines

Points = list[tuple[float, float]]

WIDTH, HEIGHT = 380, 220  # of a chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 10, 38  # its margins: tick labels, half of the last one, the name of the axis
MOST_POINTS = 500  # per curve: more than the pixels there are; each is then the mean of several cycles
# A curve goes on over cycles in which its metric was not measured, such as skipped ones: as single dots it can not be
# followed. Over more than so many of its usual distances a line would be an invention. Where cycles are skipped at
# random, half of the distances are above the median, and so only one in 2^10 is above ten of it.
GAP = 10
TICKS = 4  # about so many per axis
LARGEST = 1e300  # of a value that is drawn: the difference of two of them is still a number

# Okabe and Ito's colours without the yellow, told apart by nearly everyone; after those the dashes change.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6b6b6b")
DASHES = ("", "6 3", "2 3")

FIRST = ("reward", "loss", "kl", "ratio", "ess", "clip_frac", "groups", "completions", "optim")  # groups, in this order
LAST = ("provider", "time")
HIDDEN = frozenset({"cycle", "version"})
# Options that change no curve: how far a start went and from where, where things lie, and what others tell as well.
UNTOLD = frozenset(
    {"cycles", "first_cycle", "resume_from", "started", "session_id", "run_id", "save_every", "metrics", "storage"}
    | {"journal", "recover", "timeout", "base_url", "ca_file", "local", "optimizer"}
)
UNITS = {
    "time": "seconds",
    "kl": "nats per token",
    "ratio": "trainer / sampler",
    "ess": "share of tokens",
    "clip_frac": "share of tokens",
    "completions/tokens": "tokens per cycle",
    "completions/truncated_frac": "share of completions",
    "completions/empty_frac": "share of completions",
    "groups/uniform_frac": "share of groups",
    "optim/grad_norm": "L2 norm",
}

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #666; --rule: #ddd; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --soft: #aaa; --rule: #3a3a3a; --paper: #161616; } }
body { font: 14px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 24px; }
h1 { font-size: 20px; margin: 0 0 8px; } h2 { font-size: 15px; margin: 24px 0 4px; }
ul.legend { list-style: none; padding: 8px 0; margin: 0; position: sticky; top: 0; background: var(--paper); }
ul.legend li { display: inline-block; margin-right: 20px; }
.charts { display: flex; flex-wrap: wrap; gap: 16px; }
figure { margin: 0; } figcaption { font-weight: 600; } small { font-weight: 400; color: var(--soft); }
svg text { font-size: 11px; fill: var(--soft); } svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
table { border-collapse: collapse; } td, th { border: 1px solid var(--rule); padding: 2px 8px; text-align: left; }
"""


@dataclass
class Run:
    name: str
    configs: list[dict[str, Any]]  # of each start: the file begins with one, and each resumption adds one
    cycles: list[dict[str, Any]]

    def points(self, key: str) -> Points:
        """(cycle, value) where the metric is a finite number."""
        return [(entry["cycle"], entry[key]) for entry in self.cycles if _is_finite(entry.get(key))]

    def option(self, name: str) -> str:
        """Its value, and each other one that a resumption gave it."""
        held = groupby(self.configs, lambda config: str(config.get(name)))
        (first, _), *later = [(value, next(configs).get("first_cycle")) for value, configs in held]
        return " → ".join([first, *(f"{value} (cycle {cycle})" for value, cycle in later)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plot files of --metrics into one HTML page.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, default=Path("metrics.html"), help="default: metrics.html")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(path, name) for path, name in zip(options.files, names_of(options.files), strict=True)]
        empty = [str(path) for path, run in zip(options.files, runs, strict=True) if not run.cycles]
        told = f"no cycle yet in {', '.join(empty)}: is it of rl_loop.py --metrics?"
        if len(empty) == len(runs):
            raise ValueError(told)
        if empty:
            print(f"left out: {told}", file=sys.stderr)
        options.output.write_text(page([run for run in runs if run.cycles]), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


def read_run(path: Path, name: str) -> Run:
    """Its configurations, and its cycles in order."""
    entries = [line.entry for line in read_lines(path)]
    by_cycle = {entry["cycle"]: entry for entry in entries if _is_finite(entry.get("cycle"))}
    configs = [entry["config"] for entry in entries if isinstance(entry.get("config"), dict)]
    return Run(name, configs or [{}], [by_cycle[cycle] for cycle in sorted(by_cycle)])


def names_of(paths: Sequence[Path]) -> list[str]:
    """The files' names, or their whole paths where two are named alike."""
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def page(runs: Sequence[Run]) -> str:
    keys = sorted({key for run in runs for entry in run.cycles for key in entry} - HIDDEN, key=_rank)
    curves = {key: [run.points(key) for run in runs] for key in keys}
    names = [run.name for run in runs]
    # All charts have the same cycles across, so that a metric of one run only lines up with the others.
    across = ticks([run.cycles[end]["cycle"] for run in runs for end in (0, -1)], whole=True)
    charts = [figure(key, names, of_key, across) for key, of_key in curves.items() if any(of_key)]
    title = " · ".join(escape(run.name) for run in runs)
    return (
        f'<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{legend(runs)}{differences(runs)}"
        f"<h2>Metrics by cycle</h2><div class=charts>{''.join(charts)}</div></html>\n"
    )


def legend(runs: Sequence[Run]) -> str:
    items = []
    for index, run in enumerate(runs):
        stroke = f"<svg width=28 height=10><line x1=0 y1=5 x2=28 y2=5 {_stroke(index)}/></svg>"
        cycles = f"cycles {run.cycles[0]['cycle']:g}–{run.cycles[-1]['cycle']:g}"
        items.append(f"<li>{stroke} {escape(run.name)} ({cycles})</li>")
    return f"<ul class=legend>{''.join(items)}</ul>"


def differences(runs: Sequence[Run]) -> str:
    """A table of the options that differ between the runs or within one; nothing where there are none."""
    starts = [config for run in runs for config in run.configs]
    rows = [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(run.option(name))}</td>' for run in runs)}</tr>"
        for name in dict.fromkeys(name for config in starts for name in config)
        if name not in UNTOLD and len({str(config.get(name)) for config in starts}) > 1
    ]
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    return f"<h2>What differs</h2><table><tr><th>option</th>{head}</tr>{''.join(rows)}</table>" if rows else ""


def figure(key: str, names: Sequence[str], curves: Sequence[Points], x_ticks: Sequence[float]) -> str:
    """One metric as SVG: axes with ticks, units, and a curve per run."""
    size = math.ceil(max(map(len, curves)) / MOST_POINTS)  # one for all: as a mean of more, a run would look calmer
    drawn = [[thinned(segment, size) for segment in segments(curve)] for curve in curves]
    y_ticks = ticks([y for pieces in drawn for piece in pieces for _, y in piece])
    (x_low, x_high), (y_low, y_high) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in y_ticks:
        _, down = place(x_low, y)
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={down:.1f} y2={down:.1f} />")
        parts.append(f"<text x={LEFT - 6} y={down + 4:.1f} text-anchor=end>{_label(y, y_ticks)}</text>")
    for x in x_ticks:
        across, floor = place(x, y_low)
        parts.append(f"<line class=axis x1={across:.1f} x2={across:.1f} y1={floor} y2={floor + 4} />")
        parts.append(f"<text x={across:.1f} y={floor + 16} text-anchor=middle>{_label(x, x_ticks)}</text>")
    parts.append(f"<line class=axis x1={LEFT} x2={WIDTH - RIGHT} y1={HEIGHT - BOTTOM} y2={HEIGHT - BOTTOM} />")
    parts.append(f"<line class=axis x1={LEFT} x2={LEFT} y1={TOP} y2={HEIGHT - BOTTOM} />")
    parts.append(f"<text x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 6} text-anchor=middle>cycle</text>")
    for index, (name, pieces) in enumerate(zip(names, drawn, strict=True)):
        parts += [path(piece, place, index, name) for piece in pieces]
    unit = UNITS.get(key) or UNITS.get(key.partition("/")[0]) or ""
    svg = f'<svg width={WIDTH} height={HEIGHT} role=img aria-label="{escape(key)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(key)} <small>{escape(unit)}</small></figcaption>{svg}</figure>"


def path(segment: Points, place: Any, index: int, name: str) -> str:
    title = f"<title>{escape(name)}</title>"  # shown where the mouse rests
    placed = [place(x, y) for x, y in segment]
    if len(placed) == 1:
        [(across, down)] = placed
        return f'<circle cx={across:.1f} cy={down:.1f} r=2 fill="{COLOURS[index % len(COLOURS)]}">{title}</circle>'
    points = " ".join(f"{across:.1f},{down:.1f}" for across, down in placed)
    return f'<polyline points="{points}" fill=none {_stroke(index)}>{title}</polyline>'


def segments(curve: Points) -> list[Points]:
    """The curve in pieces: it is cut where it has no value for long."""
    usual = median([after[0] - before[0] for before, after in pairwise(curve)] or [1])
    pieces: list[Points] = []
    for point in curve:
        if pieces and point[0] - pieces[-1][-1][0] <= GAP * usual:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def thinned(curve: Points, size: int) -> Points:
    """Each point the mean of ``size`` neighbours."""
    chunks = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def ticks(values: Sequence[float], *, whole: bool = False) -> list[float]:
    """Round numbers from at most the lowest value to at least the highest; at least two of them."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if high - low <= 1e-6 * max(largest, 1e-6):  # one value, but for rounding to 32 bits: it is drawn in the middle
        low, high = (low - largest / 2, high + largest / 2) if largest else (0.0, 1.0)
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _label(value: float, beside: Sequence[float]) -> str:
    step = beside[1] - beside[0]
    largest = max(abs(tick) for tick in beside)
    if largest >= 1e6 or largest < 1e-3:
        digits = math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9) + 2
        return f"{value:.{digits}g}".replace("-", "−")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += round(step * 10**decimals, 6) % 1 != 0  # a step of 0.25 needs one more
    return f"{value:.{decimals}f}".replace("-", "−")


def _stroke(index: int) -> str:
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width=1.6 stroke-dasharray="{dash}"'


def _rank(key: str) -> tuple[int, str]:
    group = key.partition("/")[0]
    if group in FIRST:
        return FIRST.index(group), key
    return len(FIRST) + (1 + LAST.index(group) if group in LAST else 0), key


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


if __name__ == "__main__":
    sys.exit(main())
