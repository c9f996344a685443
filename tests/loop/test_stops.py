"""A training ends at a goal, a token budget or a time limit; it is saved and exported, and says why it ended."""

import pytest

from loop_runs import GRPO, check_refused, metrics_of, write_requests
from whitney_loop.loop import LoopOptions
from whitney_loop.loop.stops import Stops

COMMON = ("--lora-rank", "1", "--seed", "1", "--sample-json", "one.jsonl")
MINE = """
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal

def counts(sample, cycle, request, ctx):
    ctx.metrics["counted"] = cycle
    return grpo(sample, cycle, request, ctx)

def solved(sample, cycle, request, ctx):
    ctx.metrics["reward"] = [1.0]
    raise NoGradientSignal("solved")
"""


@pytest.fixture
def train(run_loop, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    write_requests(tmp_path / "one.jsonl", ["the "])

    def run(*arguments, build_loss="mine:counts"):
        return run_loop("rl_loop", "--build-loss", build_loss, *COMMON, *arguments)

    return run


def check_that_it_ended_well(done, ended_by, cycles):
    assert done.returncode == 0, done.stderr
    assert (done.summary["status"], done.summary["ended_by"]) == ("succeeded", ended_by)
    assert done.summary["cycles_done"] + done.summary["cycles_skipped"] == done.summary["next_cycle"] == cycles
    assert done.summary["operations"]["save_state"] == done.summary["operations"]["export_lora"] == 1
    assert done.summary["artifact"] and done.summary["state_id"]
    if ended_by:
        assert f"{ended_by} is reached: the training ends before cycle {cycles}\n" in done.stderr


def test_a_goal_is_the_mean_of_three_cycles(train):
    """The metric is 0, 1, 2, 3: the mean of the last three is 2 after cycle 3; the last value is 2 after cycle 2."""
    done = train("--cycles", "9", "--stop-at", "counted:2", "--save-every", "4")
    check_that_it_ended_well(done, "--stop-at counted:2", 4)


def test_any_of_several_goals_ends_the_training(train):
    done = train("--cycles", "9", "--stop-at", "reward/mean:2", "--stop-at", "counted:1")
    check_that_it_ended_well(done, "--stop-at counted:1", 3)


def test_a_training_without_an_end_of_its_own_trains_every_cycle(train):
    check_that_it_ended_well(train("--cycles", "2"), None, 2)


def test_a_token_budget_counts_sampled_and_trained_tokens(train, tmp_path):
    train("--cycles", "4", "--metrics", "whole.jsonl")
    sampled = [entry["completions/tokens"] for entry in metrics_of(tmp_path / "whole.jsonl")]
    done = train("--cycles", "9", "--token-budget", 2 * sum(sampled[:3]))
    check_that_it_ended_well(done, f"--token-budget {2 * sum(sampled[:3])}", 3)
    assert done.summary["tokens_sampled"] + done.summary["tokens_trained"] == 2 * sum(sampled[:3])


def test_a_time_that_is_over_at_once_trains_nothing_and_ends_well(train):
    check_that_it_ended_well(train("--cycles", "9", "--max-minutes", "1e-12"), "--max-minutes 1e-12", 0)


@pytest.mark.parametrize("script", ["sft_loop", "distillation_loop"])
def test_the_other_loops_end_too(run_loop, script):
    own = {"sft_loop": ("--epochs", "9"), "distillation_loop": ("--cycles", "9", "--teacher-epochs", "1")}[script]
    done = run_loop(script, *own, "--lora-rank", "1", "--token-budget", "1")
    assert done.returncode == 0, done.stderr
    assert (done.summary["ended_by"], done.summary["next_cycle"]) == ("--token-budget 1", 1)


def test_a_metric_that_does_not_appear_is_told_with_those_that_do(train):
    done = train("--cycles", "3", "--stop-at", "rewad/mean:0.9", "--stop-at", "reward/mean:2")
    assert done.returncode == 0 and done.summary["cycles_done"] == 3
    [warning] = [line for line in done.stderr.splitlines() if line.startswith("warning: --stop-at")]
    assert warning.startswith("warning: --stop-at: cycle 0 has no rewad/mean; it has completions/empty_frac, ")
    assert "reward/mean" in warning and "stop_at" in done.summary["warnings"]


def test_a_task_that_is_solved_from_the_start_is_no_failure(train):
    done = train("--cycles", "9", "--stop-at", "reward/mean:1", build_loss="mine:solved")
    assert (done.returncode, done.summary["cycles_done"], done.summary["cycles_skipped"]) == (0, 0, 3)


def test_the_cycles_before_a_resumption_count_in_the_mean(train, tmp_path):
    goal = ("--stop-at", "counted:2", "--metrics", "m.jsonl")
    train("--cycles", "2", *goal)
    done = train("--cycles", "9", *goal, "--resume-from", "last")
    assert (done.summary["ended_by"], done.summary["next_cycle"]) == ("--stop-at counted:2", 4)
    assert [entry["cycle"] for entry in metrics_of(tmp_path / "m.jsonl")] == [0, 1, 2, 3]


def test_a_run_that_is_done_trains_no_further_cycle_if_it_is_resumed(train):
    goal = ("--cycles", "9", "--stop-at", "counted:2", "--metrics", "m.jsonl")
    first = train(*goal)
    again = train(*goal, "--resume-from", "last")
    assert again.returncode == 0, again.stderr
    assert (again.summary["cycles_done"], again.summary["next_cycle"]) == (0, 4)
    assert again.adapter == first.adapter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stop-at", "reward/mean"), "--stop-at is 'reward/mean', expected METRIC:VALUE, such as reward/mean:0.9"),
        (("--stop-at", "reward/mean:high"), "--stop-at is 'reward/mean:high', expected METRIC:VALUE"),
        (("--stop-at", "reward/mean:nan"), "expected METRIC:VALUE"),
        (("--stop-at", ":1"), "expected METRIC:VALUE"),
        (("--token-budget", "0"), "--token-budget is 0, expected at least 1"),
        (("--max-minutes", "0"), "--max-minutes is 0.0, expected minutes above 0"),
        (("--max-minutes", "nan"), "--max-minutes is nan"),
    ],
)
def test_an_end_that_cannot_be_is_refused_before_anything_is_created(train, arguments, message):
    done = train(*arguments, build_loss=GRPO)
    check_refused(done, message)


def test_only_cycles_that_have_a_metric_count_in_its_mean():
    options = LoopOptions(stop_at=("eval/provider:sum:4",))
    stops = Stops(options, [{"eval/provider:sum": 3}, {"other": 1}, {"eval/provider:sum": None}])
    stops.take({"eval/provider:sum": 4})
    assert stops.reached(10**9) is None
    stops.take({"eval/provider:sum": 5.0})
    assert stops.reached(0) == "--stop-at eval/provider:sum:4"
    assert stops.unknown() == []
