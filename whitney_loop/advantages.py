"""Advantage estimators: from the rewards of one group of completions (same prompt) to advantages.

Numbers may be Python's, or scalars and arrays of numpy or torch; plain floats come out. A number that is
not finite is an error that names its position. Rewards that are all equal give exactly 0.0 each: equality is
decided on the rewards, since their float mean leaves a residue that looks like a signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

_LEAST_DEVIATION = 1e-6  # below it, dividing would amplify rounding into advantages


def group_mean_advantages(rewards: Iterable[float], *, normalize_std: bool = False) -> list[float]:
    """Reward minus the mean of its group, one advantage per reward.

    With ``normalize_std`` divided by the population standard deviation where that is at least 1e-6 (standard GRPO);
    without, the centred value (Dr. GRPO). Raises ValueError for fewer than two rewards, and with the
    position for one that is not finite. Source: GRPO, arXiv 2402.03300; Whitney, "Advantage helpers".
    """
    rewards = _group(rewards)
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centered = _finite([reward - mean for reward in rewards])
    if not normalize_std:
        return centered
    [deviation] = _finite([(sum(value * value for value in centered) / len(centered)) ** 0.5])
    if deviation < _LEAST_DEVIATION:
        return centered
    return [value / deviation for value in centered]


def all_zero(advantages: Iterable[float]) -> bool:
    """True where no advantage differs from 0: the group carries no gradient signal.

    Raises ValueError with the position of an advantage that is not finite. Source: Whitney, "Advantage helpers".
    """
    return all(value == 0 for value in _numbers(advantages, "advantages"))


def leave_one_out_baseline(rewards: Iterable[float]) -> list[float]:
    """RLOO: each reward minus the mean of the other rewards of its group; these are the advantages.

    Raises ValueError for fewer than two rewards, and with the position for one that is not finite.
    Source: RLOO, arXiv 2402.14740; Whitney, "Advantage helpers".
    """
    rewards = _group(rewards)
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    total = sum(rewards)
    return _finite([reward - (total - reward) / (len(rewards) - 1) for reward in rewards])


def length_normalize(advantage: float, completion_length: int) -> float:
    """The advantage divided by the completion's length in tokens, so that long ones weigh no more than short ones.

    Raises ValueError where ``completion_length`` is below 1 or the advantage is not finite. Source: Whitney,
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
    """Per token: advantage − kl_coef · (sampled logprob − reference logprob), the immediate penalty only.

    All three have one entry per completion token; logprobs in nats. Raises ValueError where lengths differ, and with
    the position for a number that is not finite (a ``logprobs`` result starts with None: cut the prompt off first).
    Source: Whitney, "Advantage helpers".
    """
    coefficient = _number(kl_coef, "kl_coef")
    plain = _numbers(advantages, "advantages")
    sampled = _numbers(sampled_logprobs, "sampled_logprobs")
    reference = _numbers(reference_logprobs, "reference_logprobs")
    if not len(plain) == len(sampled) == len(reference):
        raise ValueError(
            f"advantages has {len(plain)} entries, sampled_logprobs {len(sampled)} and reference_logprobs "
            f"{len(reference)}; expected one each per completion token"
        )
    return _finite([a - coefficient * (q - p_ref) for a, q, p_ref in zip(plain, sampled, reference, strict=True)])


def soft_advantages(rewards: Iterable[float], *, beta: float) -> list[float]:
    """DRO: reward − beta · log(mean over the group of exp(reward / beta)), one advantage per reward.

    ``beta`` > 0, and the same in the loss's ``loss_config``: a small one measures against the best of the group, a
    large one against its mean. Raises ValueError for fewer than two rewards, for one that is not finite, and for
    another beta. Source: DRO, arXiv 2405.19107.
    """
    rewards = _group(rewards)
    temperature = _number(beta, "beta")
    if temperature <= 0:
        raise ValueError(f"beta is {beta!r}, expected a number above 0")
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    # The largest reward is taken out of the exponential, so that it can not overflow; expm1 and log1p keep the digits
    # that a large beta would otherwise lose against 1.
    top = max(rewards)
    mean = sum(math.expm1((reward - top) / temperature) for reward in rewards) / len(rewards)
    above_top = temperature * math.log1p(mean)
    return _finite([(reward - top) - above_top for reward in rewards])


