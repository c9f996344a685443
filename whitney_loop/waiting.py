"""The wait for a status of an operation, a run or a session, whether or not the service holds its answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from whitney_loop import wire
from whitney_loop.errors import OperationTimeout, ServiceUnavailable, log, shortened

LONG_POLL_S = 20  # below the idle limits of common proxies (60 s)
PATIENCE_S = 30.0  # a longer wait is logged, again each time this passes
_FIRST_PAUSE_S = 0.02  # between polls of a server that does not hold them
_LONGEST_PAUSE_S = 5.0


def wait_until(
    expected: str,
    is_reached: Callable[[str], bool],
    poll: Callable[[float], dict[str, Any] | None],
    state: dict[str, Any],
    name: str,
    *,
    timeout_s: float,
    is_logged: bool = True,
    **facts: Any,
) -> dict[str, Any]:
    """Poll until ``is_reached(status)``, and return that state. Raise OperationTimeout after ``timeout_s``.

    ``poll`` takes the seconds that are left and returns the state, or None if it is not known yet. The last poll comes
    after the deadline, with 0 seconds left: this process may have been stopped (Ctrl-Z, a paused container) while the
    service went on. ``expected`` names the status in the error's message; ``facts`` are the error's attributes.
    """
    started = last_logged = time.monotonic()
    deadline = started + timeout_s
    pause_s, is_last = _FIRST_PAUSE_S, False
    while not is_reached(str(state.get(wire.STATUS))):
        asked = time.monotonic()
        found = shortened(state.get(wire.STATUS))
        if is_last:
            message = f"{name} is {found} after {asked - started:.0f} s, not {expected}"
            raise OperationTimeout(message, **facts)
        if is_logged and asked - last_logged > PATIENCE_S:
            last_logged = asked
            log(logging.WARNING, f"{name} is {found} for {asked - started:.0f} s")
        is_last = asked >= deadline
        try:
            state = poll(max(deadline - asked, 0)) or state
        except ServiceUnavailable:
            if is_last or time.monotonic() < deadline:
                raise  # otherwise the deadline passed during this poll: there is a last one
        answered = time.monotonic()
        was_held = answered - asked >= LONG_POLL_S / 2
        if not was_held and not is_reached(str(state.get(wire.STATUS))):
            time.sleep(min(pause_s, max(deadline - answered, 0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return state
