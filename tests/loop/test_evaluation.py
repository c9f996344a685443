"""Evaluation on held-out prompts: its cycles, its metrics, the best state, and resumption without repeating it."""

import re

import pytest

from loop_runs import GRPO, check_exact_resumption, check_refused, entries_of, metrics_of, write_requests
from whitney_loop.loop.plot import read_run

MINE = """
def reward(tokens, request):
    return tokens[0] / 256
"""
EVALUATES = """
from grpo_build_loss import build_loss as grpo, reward

def build_loss(sample, cycle, request, ctx):
    return grpo(sample, cycle, request, ctx)

def evaluate(samples, cycle, requests, ctx):
    assert len(samples) == len(requests) == 2 and ctx.sampler_id
    return {"accuracy": [cycle, cycle + 1.0], "reward": -abs(cycle - 2), "note": f"at {cycle}"}
"""
TWO = "def build_loss(sample, cycle, request, ctx): ...\ndef evaluate(samples, cycle): ...\n"
NONE = "from grpo_build_loss import build_loss\ndef evaluate(samples, cycle, requests, ctx): ...\n"
FAILS = (
    "from grpo_build_loss import build_loss\ndef evaluate(samples, cycle, requests, ctx): return {'x': samples[9]}\n"
)
NO_REWARD = "from grpo_build_loss import build_loss\ndef evaluate(samples, cycle, requests, ctx): return {'x': 1}\n"
MODULES = {
    "mine": MINE, "evaluates": EVALUATES, "two": TWO, "none": NONE, "fails": FAILS, "no_reward": NO_REWARD
}  # fmt: skip


@pytest.fixture
def train(run_loop, tmp_path):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    write_requests(tmp_path / "train.jsonl", ["the ", "she ", "they "])
    write_requests(tmp_path / "held_out.jsonl", ["one ", "a "])
    write_requests(tmp_path / "overlaps.jsonl", ["one ", "she "])

    def run(*arguments, build_loss=GRPO):
        data = ("--sample-json", "train.jsonl", "--batch-size", "3", "--lora-rank", "1", "--learning-rate", "0.1")
        return run_loop("rl_loop", "--build-loss", build_loss, *data, *arguments)

    return run


BY_REWARD = ("--eval-json", "held_out.jsonl", "--eval-every", "2", "--reward", "mine:reward")


def evaluations_in(path):
    return [entry for entry in metrics_of(path) if any(name.startswith("eval/") for name in entry)]


def test_held_out_prompts_are_evaluated_at_cycle_0_every_n_cycles_and_after_the_last(train, tmp_path):
    done = train(*BY_REWARD, "--seed", "1", "--cycles", "5", "--metrics", "m.jsonl")
    assert done.returncode == 0, done.stderr
    evaluations = evaluations_in(tmp_path / "m.jsonl")
    assert [entry["cycle"] for entry in evaluations] == [0, 2, 4, 5]
    assert evaluations[0].keys() == {"cycle", "eval/reward/mean", "eval/reward/std", "eval/completions/tokens"}
    assert done.summary["operations"] == {
        "save_weights_for_sampler": 5 + 1, "sample": 5 * 3 + 4 * 2, "forward_backward": 5, "optim_step": 5,
        "save_state": 1, "export_lora": 1,
    }  # fmt: skip
    sampled = sum(entry.get("completions/tokens", 0) for entry in metrics_of(tmp_path / "m.jsonl"))
    assert done.summary["tokens_sampled"] == sampled + sum(entry["eval/completions/tokens"] for entry in evaluations)
    assert len(re.findall(r"^evaluation before cycle \d  eval/reward/mean 0\.\d+ ", done.stderr, re.MULTILINE)) == 4
    curve = read_run(tmp_path / "m.jsonl").points("eval/reward/mean")
    assert [cycle for cycle, _ in curve] == [0, 2, 4, 5]
    assert [cycle for cycle, _ in read_run(tmp_path / "m.jsonl").points("reward/mean")] == [0, 1, 2, 3, 4]


def test_an_evaluation_changes_no_training(train):
    plain = train("--seed", "1", "--reward", "mine:reward")
    assert train(*BY_REWARD, "--seed", "1").adapter == plain.adapter


