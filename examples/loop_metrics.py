"""What a cycle is judged by: metrics of its samples, of its loss and of the user's, and the file that keeps them.

Keys are ``group/name``. Ratios are of the trainer's probability to the sampler's: p is a token's logprob in the outputs
of ``forward_backward``, q the one in the datum, which came from sampling; only tokens with a weight count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whitney_loop.local.objectives import evaluate

Metrics = dict[str, Any]

_RATIOS = ("clip_low_threshold", "clip_high_threshold")
THRESHOLDS = {"ppo": _RATIOS, "cispo": _RATIOS, "gspo": _RATIOS, "dppo": ("delta_low", "delta_high")}
LARGEST_LOG_RATIO = 20.0  # |p − q| is cut here before exp, so that one stale token (e²⁰ is 5e8) leaves numbers to plot


def sample_metrics(samples: Sequence[Mapping[str, Any]]) -> Metrics:
    """How the completions of all groups ended."""
    sequences = [sequence for sample in samples for sequence in sample["sequences"]]
    return {
        "completions/tokens": sum(len(sequence["tokens"]) for sequence in sequences),
        "completions/truncated_frac": _mean(sequence.get("stop_reason") == "length" for sequence in sequences),
        "completions/empty_frac": _mean(not sequence["tokens"] for sequence in sequences),
    }


def user_metrics(groups: Sequence[Mapping[str, Any]]) -> Metrics:
    """What the calls of build_loss left in ``ctx.metrics``, as one.

    A number is the mean over the groups that have it. A list of numbers, such as a group's rewards under ``reward``,
    gives ``reward/mean`` and ``reward/std`` over all groups together. Of anything else the last one counts.
    """
    merged: Metrics = {}
    groups = [{str(name): value for name, value in group.items()} for group in groups]
    for name in dict.fromkeys(name for group in groups for name in group):
        values = [_plain(group[name]) for group in groups if name in group]
        lists = [value for value in values if isinstance(value, list)]
        numbers = [number for value in lists for number in value]
        if len(lists) == len(values) and numbers and all(map(_is_number, numbers)):
            merged[f"{name}/mean"] = mean = sum(numbers) / len(numbers)
            merged[f"{name}/std"] = math.sqrt(_mean((number - mean) ** 2 for number in numbers))
        elif all(map(_is_number, values)):
            merged[name] = values[0] if len(values) == 1 else sum(values) / len(values)
        else:
            merged[name] = values[-1]
    return merged


def loss_metrics(payload: Mapping[str, Any], result: Mapping[str, Any]) -> Metrics:
    """Of one update: the loss, what the provider returned, and how far the trainer is from the sampler."""
    returned = result.get("metrics")
    returned = returned if isinstance(returned, dict) else {}
    metrics: Metrics = {"loss/sum": result.get("loss", returned.get("loss:sum"))}
    metrics |= ratio_metrics([pair for datum in logprob_pairs(payload, result) for pair in datum])
    clip_frac = returned["clip_frac"] if "clip_frac" in returned else clipped_fraction(payload, result)
    metrics |= {"clip_frac": clip_frac, "optim/grad_norm": result.get("grad_norm")}
    metrics |= {f"provider/{name}": value for name, value in returned.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def ratio_metrics(pairs: Sequence[tuple[float, float]]) -> Metrics:
    """Of (p, q) per token: estimates of KL(sampler ‖ trainer), the largest ratio, and the effective sample size.

    With d = p − q and r = exp(d): k1 = mean(−d), k3 = mean(r − 1 − d), ess = (Σr)² / (n Σr²), 1 where all ratios are
    equal. Source: J. Schulman, "Approximating KL divergence"; A. Owen, "Monte Carlo theory", chapter 9.
    """
    if not pairs:
        return {}
    gaps = [min(max(p - q, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO) for p, q in pairs]
    ratios = [math.exp(gap) for gap in gaps]
    return {
        "kl/k1": _mean(0.0 - gap for gap in gaps),  # 0.0, not −0.0, where there is none
        "kl/k3": _mean(ratio - 1 - gap for ratio, gap in zip(ratios, gaps, strict=True)),
        "ratio/max": max(ratios),
        "ess": sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios)),
    }


def clipped_fraction(payload: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    """What the embedded engine returns as ``clip_frac``, by the same objectives, for a service that returns none.

    The share of tokens whose clipped branch was taken. None where the loss does not clip, there are no outputs, or a
    threshold is left to the provider, whose default is not known.
    """
    loss_function, config = payload["loss_function"], payload["loss_config"]
    if loss_function not in THRESHOLDS or not logprob_pairs(payload, result):
        return None
    clipped = counted = 0
    for datum, output in zip(payload["data"], result["outputs"], strict=True):
        tensors = {name: tensor["values"] for name, tensor in datum["loss_inputs"].items()}
        if not all(name in tensors or name in config for name in THRESHOLDS[loss_function]):
            return None
        outcome = evaluate(loss_function, output["logprobs"], tensors, config)
        clipped, counted = clipped + outcome.clipped, counted + outcome.counted
    return clipped / counted if counted else None


def largest_gap(payload: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    """The mean of |p − q| over a completion, of the one where it is largest; None where there are no outputs."""
    return max((_mean(abs(p - q) for p, q in datum) for datum in logprob_pairs(payload, result) if datum), default=None)


def logprob_pairs(payload: Mapping[str, Any], result: Mapping[str, Any]) -> list[list[tuple[float, float]]]:
    """(p, q) of each token with a weight, a list per datum; empty where the service gave no outputs, or others."""
    outputs = result.get("outputs")
    if not isinstance(outputs, list) or len(outputs) != len(payload["data"]):
        return []
    pairs = []
    for datum, output in zip(payload["data"], outputs, strict=True):
        tensors = {name: tensor["values"] for name, tensor in datum["loss_inputs"].items()}
        sampled, weights = tensors.get("logprobs"), tensors["weights"]
        trained = output.get("logprobs") if isinstance(output, dict) else None
        if sampled is None or not isinstance(trained, list) or len(trained) != len(sampled):
            return []
        if not all(map(_is_number, trained)):
            return []
        pairs.append([(p, q) for p, q, w in zip(trained, sampled, weights, strict=True) if w])
    return pairs


class Stopwatch:
    """The seconds of each step of a cycle."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[f"time/{name}"] = now - self._last
        self._last = now

    def total(self) -> float:
        return self._last - self._started


def _plain(value: Any) -> Any:
    """Python's own, of what numpy or torch gave (``tolist`` is theirs, of scalars and arrays)."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def rate_and_time_left(seconds: float, done: int, left: int) -> str:
    """How fast cycles go, and how long those that are left will take at that rate."""
    each = seconds / done
    rate = f"{each:.1f} s/cycle" if each >= 1 else f"{1 / max(each, 1e-9):.1f} cycles/s"
    minutes, rest = divmod(round(each * left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{rate}  {hours}:{minutes:02}:{rest:02} left"
