"""The page of curves: what it shows, at any length and scale, and what it never overwrites."""

import json
import math
import os
import random
import re
from html.parser import HTMLParser

import pytest

from whitney_loop.loop.plot import HEIGHT, LEFT, POINTS, RIGHT, WIDTH, Run, chart, main, segments, ticks


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.curves, self.labels = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not {"src", "href", "onload", "onclick"} & dict(attributes).keys()  # nothing from elsewhere
        if tag == "polyline":
            self.curves.append([tuple(map(float, pair.split(","))) for pair in dict(attributes)["points"].split()])
        self.text_at = dict(attributes) if tag == "text" else {}

    def handle_data(self, data):
        self.text.append(data)
        if self.text_at:  # its ends, with 6.7 pixels for a digit or a point
            width = 6.7 * len(data)
            start = float(self.text_at["x"]) - width * {"middle": 0.5, "end": 1}[self.text_at["text-anchor"]]
            self.labels.append((data, start, start + width))


def written(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


@pytest.fixture
def plot(tmp_path):
    """``plot(*files)``: the page of these files."""

    def run(*files):
        assert main([*map(str, files), "--output", str(tmp_path / "x.html")]) == 0
        return (tmp_path / "x.html").read_text()

    return run


def chart_of(*curves, across=(0.0, 6000.0)):
    """One chart of several runs; a curve is a list of (cycle, value)."""
    runs = [Run("run", [{}], [{"cycle": cycle, "x": value} for cycle, value in curve]) for curve in curves]
    return Page(chart("x", runs, across))


# One page


def test_the_page_shows_several_runs_with_axes_legend_and_units(tmp_path, run_loop, prompts, capsys):
    for name, build_loss in (("one", "grpo_build_loss"), ("<two>", "algorithms.ppo")):
        arguments = ("--build-loss", f"{build_loss}:build_loss", *prompts, "--cycles", "3")
        assert run_loop("rl_loop", *arguments, "--metrics", f"{name}.jsonl").returncode == 0
    capsys.readouterr()
    assert main(["one.jsonl", "<two>.jsonl"]) == 0 and capsys.readouterr().out == "metrics.html\n"
    content = (tmp_path / "metrics.html").read_text()
    page = Page(content)
    assert "script" not in page.tags and "<two>" not in content and "url(" not in content
    text = " ".join(page.text)
    for expected in (
        "one.jsonl (cycles 0–2)",
        "<two>.jsonl (cycles 0–2)",
        "reward/mean",
        "cycle",
        "seconds",
        "build_loss",
    ):
        assert expected in text
    charts = page.tags.count("figcaption")
    assert charts > 15 and len(page.curves) >= charts
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for curve in page.curves for x, y in curve)


def test_all_charts_have_the_same_cycles_across(tmp_path, plot):
    one = written(tmp_path / "one.jsonl", *({"cycle": cycle, "a": cycle} for cycle in range(4)))
    two = written(tmp_path / "two.jsonl", *({"cycle": cycle, "b": cycle} for cycle in range(9)))
    of_a, of_b = Page(plot(one, two)).curves
    assert [x for x, _ in of_a] == [x for x, _ in of_b][:4]
    assert of_b[-1][0] <= WIDTH - RIGHT


def config(first_cycle, **options):
    where = {"cycles": 2 + first_cycle, "resume_from": first_cycle or None, "first_cycle": first_cycle}
    return {"config": {"seed": 1, **options, **where, "base_url": f"http://127.0.0.1:{first_cycle}"}}


