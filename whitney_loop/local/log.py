"""The log of the service: the logger ``whitney_loop.local``. If the user's logging raises, the service goes on."""

from __future__ import annotations

import functools

from whitney_loop import errors

log = functools.partial(errors.log, name="whitney_loop.local")
