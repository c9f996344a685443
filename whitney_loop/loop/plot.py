"""Curves of one or several runs, from the files of ``--metrics``, in one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from whitney_loop.loop.lines import read_lines

Points = list[tuple[float, float]]  # (cycle, value)

DESCRIPTION = """Draw the curves of one or several runs, from the files of --metrics, as one HTML page.

    {prog} a.jsonl b.jsonl --output compare.html

There is one chart per metric with all runs in it, and a table of the options in which they differ. The page needs no
network and no other file: open it in any browser. A run may still be training.

Exit codes: 0 the page is written; 2 usage, or a file cannot be read or written."""

WIDTH, HEIGHT = 400, 220  # of a chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 88, 24, 10, 38  # its margins: the longest label, half a label, the name of the axis
POINTS = 500  # per curve: more than the chart has pixels; a longer one is drawn as means of several cycles
GAP = 50  # points; a curve is broken at a longer gap
FLAT = 1e-4  # values that differ by less, relative to the largest, are drawn as one: labels of six digits suffice
SMALLEST, LARGEST = 1e-300, 1e300  # beyond them a step would vanish, or a difference overflow
# Okabe and Ito's colours without the yellow, told apart by nearly everyone.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6b6b6b")

OTHERS = ""
ORDER = ["reward", "loss", "kl", "ratio", "ess", "clip_frac", "groups", "completions", "optim", OTHERS]  # of groups
ORDER += ["provider", "time"]
UNCOMPARED_OPTIONS = frozenset(  # they change no curve: run length, paths, ids
    {"cycles", "first_cycle", "resume_from", "started", "session_id", "run_id", "save_every", "metrics", "storage"}
    | {"stop_at", "token_budget", "max_minutes", "log"}
    | {"journal", "recover", "timeout", "base_url", "ca_file", "local", "optimizer"}
)
UNITS = {  # of a metric, or of all metrics of a group
    "time": "seconds",
    "kl": "nats per token",
    "ratio": "trainer / sampler",
    "ess": "share of tokens",
    "clip_frac": "share of tokens",
    "completions/tokens": "tokens per cycle",
    "completions": "share of completions",
    "groups": "share of groups",
    "optim/grad_norm": "L2 norm",
}

HEAD = '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
STYLE = """
:root { color-scheme: light dark; } /* greys that can be read on both */
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; }
h1 { font-size: 20px; } h2 { font-size: 15px; margin: 24px 0 4px; } small { font-weight: 400; color: #808080; }
.legend { position: sticky; top: 0; padding: 8px 0; background: Canvas; } .legend span { margin-right: 20px; }
.charts { display: flex; flex-wrap: wrap; gap: 16px; } figure { margin: 0; } figcaption { font-weight: 600; }
svg text { font-size: 11px; fill: #808080; } svg line { stroke: #80808050; } polyline { fill: none; stroke-width: 1.6; }
table { border-collapse: collapse; } td, th { border: 1px solid #80808050; padding: 2px 8px; text-align: left; }
"""


@dataclass
class Run:
    name: str
    configs: list[dict[str, Any]]  # of its beginning, and of each time that it was resumed
    cycles: list[dict[str, Any]]

    def points(self, key: str) -> Points:
        """The cycles in which the metric was measured."""
        return [(entry["cycle"], entry[key]) for entry in self.cycles if _can_be_drawn(entry.get(key))]

    def option(self, name: str) -> str:
        """Its value, and each other one that a resumption gave it."""
        held = groupby(self.configs, lambda config: str(config.get(name)))
        (first, _), *later = [(value, next(configs).get("first_cycle")) for value, configs in held]
        return " → ".join([first, *(f"{value} (cycle {cycle})" for value, cycle in later)])


def main(arguments: Sequence[str] | None = None, prog: str = "python -m whitney_loop plot") -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl", help="a file of --metrics; one per run")
    parser.add_argument("--output", type=Path, default=Path("metrics.html"), help="default: metrics.html")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(path) for path in options.files]
        empty = ", ".join(run.name for run in runs if not run.cycles)
        if not any(run.cycles for run in runs):
            raise ValueError(f"no cycle yet in {empty}: is it a file of --metrics?")
        if empty:
            print(f"left out, since it has no cycle yet: {empty}", file=sys.stderr)
        write_page(options.output, page([run for run in runs if run.cycles]))
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


def read_run(path: Path) -> Run:
    """The configurations of a run, and its cycles in order."""
    entries = [line.entry for line in read_lines(path)]
    by_cycle: dict[float, dict[str, Any]] = {}
    for entry in entries:
        if _can_be_drawn(entry.get("cycle")):  # an evaluation and its cycle are two lines
            by_cycle[entry["cycle"]] = by_cycle.get(entry["cycle"], {}) | entry
    configs = [entry["config"] for entry in entries if isinstance(entry.get("config"), dict)]
    return Run(str(path), configs or [{}], [by_cycle[cycle] for cycle in sorted(by_cycle)])


def write_page(output: Path, content: str) -> None:
    """Write the page, whole or not at all. Raise ValueError if the file is something else than an older page."""
    output = output.resolve()
    if output.exists() and not (output.is_file() and output.read_bytes()[: len(HEAD)] in (HEAD.encode(), b"")):
        raise ValueError(f"--output {output} exists and is not a page of curves; give another name, or remove it")
    draft = output.with_name(f"{output.name}.draft")
    try:
        draft.write_bytes(content.encode(errors="backslashreplace"))  # JSON may hold half a character
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)


def page(runs: Sequence[Run]) -> str:
    # All charts have the same cycles across, and the same cycles in a mean, so that runs can be compared.
    first, last = min(run.cycles[0]["cycle"] for run in runs), max(run.cycles[-1]["cycle"] for run in runs)
    across = ticks(first, max(last, first + 5))  # whole numbers, for 5 or more
    keys = sorted({key for run in runs for entry in run.cycles for key in entry}, key=_place_in_order)
    shown = [key for key in keys if key not in ("cycle", "version") and any(run.points(key) for run in runs)]
    title = " · ".join(escape(run.name) for run in runs)
    charts = "".join(chart(key, runs, across) for key in shown)
    return (
        f"{HEAD}<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{legend(runs)}{differences(runs)}"
        f"<h2>Metrics by cycle</h2><div class=charts>{charts}</div></html>\n"
    )


def legend(runs: Sequence[Run]) -> str:
    items = [
        f'<span><b style="color:{_colour(index)}">━</b> {escape(run.name)} '
        f"(cycles {run.cycles[0]['cycle']:g}–{run.cycles[-1]['cycle']:g})</span>"
        for index, run in enumerate(runs)
    ]
    return f"<div class=legend>{''.join(items)}</div>"


def differences(runs: Sequence[Run]) -> str:
    """A table of the options in which the runs differ, or that a resumption changed; empty if there are none."""
    configs = [config for run in runs for config in run.configs]
    rows = [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(run.option(name))}</td>' for run in runs)}</tr>"
        for name in dict.fromkeys(name for config in configs for name in config)
        if name not in UNCOMPARED_OPTIONS and len({str(config.get(name)) for config in configs}) > 1
    ]
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    return f"<h2>What differs</h2><table><tr><th>option</th>{head}</tr>{''.join(rows)}</table>" if rows else ""


def chart(key: str, runs: Sequence[Run], across: Sequence[float]) -> str:
    """One metric as SVG: axes with ticks, the unit, and a curve per run."""
    cycles = math.ceil((across[-1] - across[0]) / POINTS)
    curves = [segments(run.points(key), cycles) for run in runs]
    values = [y for curve in curves for segment in curve for _, y in segment]
    up = ticks(min(values), max(values))

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT - RIGHT)
        return right, HEIGHT - BOTTOM - (y - up[0]) / (up[-1] - up[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f"<text x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 6} text-anchor=middle>cycle</text>"]
    for y in up:
        _, down = place(across[0], y)
        parts.append(f"<line x1={LEFT} x2={WIDTH - RIGHT} y1={down:.1f} y2={down:.1f} />")
        parts.append(f"<text x={LEFT - 6} y={down + 4:.1f} text-anchor=end>{_label(y)}</text>")
    for x in across:
        right, floor = place(x, up[0])
        parts.append(f"<line x1={right:.1f} x2={right:.1f} y1={TOP} y2={floor} />")
        parts.append(f"<text x={right:.1f} y={floor + 16} text-anchor=middle>{_label(x)}</text>")
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        title = f"<title>{escape(run.name)}</title>"  # shown under the mouse
        for segment in curve:
            placed = [place(x, y) for x, y in segment]
            if len(placed) == 1:
                placed.append((placed[0][0] + 2, placed[0][1]))  # a short dash, for a line of no length is not drawn
            points = " ".join(f"{right:.1f},{down:.1f}" for right, down in placed)
            parts.append(f'<polyline points="{points}" stroke="{_colour(index)}">{title}</polyline>')
    unit = UNITS.get(key) or UNITS.get(key.partition("/")[0]) or ""
    svg = f'<svg width={WIDTH} height={HEIGHT} role=img aria-label="{escape(key)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(key)} <small>{escape(unit)}</small></figcaption>{svg}</figure>"


def segments(curve: Points, cycles: int) -> list[Points]:
    """The curve in means of so many cycles each, broken at its gaps."""
    pieces: list[Points] = []
    for _, group in groupby(curve, lambda point: point[0] // cycles):
        points = list(group)
        x, y = fmean(x for x, _ in points), fmean(y for _, y in points)
        if not pieces or x - pieces[-1][-1][0] > GAP * cycles:
            pieces.append([])
        pieces[-1].append((x, y))
    return pieces


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers that enclose ``low`` and ``high``; whole ones if these are 5 or more apart."""
    largest = max(abs(low), abs(high))
    if high - low <= max(FLAT * largest, SMALLEST):  # one value: in the middle of the chart
        margin = largest / 2 if largest > SMALLEST else 1.0
        low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if (high - low) / step <= 5)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _label(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _place_in_order(key: str) -> tuple[int, str]:
    group = key.partition("/")[0]
    return ORDER.index(group if group in ORDER else OTHERS), key


def _can_be_drawn(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
