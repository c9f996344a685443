"""Resumption by the metrics file: the resumptions that are refused, and the lines that are printed."""

import re

import pytest

from loop_runs import GRPO, check_refused, entries_of, metrics_of, write_requests
from whitney_loop.loop.lines import read_lines

PROMPTS = ["the ", "she ", "they ", "one ", "a ", "and ", "that "]
COMMON = ("--sample-json", "prompts.jsonl", "--lora-rank", "1", "--batch-size", "3", "--learning-rate", "0.1")
MINE = """
from grpo_build_loss import build_loss as grpo

def fails(sample, cycle, request, ctx):
    raise LookupError("as it was told")

def keeps(sample, cycle, request, ctx):
    ctx.state["reference"] = ctx.sampler_id
    return grpo(sample, cycle, request, ctx)
"""


@pytest.fixture
def train(run_loop, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    write_requests(tmp_path / "prompts.jsonl", PROMPTS)
    write_requests(tmp_path / "others.jsonl", [*PROMPTS, "all "])

    def run(*arguments, build_loss=GRPO):
        return run_loop("rl_loop", "--build-loss", build_loss, *COMMON, *arguments)

    return run


def test_states_are_saved_every_n_cycles_and_named_everywhere(train, tmp_path):
    done = train("--seed", "1", "--cycles", "5", "--save-every", "2", "--metrics", "m.jsonl")
    printed = re.findall(r"^saved (state-\w+): the next cycle is (\d)$", done.stderr, re.MULTILINE)
    entries = entries_of(tmp_path / "m.jsonl")
    kept = [(entry["state_id"], entry["next_cycle"]) for entry in entries if "state_id" in entry]
    assert [number for _, number in kept] == [2, 4, 5]
    assert [(state, int(number)) for state, number in printed] == kept[:2]
    assert (done.summary["state_id"], done.summary["next_cycle"]) == kept[2]
    assert done.summary["operations"]["save_state"] == 3


def test_a_loop_that_saved_no_state_says_so(train):
    done = train("--metrics", "m.jsonl", build_loss="mine:fails")
    assert done.returncode == 1 and "no state was saved, so there is none to resume from" in done.stderr


def test_changed_options_are_printed_once(train):
    train("--seed", "1", "--metrics", "m.jsonl")
    other = ("--metrics", "m.jsonl", "--resume-from", "last", "--learning-rate", "0.01", "--updates", "2")
    assert "with other options than before: --learning-rate 0.1 → 0.01, --updates 1 → 2\n" in train(*other).stderr
    assert "with other options" not in train(*other).stderr


def test_a_state_may_start_a_training_of_its_own(train, tmp_path):
    state_id = train("--seed", "1").summary["state_id"]
    train("--seed", "2", "--resume-from", state_id, "--first-cycle", "0", "--metrics", "own.jsonl")
    assert [entry["cycle"] for entry in metrics_of(tmp_path / "own.jsonl")] == [0, 1]


def test_ctx_state_is_not_resumed_and_that_is_said(train):
    first = train("--seed", "1", "--metrics", "m.jsonl", build_loss="mine:keeps")
    assert "state" not in first.summary["warnings"]
    second = train("--metrics", "m.jsonl", "--resume-from", "last", build_loss="mine:keeps")
    assert "build_loss keeps reference in ctx.state" in second.stderr and "state" in second.summary["warnings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume-from", "state-1"), "which cycle comes next is not known; give --metrics"),
        (("--resume-from", "last"), "which cycle comes next is not known; give --metrics"),
        (("--resume-from", "last", "--first-cycle", "2"), "which cycle comes next is not known"),
        (("--first-cycle", "2"), "--first-cycle belongs to --resume-from"),
        (("--resume-from", "s", "--first-cycle", "-1"), "--first-cycle is -1"),
        (("--resume-from", "state-0", "--metrics", "m.jsonl"), "m.jsonl holds no such state"),
        (("--resume-from", "last", "--metrics", "none.jsonl"), "none.jsonl; remove it"),
        (("--resume-from", "s", "--first-cycle", "2"), "--first-cycle: give the --seed of that run too"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--lora-rank", "8"), "--lora-rank is 8, but 1 in the run"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--model", "m"), "--model is m, but byte-lm in the run"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--first-cycle", "3"), "the next cycle is 2: leave it out"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--seed", "2"), "--seed is 2, but 1 in the run"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--batch-size", "2"), "--batch-size is 2, but 3 in the run"),
        (
            ("--resume-from", "last", "--metrics", "m.jsonl", "--sample-json", "others.jsonl"),
            "the data set is not the one",
        ),
        (("--resume-from", "last", "--metrics", "headless.jsonl"), "headless.jsonl has lost its first line"),
        (("--resume-from", "last", "--metrics", "kept.jsonl"), "kept.jsonl.superseded: it is not a regular file"),
        (("--resume-from", "last", "--metrics", "utf16.jsonl"), "utf16.jsonl is not in UTF-8"),
    ],
)
def test_a_resumption_that_would_not_continue_exactly_is_refused(train, tmp_path, arguments, message):
    (tmp_path / "none.jsonl").write_text('{"cycle": 0}\n')
    train("--seed", "1", "--metrics", "m.jsonl", "--storage", "elsewhere")
    before = (tmp_path / "m.jsonl").read_bytes()
    (tmp_path / "headless.jsonl").write_bytes(before.partition(b"\n")[2])
    (tmp_path / "kept.jsonl").write_bytes(before + b'{"cycle": 2}\n')
    (tmp_path / "kept.jsonl.superseded").mkdir()
    (tmp_path / "utf16.jsonl").write_text(before.decode(), encoding="utf-16")
    done = train(*arguments, "--dry-run")
    check_refused(done, message)
    assert (tmp_path / "m.jsonl").read_bytes() == before


def test_the_metrics_file_of_another_loop_is_refused(train, run_loop, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    train("--seed", "1", "--metrics", "m.jsonl")
    resume = ("--lora-rank", "1", "--metrics", "m.jsonl", "--resume-from", "last")
    distilled = run_loop("distillation_loop", "--teacher-data", "data.jsonl", *resume)
    assert distilled.returncode == 2 and "--batch-size is None, but 3 in the run" in distilled.stderr
    tuned = run_loop("sft_loop", "--data", "data.jsonl", "--batch-size", "3", "--epochs", "9", *resume)
    assert tuned.returncode == 2 and "the data set is not the one" in tuned.stderr


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_metrics_file_that_an_editor_saved_is_still_read(train, tmp_path, encoding):
    path = tmp_path / "m.jsonl"
    train("--seed", "1", "--metrics", "m.jsonl")
    lines = [line.entry for line in read_lines(path)]
    path.write_text(path.read_text(), encoding=encoding)
    assert [line.entry for line in read_lines(path)] == lines
    if encoding == "utf-8-sig":
        assert train("--metrics", "m.jsonl", "--resume-from", "last").returncode == 0
        assert [line.entry["cycle"] for line in read_lines(path) if "cycle" in line.entry] == [0, 1, 2, 3]
