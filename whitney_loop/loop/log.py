"""The user's logger, from ``--log``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whitney_loop.callables import load_callable
from whitney_loop.loop.options import UsageError
from whitney_loop.loop.warnings import Warnings


def load_log(spec: str, warnings: Warnings) -> Callable[[dict[str, Any]], None]:
    """Load the callable that ``MODULE:CALLABLE`` names; return a function that calls it with a record.

    What it raises is printed once, and the training goes on. Raise UsageError if there is no such callable.
    """
    try:
        log = load_callable(spec, "--log")
    except ValueError as error:
        raise UsageError(f"{error}") from None

    def call(record: dict[str, Any]) -> None:
        try:
            log(record)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a logger may also call sys.exit()
            warnings.once("log", f"--log {spec} raised {type(error).__name__}: {error}. The training goes on")

    return call
