import math
import random

import pytest

from whitney_loop import (
    all_zero,
    batch_normalize,
    generalized_advantages,
    group_mean_advantages,
    kl_adjust_advantages,
    kl_shaped_returns,
    leave_one_out_baseline,
    length_normalize,
    soft_advantages,
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


def soft(rewards):
    return soft_advantages(rewards, beta=0.05)


GROUP_ESTIMATORS = [group_mean_advantages, leave_one_out_baseline, soft]


@pytest.mark.parametrize("estimate", GROUP_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -5.3, True])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(estimate, reward, size):
    assert estimate([reward] * size) == [0.0] * size
    assert all_zero(estimate([reward] * size))


@pytest.mark.parametrize("estimate", [*GROUP_ESTIMATORS, lambda rewards: batch_normalize([rewards])[0]])
@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2, 0.3, 0.3], [1e9, 1e9 + 1e-6], [1e-13, 0.0, -1e-13]])
def test_rewards_that_differ_only_by_rounding_are_equal(estimate, rewards):
    assert estimate(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimate", GROUP_ESTIMATORS)
@pytest.mark.parametrize("rewards", [[1e9, 1e9 + 1], [0.0, 1e-11], [1.0, 1.0 - 1e-11], [-1.7e308, 1.0]])
def test_rewards_that_differ_by_more_than_rounding_are_not_equal(estimate, rewards):
    assert not all_zero(estimate(rewards))


def test_leave_one_out_subtracts_the_mean_of_the_others():
    assert leave_one_out_baseline([1, 2, 6]) == [-3.0, -1.5, 4.5]


@pytest.mark.parametrize("estimate", GROUP_ESTIMATORS)
def test_a_group_of_fewer_than_two_is_refused(estimate):
    for rewards in ([], [1.0]):
        with pytest.raises(ValueError, match=f"rewards has {len(rewards)} entries.*at least two"):
            estimate(rewards)


@pytest.mark.parametrize("estimate", [*GROUP_ESTIMATORS, all_zero])
@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "1", 10**400])
def test_a_number_that_is_not_finite_is_refused_with_its_position(estimate, bad):
    with pytest.raises(ValueError, match=r"\[2\] is .*expected a finite number"):
        estimate([0.0, 0.0, bad])


def test_intermediate_results_that_overflow_are_refused():
    assert group_mean_advantages([1e200, 0]) == [5e199, -5e199]
    for overflowing in (
        lambda: group_mean_advantages([0.0, 1e200], normalize_std=True),
        lambda: group_mean_advantages([1.7e308, 1.6e308]),
        lambda: leave_one_out_baseline([1.7e308, -1.7e308]),
        lambda: kl_adjust_advantages([1e308], [-1e308], [0.0], kl_coef=1.0),
        lambda: kl_shaped_returns(1e308, [-1e308], [0.0], kl_coef=1.0),
        lambda: soft_advantages([1.7e308, -1.7e308], beta=1.0),
        lambda: generalized_advantages([1.7e308], [-1.7e308], gamma=1, gae_lambda=1),
        lambda: batch_normalize([[1e200, 0.0]]),
    ):
        with pytest.raises(ValueError, match="so large that result"):
            overflowing()


def test_all_zero_is_about_every_advantage():
    assert all_zero([0, -0.0]) and not all_zero([0, 1e-300])


def test_length_normalize_divides_by_tokens():
    assert length_normalize(3.0, 4) == 0.75
    for length in (0, -1, 0.5, math.nan):
        with pytest.raises(ValueError, match="completion_length"):
            length_normalize(1.0, length)
    with pytest.raises(ValueError, match="advantage is nan"):
        length_normalize(math.nan, 2)


def test_kl_adjust_subtracts_the_immediate_term():
    assert kl_adjust_advantages([1, 1], [-1, -2], [-1.5, -1], kl_coef=0.5) == [0.75, 1.5]


def test_kl_adjust_refuses_other_lengths_and_the_leading_none_of_a_result():
    with pytest.raises(ValueError, match="advantages has 1 entries, sampled_logprobs has 2 .*reference_logprobs has 2"):
        kl_adjust_advantages([1], [-1, -1], [-1, -1], kl_coef=0.1)
    with pytest.raises(ValueError, match=r"reference_logprobs\[0\] is None"):
        kl_adjust_advantages([1, 1], [-1, -1], [None, -1], kl_coef=0.1)


@pytest.mark.parametrize("estimate", [lambda q, ref: kl_adjust_advantages([1, 1], q, ref, kl_coef=0.1),
                                      lambda q, ref: kl_shaped_returns(1, q, ref, kl_coef=0.1)])  # fmt: skip
