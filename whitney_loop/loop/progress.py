"""The line that a loop prints for each cycle: fixed columns, so that one can read down them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whitney_loop.loop.metrics import is_number

MISSING = "–"


def progress_line(
    cycle: int, shown: Mapping[str, Any], before: Any, *, tokens_per_s: float, tokens: int, seconds_left: float
) -> str:
    """Return the line: the metrics in ``shown``, the change of the first one, speed, tokens so far, time left.

    ``before`` is the first metric's value in the cycle before. A value that is no number is shown as –.
    """
    (first, value), *others = shown.items()
    change = round(value - before, 9) if is_number(value) and is_number(before) else None  # no rounding errors
    columns = [f"cycle {cycle:<4}", f"{first} {_text(value, '.4g'):<8} {_text(change, '+.2g'):<8}"]
    columns += [f"{name} {_text(other, '.3g'):<8}" for name, other in others]
    columns += [f"{tokens_per_s:>5.0f} tokens/s", f"{tokens:>7} tokens", f"{clock(seconds_left):>7} left"]
    return "  ".join(columns)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _text(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else MISSING
