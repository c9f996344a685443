"""The page of curves: its charts at any length and scale, and the files that it never overwrites."""

import json
import math
import os
import random
import re
from html.parser import HTMLParser

import pytest

from whitney_loop.loop.curves import Run, segments
from whitney_loop.loop.plot import METRICS, POINTS, SIDE, chart, main, ticks


class Page(HTMLParser):
    """The parsed page: its tags, texts, curves, and labels of the axes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.curves, self.labels, self.figures = [], [], [], [], []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        assert not {"src", "href", "onload", "onclick"} & attributes.keys()  # nothing from elsewhere
        if tag == "polyline":
            self.curves.append([tuple(map(float, pair.split(","))) for pair in attributes["points"].split()])
        self.inside = f"{tag} {attributes.get('class', '')}".strip()

    def handle_data(self, data):
        self.text.append(data)
        if self.inside == "i y":
            self.labels.append(data)
        if self.inside == "figcaption":
            self.figures.append(data.strip())
        self.inside = ""


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
    assert "<two>" not in content and "url(" not in content and "{{" not in content
    text = " ".join(page.text)
    for expected in (
        "one.jsonl (cycles 0–2)",
        "<two>.jsonl (cycles 0–2)",
        "reward/mean",
        "Metrics by cycle",
        "seconds",
        "build_loss",
    ):
        assert expected in text
    charts = page.tags.count("figcaption")
    assert charts >= 8 and len(page.curves) >= charts
    assert all(0 <= x <= SIDE and 0 <= y <= SIDE for curve in page.curves for x, y in curve)


def test_all_charts_have_the_same_cycles_across(tmp_path, plot):
    one = written(tmp_path / "one.jsonl", *({"cycle": cycle, "a": cycle} for cycle in range(4)))
    two = written(tmp_path / "two.jsonl", *({"cycle": cycle, "b": -cycle} for cycle in range(9)))
    of_a, of_b = Page(plot(one, two)).curves
    assert [x for x, _ in of_a] == [x for x, _ in of_b][:4]
    assert of_b[-1][0] <= SIDE


def config(first_cycle, **options):
    where = {"cycles": 2 + first_cycle, "resume_from": first_cycle or None, "first_cycle": first_cycle}
    return {"config": {"seed": 1, **options, **where, "base_url": f"http://127.0.0.1:{first_cycle}"}}


def test_the_page_says_what_differs_between_runs_and_what_a_resumption_changed(tmp_path, plot):
    def rows(*names):
        shown = plot(*names).partition("<details>")[0]
        table = shown.partition("<table>")[2].partition("</table>")[0]
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


def test_the_reward_comes_first_and_the_evaluation_beside_it(tmp_path, plot):
    keys = ("a", "reward/std", "eval/completions/tokens", "eval/accuracy", "eval/reward/mean", "reward/mean")
    entries = [{"cycle": cycle, **{key: cycle * index for index, key in enumerate(keys, 1)}} for cycle in (0, 1)]
    content = plot(written(tmp_path / "m.jsonl", *entries))
    top, rest = content.partition("<h2>")[::2]
    assert Page(top).figures == ["reward/mean", "eval/accuracy", "eval/reward/mean"]
    assert Page(rest).figures == ["reward/std", "eval/completions/tokens", "a"]


def test_each_chart_tells_the_last_and_the_best_value_its_meaning_and_which_way_is_good(tmp_path, plot):
    entries = [
        {"cycle": cycle, "reward/mean": value, "kl/k3": value, "mine": -value} for cycle, value in enumerate([1, 3, 2])
    ]
    entries[1]["kl/k3"] = 4
    text = "\n".join(Page(plot(written(tmp_path / "m.jsonl", *entries))).text)
    assert "last 2 · best 3 (cycle 1)" in text and "what you train for. Higher is better." in text
    assert "last 2 · best 1 (cycle 0)" in text and "Lower is better." in text
    assert "last −2 · from −3 to −1" in text and METRICS[""][2] in text


def test_constant_and_repeated_curves_become_a_line_of_text(tmp_path, plot):
    rows = ((0, 0.0, 5.0), (1, 1e-15, 6.0), (2, 0.0, 7.0))
    entries = [{"cycle": c, "kl/k1": kl, "ess": 1, "loss/sum": loss, "provider/loss:sum": loss} for c, kl, loss in rows]
    page = Page(plot(written(tmp_path / "m.jsonl", *entries)))
    assert page.figures == ["loss/sum"]
    assert "The same in all cycles: kl/k1 0, ess 1. Drawn once: provider/loss:sum is loss/sum." in page.text


def test_a_resumption_is_marked_in_every_chart_and_the_configuration_is_shown(tmp_path, plot):
    first, again = config(0, optimizer={"beta1": 0.9}), config(2, optimizer={"beta1": 0.5})
    cycles = [{"cycle": cycle, "a": cycle, "b": -cycle} for cycle in range(4)]
    content = plot(written(tmp_path / "m.jsonl", first, *cycles[:2], again, *cycles[2:]))
    assert len(re.findall(r'<line class=resumed stroke="#0072b2" x1="400.0" x2="400.0"', content)) == 2
    assert "(cycles 0–3; dashed: resumed at 2)" in content
    assert content.count("<td>optimizer beta1</td><td>0.9 → 0.5 (cycle 2)</td>") == 2
    assert "<td>seed</td><td>1</td>" in content.partition("<details>")[2]


def test_values_under_the_pointer_are_those_of_the_file(tmp_path, plot):
    path = written(tmp_path / "m.jsonl", *({"cycle": cycle, "a": cycle / 3} for cycle in range(3)))
    assert 'data-points="0,0 1,0.33333 2,0.66667"' in plot(path)


# Texts


def sample(cycle, reward, text, **more):
    fields = {"prompt": [97], "tokens": [98, 99], "prompt_text": "a", "advantage": None}
    return {"cycle": cycle, "reward": reward, "text": text, **fields, **more}


def samples_of(content):
    [data] = re.findall("<script type=application/json id=data>(.*?)</script>", content)
    return json.loads(data)["samples"]


@pytest.mark.parametrize("given", ["as an option", "where it was written", "beside the metrics"])
def test_the_best_and_the_worst_text_of_each_cycle_are_on_the_page(tmp_path, plot, given):
    texts = [sample(0, 0.5, "mid"), sample(0, 1, "</script>"), sample(0, 0, "bad"), sample(1, None, None, advantage=2)]
    samples = written(tmp_path / "s.jsonl", *texts)
    where = {"as an option": None, "where it was written": samples, "beside the metrics": "/gone/s.jsonl"}[given]
    path = written(tmp_path / "m.jsonl", config(0, samples=where), {"cycle": 0, "a": 1}, {"cycle": 1, "a": 2})
    content = plot(path, *(["--samples", samples] if where is None else []))
    assert samples_of(content) == [
        [
            [0, "best of cycle 0: 1", "a → </script>", "worst of cycle 0: 0", "a → bad"],
            [1, "best of cycle 1: 2", "a → 98 99", "worst of cycle 1: 2", "a → 98 99"],
        ]
    ]
    assert content.count("</script>") == 2 and content.count("<section>") == 1


def test_texts_of_many_cycles_are_thinned_out_and_those_of_the_last_stay(tmp_path, plot):
    samples = written(tmp_path / "s.jsonl", *(sample(cycle, 1, "x" * 5000) for cycle in range(1201)))
    content = plot(written(tmp_path / "m.jsonl", {"cycle": 0, "a": 1}), "--samples", samples)
    [texts] = samples_of(content)
    assert len(texts) <= POINTS and texts[-1][0] == 1200 and len(content) < 1e6


@pytest.mark.parametrize("arguments", [["--samples", "m.jsonl"], ["--samples", "gone.jsonl"]])
def test_a_file_that_holds_no_samples_is_named(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "m.jsonl", {"cycle": 0, "a": 1})
    assert main(["m.jsonl", *arguments]) == 2 and f"error: {arguments[1]}" in capsys.readouterr().err


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
def test_a_curve_is_one_line_for_any_number_of_cycles_and_of_skipped_ones(cycles):
    [line] = chart_of([(cycle, math.sin(cycle)) for cycle in cycles], across=(0.0, max(cycles) + 1.0)).curves
    assert 2 <= len(line) <= POINTS + 1


def test_a_curve_is_broken_where_it_has_no_value_for_long():
    curve = [(cycle, 1.0) for cycle in [*range(10), *range(60, 70), 200]]
    assert segments(curve, 1) == [curve[:10], curve[10:20], curve[20:]]
    assert segments([], 1) == []


def test_a_curve_of_few_evaluations_is_not_broken_between_them():
    assert segments([(cycle, 1.0) for cycle in range(0, 1000, 100)], 2) == [
        [(cycle, 1.0) for cycle in range(0, 1000, 100)]
    ]


def test_a_long_curve_is_drawn_as_means_of_as_many_cycles_in_each_run():
    assert segments([(cycle, float(cycle % 4)) for cycle in range(8)], 4) == [[(1.5, 1.5), (5.5, 1.5)]]
    drawn = chart_of([(cycle, 0.5) for cycle in range(6000)], [(cycle, 0.5) for cycle in range(600)])
    assert [len(line) for line in drawn.curves] == [500, 50]


def test_the_axis_fits_the_means_that_are_drawn():
    curve = [(cycle, 100.0 if cycle % 12 else -1100.0) for cycle in range(6000)]
    assert "100" not in chart_of(curve).labels


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
def test_the_labels_of_an_axis_differ(last, values):
    drawn = chart_of([*zip((0, last), values, strict=True)], across=ticks(0, max(last, 5)))
    assert len(drawn.labels) == len(set(drawn.labels)) >= 3


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


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, plot, capsys):
    path = written(tmp_path / "m.jsonl", {"cycle": 0, "a": 1})
    old = plot(path)
    (tmp_path / "x.html.draft").mkdir()  # stands for a disk that is full
    assert main([path, "--output", str(tmp_path / "x.html")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and (tmp_path / "x.html").read_text() == old