def test_a_positive_logprob_is_refused_by_name_unless_it_is_rounding(estimate):
    estimate([-1.0, 1e-3], [-1.0, 1e-4])
    with pytest.raises(ValueError, match=r"sampled_logprobs\[1\] is 0.5, but a logprob is at most 0: is its sign"):
        estimate([-1.0, 0.5], [-1.0, -1.0])
    with pytest.raises(ValueError, match=r"reference_logprobs\[0\] is 2.0, but a logprob is at most 0"):
        estimate([-1.0, -0.5], [2.0, 1.0])


def test_soft_advantages_are_rewards_over_the_soft_value_of_the_group():
    rewards, beta = [0.0, 0.5, 1.0], 0.5
    baseline = beta * math.log(sum(math.exp(reward / beta) for reward in rewards) / 3)
    assert soft_advantages(rewards, beta=beta) == pytest.approx([reward - baseline for reward in rewards], abs=1e-12)
    # exp(advantage / beta) is a weight whose group mean is 1: the optimal policy over the sampled one.
    weights = [math.exp(advantage / beta) for advantage in soft_advantages([3.0, -2.0, 0.3], beta=beta)]
    assert sum(weights) / 3 == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("beta", [1e6, 1e12, 1e17])
def test_soft_advantages_of_a_large_beta_are_measured_against_the_mean(beta):
    assert soft_advantages([0.0, 1.0, 0.5], beta=beta) == pytest.approx([-0.5, 0.5, 0.0], abs=1e-6)


def test_soft_advantages_do_not_overflow():
    assert soft_advantages([0.0, 1000.0], beta=0.01) == pytest.approx([-1000 + 0.01 * math.log(2), 0.01 * math.log(2)])


@pytest.mark.parametrize("beta", [0, -1, math.nan, None])
def test_soft_advantages_refuse_a_beta_that_is_not_positive(beta):
    with pytest.raises(ValueError, match="beta is"):
        soft_advantages([0, 1], beta=beta)


def test_generalized_advantages_follow_their_recursion():
    advantages, returns = generalized_advantages([0, 0, 1], [0.5, 0.25, 0.75], gamma=0.9, gae_lambda=0.8)
    last = 1 - 0.75
    middle = 0.9 * 0.75 - 0.25 + 0.9 * 0.8 * last
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * middle
    assert advantages == pytest.approx([first, middle, last], abs=1e-15)
    assert returns == pytest.approx([first + 0.5, middle + 0.25, last + 0.75], abs=1e-15)


def test_with_gamma_and_lambda_one_the_returns_are_the_rewards_to_come():
    rng = random.Random(5)
    rewards, values = ([rng.gauss(0, 1) for _ in range(9)] for _ in range(2))
    _, returns = generalized_advantages(rewards, values, gamma=1, gae_lambda=1)
    assert returns == pytest.approx([sum(rewards[t:]) for t in range(9)])
    assert generalized_advantages([], [], gamma=1, gae_lambda=1) == ([], [])


def test_generalized_advantages_refuse_bad_arguments():
    with pytest.raises(ValueError, match="rewards has 1 entries, values has 2"):
        generalized_advantages([1], [1, 2], gamma=1, gae_lambda=1)
    with pytest.raises(ValueError, match="gae_lambda is 1.5"):
        generalized_advantages([1], [1], gamma=1, gae_lambda=1.5)
    with pytest.raises(ValueError, match=r"values\[0\] is None"):
        generalized_advantages([1], [None], gamma=1, gae_lambda=1)


def test_kl_shaped_returns_carry_the_penalty_of_all_later_tokens():
    assert kl_shaped_returns(1, [-1.0, -2.0, -3.0], [-1.5, -2.0, -1.0], kl_coef=0.5) == [1.75, 2.0, 2.0]
    with pytest.raises(ValueError, match="sampled_logprobs has 1 entries, reference_logprobs has 2"):
        kl_shaped_returns(1, [-1], [-1, -1], kl_coef=0.5)


def test_batch_normalize_is_over_all_tokens_of_all_completions():
    rows = batch_normalize([[1, 2, 3], [], [6]])
    flat = [number for row in rows for number in row]
    assert [len(row) for row in rows] == [3, 0, 1]
    assert sum(flat) == pytest.approx(0, abs=1e-12) and sum(x * x for x in flat) / 4 == pytest.approx(1)
    assert batch_normalize([[0.1, 0.1], [0.1]]) == [[0.0, 0.0], [0.0]]
    assert batch_normalize([]) == []
    with pytest.raises(ValueError, match=r"advantages\[1\]\[0\] is nan"):
        batch_normalize([[1.0], [math.nan]])
