"""The service's log, the logger ``whitney_loop.local``. What the user's logging raises does not reach the service."""

from __future__ import annotations

import functools

from whitney_loop import errors

log = functools.partial(errors.log, name="whitney_loop.local")
