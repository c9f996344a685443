"""The metrics of a cycle: their formulas, and how a user's own metrics are merged, kept and printed."""

import math
import re
from decimal import Decimal
from fractions import Fraction

import pytest

from loop_runs import entries_of
from whitney_loop import forward_backward_payload, rl_datum
from whitney_loop.loop.metrics import (
    LONGEST_TEXT,
    largest_gap,
    logprob_gaps,
    loss_metrics,
    merged_results,
    ratio_metrics,
    sample_metrics,
    user_metrics,
)

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

def skips(sample, cycle, request, ctx):
    raise NoGradientSignal("one\\ntwo")

def flat(sample, cycle, request, ctx):
    ctx.metrics["reward"] = 1.0
    return forward_backward_payload([rl_datum([1], [2], [-1.0], 0.0)], "ppo")

class Mute:
    def __str__(self):
        raise RuntimeError("no text")

def spoils(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    ctx.metrics |= {"huge": 10**400, "mute": Mute(), "long": "x" * 5_000_000, "good": True, "far": [1e200, -1e200]}
    return payload

def loses(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    ctx.metrics = None
    return payload
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def cycles_in(path):
    return [entry for entry in entries_of(path) if "cycle" in entry]


# Sampler and trainer


def policy_payload():
    data = [rl_datum([7, 8], [1, 2], [-1.0, -2.0], 1.0), rl_datum([7, 8], [3], [-0.5], -1.0)]
    return forward_backward_payload(data, "ppo", {})


OUTPUTS = [{"logprobs": [-9.0, -1.0 + math.log(2), -2.0]}, {"logprobs": [-9.0, -0.5 - math.log(2)]}]


def test_ratio_metrics_are_their_formulas():
    """Ratios 2, 1 and 1/2: gaps ln 2, 0 and −ln 2."""
    result = {"loss": 1.5, "outputs": OUTPUTS, "metrics": {"loss:sum": 1.5, "kept": "x"}, "grad_norm": 3.0}
    gaps = logprob_gaps(policy_payload(), result)
    assert loss_metrics(result, [gap for datum in gaps for gap in datum]) == {
        "loss/sum": 1.5,
        "kl/k1": pytest.approx(0.0),
        "kl/k3": pytest.approx(((2 - 1 - math.log(2)) + 0 + (0.5 - 1 + math.log(2))) / 3),
        "ratio/max": pytest.approx(2.0),
        "ess": pytest.approx(3.5**2 / (3 * (4 + 1 + 0.25))),
        "optim/grad_norm": 3.0,
        "provider/loss:sum": 1.5,
        "provider/kept": "x",
    }
    assert largest_gap(gaps) == pytest.approx(math.log(2))


def test_a_ratio_that_would_overflow_is_cut():
    assert ratio_metrics([1e6])["ratio/max"] == pytest.approx(math.exp(20))


def test_the_clipped_share_and_the_loss_are_those_that_the_service_reports():
    result = {"loss": None, "metrics": {"clip_frac": 0.25, "loss:sum": 2.0}}
    metrics = loss_metrics(result, [])
    assert (metrics["clip_frac"], metrics["loss/sum"]) == (0.25, 2.0)


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"outputs": None, "metrics": None},
        {"metrics": ["a", "list"]},
        {"outputs": [{}, {}]},
        {"outputs": OUTPUTS[:1]},
        {"outputs": [OUTPUTS[1], OUTPUTS[1]]},
        {"outputs": [{"logprobs": [None, -1.0, -1.0]}, OUTPUTS[1]]},
    ],
)
def test_a_service_without_usable_outputs_leaves_metrics_out(result):
    payload = policy_payload()
    gaps = logprob_gaps(payload, result)
    assert gaps == [] and largest_gap(gaps) is None
    assert loss_metrics(result, gaps) == {}
    assert loss_metrics(merged_results([payload, payload], [result, result]), gaps) == {}


def test_truncated_and_empty_completions_are_counted():
    sequences = [
        {"tokens": [1, 2], "stop_reason": "length"}, {"tokens": [], "stop_reason": "stop"},
        {"tokens": [3], "stop_reason": "stop"}, {"tokens": [4]},
    ]  # fmt: skip
    assert sample_metrics([{"sequences": sequences[:2]}, {"sequences": sequences[2:]}]) == {
        "completions/tokens": 4, "completions/truncated_frac": 0.25, "completions/empty_frac": 0.25,
    }  # fmt: skip


# ctx.metrics


class Array:
    """Like an array of numpy or torch."""

    def __init__(self, value):
        self.value = value

    def tolist(self):
        return self.value

    def __float__(self):
        return float(self.value)


class Broken:
    def __str__(self):
        raise RuntimeError("no text")


def test_the_metrics_of_all_groups_become_one():
    groups = [
        {"reward": [0.0, 1.0], "n": 1, "text": "a", "none": None, 16: 0.5},
        {"reward": Array([3.0]), "n": 2, "text": "b", "none": None, 16: 1.5, "alone": 5, "empty": []},
    ]
    expected = {
        "reward/mean": pytest.approx(4 / 3), "reward/std": pytest.approx(math.sqrt(14) / 3),
        "n": 1.5, "text": "b", "alone": 5, "16": 1.0,
    }  # fmt: skip
    assert user_metrics(groups) == (expected, [])
    assert user_metrics([]) == ({}, [])


