"""The losses, each with its gradient beside it.

An objective takes one datum: ``p``, the logprobs of its N targets under the weights being trained (for
``ppo_critic`` v, the values of its N prefixes); ``tensors``, its loss inputs as lists of N numbers; and the payload's
``loss_config``. It yields a ``Term`` for each token whose weight is not 0; ``evaluate`` adds the terms up. Every loss
is a sum over tokens.

In the formulas q = ``logprobs`` (from sampling), A = ``advantages``, w = ``weights``, r = exp(p − q), sg stops the
gradient, and clip(x) = min(max(x, low), high). If a min or max selects its clipped argument, the gradient is 0; if both
arguments are equal, it selects the unclipped one. Tokens with w = 0 are skipped, so a NaN or infinity there is
harmless. At any other token it makes the loss NaN or infinite, and the engine refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Tensors = Mapping[str, Sequence[float]]
Config = Mapping[str, float]

LOG_RATIO_LIMIT = 20.0
"""p − q is limited to ±20 before exp, so that one stale token cannot overflow a batch; e²⁰ is 5e8."""

_LARGEST_EXPONENT = 700.0  # exp overflows above 709


class Term(NamedTuple):
    """One token, at position ``t``: its part of the loss, d loss / d p[t], and whether it was clipped."""

    t: int
    value: float
    slope: float
    clipped: bool = False


class Outcome(NamedTuple):
    """The loss of a datum; d loss / d p; the numbers of clipped tokens and of tokens that count (w ≠ 0)."""

    loss: float
    slopes: list[float]
    clipped: int
    counted: int


Objective = Callable[[Sequence[float], Tensors, Config], Iterator[Term]]


def cross_entropy(p: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """−Σ w·p"""
    for t, w in _weighted(tensors):
        yield Term(t, -w * p[t], -w)


def importance_sampling(p: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """−Σ w·r·A"""
    for t, w, q, a in _sampled(tensors):
        r, dr = _ratio(p[t] - q)
        yield Term(t, -w * r * a, -w * dr * a)


def ppo(p: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """−Σ w·min(r·A, clip(r)·A)   1707.06347; GRPO's surrogate, 2402.03300"""
    low, high = _clip_range(tensors, config)
    for t, w, q, a in _sampled(tensors):
        r, dr = _ratio(p[t] - q)
        cut = _clip(r, low[t], high[t])
        clipped = cut * a < r * a
        yield Term(t, -w * cut * a, 0.0, True) if clipped else Term(t, -w * r * a, -w * dr * a)


