"""The optimizer of each cycle: ``--learning-rate``, ``--optimizer``, ``--schedule`` and ``--warmup``."""

from __future__ import annotations

import math
from typing import Any

from whitney_loop.loop.options import LoopOptions, UsageError
from whitney_loop.payloads import adamw_optimizer

FIELDS = ("grad_clip_norm", "weight_decay", "beta1", "beta2", "eps")


def full_optimizer(options: LoopOptions) -> dict[str, Any]:
    """Return the ``optimizer`` field of ``optim_step`` at the full learning rate. Raise UsageError if it is wrong."""
    assert options.learning_rate is not None  # it is settled
    fields = {}
    for text in options.optimizer:
        name, _, number = text.partition("=")
        if name not in FIELDS:
            raise UsageError(f"--optimizer {text}: expected NAME=VALUE, NAME one of {', '.join(FIELDS)}")
        try:
            fields[name] = float(number)
        except ValueError:
            raise UsageError(f"--optimizer {text}: {number!r} is not a number") from None
    try:
        return adamw_optimizer(options.learning_rate, **fields)
    except ValueError as error:
        option = "--learning-rate" if "learning_rate" in f"{error}" else "--optimizer"
        raise UsageError(f"{option}: {error}") from None


def check_warmup(options: LoopOptions, end: int) -> None:
    """Raise UsageError if the warmup would last until the end of the training, which is before cycle ``end``."""
    if options.warmup >= end:
        raise UsageError(f"--warmup is {options.warmup}, but the last cycle is {end - 1}: expected at most {end - 1}")


def scheduled_optimizer(options: LoopOptions, cycle: int, end: int) -> dict[str, Any]:
    """Return the optimizer of a cycle. It depends on the number of the cycle, not on where the process began."""
    optimizer = full_optimizer(options)
    return optimizer | {"learning_rate": optimizer["learning_rate"] * _share(options, cycle, end)}


def _share(options: LoopOptions, cycle: int, end: int) -> float:
    """Return the share of the full learning rate: it rises in the warmup, and then falls until ``end``."""
    if cycle < options.warmup:
        return (cycle + 1) / (options.warmup + 1)
    fallen = (cycle - options.warmup) / (end - options.warmup)
    if options.schedule == "linear":
        return 1 - fallen
    return (1 + math.cos(math.pi * fallen)) / 2 if options.schedule == "cosine" else 1.0
