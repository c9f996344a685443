"""One family of exceptions: everything that the client raises about the service is a WhitneyError.

The rules for every message stand here too: it never holds a key, and a log line that cannot be written does no harm.
"""

from __future__ import annotations

import contextlib
import json
import logging
import reprlib
import urllib.parse
from typing import Any, Literal

Outcome = Literal["not_sent", "rejected", "failed", "unknown"]
"""What is known of the request: it never left; the service refused it and did nothing; it was accepted, ran and
failed without effect; or it may have taken effect."""

_SHORTEST_SECRET = 8  # characters; replacing a shorter word would black out half of every message

_secrets: list[str] = []  # the longest first, since one may be part of another


def keep_out_of_errors(secret: str) -> None:
    """Keep ``secret`` out of every error, log line and answer of this process from now on."""
    if len(secret) >= _SHORTEST_SECRET:
        # Unchanged, and as it looks in a path, in a repr and in JSON.
        forms = {secret, urllib.parse.quote(secret, safe=""), repr(secret)[1:-1], json.dumps(secret)[1:-1]}
        _secrets[:] = sorted(forms.union(_secrets), key=len, reverse=True)


def redacted(text: str) -> str:
    """Return the text with ``[key]`` in place of every key that was given to a client.

    The text may have been cut off within a key: the start of a key at its end is replaced too.
    """
    for secret in _secrets:
        text = text.replace(secret, "[key]")
    for secret in _secrets:
        if secret[:_SHORTEST_SECRET] not in text[-len(secret) :]:
            continue
        for length in range(len(secret) - 1, _SHORTEST_SECRET - 1, -1):
            if text.endswith(secret[:length]):
                return text[:-length] + "[key]"
    return text


def redacted_json(value: Any) -> Any:
    """Return a JSON value with every string in it redacted, names of fields too. Numbers are not changed."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, list):  # most lists are long and hold numbers: no call for each of them
        return [item if isinstance(item, (int, float)) else redacted_json(item) for item in value]
    if isinstance(value, dict):
        return {redacted(name): redacted_json(item) for name, item in value.items()}
    return value


shortened = reprlib.Repr().repr
"""The ``repr`` of a value that a service sent, in a few characters."""


def log(level: int, message: str, cause: BaseException | None = None, *, name: str = "whitney_loop") -> None:
    """Write a line, and the traceback of ``cause``, to a logger. What the user's logging raises must not matter."""
    with contextlib.suppress(Exception):
        logger = logging.getLogger(name)
        if logger.isEnabledFor(level):
            logger.log(level, "%s", redacted(message), exc_info=cause)


class WhitneyError(Exception):
    """The base class. ``str()`` says what was wrong and what to do, then the facts below in brackets.

    ``method``, ``path``, ``status`` (HTTP), ``code`` and ``request_id`` (the service's), ``seq_id``, ``attempts`` (how
    often it was sent) are None if they do not apply. ``retryable``: asking again may succeed. Picklable; never holds
    the key.
    """

    index: int | None = None  # of the payload that it is about, if several were given at once

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome,
        method: str | None = None,
        path: str | None = None,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        seq_id: int | None = None,
        attempts: int | None = None,
        retryable: bool = False,
    ) -> None:
        message = redacted(message)
        super().__init__(message)
        self.message = message
        self.outcome: Outcome = outcome
        self.method = method
        self.path = redacted(path) if path else path
        self.status = status
        self.code = code
        self.request_id = request_id
        self.seq_id = seq_id
        self.attempts = attempts
        self.retryable = retryable

    def __str__(self) -> str:
        facts = [f"{self.method} {self.path}"] if self.method else []
        for name in ("status", "code", "request_id", "seq_id", "attempts"):
            if getattr(self, name) is not None:
                facts.append(f"{name} {getattr(self, name)}")
        return f"{self.message} [{', '.join([*facts, f'outcome {self.outcome}'])}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(cls: type[WhitneyError], attributes: dict[str, Any]) -> WhitneyError:
    error = cls(attributes["message"], outcome=attributes["outcome"])
    error.__dict__.update(attributes)
    return error


class ConfigurationError(WhitneyError):
    """The base URL, the key, a time-out or the provider cannot be used as given. Nothing was sent."""


class RequestRejected(WhitneyError):
    """The service refused the request (a 4xx, or a redirect, which is never followed); ``code`` says why."""


class ServiceUnavailable(WhitneyError):
    """No usable answer in time: the connection failed, or the service kept answering that it cannot serve now."""


class UnexpectedResponse(WhitneyError):
    """An answer that breaks the contract; the message names the operation and the field."""


class OperationFailed(WhitneyError):
    """The operation was accepted and ended as ``failed`` or ``cancelled``, or a run could not be allocated."""


class OperationTimeout(WhitneyError):
    """An operation, a run or a session did not end in time; it may still end."""


class RunBroken(WhitneyError):
    """Not sent: the outcome of an earlier operation of this run is unknown, or this process was forked from its own."""