def cispo(p: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """−Σ w·sg(clip(r))·p·A   2506.13585; a clipped token keeps its gradient"""
    low, high = _clip_range(tensors, config)
    for t, w, q, a in _sampled(tensors):
        r, _ = _ratio(p[t] - q)
        cut = _clip(r, low[t], high[t])
        yield Term(t, -w * cut * p[t] * a, -w * cut * a, cut != r)


def gspo(p: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """−Σ w·min(s_t·A, clip(s_t)·A), s_t = sg(s)·exp(p − sg(p)), s = exp(mean of p − q where w ≠ 0)   2507.18071

    So the value of s_t is s, and its derivative by p[t] is s, not s/N. The paper calls this the token-level variant.
    """
    low, high = _clip_range(tensors, config)
    log_ratios = [p[t] - q for t, _, q, _ in _sampled(tensors)]
    s, ds = _ratio(sum(log_ratios) / max(len(log_ratios), 1))
    for t, w, _, a in _sampled(tensors):
        cut = _clip(s, low[t], high[t])
        clipped = cut * a < s * a
        yield Term(t, -w * cut * a, 0.0, True) if clipped else Term(t, -w * s * a, -w * ds * a)


def dro(p: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """−Σ w·(p·A − ½β(p − q)²)   2405.19107"""
    beta = config.get("beta", 0.05)
    for t, w, q, a in _sampled(tensors):
        gap = p[t] - q
        yield Term(t, -w * (p[t] * a - beta / 2 * gap * gap), -w * (a - beta * gap))


def dppo(p: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """−Σ w·r·A·sg(m)   2602.04879, binary total variation

    m = 0 if A > 0 and the probability has risen by more than delta_high, or if A < 0 and it has fallen by more than
    delta_low; otherwise m = 1.
    """
    delta_low, delta_high = config.get("delta_low", 0.2), config.get("delta_high", 0.2)
    for t, w, q, a in _sampled(tensors):
        r, dr = _ratio(p[t] - q)
        moved = _exp(p[t]) - _exp(q)
        masked = (a > 0 and moved > delta_high) or (a < 0 and -moved > delta_low)
        m = 0.0 if masked else 1.0
        yield Term(t, -w * r * a * m, -w * dr * a * m, masked)


def ppo_critic(v: Sequence[float], tensors: Tensors, config: Config) -> Iterator[Term]:
    """½ Σ w·max((clip(v) − R)², (v − R)²)

    R = ``returns``; clip(v) lies within value_clip of ``values``, and is v if there is no value_clip. A datum without
    ``values`` or ``returns``, which a ``forward`` may send, has no terms.
    """
    if not {"values", "returns"} <= tensors.keys():
        return
    value_clip = config.get("value_clip", math.inf)
    for t, w in _weighted(tensors):
        v_old, target = tensors["values"][t], tensors["returns"][t]
        error, cut = v[t] - target, _clip_value(v[t], v_old, value_clip) - target
        unclipped = error * error >= cut * cut  # False for a NaN in cut, which then makes the loss NaN
        yield Term(t, w / 2 * error * error, w * error) if unclipped else Term(t, w / 2 * cut * cut, 0.0, True)


OBJECTIVES: dict[str, Objective] = {
    objective.__name__: objective
    for objective in (cross_entropy, importance_sampling, ppo, cispo, gspo, dro, dppo, ppo_critic)
}
"""From the name in a payload to the objective."""

_TINKER_DEFAULTS: dict[str, Config] = {"cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}}


def provider_defaults(provider: str, loss_function: str) -> Config:
    """Return the provider's defaults for keys that ``loss_config`` leaves out, if they differ from Modal's.

    Modal's defaults are in the objectives. The service merges these into the ``loss_config`` of each payload before
    the engine gets it, since ``evaluate`` does not know the provider.
    """
    return _TINKER_DEFAULTS.get(loss_function, {}) if provider == "tinker" else {}


CLIPPING = frozenset({"ppo", "cispo", "gspo", "dppo", "ppo_critic"})
"""The losses whose metrics have a ``clip_frac``."""


def evaluate(loss_function: str, p: Sequence[float], tensors: Tensors, config: Config) -> Outcome:
    """Return the sum of the terms of one datum, and their slopes."""
    loss, slopes, clipped, counted = 0.0, [0.0] * len(p), 0, 0
    for term in OBJECTIVES[loss_function](p, tensors, config):
        loss += term.value
        slopes[term.t] = term.slope
        clipped += term.clipped
        counted += 1
    return Outcome(loss, slopes, clipped, counted)


def _weighted(tensors: Tensors) -> Iterator[tuple[int, float]]:
    """Return t and w of the tokens that count."""
    return ((t, w) for t, w in enumerate(tensors["weights"]) if w != 0)


def _sampled(tensors: Tensors) -> Iterator[tuple[int, float, float, float]]:
    """Return t, w, q and A of the tokens that count."""
    q, advantages = tensors["logprobs"], tensors["advantages"]
    return ((t, w, q[t], advantages[t]) for t, w in _weighted(tensors))


def _clip_range(tensors: Tensors, config: Config) -> tuple[Sequence[float], Sequence[float]]:
    """Return low and high for each token: from the tensors, else from ``loss_config``, else 0.8 and 1.2."""
    n = len(tensors["weights"])
    low, high = (
        tensors[name] if name in tensors else [config.get(name, default)] * n
        for name, default in (("clip_low_threshold", 0.8), ("clip_high_threshold", 1.2))
    )
    return low, high


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)  # in this order a NaN stays a NaN


def _clip_value(v: float, v_old: float, limit: float) -> float:
    """Return v, moved to within ``limit`` of v_old. Unclipped it stays exact: v_old + (v − v_old) may be rounded."""
    return v if abs(v - v_old) <= limit else v_old + _clip(v - v_old, -limit, limit)


def _exp(x: float) -> float:
    return math.exp(min(x, _LARGEST_EXPONENT))


def _ratio(log_ratio: float) -> tuple[float, float]:
    """Return exp(log_ratio), limited, and its derivative, which is 0 beyond the limit. A NaN stays a NaN."""
    r = math.exp(_clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return r, 0.0 if abs(log_ratio) > LOG_RATIO_LIMIT else r
