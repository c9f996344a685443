"""The wait for a status: of an operation, a run or a session, whether or not the service holds its answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from whitney_loop import wire
from whitney_loop.errors import OperationTimeout, ServiceUnavailable, log, shortened

LONG_POLL_S = 20  # below the idle limits of common proxies (60 s)
PATIENCE_S = 30.0  # a wait that takes longer is logged, each time this passes
_FIRST_PAUSE_S = 0.02  # between polls of a server that does not hold them
_LONGEST_PAUSE_S = 5.0


def wait_until(
    statuses: Collection[str],
    poll: Callable[[float], dict[str, Any] | None],
    state: dict[str, Any],
    name: str,
    *,
    timeout_s: float,
    says: bool = True,
    **facts: Any,
) -> dict[str, Any]:
    """Poll until the status is one of ``statuses``, and return that state. Raise OperationTimeout after ``timeout_s``.

    ``poll`` takes the seconds that are left and returns the state, or None if it is not known yet. The last poll begins
    after the deadline: this process may have been stopped (Ctrl-Z, a paused container) while the service went on.
    ``says``: whether a long wait is logged.
    """

    def has_ended() -> bool:
        return str(state.get(wire.STATUS)) in statuses  # str: a wrong status may not even be hashable

    started = said = time.monotonic()
    deadline = started + timeout_s
    pause, is_last = _FIRST_PAUSE_S, False
    while not has_ended():
        asked = time.monotonic()
        found = shortened(state.get(wire.STATUS))
        if is_last:
            raise OperationTimeout(
                f"{name} is {found} after {asked - started:.0f} s, not {' or '.join(sorted(statuses))}",
                outcome="unknown",
                **facts,
            )
        if says and asked - said > PATIENCE_S:
            said = asked
            log(logging.WARNING, f"{name} is {found} for {asked - started:.0f} s")
        is_last = asked >= deadline
        try:
            state = poll(max(deadline - asked, 0)) or state
        except ServiceUnavailable:
            if is_last or time.monotonic() < deadline:
                raise
            continue
        answered = time.monotonic()
        if not has_ended() and answered - asked < LONG_POLL_S / 2:  # the service did not hold the poll
            time.sleep(min(pause, max(deadline - answered, 0)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
    return state
