"""What a cycle is judged by: metrics of its samples, of its loss, and the user's own.

Keys are ``group/name``. Ratios are of the trainer's probability to the sampler's: p is a token's logprob in the outputs
of ``forward_backward``, q the one in the datum, which came from sampling; only tokens with a weight count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

Metrics = dict[str, Any]
Payload = dict[str, Any]

LONGEST_TEXT = 200  # characters of a text in ctx.metrics, which is printed with its cycle
LARGEST_LOG_RATIO = 20.0  # |p − q| is limited before exp, so that one stale token (e²⁰ is 5e8) leaves numbers to plot
METRIC_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}  # by NAME:reduction


def sample_metrics(samples: Sequence[Mapping[str, Any]]) -> Metrics:
    """Return how the completions of all groups ended."""
    sequences = [sequence for sample in samples for sequence in sample["sequences"]]
    return {
        "completions/tokens": sum(len(sequence["tokens"]) for sequence in sequences),
        "completions/truncated_frac": fmean(sequence.get("stop_reason") == "length" for sequence in sequences),
        "completions/empty_frac": fmean(not sequence["tokens"] for sequence in sequences),
    }


def user_metrics(groups: Sequence[object]) -> tuple[Metrics, list[str]]:
    """Merge what the calls of build_loss left in ``ctx.metrics``. Return it, and a note on each loss.

    A number becomes the mean over the groups that have it. A list of numbers, such as a group's rewards under
    ``reward``, becomes ``reward/mean`` and ``reward/std`` over all groups. Anything else is kept as text, that of the
    last group. Whatever ``float()`` takes is a number, but for text. Never raises: the step is already made.
    """
    notes: list[str] = []
    values: dict[str, list[float | list[float] | str]] = {}
    for group in groups:
        if not isinstance(group, dict):
            notes.append(f"ctx.metrics is of type {type(group).__name__}, expected a dict")
            continue
        for key, value in group.items():
            try:
                name, kept = str(key)[:LONGEST_TEXT], plain(value)
            except Exception as error:  # whatever the user's objects raise
                notes.append(f"{key if isinstance(key, str) else type(key).__name__}: {type(error).__name__}")
                continue
            if isinstance(kept, str) and len(kept) > LONGEST_TEXT:
                notes.append(f"{name}: all but the first {LONGEST_TEXT} of {len(kept)} characters")
                kept = kept[:LONGEST_TEXT]
            if kept is not None:
                values.setdefault(name, []).append(kept)
    merged: Metrics = {}
    for name, of_groups in values.items():
        merged |= _merged(name, of_groups)
    return merged, notes


def _merged(name: str, values: Sequence[float | list[float] | str]) -> Metrics:
    """Return the values of one metric in all groups as one."""
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return {name: texts[-1]}
    lists = [value if isinstance(value, list) else [value] for value in values if not isinstance(value, str)]
    numbers = [number for numbers in lists for number in numbers]
    if not numbers:
        return {}
    mean = sum(numbers) / len(numbers)
    if not any(isinstance(value, list) for value in values):
        return {name: mean}
    deviation = math.hypot(*(number - mean for number in numbers)) / math.sqrt(len(numbers))  # the population's
    return {f"{name}/mean": mean, f"{name}/std": deviation}


def loss_metrics(result: Mapping[str, Any], gaps: Sequence[float]) -> Metrics:
    """Return the metrics of one update: the loss, the provider's own, and how far the trainer is from the sampler.

    ``gaps`` holds p − q of each token.
    """
    returned = _returned(result)
    loss = result.get("loss")
    metrics: Metrics = {"loss/sum": returned.get("loss:sum") if loss is None else loss}
    metrics |= ratio_metrics(gaps)
    metrics |= {"clip_frac": returned.get("clip_frac"), "optim/grad_norm": result.get("grad_norm")}
    metrics |= {f"provider/{name}": value for name, value in returned.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def ratio_metrics(gaps: Sequence[float]) -> Metrics:
    """Return estimates of KL(sampler ‖ trainer), the largest ratio and the effective sample size, from p − q per token.

    With d = p − q and r = exp(d): k1 = mean(−d), k3 = mean(r − 1 − d), ess = (Σr)² / (n Σr²), which is 1 if all ratios
    are equal. Source: J. Schulman, "Approximating KL divergence"; A. Owen, "Monte Carlo theory", chapter 9.
    """
    if not gaps:
        return {}
    if max(map(abs, gaps)) > LARGEST_LOG_RATIO:
        gaps = [min(max(gap, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO) for gap in gaps]
    ratios = list(map(math.exp, gaps))
    return {
        "kl/k1": 0.0 - fmean(gaps),  # 0.0, not −0.0, if there is no gap
        "kl/k3": fmean([ratio - 1 - gap for ratio, gap in zip(ratios, gaps, strict=True)]),
        "ratio/max": max(ratios),
        "ess": sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios)),
    }


def largest_gap(gaps: Iterable[Sequence[float]]) -> float | None:
    """Return the largest mean of |p − q| over one completion, from ``logprob_gaps``; None if there are no outputs."""
    return max((fmean(list(map(abs, of_datum))) for of_datum in gaps if of_datum), default=None)


def logprob_gaps(payload: Payload, result: Mapping[str, Any]) -> list[list[float]]:
    """Return p − q of each token with a weight, one list per datum; empty if the outputs do not fit the payload."""
    gaps = []
    for tensors, trained in _tensors_and_logprobs(payload, result):
        if "logprobs" not in tensors or not are_numbers(trained):
            return []
        rows = zip(trained, tensors["logprobs"]["values"], tensors["weights"]["values"], strict=True)
        gaps.append([p - q for p, q, weight in rows if weight])
    return gaps


def mean_loss(payloads: Sequence[Payload], results: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean of −logprob over the tokens with a weight, from the outputs, whatever the provider's reduction.

    None if the outputs do not fit the payloads.
    """
    total = 0.0
    for payload, result in zip(payloads, results, strict=True):
        of_datums = _tensors_and_logprobs(payload, result)
        if not of_datums:
            return None
        for tensors, trained in of_datums:
            counted = [(p, weight) for p, weight in zip(trained, tensors["weights"]["values"], strict=True) if weight]
            if not are_numbers(p for p, _ in counted):
                return None
            total -= sum(weight * p for p, weight in counted)
    return total / sum(map(trained_tokens, payloads))


