"""The line of progress and its columns."""

import re

import pytest

from loop_runs import GRPO
from whitney_loop.loop.progress import clock, progress_line


def line(shown, before=None, cycle=3):
    return progress_line(cycle, shown, before, tokens_per_s=1234.5, tokens=99_000, seconds_left=61.4)


def test_a_line_shows_a_metric_its_change_and_what_is_left():
    said = line({"reward/mean": 0.52345, "kl": 0.00123, "grad_norm": 12.345}, 0.5)
    assert re.sub(" +", " ", said) == (
        "cycle 3 reward/mean 0.5234 +0.023 kl 0.00123 grad_norm 12.3 1234 tokens/s 99000 tokens 0:01:01 left"
    )


def test_the_columns_are_the_same_for_all_values():
    lines = [
        line({"reward": None, "kl": None, "grad_norm": None}),
        line({"reward": 0.123456, "kl": 1.23456e-05, "grad_norm": 123456.0}, 1.0, cycle=9999),
        line({"reward": 1, "kl": 0.0, "grad_norm": 0}, 0),
    ]
    for column in ("kl", "grad_norm", "tokens/s", "tokens ", "left"):
        assert len({text.index(column) for text in lines}) == 1, column
    assert lines[0].count("–") == 4


def test_a_change_by_a_rounding_error_is_shown_as_0():
    assert "0.3 +0 " in re.sub(" +", " ", line({"reward": 0.1 + 0.2}, 0.3))


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05")])
def test_a_time_is_hours_minutes_and_seconds(seconds, shown):
    assert clock(seconds) == shown


def test_the_time_left_is_at_most_that_of_max_minutes(run_loop):
    arguments = ("--build-loss", GRPO, "--lora-rank", "1", "--cycles", "99999", "--max-minutes", "0.01")
    done = run_loop("rl_loop", *arguments)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"(\S+) left", done.stderr)) <= {"0:00:00", "0:00:01"}


def test_tokens_so_far_are_sampled_and_trained_ones(run_loop):
    done = run_loop("rl_loop", "--build-loss", GRPO, "--lora-rank", "1", "--cycles", "3")
    so_far = [int(number) for number in re.findall(r"(\d+) tokens  ", done.stderr)]
    assert len(so_far) == 3 and so_far[-1] == done.summary["tokens_sampled"] + done.summary["tokens_trained"]
