"""Advantage estimators: from the rewards of one group of completions (same prompt) to advantages.

Numbers may be Python's, or scalars and arrays of numpy or torch; the results are plain floats. A number that is not
finite raises ValueError with its position. If all rewards are equal, every advantage is exactly 0.0. The rewards
themselves are compared, because a difference to their rounded mean would look like a signal. Rewards that differ only
by rounding, such as 0.3 and 0.1 + 0.2, are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def group_mean_advantages(rewards: Iterable[float], *, normalize_std: bool = False) -> list[float]:
    """Return reward minus the mean of its group, one advantage per reward.

    With ``normalize_std`` (standard GRPO) divide by the population standard deviation if that is at least 1e-6; without
    it, do not divide (Dr. GRPO). Raise ValueError for fewer than two rewards, and with the position if one is not
    finite. Source: GRPO, arXiv 2402.03300; Whitney, "Advantage helpers".
    """
    rewards = _group(rewards)
    if normalize_std:
        return batch_normalize([rewards])[0]
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return _finite([reward - mean for reward in rewards])


def all_zero(advantages: Iterable[float]) -> bool:
    """Return True if every advantage is 0: the group has no gradient signal.

    Raise ValueError with the position if an advantage is not finite. Source: Whitney, "Advantage helpers".
    """
    return all(value == 0 for value in _numbers(advantages, "advantages"))


def leave_one_out_baseline(rewards: Iterable[float]) -> list[float]:
    """Return the advantages of RLOO: each reward minus the mean of the other rewards of its group.

    Raise ValueError for fewer than two rewards, and with the position if one is not finite.
    Source: RLOO, arXiv 2402.14740; Whitney, "Advantage helpers".
    """
    rewards = _group(rewards)
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    total = sum(rewards)
    return _finite([reward - (total - reward) / (len(rewards) - 1) for reward in rewards])


def length_normalize(advantage: float, completion_length: int) -> float:
    """Return the advantage divided by the completion's length in tokens, so that all completions weigh the same.

    Raise ValueError if ``completion_length`` is below 1 or the advantage is not finite. Source: Whitney,
    "Advantage helpers".
    """
    length = _number(completion_length, "completion_length")
    if length < 1:
        raise ValueError(f"completion_length is {completion_length!r}, expected at least one token")
    return _number(advantage, "advantage") / length


def kl_adjust_advantages(
    advantages: Iterable[float],
    sampled_logprobs: Iterable[float],
    reference_logprobs: Iterable[float],
    *,
    kl_coef: float,
) -> list[float]:
    """Return, per token, advantage − kl_coef · (sampled logprob − reference logprob): the penalty of that token alone.

    All three have one entry per completion token; logprobs in nats. Raise ValueError if lengths differ, and with the
    position if a number is not finite (a ``logprobs`` result starts with None: take ``completion_logprobs`` of it) or a
    logprob is above 0 by more than rounding. Source: Whitney, "Advantage helpers".
    """
    coefficient = _number(kl_coef, "kl_coef")
    plain = _numbers(advantages, "advantages")
    sampled = _logprobs(sampled_logprobs, "sampled_logprobs")
    reference = _logprobs(reference_logprobs, "reference_logprobs")
    _require_one_length(advantages=plain, sampled_logprobs=sampled, reference_logprobs=reference)
    return _finite([a - coefficient * (q - p_ref) for a, q, p_ref in zip(plain, sampled, reference, strict=True)])


def soft_advantages(rewards: Iterable[float], *, beta: float) -> list[float]:
    """Return the advantages of DRO: reward − beta · log(mean over the group of exp(reward / beta)), one per reward.

    ``beta`` > 0, the same as in the ``loss_config``: a small beta compares with the best reward of the group, a large
    one with its mean. Raise ValueError for fewer than two rewards, if one is not finite, and if beta is not above 0.
    Source: DRO, arXiv 2405.19107.
    """
    rewards = _group(rewards)
    temperature = _number(beta, "beta")
    if temperature <= 0:
        raise ValueError(f"beta is {beta!r}, expected a number above 0")
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    # The largest reward is taken out of the exponential, so that it cannot overflow. With a large beta the exponential
    # is close to 1: expm1 and log1p keep the digits that exp and log would lose there.
    top = max(rewards)
    mean = sum(math.expm1((reward - top) / temperature) for reward in rewards) / len(rewards)
    above_top = temperature * math.log1p(mean)
    return _finite([(reward - top) - above_top for reward in rewards])


def generalized_advantages(
    rewards: Iterable[float], values: Iterable[float], *, gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Return ``(advantages, returns)`` of one completion by GAE, one each per token.

    δ_t = r_t + gamma·V_{t+1} − V_t and A_t = δ_t + gamma·gae_lambda·A_{t+1}; returns are A + V. ``rewards`` (often 0
    except for the last token) and ``values`` (of the state before the token) have one entry per token. The value after
    the last token is taken as 0, even if the completion was cut off. ``gamma`` and ``gae_lambda`` are in 0…1. Raise
    ValueError if they are not, if lengths differ, and if a number is not finite. Source: GAE, arXiv 1506.02438.
    """
    discount, trace = _number(gamma, "gamma"), _number(gae_lambda, "gae_lambda")
    if not (0 <= discount <= 1 and 0 <= trace <= 1):
        raise ValueError(f"gamma is {gamma!r} and gae_lambda is {gae_lambda!r}, expected both between 0 and 1")
    r, v = _numbers(rewards, "rewards"), _numbers(values, "values")
    _require_one_length(rewards=r, values=v)
    advantages = [0.0] * len(r)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(r))):
        delta = r[t] + discount * next_value - v[t]
        advantages[t] = next_advantage = delta + discount * trace * next_advantage
        next_value = v[t]
    return _finite(advantages), _finite([a + value for a, value in zip(advantages, v, strict=True)])