def test_the_page_says_what_differs_between_runs_and_what_a_resumption_changed(tmp_path, plot):
    def rows(*names):
        table = plot(*names).partition("<table>")[2].partition("</table>")[0]
        return [re.findall("<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]

    first, cycles = config(0, learning_rate=0.1, updates=1), [{"cycle": 0, "x": 1}, {"cycle": 1, "x": 1}]
    plain = written(tmp_path / "plain.jsonl", first, *cycles)
    other = written(tmp_path / "other.jsonl", config(0, learning_rate=0.1, updates=3), *cycles)
    same = written(tmp_path / "same.jsonl", first, *cycles, config(2, learning_rate=0.1, updates=1))
    resumed = written(
        tmp_path / "resumed.jsonl",
        *(first, *cycles, config(2, learning_rate=0.001, updates=3), {"cycle": 2}),
        *(config(3, learning_rate=0.001, updates=3), {"cycle": 3}, config(4, learning_rate=0.1, updates=3)),
    )
    rate = "0.1 → 0.001 (cycle 2) → 0.1 (cycle 4)"
    assert rows(plain) == rows(plain, same) == []
    assert rows(plain, other) == [["updates", "1", "3"]]
    assert rows(resumed) == [["learning_rate", rate], ["updates", "1 → 3 (cycle 2)"]]
    assert rows(resumed, other) == [["learning_rate", rate, "0.1"], ["updates", "1 → 3 (cycle 2)", "3"]]


def test_a_file_without_a_cycle_is_named_and_the_others_are_plotted(tmp_path, plot, capsys):
    empty, full = written(tmp_path / "e.jsonl", config(0)), written(tmp_path / "f.jsonl", {"cycle": 0, "a": 1})
    assert "f.jsonl (cycles 0–0)" in " ".join(Page(plot(empty, full)).text)
    assert f"no cycle yet: {empty}" in capsys.readouterr().err


# Curves of any length


@pytest.mark.parametrize(
    "cycles",
    [
        range(1),
        range(500),
        range(501),
        range(6000),
        [*range(0, 1000, 10), 999],  # an evaluation every ten cycles, and one at the end
        [cycle for cycle in range(1200) if random.Random(cycle).random() > 0.3],  # the others were skipped
        [cycle for cycle in range(6000) if random.Random(cycle).random() > 0.8],
    ],
    ids=len,
)
def test_a_curve_is_one_line_however_many_cycles_it_has_and_however_many_were_skipped(cycles):
    [line] = chart_of([(cycle, math.sin(cycle)) for cycle in cycles], across=(0.0, max(cycles) + 1.0)).curves
    assert 2 <= len(line) <= POINTS + 1


def test_a_curve_is_broken_where_it_has_no_value_for_long():
    curve = [(cycle, 1.0) for cycle in [*range(10), *range(60, 70), 200]]
    assert segments(curve, 1) == [curve[:10], curve[10:20], curve[20:]]
    assert segments([], 1) == []


def test_a_long_curve_is_drawn_as_means_of_as_many_cycles_in_each_run():
    assert segments([(cycle, float(cycle % 4)) for cycle in range(8)], 4) == [[(1.5, 1.5), (5.5, 1.5)]]
    drawn = chart_of([(cycle, 0.5) for cycle in range(6000)], [(cycle, 0.5) for cycle in range(600)])
    assert [len(line) for line in drawn.curves] == [500, 50]


def test_the_axis_is_that_of_the_means_which_are_drawn():
    curve = [(cycle, 100.0 if cycle % 12 else -1100.0) for cycle in range(6000)]
    assert "100" not in " ".join(chart_of(curve).text)


# Values of any size


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.0, 1.0), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ((0.0, 0.0), [-1.0, -0.5, 0.0, 0.5, 1.0]),
        ((-3.0, 7.0), [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 8.0]),
        ((0, 5), [0, 1, 2, 3, 4, 5]),
        ((0.999_999_1, 1.0), [0.0, 0.5, 1.0, 1.5]),  # one value, but for rounding
        ((1e-13, 4e-13), [1e-13, 2e-13, 3e-13, 4e-13]),
        ((5e-324, 5e-324), [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_all_values(values, expected):
    assert ticks(*values) == pytest.approx(expected, rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-299, 1e-12, 1e-3, 1.0, 1e9, 1e300])
def test_a_chart_can_be_drawn_at_any_scale(scale):
    drawn = chart_of([(cycle, scale * math.sin(cycle)) for cycle in range(2000)], [(3, scale)], [])
    assert len(drawn.curves) == 2 and "nan" not in " ".join(drawn.text)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, 10**400, True, "text", None, [1]])
def test_a_value_that_cannot_be_drawn_is_left_out(tmp_path, plot, value):
    path = written(tmp_path / "m.jsonl", {"cycle": 0, "a": 1, "b": value}, {"cycle": 1, "a": 2, "b": 0.5})
    assert [len(curve) for curve in Page(plot(path)).curves] == [2, 2]  # of b a short dash


@pytest.mark.parametrize("last", [1, 100, 5999, 900_000])
@pytest.mark.parametrize(
    "values", [(0.99999905, 1.0), (-4e-4, 2e-4), (0.0, 3e-7), (0.2, 0.9), (-1.2002e6, -1.2e6), (-9e5, 0)]
)
def test_the_labels_of_an_axis_differ_and_are_inside_the_chart(last, values):
    drawn = chart_of([*zip((0, last), values, strict=True)], across=ticks(0, max(last, 5)))
    assert all(start >= 0 and end <= WIDTH for _, start, end in drawn.labels)
    down = [label for label, _, end in drawn.labels if end < LEFT]
    assert len(down) == len(set(down)) >= 3


# Files


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), ("{}\n", "no cycle yet"), ("x\ny\n", ":1 ")])
def test_a_file_that_cannot_be_plotted_is_named_with_the_reason(content, message, tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    if content:
        path.write_text(content)
    assert main([str(path), "--output", str(tmp_path / "x.html")]) == 2
    shown = capsys.readouterr().err
    assert message in shown and str(path) in shown and not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("kind", ["name", "link", "hard link", "another metrics file", "folder", "pipe"])
def test_nothing_but_a_page_is_overwritten(kind, tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    content = written(path, {"cycle": 0, "a": 1}) and path.read_bytes()
    output = path if kind == "name" else tmp_path / "output"
    if kind == "link":
        output.symlink_to(path)
    elif kind == "hard link":
        output.hardlink_to(path)
    elif kind == "another metrics file":
        output.write_bytes(content)
    elif kind == "folder":
        output.mkdir()
    elif kind == "pipe":
        os.mkfifo(output)
    before = sorted(tmp_path.iterdir())
    assert main([str(path), "--output", str(output)]) == 2
    assert "is not a page of curves; give another name" in capsys.readouterr().err
    assert path.read_bytes() == content and sorted(tmp_path.iterdir()) == before


def test_an_older_page_is_replaced_whole_through_a_link(tmp_path, plot):
    one, two = (written(tmp_path / f"{name}.jsonl", {"cycle": 0, name: 1}) for name in ("one", "two"))
    plot(one)
    (tmp_path / "x.html").rename(tmp_path / "page.html")
    (tmp_path / "x.html").symlink_to("page.html")
    assert "two.jsonl" in plot(two)
    assert (tmp_path / "x.html").is_symlink() and not (tmp_path / "x.html.draft").exists()


def test_half_a_character_in_a_name_does_not_cost_the_page(tmp_path, plot):
    path = written(tmp_path / "m.jsonl", {"cycle": 0, "\ud800": 1})
    assert r"\ud800" in plot(path)


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, plot, monkeypatch, capsys):
    path = written(tmp_path / "m.jsonl", {"cycle": 0, "a": 1})
    old = plot(path)
    (tmp_path / "x.html.draft").mkdir()  # stands for a disk that is full
    assert main([path, "--output", str(tmp_path / "x.html")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and (tmp_path / "x.html").read_text() == old