def generalized_advantages(
    rewards: Iterable[float], values: Iterable[float], *, gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """GAE over one completion: ``(advantages, returns)``, one each per token.

    δ_t = r_t + gamma·V_{t+1} − V_t and A_t = δ_t + gamma·gae_lambda·A_{t+1}; returns are A + V. ``rewards`` (often 0
    but for the last) and ``values`` have one entry per token, the value for the state before it. The value after the
    last token is 0, also where the completion was cut off: a choice. ``gamma`` and ``gae_lambda`` are in 0…1. Raises
    ValueError for other ranges, lengths that differ and numbers that are not finite. Source: GAE, arXiv 1506.02438.
    """
    discount, trace = _number(gamma, "gamma"), _number(gae_lambda, "gae_lambda")
    if not (0 <= discount <= 1 and 0 <= trace <= 1):
        raise ValueError(f"gamma is {gamma!r} and gae_lambda is {gae_lambda!r}, expected both between 0 and 1")
    r, v = _numbers(rewards, "rewards"), _numbers(values, "values")
    if len(r) != len(v):
        raise ValueError(f"rewards has {len(r)} entries and values {len(v)}; expected one each per token")
    advantages = [0.0] * len(r)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(r))):
        delta = r[t] + discount * next_value - v[t]
        advantages[t] = next_advantage = delta + discount * trace * next_advantage
        next_value = v[t]
    return _finite(advantages), _finite([a + value for a, value in zip(advantages, v, strict=True)])


def kl_shaped_returns(
    reward: float,
    sampled_logprobs: Iterable[float],
    reference_logprobs: Iterable[float],
    *,
    kl_coef: float,
) -> list[float]:
    """REINFORCE++: per token, reward − kl_coef · Σ over this and all later tokens of (sampled − reference logprob).

    Both have one entry (in nats) per completion token. With groups pass the reward minus its group's mean. Raises
    ValueError where lengths differ, and for a number that is not finite. Source: REINFORCE++, arXiv 2501.03262.
    """
    total, coefficient = _number(reward, "reward"), _number(kl_coef, "kl_coef")
    sampled = _numbers(sampled_logprobs, "sampled_logprobs")
    reference = _numbers(reference_logprobs, "reference_logprobs")
    if len(sampled) != len(reference):
        raise ValueError(
            f"sampled_logprobs has {len(sampled)} entries and reference_logprobs {len(reference)}; "
            "expected one each per completion token"
        )
    returns = [0.0] * len(sampled)
    for t in reversed(range(len(sampled))):
        total -= coefficient * (sampled[t] - reference[t])
        returns[t] = total
    return _finite(returns)


def batch_normalize(advantages: Iterable[Iterable[float]]) -> list[list[float]]:
    """Mean 0 and population deviation 1 over all tokens of a batch: one list of advantages per completion.

    Only tokens with a weight belong in it. Where all are equal each becomes exactly 0.0; where the deviation is below
    1e-6 they are centred only. Raises ValueError with the position of a number that is not finite. Source:
    REINFORCE++, arXiv 2501.03262.
    """
    rows = [_numbers(row, f"advantages[{index}]") for index, row in enumerate(_listed(advantages, "advantages"))]
    flat = [number for row in rows for number in row]
    if not flat or _all_equal(flat):
        return [[0.0] * len(row) for row in rows]
    mean = sum(flat) / len(flat)
    [deviation] = _finite([(sum((number - mean) * (number - mean) for number in flat) / len(flat)) ** 0.5])
    scale = deviation if deviation >= _LEAST_DEVIATION else 1.0
    return [_finite([(number - mean) / scale for number in row]) for row in rows]


def _group(rewards: Any) -> list[float]:
    numbers = _numbers(rewards, "rewards")
    if len(numbers) < 2:
        raise ValueError(f"rewards has {len(numbers)} entries; a group needs at least two (num_samples ≥ 2)")
    return numbers


def _all_equal(numbers: list[float]) -> bool:
    return all(number == numbers[0] for number in numbers)


def _finite(results: list[float]) -> list[float]:
    for index, result in enumerate(results):
        if not math.isfinite(result):
            raise ValueError(f"the numbers given are so large that result {index} is {result}; scale them down")
    return results


def _numbers(values: Any, where: str) -> list[float]:
    return [_number(value, f"{where}[{index}]") for index, value in enumerate(_listed(values, where))]


def _listed(values: Any, where: str) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{where} is {_show(values)}, expected a sequence")
    return list(values)


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch, of several elements
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} is {_show(value)}, expected a finite number")
    return number


def _show(value: Any) -> str:
    kind = f"of type {type(value).__name__}"
    try:
        text = kind if isinstance(value, int) and abs(value) >= 2**64 else repr(value)
    except ValueError:  # Python prints no integer of thousands of digits, whatever holds it
        text = kind
    return text if len(text) <= 80 else text[:77] + "..."