@pytest.mark.parametrize("one", [True, Decimal(1), Fraction(1), Array(1.0)])
def test_whatever_float_takes_is_a_number_alone_and_in_a_list(one):
    merged, notes = user_metrics([{"alone": one, "list": [one, 0, one, 0]}])
    assert merged == {"alone": 1.0, "list/mean": 0.5, "list/std": 0.5} and notes == []


def test_numbers_as_text_stay_text():
    assert user_metrics([{"answer": "42", "answers": ["4", "2"], "raw": b"4"}]) == (
        {"answer": "42", "answers": "['4', '2']", "raw": "b'4'"}, [],
    )  # fmt: skip


def test_large_numbers_have_a_deviation_and_infinite_ones_a_mean():
    merged, _ = user_metrics([{"far": [1e200, -1e200], "infinite": [math.inf, 0.0]}])
    assert merged["far/std"] == pytest.approx(1e200) and merged["infinite/mean"] == math.inf


def test_an_entry_that_cannot_be_kept_is_noted_and_costs_no_other():
    circular = []
    circular.append(circular)
    merged, notes = user_metrics([{"huge": 10**400, "broken": Broken(), "circular": circular, "good": 1}, None])
    assert merged == {"circular": "[[...]]", "good": 1.0}
    assert notes == [
        "huge: OverflowError", "broken: RuntimeError", "ctx.metrics is of type NoneType, expected a dict",
    ]  # fmt: skip


def test_a_long_text_is_shortened_and_noted():
    merged, notes = user_metrics([{"text": "x" * 1000}])
    assert merged == {"text": "x" * LONGEST_TEXT} and "of 1000 characters" in notes[0]


@pytest.mark.parametrize(
    ("name", "lost"), [("spoils", "huge: OverflowError; mute: RuntimeError; long"), ("loses", "NoneType")]
)
def test_metrics_that_cannot_be_kept_are_warned_of_once_and_do_not_end_the_run(folder, run_loop, prompts, name, lost):
    arguments = ("--build-loss", f"mine:{name}", *prompts, "--cycles", "2", "--metrics", "m.jsonl")
    done = run_loop("rl_loop", *arguments)
    assert done.returncode == 0 and done.summary["cycles_done"] == 2
    [warning] = [line for line in done.stderr.splitlines() if line.startswith("warning: not kept of ctx.metrics")]
    assert lost in warning and "metrics" in done.summary["warnings"]
    assert len(done.stderr) < 5000
    if name == "spoils":
        assert all((cycle["good"], cycle["far/std"]) == (1.0, 1e200) for cycle in cycles_in(folder / "m.jsonl"))


def test_a_users_metric_with_a_name_of_the_loops_own_is_kept_beside_it(folder, run_loop, prompts):
    arguments = ("--build-loss", "mine:tells", *prompts, "--cycles", "1", "--metrics", "m.jsonl")
    done = run_loop("rl_loop", *arguments)
    [cycle] = cycles_in(folder / "m.jsonl")
    assert cycle["cycle"] == 0 and cycle["user/cycle"] == 99
    assert cycle["kl/k1"] != 7.0 and cycle["user/kl/k1"] == 7.0 and cycle["user/state_id"] == "mine"
    assert "user/kl/k1 7" in done.stderr and "  kl/k1 7" not in done.stderr
    assert cycle["odd"] is None and cycle["object"].startswith("<object")
    assert cycle["completions/tokens"] == done.summary["tokens_sampled"]  # whatever build_loss does to its sample


# A cycle that is skipped


def test_the_share_of_groups_without_a_signal_is_kept(folder, run_loop, prompts):
    done = run_loop("rl_loop", "--build-loss", "mine:skips_the", *prompts, "--cycles", "1", "--metrics", "m.jsonl")
    [cycle] = cycles_in(folder / "m.jsonl")
    assert done.returncode == 0 and cycle["groups/uniform_frac"] == 0.25


def test_a_skipped_cycle_is_one_line_with_its_reason(folder, run_loop, prompts):
    done = run_loop("rl_loop", "--build-loss", "mine:skips", *prompts, "--cycles", "1", "--metrics", "m.jsonl")
    [cycle] = cycles_in(folder / "m.jsonl")
    assert done.returncode == 1 and cycle["groups/uniform_frac"] == 1.0 and "one\ntwo" in cycle["skipped"]
    assert "loss/sum" not in cycle
    assert any(re.search("^cycle 0 .* skipped: .*one two", line) for line in done.stderr.splitlines())


def test_a_payload_without_a_gradient_is_not_sent(folder, run_loop, prompts):
    done = run_loop("rl_loop", "--build-loss", "mine:flat", *prompts, "--cycles", "4", "--metrics", "m.jsonl")
    cycles = cycles_in(folder / "m.jsonl")
    assert [cycle["groups/uniform_frac"] for cycle in cycles] == [1.0] * 4
    assert done.returncode == 1 and "every advantage is 0" in cycles[0]["skipped"]
    assert "forward_backward" not in done.summary["operations"] and "(mean reward: 1)" in done.stderr
    assert done.summary["error"].startswith("every cycle was skipped")
