"""The losses, each with its gradient beside it.

An objective takes one datum: ``p``, the logprobs of its N targets under the weights being trained; ``tensors``,
its loss inputs as plain lists of N numbers; and the payload's ``loss_config``. It returns the datum's loss, a
sum over its tokens, and d loss / d p, one number per token.

In the formulas q = ``logprobs`` (from sampling), A = ``advantages``, w = ``weights``, r = exp(p − q). A token
whose w is 0 is never looked at, so neither a NaN nor an infinity at a masked position can leak. One anywhere else
makes the loss not finite, and the engine refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

Tensors = Mapping[str, Sequence[float]]
Config = Mapping[str, float]
Objective = Callable[[Sequence[float], Tensors, Config], tuple[float, list[float]]]

LOG_RATIO_LIMIT = 20.0
"""|p − q| beyond this is cut before exp, so that one stale token (e²⁰ is 5e8) cannot overflow a batch."""


def cross_entropy(p: Sequence[float], tensors: Tensors, config: Config) -> tuple[float, list[float]]:
    """−Σ w·p"""
    loss, slopes = 0.0, [0.0] * len(p)
    for t, w in _weighted(tensors):
        loss -= w * p[t]
        slopes[t] = -w
    return loss, slopes


def importance_sampling(p: Sequence[float], tensors: Tensors, config: Config) -> tuple[float, list[float]]:
    """−Σ w·r·A"""
    q, advantages = tensors["logprobs"], tensors["advantages"]
    loss, slopes = 0.0, [0.0] * len(p)
    for t, w in _weighted(tensors):
        r, dr = _ratio(p[t] - q[t])
        loss -= w * r * advantages[t]
        slopes[t] = -w * dr * advantages[t]
    return loss, slopes


OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
}
"""Name on the wire → objective. A further loss is a function above and a line here."""


def _weighted(tensors: Tensors) -> Iterator[tuple[int, float]]:
    """The positions that count, with their weights."""
    return ((t, w) for t, w in enumerate(tensors["weights"]) if w != 0)


def _ratio(log_ratio: float) -> tuple[float, float]:
    """exp and its derivative, which is 0 where the limit cuts. A NaN stays a NaN."""
    if log_ratio > LOG_RATIO_LIMIT:
        return math.exp(LOG_RATIO_LIMIT), 0.0
    if log_ratio < -LOG_RATIO_LIMIT:
        return math.exp(-LOG_RATIO_LIMIT), 0.0
    r = math.exp(log_ratio)
    return r, r
