"""Warnings that save runs: each is printed once, when it is due and only then, and named in the summary."""

import json

import pytest

from loop_runs import GRPO, training_on
from whitney_loop import sample_request
from whitney_loop.loop.warnings import Warnings

MINE = """
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal

def shifted(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    for datum in payload["data"]:
        values = datum["loss_inputs"]["logprobs"]["values"]
        values[:] = [0.0, *values[:-1]]
    return payload

def skips(sample, cycle, request, ctx):
    ctx.metrics["reward"] = [0.25, 0.25]
    raise NoGradientSignal("all alike")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def warnings_of(done):
    return [line for line in done.stderr.splitlines() if line.startswith("warning: ")]


def request(**params):
    return sample_request([1], num_samples=1, max_tokens=1, **params)


@pytest.mark.parametrize(
    "warn",
    [
        lambda w: w.learning_rate(1e-7, rehearsal=False) or w.learning_rate(1e-2, rehearsal=False),
        lambda w: w.learning_rate(1.0, rehearsal=True),
        lambda w: w.gap(0.05, 0) or w.gap(None, 0),
        lambda w: w.completions({"completions/truncated_frac": 0.99}, 0),
        lambda w: w.sampling([request(temperature=0.5)], "cross_entropy"),
        lambda w: w.sampling([request()], "ppo"),
        lambda w: w.lost_metrics([]) or w.lost_state([]),
    ],
)
def test_values_just_within_their_bounds_give_no_warning(warn, capsys):
    warn(Warnings([]))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("warn", "name", "said"),
    [
        (lambda w: w.learning_rate(0.99e-7, rehearsal=False), "learning_rate", "--learning-rate 9.9e-08"),
        (lambda w: w.learning_rate(1.01e-2, rehearsal=False), "learning_rate", "--learning-rate 0.0101"),
        (lambda w: w.gap(0.051, 3), "logprobs", "in cycle 3"),
        (lambda w: w.completions({"completions/truncated_frac": 1}, 2), "truncated", "Raise max_tokens"),
        (lambda w: w.sampling([request(temperature=0.5, top_p=0.9)], "dro"), "sampling",
         "Set temperature to 1 and top_p to 1"),
        (lambda w: w.lost_metrics(["a: ValueError"]), "metrics", "a: ValueError"),
        (lambda w: w.lost_state(["critic"]), "state", "keeps critic in ctx.state"),
    ],
)  # fmt: skip
def test_values_just_out_of_their_bounds_give_one_warning(warn, name, said, capsys):
    printed = []
    for _ in range(2):
        warn(Warnings(printed))
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1 and printed == [name]


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 20)])
def test_sampling_from_another_distribution_than_the_ratio_takes_is_warned_of(folder, run_loop, name, value):
    (folder / "r.json").write_text(json.dumps(sample_request(b"the ", num_samples=8, max_tokens=6, **{name: value})))
    done = run_loop("rl_loop", "--build-loss", GRPO, "--sample-json", "r.json", "--seed", "1", "--lora-rank", "2")
    [warning] = [line for line in warnings_of(done) if "samples with" in line]
    assert f"samples with {name} {value}" in warning and f"Set {name} to" in warning
    assert "sampling" in done.summary["warnings"]


def test_logprobs_that_differ_between_sampler_and_trainer_are_warned_of(folder, run_loop, prompts):
    done = run_loop("rl_loop", "--build-loss", "mine:shifted", *prompts)
    [warning] = [line for line in warnings_of(done) if "logprobs of sampler and trainer" in line]
    assert "in cycle 0" in warning and "rl_datum" in warning
    assert "logprobs" in done.summary["warnings"]


def test_later_updates_and_good_data_give_no_warning(run_loop, prompts):
    done = run_loop("rl_loop", "--build-loss", GRPO, *prompts, "--updates", "4", "--learning-rate", "0.1")
    assert not {"logprobs", "sampling", "metrics"} & set(done.summary["warnings"])


@pytest.mark.parametrize(("rate", "warned"), [("0.1", True), ("1e-9", True), ("1e-5", False)])
def test_a_learning_rate_for_the_embedded_model_is_warned_of_elsewhere(run_loop, prompts, remote, rate, warned):
    arguments = ("--build-loss", GRPO, *prompts, "--cycles", "1", "--learning-rate", rate)
    elsewhere = run_loop("rl_loop", *arguments, "--model", "byte-lm", **training_on(remote))
    assert ("learning_rate" in elsewhere.summary["warnings"]) == warned
    assert "learning_rate" not in run_loop("rl_loop", *arguments).summary["warnings"]


def test_three_cycles_without_signal_are_warned_of_with_the_mean_reward(folder, run_loop, prompts):
    done = run_loop("rl_loop", "--build-loss", "mine:skips", *prompts, "--cycles", "7")
    [warning] = [line for line in warnings_of(done) if "no gradient signal" in line]
    assert "3 cycles in a row (mean reward: 0.25)" in warning and "solved" in warning and "collapsed" in warning
    two = run_loop("rl_loop", "--build-loss", "mine:skips", *prompts, "--cycles", "2")
    assert "no_signal" not in two.summary["warnings"]


def test_a_signal_in_between_starts_the_count_again(capsys):
    warnings = Warnings([])
    for skipped in (True, True, False, True, True):
        warnings.signal(skipped, None)
    assert capsys.readouterr().err == ""
    warnings.signal(True, None)
    assert "ctx.metrics['reward']" in capsys.readouterr().err