def kl_shaped_returns(
    reward: float, sampled_logprobs: Iterable[float], reference_logprobs: Iterable[float], *, kl_coef: float
) -> list[float]:
    """Return, per token, reward − kl_coef · Σ over this and all later tokens of (sampled − reference logprob).

    These are the returns of REINFORCE++ without groups; with groups, the penalty is that of ``kl_adjust_advantages``,
    after ``batch_normalize``. Both lists have one entry (in nats) per completion token. Raise ValueError if lengths
    differ, a number is not finite, or a logprob is above 0 by more than rounding.
    Source: REINFORCE++, arXiv 2501.03262.
    """
    total, coefficient = _number(reward, "reward"), _number(kl_coef, "kl_coef")
    sampled = _logprobs(sampled_logprobs, "sampled_logprobs")
    reference = _logprobs(reference_logprobs, "reference_logprobs")
    _require_one_length(sampled_logprobs=sampled, reference_logprobs=reference)
    returns = [0.0] * len(sampled)
    for t in reversed(range(len(sampled))):
        total -= coefficient * (sampled[t] - reference[t])
        returns[t] = total
    return _finite(returns)


def batch_normalize(advantages: Iterable[Iterable[float]]) -> list[list[float]]:
    """Return the advantages with mean 0 and population deviation 1 over all tokens: one list per completion.

    Pass only tokens that have a weight. If all numbers are equal, each result is exactly 0.0; if the deviation is below
    1e-6, they are centred only. Raise ValueError with the position if a number is not finite.
    Source: REINFORCE++, arXiv 2501.03262.
    """
    rows = [_numbers(row, f"advantages[{index}]") for index, row in enumerate(_listed(advantages, "advantages"))]
    flat = [number for row in rows for number in row]
    if not flat or _all_equal(flat):
        return [[0.0] * len(row) for row in rows]
    mean = sum(flat) / len(flat)
    variance = sum((number - mean) * (number - mean) for number in flat) / len(flat)  # ** 2 would raise OverflowError
    deviation = _finite([variance])[0] ** 0.5
    scale = deviation if deviation >= 1e-6 else 1.0  # dividing by less would turn rounding errors into advantages
    return [_finite([(number - mean) / scale for number in row]) for row in rows]


def _group(rewards: Any) -> list[float]:
    numbers = _numbers(rewards, "rewards")
    if len(numbers) < 2:
        raise ValueError(f"rewards has {len(numbers)} entries; a group needs at least two (num_samples ≥ 2)")
    return numbers


def _require_one_length(**lists: list[float]) -> None:
    if len(set(map(len, lists.values()))) > 1:
        lengths = ", ".join(f"{name} has {len(numbers)} entries" for name, numbers in lists.items())
        raise ValueError(f"{lengths}; expected one each per completion token")


def _all_equal(numbers: list[float]) -> bool:
    """Return True if the numbers differ by no more than rounding: AdamW makes a real step of a gradient of 1e-16."""
    low, high = min(numbers), max(numbers)
    return high - low <= 1e-12 * max(1.0, abs(low), abs(high))  # absolutely, or relative to the largest


def _finite(results: list[float]) -> list[float]:
    for index, result in enumerate(results):
        if not math.isfinite(result):
            raise ValueError(f"the numbers given are so large that result {index} is {result}; scale them down")
    return results


def _numbers(values: Any, where: str) -> list[float]:
    numbers = _listed(values, where)
    # First check the whole list at once, which is fast: if one entry is not finite, their sum is not either.
    if set(map(type, numbers)) <= {float} and math.isfinite(sum(numbers)):
        return numbers
    return [_number(value, f"{where}[{index}]") for index, value in enumerate(numbers)]


def _logprobs(values: Any, where: str) -> list[float]:
    logprobs = _numbers(values, where)
    for index, logprob in enumerate(logprobs):
        if logprob > 1e-3:  # rounding may leave it a little above 0
            raise ValueError(f"{where}[{index}] is {logprob!r}, but a logprob is at most 0: is its sign flipped?")
    return logprobs


def _listed(values: Any, where: str) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{where} is {_show(values)}, expected a sequence")
    return list(values)


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} is {_show(value)}, expected a finite number")
    return number


def _show(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print an integer of thousands of digits, alone or in a list
        return f"of type {type(value).__name__}"
