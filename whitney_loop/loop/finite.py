"""Numbers of the service that are NaN or infinite: they end a training before they reach its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whitney_loop.loop.metrics import Payload


def not_finite(payloads: Sequence[Payload], results: Sequence[Mapping[str, Any]]) -> str:
    """Name the first loss, or output of a token with a weight, that is NaN or infinite; empty if there is none.

    ``results`` are those of ``forward_backward``, one per payload. A field that is not reported is not judged.
    """
    first = 0  # datum of a payload, in all payloads together
    for payload, result in zip(payloads, results, strict=True):
        loss = reported_loss(result)
        if is_not_finite(loss):
            return f"the loss is {loss}"
        outputs = result.get("outputs")
        outputs = outputs if isinstance(outputs, list) else []
        for index, (datum, output) in enumerate(zip(payload["data"], outputs, strict=False), start=first):
            if found := _not_finite_in(output, datum["loss_inputs"]["weights"]["values"]):
                return f"outputs[{index}].{found}"
        first += len(payload["data"])
    return ""


def _not_finite_in(output: Any, weights: Sequence[float]) -> str:
    for name in ("logprobs", "values"):
        numbers = output.get(name) if isinstance(output, dict) else None
        if not isinstance(numbers, list):
            continue
        # Decided for the whole list, which is fast: a NaN or infinity stays in a sum. Otherwise, entry by entry.
        if set(map(type, numbers)) <= {float} and math.isfinite(sum(numbers)):
            continue
        for position, (number, weight) in enumerate(zip(numbers, weights, strict=False)):
            if weight and is_not_finite(number):
                return f"{name}[{position}] is {number}"
    return ""


def reported_loss(result: Mapping[str, Any]) -> Any:
    """Return the loss in a result of ``forward_backward``; None if the service reports none."""
    metrics = result.get("metrics")
    loss = result.get("loss")
    return metrics.get("loss:sum") if loss is None and isinstance(metrics, dict) else loss


def is_not_finite(value: object) -> bool:
    """Return whether it is a number, but NaN, infinite or too large for a float."""
    if not isinstance(value, (int, float)):
        return False
    try:
        return not math.isfinite(value)
    except OverflowError:
        return True
