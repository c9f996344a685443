"""One HTML page, which needs nothing else, with the curves and texts of one or several runs."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from whitney_loop.loop.curves import UNCOMPARED_OPTIONS, Points, Run, read_run, segments

DESCRIPTION = """Draw the curves of one or several runs, from the files of --metrics, as one HTML page.

    {prog} a.jsonl b.jsonl --output compare.html

The page shows the reward first, then one chart per metric with all runs in it and its meaning, then the options of the
runs. With a file of --samples, the best and the worst text of each cycle stand beside the reward. The page needs no
network and no other file: open it in any browser. A run may still be training.

Exit codes: 0 the page is written; 2 usage, or a file cannot be read or written."""

POINTS = 500  # per curve: about as many as a chart has pixels; a longer one is drawn as means of several cycles
FLAT = 1e-4  # values that differ by less, relative to the largest, are drawn as one: labels of six digits suffice
ROUNDING = 1e-11  # values that differ by less are drawn as one too: a loss that is 0 by construction
SMALLEST = 1e-300  # below it a step between ticks would vanish
SIDE = 1000  # of a chart's coordinates, which the page stretches to its width
# Okabe and Ito's colours without the yellow, told apart by nearly everyone.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6b6b6b")

UP, DOWN, NEITHER = "Higher is better.", "Lower is better.", ""
METRICS = {  # a metric, or all of a group, in the order of the page: (unit, which way is good, meaning)
    "reward/mean": ("", UP, "Mean reward of all completions of a cycle: what you train for."),
    "reward/std": ("", NEITHER, "How much the rewards differ. At 0 no completion is better: nothing is learned."),
    "reward": ("", UP, "Reward of a cycle: what you train for."),
    "eval": ("", NEITHER, "On prompts that are not trained on. If it falls while the reward rises, read the texts."),
    "": ("", NEITHER, "From ctx.metrics of your build_loss."),
    "loss/token": ("nats", DOWN, "Mean of −logprob over the tokens that are trained on."),
    "loss": ("", NEITHER, "Only its gradient matters; its value says little, as the mean advantage is about 0."),
    "kl/k3": ("nats per token", DOWN, "Distance from the weights that sampled to the trained ones."),
    "kl": ("nats per token", NEITHER, "Estimated distance of two policies, which may be below 0. Near 0 is good."),
    "ratio": ("trainer / sampler", NEITHER, "Largest probability ratio of a token. Near 1 is good."),
    "ess": ("share of tokens", UP, "Effective sample size: 1 if all tokens count alike, near 0 if a few decide."),
    "clip_frac": ("share of tokens", NEITHER, "Tokens whose gradient was clipped away. Below 0.3 is good."),
    "groups": ("share of groups", DOWN, "Groups whose rewards are all equal: they are billed and teach nothing."),
    "completions/tokens": ("tokens per cycle", NEITHER, "Sampled tokens. If they rise, the texts tell why."),
    "completions": ("share of completions", DOWN, "Completions that were cut off at max_tokens, or that are empty."),
    "optim/grad_norm": ("L2 norm", NEITHER, "Steady is good; a jump often comes before a collapse."),
    "optim/learning_rate": ("", NEITHER, "Learning rate of the optimizer step."),
    "tokens": ("tokens per cycle", NEITHER, "Tokens that are trained on."),
    "provider": ("", NEITHER, "Reported by the service."),
    "time": ("seconds", NEITHER, "Where the time of a cycle goes."),
}

HEAD = '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
TEMPLATE = Path(__file__).with_name("page.html")


def main(arguments: Sequence[str] | None = None, prog: str = "python -m whitney_loop plot") -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl", help="a file of --metrics; one per run")
    about = "a file of --samples, one per run in their order; default: those that the runs wrote"
    parser.add_argument("--samples", action="append", default=[], type=Path, metavar="FILE.jsonl", help=about)
    parser.add_argument(
        "--output", type=Path, default=Path("metrics.html"), metavar="FILE.html", help="default: metrics.html"
    )
    options = parser.parse_args(arguments)
    if len(options.samples) > len(options.files):
        parser.error(f"--samples: {len(options.samples)} files for {len(options.files)} runs")
    try:
        runs = [read_run(path, samples) for path, samples in zip_longest(options.files, options.samples)]
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
    """Return the page: the template, filled from the runs."""
    # All charts have the same cycles across, and the same cycles in a mean, so that runs can be compared.
    first, last = min(run.cycles[0]["cycle"] for run in runs), max(run.cycles[-1]["cycle"] for run in runs)
    across = ticks(first, max(last, first + 5))  # whole numbers, for 5 or more
    moving, notes = sorted_out(runs)
    top = [key for key in moving if _is_headline(key)] or moving[:1]
    differing = options(runs, only_differing=True)
    samples = [texts_by_cycle(run) for run in runs if run.samples]
    data = {"first": across[0], "last": across[-1], "step": cycles_in_a_mean(across), "samples": samples}
    parts = {
        "title": " · ".join(escape(run.name) for run in runs),
        "legend": legend(runs),
        "top": "".join(chart(key, runs, across) for key in top) + texts(runs),
        "changes": differing and f"<h2>What differs between runs, or since a resumption</h2>{differing}",
        "notes": notes,
        "charts": "".join(chart(key, runs, across) for key in moving if key not in top),
        "configuration": options(runs),
        "data": json.dumps(data).replace("<", r"\u003c"),  # a text may hold "</script>"
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda place: parts[place[1]], template)


def sorted_out(runs: Sequence[Run]) -> tuple[list[str], str]:
    """Return the metrics to draw, in order, and a text on the others: constant ones, and copies of another one."""
    moving: dict[str, str] = {}  # by its points
    still, same = [], []
    for key in sorted({key for run in runs for entry in run.cycles for key in entry}, key=_place_in_order):
        points = [run.points(key) for run in runs]
        values = [y for of_run in points for _, y in of_run]
        if key in ("cycle", "version") or not values:
            continue
        if len(values) > len(runs) and _as_one(min(values), max(values)):
            still.append(f"{escape(key)} {_label(values[-1])}")
        elif moving.setdefault(str(points), key) != key:
            same.append(f"{escape(key)} is {escape(moving[str(points)])}")
    notes = [f"The same in all cycles: {', '.join(still)}."] if still else []
    notes += [f"Drawn once: {', '.join(same)}."] if same else []
    return list(moving.values()), " ".join(notes)


def legend(runs: Sequence[Run]) -> str:
    items = []
    for index, run in enumerate(runs):
        cycles = f"cycles {run.cycles[0]['cycle']:g}–{run.cycles[-1]['cycle']:g}"
        resumed = ", ".join(str(cycle) for cycle in run.resumed_at())
        cycles += f"; dashed: resumed at {escape(resumed)}" if resumed else ""
        items.append(f"<span>{_dash(index)} {escape(run.name)} ({cycles})</span>")
    return "".join(items)


def options(runs: Sequence[Run], only_differing: bool = False) -> str:
    """Return a table of the options that have a value, or only of those that differ; empty if there are none."""
    configs = [config for run in runs for config in run.configs]
    names = dict.fromkeys(name for config in configs for name in config)
    if only_differing:
        kept = [name for name in names if name not in UNCOMPARED_OPTIONS]
        kept = [name for name in kept if len({str(config.get(name)) for config in configs}) > 1]
    else:
        kept = [name for name in names if any(config.get(name) not in (None, [], False) for config in configs)]
    rows = [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(run.option(name))}</td>' for run in runs)}</tr>"
        for name in kept
    ]
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    return f"<table><tr><th>option</th>{head}</tr>{''.join(rows)}</table>" if rows else ""


def texts(runs: Sequence[Run]) -> str:
    """Places for the best and the worst text of a cycle, which the script fills."""
    cycles = [cycle for run in runs for cycle in run.samples]
    if not cycles:
        return ""
    slider = f"<input type=range aria-label=cycle min={min(cycles)} max={max(cycles)} value={max(cycles)}>"
    places = "".join(
        f"<section>{_dash(index)} <b></b><div></div>{_dash(index)} <b></b><div></div></section>"
        for index, run in enumerate(runs)
        if run.samples
    )
    return f"<div class=texts>Best and worst completion, cycle by cycle{slider}{places}</div>"


def texts_by_cycle(run: Run) -> list[tuple[int, str, str, str, str]]:
    """Return (cycle, title, best text, title, worst text) of the last cycle and of up to ``POINTS`` − 1 before it."""
    cycles = sorted(run.samples, reverse=True)
    return [
        (cycle, f"best of cycle {cycle}: {best:.4g}", best_text, f"worst of cycle {cycle}: {worst:.4g}", worst_text)
        for cycle in reversed(cycles[:: math.ceil(len(cycles) / POINTS)])
        for (best, best_text), (worst, worst_text) in [run.samples[cycle]]
    ]


def chart(key: str, runs: Sequence[Run], across: Sequence[float]) -> str:
    """Return the chart of a metric: last and best values, axes, a curve per run, and the meaning."""
    unit, good, meaning = about(key)
    curves = [segments(run.points(key), cycles_in_a_mean(across)) for run in runs]
    drawn = [y for curve in curves for segment in curve for _, y in segment]
    up = ticks(min(drawn), max(drawn))
    values, lines = [], []
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        lines += [vertical(cycle, across, f'class=resumed stroke="{_colour(index)}"') for cycle in run.resumed_at()]
        lines += [polyline(segment, across, up, _colour(index)) for segment in curve]
        if curve:
            exact = " ".join(f"{x:g},{y:.5g}" for segment in curve for x, y in segment)
            told = summary(run.points(key), good)
            values.append(f'<div>{_dash(index)} <span class=value data-points="{exact}">{told}</span></div>')
    grid = [vertical(x, across) for x in across]
    grid += [f'<line x1=0 x2={SIDE} y1="{y:.1f}" y2="{y:.1f}" />' for y in (SIDE - _scaled(y, up) for y in up)]
    labels = [f'<i class=y style="top:{100 - _scaled(y, up) * 100 / SIDE:.2f}%">{_label(y)}</i>' for y in up]
    labels += [f'<i class=x style="left:{_scaled(x, across) * 100 / SIDE:.2f}%">{_label(x)}</i>' for x in across]
    margin = max(len(_label(y)) for y in up) + 1
    return (
        f"<figure><figcaption>{escape(key)} <small>{unit}</small></figcaption>{''.join(values)}"
        f'<div class=plot style="margin-left:{margin}ch"><svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio=none '
        f'role=img aria-label="{escape(key)}">{"".join(grid + lines)}</svg>{"".join(labels)}<i class=cursor></i></div>'
        f"<p>{meaning} {good}</p></figure>"
    )


def vertical(cycle: float, across: Sequence[float], attributes: str = "") -> str:
    x = f"{_scaled(cycle, across):.1f}"
    return f'<line {attributes} x1="{x}" x2="{x}" y1=0 y2={SIDE} />'


def polyline(segment: Points, across: Sequence[float], up: Sequence[float], colour: str) -> str:
    placed = [(_scaled(x, across), SIDE - _scaled(y, up)) for x, y in segment]
    if len(placed) == 1:
        placed.append((placed[0][0] + 8, placed[0][1]))  # a short dash, for a line of no length is not drawn
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return f'<polyline points="{points}" stroke="{colour}" />'


def about(key: str) -> tuple[str, str, str]:
    """Return (unit, which way is good, meaning) of a metric."""
    if key.startswith("eval/"):
        unit, good, meaning = about(key.removeprefix("eval/"))
        return unit, good, METRICS["eval"][2] if _is_headline(key) else f"In the evaluation. {meaning}"
    group = key.partition("/")[0]
    return METRICS.get(key) or METRICS.get(group) or METRICS[""]


def summary(points: Points, good: str) -> str:
    """Return the last value, and the best one with its cycle, or the lowest and the highest if neither way is good."""
    low, high = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    cycle, best = high if good == UP else low
    last = f"last {_label(points[-1][1], 4)}"
    if good == NEITHER:
        return f"{last} · from {_label(low[1], 4)} to {_label(high[1], 4)}"
    return f"{last} · best {_label(best, 4)} (cycle {cycle:g})"


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers that enclose ``low`` and ``high``; whole ones if these are 5 or more apart."""
    largest = max(abs(low), abs(high))
    if high - low <= max(FLAT * largest, SMALLEST):  # one value: in the middle of the chart
        margin = largest / 2 if largest > SMALLEST else 1.0
        low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if (high - low) / step <= 5)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def cycles_in_a_mean(across: Sequence[float]) -> int:
    return math.ceil((across[-1] - across[0]) / POINTS)


def _scaled(value: float, along: Sequence[float]) -> float:
    return (value - along[0]) / (along[-1] - along[0]) * SIDE


def _as_one(low: float, high: float) -> bool:
    return high - low <= max(FLAT * max(abs(low), abs(high)), ROUNDING)


def _label(value: float, digits: int = 6) -> str:
    return f"{value:.{digits}g}".replace("-", "−")


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _dash(index: int) -> str:
    return f'<span style="color:{_colour(index)}">━</span>'


def _is_headline(key: str) -> bool:
    return key in ("reward/mean", "reward") or (key.startswith("eval/") and not key.endswith(("/std", "/tokens")))


def _place_in_order(key: str) -> tuple[int, str]:
    group = key.partition("/")[0]
    return list(METRICS).index(key if key in METRICS else group if group in METRICS else ""), key
