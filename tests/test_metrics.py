"""What a cycle is judged by, the file that keeps it, the page that shows it, and the warnings that save a run."""

import json
import math
import os
import pty
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from loop_process import GRPO, LOOP, ROOT, elsewhere, environment, loop, summary_of
from whitney_loop import forward_backward_payload, rl_datum, sample_request
from whitney_loop.local import serve

sys.path.insert(0, str(ROOT / "examples"))

import loop_history
import loop_metrics
import loop_warnings
import plot_metrics

PROMPTS = ["the ", "she ", "they ", "one "]
MINE = """
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal, forward_backward_payload, rl_datum

def tells(sample, cycle, request, ctx):
    ctx.metrics |= {"odd": float("nan"), "object": object(), "cycle": 99, "prompt": request["prompt"]["token_ids"][0]}
    ctx.metrics |= {"kl/k1": 7.0, "state_id": "mine"}
    payload = grpo(sample, cycle, request, ctx)
    sample.clear()
    return payload

def skips_the(sample, cycle, request, ctx):
    ctx.metrics["reward"] = [0.0, 1.0]
    if bytes(request["prompt"]["token_ids"]) == b"the ":
        raise NoGradientSignal("not this one")
    return grpo(sample, cycle, request, ctx)

def shifted(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    for datum in payload["data"]:
        values = datum["loss_inputs"]["logprobs"]["values"]
        values[:] = [0.0, *values[:-1]]
    return payload

def flat(sample, cycle, request, ctx):
    ctx.metrics["reward"] = 1.0
    payload = forward_backward_payload([rl_datum([1], [2], [-1.0], 0.0)], "ppo")
    return payload

def skips_in_lines(sample, cycle, request, ctx):
    raise NoGradientSignal("one\\ntwo")

def skips(sample, cycle, request, ctx):
    ctx.metrics["reward"] = [0.25, 0.25]
    raise NoGradientSignal("all alike")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    requests = [sample_request(prompt.encode(), num_samples=4, max_tokens=6) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    return tmp_path


BATCH = ("--sample-json", "prompts.jsonl", "--lora-rank", "4", "--seed", "1", "--batch-size", "4")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# The numbers


def policy_payload(loss="ppo", config=None, sign=1.0, **clip):
    data = [
        rl_datum([7, 8], [1, 2], [-1.0, -2.0], sign, **clip),
        rl_datum([7, 8], [3], [-0.5], -sign, **clip),
    ]
    return forward_backward_payload(data, loss, {} if config is None else config)


RANGE = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OUTPUTS = [{"logprobs": [-9.0, -1.0 + math.log(2), -2.0]}, {"logprobs": [-9.0, -0.5 - math.log(2)]}]


def test_ratio_metrics_are_their_formulas():
    """Ratios 2, 1 and 1/2: gaps ln 2, 0 and −ln 2."""
    result = {"loss": 1.5, "outputs": OUTPUTS, "metrics": {"loss:sum": 1.5, "kept": "x"}, "grad_norm": 3.0}
    assert loop_metrics.loss_metrics(policy_payload(), result) == {
        "loss/sum": 1.5,
        "kl/k1": pytest.approx(0.0),
        "kl/k3": pytest.approx(((2 - 1 - math.log(2)) + 0 + (0.5 - 1 + math.log(2))) / 3),
        "ratio/max": pytest.approx(2.0),
        "ess": pytest.approx(3.5**2 / (3 * (4 + 1 + 0.25))),
        "optim/grad_norm": 3.0,
        "provider/loss:sum": 1.5,
        "provider/kept": "x",
    }
    assert loop_metrics.largest_gap(policy_payload(), result) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (policy_payload(config=RANGE), 2 / 3),
        (policy_payload(config={"clip_low_threshold": 0.4, "clip_high_threshold": 1.2}), 1 / 3),
        (policy_payload(clip_low=0.4, clip_high=3.0), 0.0),
        (policy_payload(config=RANGE, sign=-1.0), 0.0),  # further than the range, but the way back is not clipped
        (policy_payload("cispo", RANGE, sign=-1.0), 2 / 3),
        (policy_payload("gspo", RANGE), 1.0),  # of sequences: √2 with A > 0, and 1/2 with A < 0
        (policy_payload("dppo", {"delta_low": 0.2, "delta_high": 0.2}), 2 / 3),
        (policy_payload("importance_sampling"), None),
        (policy_payload(), None),
        (policy_payload("dppo", {"delta_low": 0.2}), None),
    ],
)
def test_the_clipped_share_is_the_providers_or_that_of_tokens_whose_clipped_branch_is_taken(payload, expected):
    assert loop_metrics.loss_metrics(payload, {"outputs": OUTPUTS}).get("clip_frac") == expected
    assert loop_metrics.loss_metrics(payload, {"outputs": OUTPUTS, "metrics": {"clip_frac": 0.25}})["clip_frac"] == 0.25


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"outputs": None, "metrics": None},
        {"outputs": [{}, {}]},
        {"outputs": OUTPUTS[:1]},
        {"outputs": [OUTPUTS[1], OUTPUTS[1]]},
        {"outputs": [{"logprobs": [None, -1.0, -1.0]}, OUTPUTS[1]]},
    ],
)
def test_a_service_that_gives_no_usable_outputs_leaves_metrics_out(result):
    payload = policy_payload(config=RANGE)
    assert loop_metrics.loss_metrics(payload, result) == {}
    assert loop_metrics.largest_gap(payload, result) is None


def test_a_ratio_that_would_overflow_is_cut():
    assert loop_metrics.ratio_metrics([(0.0, -1e6)])["ratio/max"] == pytest.approx(math.exp(20))


def test_what_groups_left_in_metrics_becomes_one():
    class Array:
        def tolist(self):
            return [3.0]

    groups = [{"reward": [0.0, 1.0], "n": 1, "text": "a"}, {"reward": Array(), "n": 2, "text": "b", "alone": 5}]
    assert loop_metrics.user_metrics(groups) == {
        "reward/mean": pytest.approx(4 / 3), "reward/std": pytest.approx(math.sqrt(14) / 3),
        "n": 1.5, "text": "b", "alone": 5,
    }  # fmt: skip
    assert loop_metrics.user_metrics([]) == {}
    assert loop_metrics.user_metrics([{16: 0.5}, {16: 1.5}]) == {"16": 1.0}
    assert loop_metrics.user_metrics([{"reward": []}]) == {"reward": []}


def test_how_completions_ended():
    sequences = [
        {"tokens": [1, 2], "stop_reason": "length"}, {"tokens": [], "stop_reason": "stop"},
        {"tokens": [3], "stop_reason": "stop"}, {"tokens": [4]},
    ]  # fmt: skip
    assert loop_metrics.sample_metrics([{"sequences": sequences[:2]}, {"sequences": sequences[2:]}]) == {
        "completions/tokens": 4, "completions/truncated_frac": 0.25, "completions/empty_frac": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "done", "left", "expected"),
    [
        (10.0, 20, 60, "2.0 cycles/s  0:00:30 left"),
        (25.0, 2, 300, "12.5 s/cycle  1:02:30 left"),
        (0.0, 1, 0, "1000000000.0 cycles/s  0:00:00 left"),
    ],
)
def test_the_rate_and_the_time_left(seconds, done, left, expected):
    assert loop_metrics.rate_and_time_left(seconds, done, left) == expected


# The file


def test_the_metrics_file_has_the_configuration_and_a_line_per_cycle(folder):
    arguments = ("--build-loss", "mine:tells", *BATCH, "--cycles", "3", "--learning-rate", "0.1", "--updates", "2")
    done = loop(folder, *arguments, "--metrics", "m.jsonl")
    assert done.returncode == 0, done.stderr
    first, *cycles, state = lines_of(folder / "m.jsonl")
    assert list(first) == ["config"] and first["config"]["seed"] == 1 and first["config"]["batch_size"] == 4
    assert first["config"]["run_id"] == summary_of(done)["run_id"]
    assert [entry["cycle"] for entry in cycles] == [0, 1, 2] and [entry["version"] for entry in cycles] == [0, 2, 4]
    assert state == {"state_id": summary_of(done)["state_id"], "next_cycle": 3}
    expected = {
        "reward/mean", "reward/std", "loss/sum", "kl/k1", "kl/k3", "ratio/max", "ess", "groups/uniform_frac",
        "completions/truncated_frac", "completions/empty_frac", "completions/tokens", "optim/grad_norm",
        "time/sample", "time/build_loss", "time/train", "time/total", "provider/loss:sum", "odd", "object", "prompt",
    }  # fmt: skip
    assert expected <= cycles[0].keys()
    assert cycles[0]["odd"] is None and cycles[0]["object"].startswith("<object")
    assert cycles[0]["user/cycle"] == 99 and cycles[0]["user/kl/k1"] == 7.0 and cycles[0]["user/state_id"] == "mine"
    assert "user/kl/k1 7" in done.stderr and "  kl/k1 7" not in done.stderr
    assert sum(entry["completions/tokens"] for entry in cycles) == summary_of(done)["tokens_sampled"]
    assert cycles[0]["ratio/max"] > 1 and 0 < cycles[0]["ess"] < 1  # of the second update


def test_a_cycle_that_is_skipped_has_its_line_and_the_share_of_uniform_groups_is_told(folder):
    done = loop(folder, "--build-loss", "mine:skips_the", *BATCH, "--cycles", "1", "--metrics", "m.jsonl")
    assert done.returncode == 0 and lines_of(folder / "m.jsonl")[1]["groups/uniform_frac"] == 0.25
    done = loop(folder, "--build-loss", "mine:skips", *BATCH, "--cycles", "1", "--metrics", "s.jsonl")
    [_, cycle, _] = lines_of(folder / "s.jsonl")
    assert done.returncode == 1 and cycle["groups/uniform_frac"] == 1.0 and "all alike" in cycle["skipped"]
    assert "loss/sum" not in cycle


def test_a_group_whose_payload_has_no_gradient_is_left_out_though_build_loss_did_not_say_so(folder):
    done = loop(folder, "--build-loss", "mine:flat", *BATCH, "--cycles", "4", "--metrics", "m.jsonl")
    [_, *cycles, _] = lines_of(folder / "m.jsonl")
    assert [cycle["groups/uniform_frac"] for cycle in cycles] == [1.0] * 4
    assert done.returncode == 1 and "every advantage is 0" in cycles[0]["skipped"]
    summary = summary_of(done)
    assert "forward_backward" not in summary["operations"] and "(mean reward: 1)" in done.stderr
    assert summary["error"].startswith("every cycle was skipped")


def test_a_reason_of_several_lines_stays_on_the_line_of_its_cycle(folder):
    done = loop(folder, "--build-loss", "mine:skips_in_lines", *BATCH[:-1], "1", "--cycles", "1")
    assert any(re.search("^cycle 0 .* skipped: one two ", line) for line in done.stderr.splitlines())


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the platform has no file that is always full")
def test_a_disk_that_is_full_ends_the_run_with_the_files_name():
    with pytest.raises(ValueError, match="--metrics /dev/full can not be written: No space left"):
        with loop_history.MetricsFile(FULL, loop_history.Start()) as metrics:
            metrics.write({"cycle": 0})


def test_the_key_is_nowhere_in_the_file(folder):
    with serve(folder / "storage") as service:
        arguments = ("--build-loss", GRPO, "--model", "byte-lm", *BATCH, "--metrics", "m.jsonl")
        done = loop(folder, *arguments, env=elsewhere(service))
        assert done.returncode == 0, done.stderr
        assert service.api_key not in (folder / "m.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metrics", "old.jsonl"), "old.jsonl exists: give another name, or remove it: no state was saved in it"),
        (("--metrics", "saved.jsonl"), "--metrics saved.jsonl exists: give another name, or --resume-from last"),
        (("--metrics", "pipe"), "not a file in a folder that exists"),
        (("--metrics", "same", "--journal", "same"), "--metrics and --journal are both same"),
        (("--metrics", "nowhere/m.jsonl"), "not a file in a folder that exists"),
        (("--metrics", "."), "not a file in a folder that exists"),
    ],
)
def test_a_metrics_file_that_can_not_be_written_is_refused_before_anything_is_created(folder, arguments, message):
    (folder / "old.jsonl").write_text('{"cycle": 0}\n')
    (folder / "saved.jsonl").write_text('{"state_id": "state-1", "next_cycle": 1}\n')
    os.mkfifo(folder / "pipe")
    done = loop(folder, "--build-loss", GRPO, *arguments)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / ".whitney_local").exists()


def test_a_last_line_that_was_cut_off_is_left_out_and_another_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"cycle": 0}\n\n{"cycle": 1}\n{"cyc')
    assert [line.entry for line in loop_history.read_lines(path)] == [{"cycle": 0}, {"cycle": 1}]
    path.write_text('{"cycle": 0}\n[]\n{"cycle": 1}\n')
    with pytest.raises(ValueError, match="m.jsonl:2 is not a line of a metrics file"):
        loop_history.read_lines(path)


def test_on_a_terminal_the_line_has_rate_and_time_left_and_in_a_pipe_it_has_not(folder):
    command = [sys.executable, str(LOOP), "--build-loss", GRPO, *BATCH]
    terminal, end = pty.openpty()
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=end):
        os.close(end)
        said = b""
        try:
            while chunk := os.read(terminal, 4096):
                said += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(terminal)
    pace = r" s  \d+\.\d (cycles/s|s/cycle)  \d:\d\d:\d\d left"
    assert re.search(rf"cycle 1 .*{pace}\r\n$", said.decode())
    assert not re.search(pace, loop(folder, "--build-loss", GRPO, *BATCH).stderr)


# The page


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


def test_the_page_shows_several_runs_with_axes_legend_and_units(folder):
    for name, build_loss in (("one", GRPO), ("<two>", "mine:tells")):
        arguments = ("--build-loss", build_loss, *BATCH, "--cycles", "3", "--metrics", f"{name}.jsonl")
        assert loop(folder, *arguments).returncode == 0
    command = [sys.executable, str(ROOT / "examples" / "plot_metrics.py"), "one.jsonl", "<two>.jsonl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "metrics.html\n"), done.stderr
    content = (folder / "metrics.html").read_text()
    page = Page(content)
    assert "script" not in page.tags and "<two>" not in content and "url(" not in content
    text = " ".join(page.text)
    for expected in ("one (cycles 0–2)", "<two> (cycles 0–2)", "reward/mean", "cycle", "seconds", "build_loss"):
        assert expected in text
    charts = page.tags.count("figcaption")
    assert charts > 15 and len(page.curves) >= charts
    inside = [point for curve in page.curves for point in curve]
    assert all(0 <= x <= plot_metrics.WIDTH and 0 <= y <= plot_metrics.HEIGHT for x, y in inside)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 1.0], [0.0, 0.25, 0.5, 0.75, 1.0]),
        ([0.0, 0.0], [0.0, 0.25, 0.5, 0.75, 1.0]),
        ([-3.0, 7.0], [-5.0, -2.5, 0.0, 2.5, 5.0, 7.5]),
        ([5.0], [2.0, 4.0, 6.0, 8.0]),
        ([0.999_999_1, 1.0], [0.0, 0.5, 1.0, 1.5]),  # rounding to 32 bits
        ([1e-13, 4e-13], [-2e-13, 0.0, 2e-13, 4e-13, 6e-13]),
    ],
)
def test_ticks_are_round_and_hold_all_values(values, expected):
    assert plot_metrics.ticks(values) == pytest.approx(expected, abs=1e-20)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e9, 1e300])
def test_a_chart_can_be_drawn_at_any_scale(scale):
    curve = [(float(cycle), scale * math.sin(cycle)) for cycle in range(2000)]
    drawn = Page(plot_metrics.figure("x", ["a", "b", "c"], [curve, [(3.0, scale)], []], [0.0, 2000.0]))
    assert len(drawn.curves) == 1 and len(drawn.curves[0]) <= plot_metrics.MOST_POINTS
    assert "circle" in drawn.tags and "nan" not in " ".join(drawn.text)


def test_a_curve_is_not_drawn_over_many_cycles_without_a_value():
    curve = [(cycle, 1) for cycle in (0, 1, 2, 3, 8, 9, 19, 30)]
    assert plot_metrics.segments(curve) == [curve[:-1], curve[-1:]]


def curves_of(*curves):
    """What is drawn of them in one chart: lines and single dots."""
    values = [[(cycle, math.sin(cycle)) for cycle in curve] for curve in curves]
    drawn = Page(plot_metrics.figure("x", ["run"] * len(curves), values, [0.0, 6000.0]))
    return drawn.curves, drawn.tags.count("circle")


@pytest.mark.parametrize(
    "cycles",
    [
        *(range(length) for length in range(500, 6001, 61)),
        [*range(0, 1000, 10), 999],  # an evaluation every ten cycles, and one at the end
        [cycle for cycle in range(1200) if random.Random(cycle).random() > 0.3],  # the others were skipped
        [cycle for cycle in range(6000) if random.Random(cycle).random() > 0.8],
    ],
    ids=len,
)
def test_a_curve_is_one_line_however_many_cycles_it_has_and_however_many_were_skipped(cycles):
    [line], dots = curves_of(cycles)
    assert len(line) <= plot_metrics.MOST_POINTS and dots == 0


def test_of_a_long_curve_each_piece_is_thinned_and_none_over_a_gap():
    lines, dots = curves_of([*range(1001), *range(3000, 4002)])
    assert [len(line) for line in lines] == [201, 201] and dots == 0
    assert lines[0][-1][0] < lines[1][0][0] - 90


def test_runs_in_one_chart_are_means_of_as_many_cycles():
    assert [len(line) for line in curves_of(range(2000), range(200))[0]] == [500, 50]


@pytest.mark.parametrize("last", [1, 100, 1999, 5999, 20_000, 900_000])
@pytest.mark.parametrize(
    "values", [(0.99999905, 1.0), (-4e-4, 2e-4), (0.0, 3e-7), (0.2, 0.9), (1.2e6, 1.21e6), (-9e5, 0)]
)
def test_the_names_of_the_ticks_are_inside_and_differ(last, values):
    across = plot_metrics.ticks([0, last], whole=True)
    drawn = Page(plot_metrics.figure("loss", ["run"], [[*zip((0, last), values, strict=True)]], across))
    assert all(start >= 0 and end <= plot_metrics.WIDTH for _, start, end in drawn.labels)
    down = [label for label, _, end in drawn.labels if end < plot_metrics.LEFT]
    assert len(down) == len(set(down)) >= 3


def test_the_axis_is_that_of_what_is_drawn():
    """Means of four cycles: by the values themselves, most of the chart would be empty."""
    curve = [(cycle, 100.0 if cycle % 4 else -300.0) for cycle in range(2000)]
    assert "300" not in " ".join(Page(plot_metrics.figure("x", ["run"], [curve], [0.0, 2000.0])).text)


def written(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def start(first_cycle, **options):
    where = {"cycles": 2 + first_cycle, "resume_from": first_cycle or None, "first_cycle": first_cycle}
    return {"config": {"seed": 1, **options, **where, "base_url": f"http://127.0.0.1:{first_cycle}"}}


def table_of(content):
    """The rows of what differs; none where there is no table."""
    rows = content.partition("<table>")[2].partition("</table>")[0].split("<tr>")[2:]
    return [re.findall("<td>(.*?)</td>", row) for row in rows]


def test_the_page_says_what_differs_between_runs_and_what_a_resumption_changed(tmp_path):
    def rows(*names):
        assert plot_metrics.main([*names, "--output", str(tmp_path / "x.html")]) == 0
        return table_of((tmp_path / "x.html").read_text())

    first, cycles = start(0, learning_rate=0.1, updates=1), [{"cycle": 0}, {"cycle": 1}]
    plain = written(tmp_path / "plain.jsonl", first, *cycles)
    other = written(tmp_path / "other.jsonl", start(0, learning_rate=0.1, updates=3), *cycles)
    same = written(tmp_path / "same.jsonl", first, *cycles, start(2, learning_rate=0.1, updates=1))
    resumed = written(
        tmp_path / "resumed.jsonl",
        *(first, *cycles, start(2, learning_rate=0.001, updates=3), {"cycle": 2}),
        *(start(3, learning_rate=0.001, updates=3), {"cycle": 3}, start(4, learning_rate=0.1, updates=3)),
    )
    rate = "0.1 → 0.001 (cycle 2) → 0.1 (cycle 4)"
    assert rows(plain) == rows(plain, same) == []
    assert rows(plain, other) == [["updates", "1", "3"]]
    assert rows(resumed) == [["learning_rate", rate], ["updates", "1 → 3 (cycle 2)"]]
    assert rows(resumed, other) == [["learning_rate", rate, "0.1"], ["updates", "1 → 3 (cycle 2)", "3"]]


def test_all_charts_have_the_same_cycles_across(tmp_path):
    one = written(tmp_path / "one.jsonl", *({"cycle": cycle, "a": cycle} for cycle in range(4)))
    two = written(tmp_path / "two.jsonl", *({"cycle": cycle, "b": cycle} for cycle in range(9)))
    assert plot_metrics.main([one, two, "--output", str(tmp_path / "x.html")]) == 0
    of_a, of_b = Page((tmp_path / "x.html").read_text()).curves
    assert [x for x, _ in of_a] == [x for x, _ in of_b][:4]
    assert of_b[-1][0] <= plot_metrics.WIDTH - plot_metrics.RIGHT


def test_a_file_without_a_cycle_is_named_and_the_others_are_plotted(tmp_path, capsys):
    empty, full = written(tmp_path / "e.jsonl", start(0)), written(tmp_path / "f.jsonl", {"cycle": 0, "a": 1})
    assert plot_metrics.main([empty, full, "--output", str(tmp_path / "x.html")]) == 0
    assert f"no cycle yet in {empty}:" in capsys.readouterr().err
    assert "f (cycles 0–0)" in " ".join(Page((tmp_path / "x.html").read_text()).text)


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), ("{}\n", "no cycle yet"), ("x\ny\n", ":1 ")])
def test_what_can_not_be_plotted_is_said(content, message, tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    if content:
        path.write_text(content)
    assert plot_metrics.main([str(path), "--output", str(tmp_path / "x.html")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "x.html").exists()


# Warnings


def warnings_of(done):
    return [line for line in done.stderr.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize("warn", [
    lambda w: w.learning_rate(1e-7, embedded=False) or w.learning_rate(1e-2, embedded=False),
    lambda w: w.gap(0.05, 0) or w.gap(None, 0),
    lambda w: w.completions({"completions/truncated_frac": 0.99}, 0),
    lambda w: w.sampling([sample_request([1], num_samples=1, max_tokens=1, temperature=0.5)], "cross_entropy"),
    lambda w: w.sampling([sample_request([1], num_samples=1, max_tokens=1)], "ppo"),
])  # fmt: skip
def test_what_is_just_within_its_bounds_is_not_warned_of(warn, capsys):
    warn(loop_warnings.Warnings({}))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("warn", "said"), [
    (lambda w: w.learning_rate(0.99e-7, embedded=False), "--learning-rate 9.9e-08"),
    (lambda w: w.learning_rate(1.01e-2, embedded=False), "--learning-rate 0.0101"),
    (lambda w: w.gap(0.051, 3), "in cycle 3"),
    (lambda w: w.sampling([sample_request([1], num_samples=1, max_tokens=1, temperature=0.5, top_p=0.9)], "dro"),
     "Set temperature to 1 and top_p to 1"),
])  # fmt: skip
def test_what_is_just_out_of_its_bounds_is_warned_of(warn, said, capsys):
    warn(loop_warnings.Warnings({}))
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 20)])
def test_sampling_from_another_distribution_than_the_ratio_takes_is_warned_of_once(folder, name, value):
    request = sample_request(b"the ", num_samples=8, max_tokens=6, **{name: value})
    (folder / "r.json").write_text(json.dumps(request))
    done = loop(folder, "--build-loss", GRPO, "--sample-json", "r.json", "--seed", "1")
    [warning] = [line for line in warnings_of(done) if "samples with" in line]
    assert f"samples with {name} {value}" in warning and f"Set {name} to" in warning
    assert "sampling" in summary_of(done)["warnings"]


def test_logprobs_that_differ_between_sampler_and_trainer_are_warned_of_once(folder):
    done = loop(folder, "--build-loss", "mine:shifted", *BATCH)
    [warning] = [line for line in warnings_of(done) if "logprobs of sampler and trainer" in line]
    assert "in cycle 0" in warning and "rl_datum" in warning
    assert "logprobs" in summary_of(done)["warnings"]


def test_later_updates_and_good_data_are_not_warned_of(folder):
    done = loop(folder, "--build-loss", GRPO, *BATCH, "--updates", "4", "--learning-rate", "0.1")
    assert "logprobs" not in summary_of(done)["warnings"] and "sampling" not in summary_of(done)["warnings"]


def test_every_completion_cut_off_is_warned_of_once(folder):
    (folder / "r.json").write_text(json.dumps(sample_request(b"the ", num_samples=8, max_tokens=1)))
    done = loop(folder, "--build-loss", GRPO, "--sample-json", "r.json", "--cycles", "3", "--seed", "1")
    [warning] = [line for line in warnings_of(done) if "cut off" in line]
    assert "Raise max_tokens" in warning and summary_of(done)["warnings"].count("truncated") == 1


@pytest.mark.parametrize(("rate", "warned"), [("0.1", True), ("1e-9", True), ("1e-5", False)])
def test_a_learning_rate_for_the_embedded_model_is_warned_of_elsewhere(folder, rate, warned):
    with serve(folder / "storage") as service:
        arguments = ("--build-loss", GRPO, "--model", "byte-lm", *BATCH, "--cycles", "1", "--learning-rate", rate)
        done = loop(folder, *arguments, env=elsewhere(service))
    assert ("learning_rate" in summary_of(done)["warnings"]) == warned
    here = loop(folder, "--build-loss", GRPO, *BATCH, "--cycles", "1", "--learning-rate", rate)
    assert "learning_rate" not in summary_of(here)["warnings"]


def test_three_cycles_without_signal_are_warned_of_with_the_mean_reward(folder):
    done = loop(folder, "--build-loss", "mine:skips", *BATCH, "--cycles", "7")
    [warning] = [line for line in warnings_of(done) if "no gradient signal" in line]
    assert "3 cycles in a row (mean reward: 0.25)" in warning and "solved" in warning and "collapsed" in warning
    two = loop(folder, "--build-loss", "mine:skips", *BATCH, "--cycles", "2")
    assert "no_signal" not in summary_of(two)["warnings"]


def test_a_signal_between_starts_the_count_again(capsys):
    warnings = loop_warnings.Warnings({})
    for skipped in (True, True, False, True, True):
        warnings.signal(skipped, None)
    assert capsys.readouterr().err == ""
    warnings.signal(True, None)
    assert "ctx.metrics['reward']" in capsys.readouterr().err


def test_a_metrics_file_keeps_no_key_and_goes_on_after_a_last_line_without_its_end(tmp_path):
    from loop_history import MetricsFile, Start, read_lines

    path = tmp_path / "m.jsonl"
    path.write_text('{"config": {}}\n{"state_id": "s-1", "next_cycle": 1}')
    [_, state] = read_lines(path)
    assert state.end == path.stat().st_size
    with MetricsFile(path, Start(1, "s-1", state.end), lambda text: text.replace("the-key", "[key]")) as metrics:
        metrics.begin({"note": "the-key"})
    assert [line.entry for line in read_lines(path)] == [
        {"config": {}}, {"state_id": "s-1", "next_cycle": 1}, {"config": {"note": "[key]"}},
    ]  # fmt: skip