def _tensors_and_logprobs(payload: Payload, result: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the tensors and the trainer's logprobs of each datum; empty if the outputs do not fit the payload."""
    outputs = result.get("outputs")
    outputs = outputs if isinstance(outputs, list) else []
    logprobs: list[Any] = [output.get("logprobs") if isinstance(output, dict) else None for output in outputs]
    lengths = [len(trained) if isinstance(trained, list) else None for trained in logprobs]
    if lengths != [len(datum["input"]["token_ids"]) for datum in payload["data"]]:
        return []
    return [(datum["loss_inputs"], trained) for datum, trained in zip(payload["data"], logprobs, strict=True)]


def trained_tokens(payload: Payload) -> int:
    """Return the number of tokens with a weight: those that the loss is summed over."""
    weights = [datum["loss_inputs"]["weights"]["values"] for datum in payload["data"]]
    return sum(len(of_datum) - of_datum.count(0) for of_datum in weights)


def merged_results(parts: Sequence[Payload], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a payload's parts as one.

    Sums are added up, maxima and minima are kept, and other metrics become their mean over the tokens."""
    if len(results) == 1:
        return results[0]
    merged: dict[str, Any] = {}
    losses: list[Any] = [result.get("loss") for result in results]
    if are_numbers(losses):
        merged["loss"] = sum(losses)
    outputs: list[Any] = [result.get("outputs") for result in results]
    if all(isinstance(output, list) for output in outputs):
        merged["outputs"] = [output for of_part in outputs for output in of_part]
    tokens = [trained_tokens(part) for part in parts]
    merged["metrics"] = {}
    for name in _returned(results[0]):
        values: list[Any] = [_returned(result).get(name) for result in results]
        if are_numbers(values):
            reduce = METRIC_REDUCTIONS.get(name.rpartition(":")[2])
            weighted = sum(value * weight for value, weight in zip(values, tokens, strict=True))
            merged["metrics"][name] = reduce(values) if reduce else weighted / max(sum(tokens), 1)
    return merged


def _returned(result: Mapping[str, Any]) -> Metrics:
    """Return the provider's own metrics; none if they are not an object."""
    metrics = result.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def plain(value: Any) -> float | list[float] | str | None:
    """Return a number, a list of numbers, or the text of anything else; None for no value."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch, a scalar or an array
    if value is None:
        return None
    entries = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(entry, (str, bytes)) for entry in entries):
        return str(value)  # although float() takes a text of digits
    try:
        numbers = [float(entry) for entry in entries]
    except (TypeError, ValueError):
        return str(value)
    return numbers if entries is value else numbers[0]


def is_number(value: object) -> bool:
    """Return whether it is a number; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def are_numbers(values: Iterable[object]) -> bool:
    """Return whether all values, which come from JSON, are numbers."""
    return set(map(type, values)) <= {int, float}
