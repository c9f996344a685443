"""One family of exceptions: everything that the client raises about the service is a WhitneyError.

The rules for every message stand here too: it never holds a key, and a log line that cannot be written does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import re
import reprlib
from typing import Any, Literal

Outcome = Literal["not_sent", "rejected", "failed", "unknown"]
"""What is known about the request: it was not sent; the service refused it and did nothing; the service accepted it,
and it failed without effect; or it may have taken effect."""

_SHORTEST_SECRET = 8  # characters; replacing a shorter word would black out half of every message
_NO_WORD = 16  # characters; a shorter key, such as localhost, may stand in an id, a URL or a field's name by chance
# A field whose name ends like this has a value that is compared, or sent back to the service.
_EXACT = ("_id", "uri", "url", "status", "kind", "model", "provider", "operations")
_HOLD_NO_KEY = {int, float, bool, type(None)}
_HTML_NAMES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_CUT_OFF = r"(?:[%\\&][#\w]{0,6})?\Z"  # the end of a text, perhaps in the middle of an escape

_secrets: dict[str, re.Pattern[str]] = {}  # each with a pattern that recognises it, however it is escaped


def keep_out_of_errors(secret: str) -> None:
    """Keep ``secret`` out of every error, log line and answer of this process from now on."""
    if len(secret) >= _SHORTEST_SECRET:
        first, *others = map(_forms, secret)  # no backslash is allowed before the first, so that re finds it faster
        head, rest = others[: _SHORTEST_SECRET - 1], others[_SHORTEST_SECRET - 1 :]
        # The text may be cut off within the key, so it may end after the key's first characters.
        followed = [rf"\\*{form}" for form in head] + [rf"(?:\\*{form}|{_CUT_OFF})" for form in rest]
        _secrets[secret] = re.compile("".join([first, *followed]))


def _forms(character: str) -> str:
    """Return a pattern of a character, and of its escapes in a path, in HTML and in JSON."""
    code = ord(character)
    forms = [character, f"&#{code};"]
    if character in _HTML_NAMES:
        forms.append(_HTML_NAMES[character])
    for digits in (f"{code:02x}", f"{code:02X}"):
        forms += [f"%{digits}", f"&#x{digits};", f"\\u00{digits}"]
    return f"(?:{'|'.join(map(re.escape, forms))})"


def redacted(text: str, *, shortest: int = 0) -> str:
    """Return the text with ``[key]`` in place of every key, or start of a key at its end, given to a client.

    ``shortest``: keys of fewer characters are left.
    """
    for secret in sorted(_secrets, key=len, reverse=True):  # one may be part of another
        if len(secret) >= shortest:
            text = _secrets[secret].sub("[key]", text)
    return text


def redacted_json(value: Any, name: str = "") -> Any:
    """Return the JSON value of the field ``name`` with its strings redacted. Numbers are not changed.

    In an id, a URL and a field's name, only a key that cannot stand there by chance is replaced.
    """
    if isinstance(value, str):
        return redacted(value, shortest=_NO_WORD if name.endswith(_EXACT) else 0)
    if isinstance(value, (list, tuple)):  # most lists are long and hold only numbers: skip those, which is fast
        return value if set(map(type, value)) <= _HOLD_NO_KEY else [redacted_json(item, name) for item in value]
    if isinstance(value, dict):
        return {redacted(name, shortest=_NO_WORD): redacted_json(item, name) for name, item in value.items()}
    return value


shortened = reprlib.Repr().repr
"""The ``repr`` of a value that a service sent, in a few characters."""


def log(level: int, message: str, cause: BaseException | None = None, *, name: str = "whitney_loop") -> None:
    """Write a line, and the traceback of ``cause``, to a logger. Ignore what the user's logging raises."""
    with contextlib.suppress(Exception):
        logger = logging.getLogger(name)
        if logger.isEnabledFor(level):
            logger.log(level, "%s", redacted(message), exc_info=cause)


class WhitneyError(Exception):
    """The base class. ``str()`` says what was wrong and what to do, then the facts below in brackets.

    ``method``, ``path``, ``status`` (HTTP), ``code`` and ``request_id`` (the service's), ``seq_id``, ``attempts`` (how
    often it was sent) are None if they do not apply. ``retryable``: asking again may succeed. ``outcome`` is one of
    ``Outcome``. An error can be pickled, and never holds the key.
    """

    outcome: Outcome = "unknown"
    method: str | None = None
    path: str | None = None
    status: int | None = None
    code: str | None = None
    request_id: str | None = None
    seq_id: int | None = None
    attempts: int | None = None
    retryable: bool = False
    index: int | None = None  # of the payload that caused it, if several were given at once
    payload: Any = None  # that payload

    def __init__(self, message: str, *, outcome: Outcome | None = None, **facts: Any) -> None:
        super().__init__(redacted(message))
        self.message = redacted(message)
        self.outcome = outcome or self.outcome
        self.add(**facts)

    def add(self, **facts: Any) -> None:
        """Set some of the attributes above."""
        vars(self).update(redacted_json(facts))

    def __str__(self) -> str:
        facts = [f"{self.method} {self.path}"] if self.method else []
        for name in ("status", "code", "request_id", "seq_id", "attempts"):
            if getattr(self, name) is not None:
                facts.append(f"{name} {getattr(self, name)}")
        return redacted(f"{self.message} [{', '.join([*facts, f'outcome {self.outcome}'])}]")


class ConfigurationError(WhitneyError):
    """The base URL, the key, a time-out or the provider cannot be used as given. Nothing was sent."""

    outcome = "not_sent"


class RequestRejected(WhitneyError):
    """The service refused the request (a 4xx, or a redirect, which is never followed); ``code`` says why."""

    outcome = "rejected"


class ServiceUnavailable(WhitneyError):
    """No usable answer in time: the connection failed, or the service kept answering that it cannot serve now."""


class UnexpectedResponse(WhitneyError):
    """An answer that breaks the contract; the message names the operation and the field."""


class OperationFailed(WhitneyError):
    """The operation was accepted and ended as ``failed`` or ``cancelled``, or a run could not be allocated."""

    outcome = "failed"


class OperationTimeout(WhitneyError):
    """An operation, a run or a session did not end in time; it may still end."""


class RunBroken(WhitneyError):
    """Not sent: the outcome of an earlier operation of this run is unknown, or this process was forked from its own."""

    outcome = "not_sent"
