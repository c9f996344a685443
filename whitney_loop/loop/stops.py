"""Options that end a training before its last cycle: ``--stop-at``, ``--token-budget`` and ``--max-minutes``."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from whitney_loop.loop.metrics import is_number
from whitney_loop.loop.options import LoopOptions, parse_goal

LATEST = 3  # cycles whose mean is compared with the value of --stop-at: one lucky batch ends nothing


class Stops:
    """Tells whether an option ends the training now.

    ``cycles`` are the records of the resumed run, whose last cycles count in the means.
    """

    def __init__(self, options: LoopOptions, cycles: Sequence[Mapping[str, Any]]) -> None:
        self._goals = [parse_goal(text) for text in options.stop_at]
        self._latest: dict[str, deque[float]] = {metric: deque(maxlen=LATEST) for metric, _ in self._goals}
        self._token_budget = options.token_budget
        self._max_minutes = options.max_minutes
        self._started = time.monotonic()
        for record in cycles:
            self.take(record)

    def take(self, record: Mapping[str, Any]) -> None:
        """Keep the metrics of a cycle that ``--stop-at`` names."""
        for metric, values in self._latest.items():
            value: Any = record.get(metric)
            if is_number(value) and math.isfinite(value):
                values.append(value)

    def reached(self, tokens: int) -> str | None:
        """Return the option that ends the training now, as it was given; None if none does.

        ``tokens`` were sampled and trained in this process.
        """
        for metric, value in self._goals:
            latest = self._latest[metric]
            if len(latest) == LATEST and fmean(latest) >= value:
                return f"--stop-at {metric}:{value:g}"
        if self._token_budget is not None and tokens >= self._token_budget:
            return f"--token-budget {self._token_budget}"
        if self._max_minutes is not None and time.monotonic() - self._started >= 60 * self._max_minutes:
            return f"--max-minutes {self._max_minutes:g}"
        return None

    def unknown(self) -> list[str]:
        """Return the metrics of ``--stop-at`` that no record has had."""
        return [metric for metric, values in self._latest.items() if not values]
