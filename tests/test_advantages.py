import math
import random

import pytest

from whitney_loop import (
    all_zero,
    group_mean_advantages,
    kl_adjust_advantages,
    leave_one_out_baseline,
    length_normalize,
)


def test_group_mean_advantages_are_centred():
    assert group_mean_advantages([1, 2, 6]) == [-2.0, -1.0, 3.0]


def test_with_normalize_std_they_have_population_deviation_one():
    assert group_mean_advantages([0, 1], normalize_std=True) == [-1.0, 1.0]
    rng = random.Random(2)
    advantages = group_mean_advantages([rng.random() for _ in range(50)], normalize_std=True)
    assert math.isclose(sum(value * value for value in advantages) / 50, 1)
    assert math.isclose(sum(advantages), 0, abs_tol=1e-12)


def test_a_deviation_that_is_nearly_zero_is_not_divided_by():
    rewards = [1.0, 1.0 + 1e-7]
    assert group_mean_advantages(rewards, normalize_std=True) == group_mean_advantages(rewards)


@pytest.mark.parametrize("estimate", [group_mean_advantages, leave_one_out_baseline])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -5.3, True])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(estimate, reward, size):
    assert estimate([reward] * size) == [0.0] * size
    assert all_zero(estimate([reward] * size))


def test_leave_one_out_subtracts_the_mean_of_the_others():
    assert leave_one_out_baseline([1, 2, 6]) == [-3.0, -1.5, 4.5]


@pytest.mark.parametrize("estimate", [group_mean_advantages, leave_one_out_baseline])
def test_a_group_of_fewer_than_two_is_refused(estimate):
    for rewards in ([], [1.0]):
        with pytest.raises(ValueError, match=f"rewards has {len(rewards)} entries.*at least two"):
            estimate(rewards)


@pytest.mark.parametrize("estimate", [group_mean_advantages, leave_one_out_baseline, all_zero])
@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "1", 10**400])
def test_a_number_that_is_not_finite_is_refused_with_its_position(estimate, bad):
    with pytest.raises(ValueError, match=r"\[2\] is .*expected a finite number"):
        estimate([0.0, 0.0, bad])


def test_rewards_whose_squares_overflow_are_refused_not_flattened_to_zero():
    with pytest.raises(ValueError, match=r"rewards\[1\] is 1e\+200"):
        group_mean_advantages([0.0, 1e200], normalize_std=True)


def test_all_zero_is_about_every_advantage():
    assert all_zero([0, -0.0]) and not all_zero([0, 1e-300])


def test_length_normalize_divides_by_tokens():
    assert length_normalize(3.0, 4) == 0.75
    for length in (0, -1, math.nan):
        with pytest.raises(ValueError, match="completion_length"):
            length_normalize(1.0, length)
    with pytest.raises(ValueError, match="advantage is nan"):
        length_normalize(math.nan, 2)


def test_kl_adjust_subtracts_the_immediate_term():
    assert kl_adjust_advantages([1, 1], [-1, -2], [-1.5, -1], kl_coef=0.5) == [0.75, 1.5]


def test_kl_adjust_refuses_lengths_that_do_not_match_and_the_leading_none_of_a_logprobs_result():
    with pytest.raises(ValueError, match="advantages has 1 entries, sampled_logprobs 2 and reference_logprobs 2"):
        kl_adjust_advantages([1], [-1, -1], [-1, -1], kl_coef=0.1)
    with pytest.raises(ValueError, match=r"reference_logprobs\[0\] is None"):
        kl_adjust_advantages([1, 1], [-1, -1], [None, -1], kl_coef=0.1)
