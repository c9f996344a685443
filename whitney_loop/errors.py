"""One family of exceptions: everything that the client raises about the service is a WhitneyError."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any, Literal

Outcome = Literal["not_sent", "rejected", "failed", "unknown"]
"""What is known of the request: it never left; the service refused it and did nothing; it was accepted, ran and
failed without effect; or it may have taken effect."""


_SHORTEST_SECRET = 8  # characters; a shorter key is none, and would black out half of every message

_secrets: set[str] = set()


def keep_out_of_errors(secret: str) -> None:
    """From now on no WhitneyError of this process holds ``secret``, whatever a service echoes."""
    if len(secret) >= _SHORTEST_SECRET:
        # As it is, and as it looks in a path, in a repr and in JSON.
        _secrets.update({secret, urllib.parse.quote(secret, safe=""), repr(secret)[1:-1], json.dumps(secret)[1:-1]})


def redacted(text: str) -> str:
    """The text with ``[key]`` in place of every key that was given to a client, and of the start of one at its end."""
    secrets = sorted(_secrets, key=len, reverse=True)  # one may be part of another
    for secret in secrets:
        text = text.replace(secret, "[key]")
    for secret in secrets:  # what a network cut off may end within one
        for length in range(len(secret) - 1, _SHORTEST_SECRET - 1, -1):
            if text.endswith(secret[:length]):
                return text[:-length] + "[key]"
    return text


class WhitneyError(Exception):
    """The base. ``str()`` says what was wrong and what to do, then the facts below in brackets.

    ``method``, ``path``, ``status`` (HTTP), ``code`` and ``request_id`` (the service's), ``seq_id``, ``attempts`` (how
    often it was sent) are None where they do not apply. ``retryable``: asking again may succeed. Picklable; never
    holds the key.
    """

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
        self.code = redacted(code) if isinstance(code, str) else None
        self.request_id = redacted(request_id) if isinstance(request_id, str) else None
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
    """The base URL, the key or the provider can not be used as given. Nothing was sent."""


class RequestRejected(WhitneyError):
    """The service refused the request (a 4xx, or a redirect, which is never followed); ``code`` says why."""


class ServiceUnavailable(WhitneyError):
    """No usable answer within the time: connection trouble, 408, 429 or 5xx until it ended."""


class UnexpectedResponse(WhitneyError):
    """An answer that is not what the contract says; the message names the operation and the field."""


class OperationFailed(WhitneyError):
    """The operation was accepted and ended as ``failed`` or ``cancelled``; ``code`` says why."""


class OperationTimeout(WhitneyError):
    """The operation (or the run's end) was waited for and did not come in time; it may still."""


class RunBroken(WhitneyError):
    """An earlier operation of this run has an unknown outcome, so no later one may follow it. Nothing was sent."""