def test_the_users_evaluate_comes_before_the_reward(train, tmp_path):
    data = ("--eval-json", "held_out.jsonl", "--eval-every", "2", "--metrics", "m.jsonl", "--seed", "1")
    assert train(*data, "--reward", "evaluates:reward").returncode == 0
    [first, last] = evaluations_in(tmp_path / "m.jsonl")
    assert first == {
        "cycle": 0, "eval/accuracy/mean": 0.5, "eval/accuracy/std": 0.5, "eval/reward": -2.0, "eval/note": "at 0",
        "eval/completions/tokens": first["eval/completions/tokens"],
    }  # fmt: skip
    assert (last["cycle"], last["eval/reward"]) == (2, 0.0)
    (tmp_path / "m.jsonl").unlink()
    assert train(*data, build_loss="evaluates:build_loss").returncode == 0
    assert evaluations_in(tmp_path / "m.jsonl") == [first, last]


# Resumption


def test_a_resumed_run_does_not_repeat_an_evaluation_and_continues_exactly(train):
    outcomes = check_exact_resumption(train, *BY_REWARD, "--save-best", "--reward-threads", "2")
    samples = [done.summary["operations"]["sample"] for done in outcomes]
    assert samples == [4 * 3 + 3 * 2, 2 * 3 + 2 * 2, 2 * 3 + 1 * 2]


def test_the_best_state_is_saved_before_the_training_of_its_cycle_and_can_be_resumed(train, tmp_path):
    options = ("--eval-json", "held_out.jsonl", "--eval-every", "1", "--save-best", "--cycles")
    whole = train(*options, "4", "--metrics", "whole.jsonl", "--seed", "1", build_loss="evaluates:build_loss")
    lines = entries_of(tmp_path / "whole.jsonl")
    saved = [(line["next_cycle"], line["state_id"]) for line in lines if "state_id" in line]
    assert [next_cycle for next_cycle, _ in saved] == [0, 1, 2, 4]  # the last is that of the end
    best = saved[2][1]
    assert (whole.summary["best_state_id"], whole.summary["best_reward"]) == (best, 0.0)
    assert whole.summary["operations"]["save_state"] == 4
    (tmp_path / "again.jsonl").write_bytes((tmp_path / "whole.jsonl").read_bytes())
    resumed = ("2", "--metrics", "again.jsonl", "--resume-from", best)
    again = train(*options, *resumed, build_loss="evaluates:build_loss")
    assert again.adapter == whole.adapter and again.summary["operations"]["save_state"] == 1
    assert metrics_of(tmp_path / "again.jsonl") == metrics_of(tmp_path / "whole.jsonl")


# Bad input


def test_prompts_that_are_trained_on_too_are_told_not_refused(train):
    done = train("--eval-json", "overlaps.jsonl", "--reward", "mine:reward", "--dry-run")
    assert done.returncode == 0
    assert "--eval-json: 1 of its 2 prompts are in --sample-json too, the first at overlaps.jsonl:2" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save-best"], "--save-best needs --eval-json FILE"),
        (["--eval-json", "held_out.jsonl"], "--eval-json needs --reward MODULE:CALLABLE, or evaluate(samples, cycle,"),
        (["--eval-json", "nowhere.jsonl", "--reward", "mine:reward"], "--eval-json nowhere.jsonl: No such file"),
        (["--eval-json", "mine.py", "--reward", "mine:reward"], "--eval-json mine.py: Expecting value"),
        (["--eval-json", "held_out.jsonl", "--build-loss", "two:build_loss"],
         "--eval-json: evaluate(samples, cycle) cannot be called with four arguments"),
        (["--eval-every", "0"], "--eval-every is 0, expected at least 1"),
    ],
)  # fmt: skip
def test_an_evaluation_that_cannot_be_is_refused_before_anything_is_created(train, arguments, message):
    done = train(*arguments)
    check_refused(done, message)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("none", "evaluate returned None in cycle 0 (is its return missing?): expected a dict of metrics"),
        ("fails", "evaluate raised IndexError in cycle 0: list index out of range"),
        ("no_reward", "--save-best: evaluate returned no number or list of numbers named reward, by which it compares"),
    ],
)
def test_an_evaluate_that_fails_is_named(train, module, message):
    done = train("--eval-json", "held_out.jsonl", "--save-best", build_loss=f"{module}:build_loss")
    assert done.returncode == 1 and f"error: {message}" in done.stderr
    assert ("Traceback" in done.stderr) == (module == "fails") and "evaluation.py" not in done.stderr
