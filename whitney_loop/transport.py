"""One exchange with the service: where it may go, when the request is sent again, and when that ends.

Every request of this package may be sent twice without harm: it is a GET, or has an Idempotency-Key or a ``seq_id``, or
asks for an end. So each retry sends the same bytes. Retries are limited by time, not by count.
"""

from __future__ import annotations

import datetime
import email.message
import email.utils
import http.client
import ipaddress
import json
import logging
import os
import random
import re
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from whitney_loop import wire
from whitney_loop.connections import Answer, Connections, HangUp, KeptConnectionLost, NotConnected
from whitney_loop.errors import (
    ConfigurationError,
    Outcome,
    RequestRejected,
    ServiceUnavailable,
    UnexpectedResponse,
    WhitneyError,
    keep_out_of_errors,
    log,
    redacted,
    redacted_json,
)
from whitney_loop.version import __version__

TIMEOUT = "timeout"  # stands for a status: the answer did not come in time
_NOT_TAKEN = frozenset({408, 425, 429})  # the service says that it did not take the request
_NEVER_SERVED = frozenset({501, 505})  # asking again cannot help
_CONFLICT = 409  # asking again cannot help, even if the service says so
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 20.0
_LEAST_TIMEOUT_S = 0.001  # a socket takes 0 for "do not wait"
_FIRST_CONTACT_S = 5.0  # until a service that was never reached is reported: its address may be wrong
_LAST_POLL_S = 5.0  # for a poll after the deadline, retries included
_SHOWN_CHARACTERS = 200  # of a body that is not JSON


class NotYet(Exception):
    """The answer means "not finished yet" to the caller."""


class Transport:
    """Sends requests to one base URL, with one key. Thread-safe.

    ``timeout_s`` limits a request, retries included, and ``exchange_timeout_s`` the silence in one attempt.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        timeout_s: float,
        exchange_timeout_s: float,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.base_url = _checked_base_url(base_url)
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": f"whitney-loop/{__version__}",  # some gateways refuse Python's own
        }
        is_loopback = _is_loopback(urllib.parse.urlsplit(self.base_url).hostname or "")
        if api_key:
            if not re.fullmatch(r"[!-~]+", api_key):
                message = "the API key holds a space, a line break or a character outside ASCII; copy it again"
                raise ConfigurationError(message)
            self._headers["Authorization"] = f"Bearer {api_key}"
            keep_out_of_errors(api_key)
        elif not is_loopback:
            message = f"no API key for {self.base_url}: set WHITNEY_API_KEY (only a loopback address needs none)"
            raise ConfigurationError(message)
        self._timeout_s = timeout_s
        self._exchange_timeout_s = exchange_timeout_s
        self._connections = Connections(self.base_url, ca_file=ca_file, direct=is_loopback)
        self._quiet_until = 0.0  # until then no trouble is logged

    def exchange(
        self,
        method: str,
        path: str,
        body: Sequence[bytes] = (),
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        seq_id: int | None = None,
        not_yet: Collection[int | str] = (),
        hang_up: HangUp | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of its answer, without any API key. ``body`` is given in parts.

        The request is sent again after a failed connection, after a status that may pass, and if the service's error
        says ``retryable``, for ``timeout_s`` seconds, or _FIRST_CONTACT_S if there never was a connection.

        Raise NotYet for a status in ``not_yet``, which may hold TIMEOUT too; RequestRejected; UnexpectedResponse;
        ConfigurationError if the certificate is not trusted; ServiceUnavailable when the time is up; HungUp.
        """
        started = time.monotonic()
        deadline = started + (self._timeout_s if timeout_s is None else timeout_s)
        headers = {**self._headers, **(headers or {})}
        facts: dict[str, Any] = {"method": method, "path": path, "seq_id": seq_id, "attempts": 0}
        may_have_arrived = new_connection = False
        while True:
            facts["attempts"] += 1
            attempt_s = min(self._exchange_timeout_s, max(deadline - time.monotonic(), _LEAST_TIMEOUT_S))
            options: dict[str, Any] = {"new_connection": new_connection, "hang_up": hang_up}
            try:
                return self._read(self._ask(method, path, body, headers, attempt_s, **options), path)
            except KeptConnectionLost:
                new_connection = may_have_arrived = True
            except _Trouble as trouble:
                if trouble.status in not_yet:
                    raise NotYet from None
                if not self._connections.ever_connected:
                    deadline = min(deadline, started + _FIRST_CONTACT_S)
                may_have_arrived |= trouble.outcome == "unknown"
                if may_have_arrived:
                    trouble.outcome = "unknown"
                self._pause_or_give_up(trouble, deadline, facts)
            except WhitneyError as error:
                error.add(**facts)
                if may_have_arrived:  # an earlier attempt may have been executed, whatever this answer says
                    error.outcome = "unknown"
                raise

    def poll(self, path: str, left_s: float, **options: Any) -> dict[str, Any]:
        """GET a state that ``wait_until`` waits for. Retry as long as that would wait."""
        return self.exchange("GET", path, timeout_s=left_s or _LAST_POLL_S, **options)

    def close(self) -> None:
        self._connections.close()

    def _ask(self, *request: Any, **options: Any) -> Answer:
        # No error shows its cause, which holds the key if a server echoes it in place of HTTP.
        try:
            return self._connections.ask(*request, **options)
        except NotConnected as error:
            raise _Trouble(str(error), "not_sent") from None
        except (OSError, http.client.HTTPException) as error:
            status = TIMEOUT if isinstance(error, TimeoutError) else None
            raise _Trouble(f"{type(error).__name__}: {error}", "unknown", status) from None

    def _read(self, answer: Answer, path: str) -> dict[str, Any]:
        """Return the answer's object. Raise _Trouble if the request may be sent again, a WhitneyError if not."""
        status = answer.status
        if not 200 <= status < 300:
            raise self._refusal(answer, path)
        try:
            parsed = _json_object(answer.body)
        except (ValueError, RecursionError) as error:
            message = f"the service answered {status} with JSON that Python cannot read: {error}"
            raise UnexpectedResponse(message, status=status) from None
        if parsed is not None:
            return parsed
        message = f"answered {status} with a body that is not a JSON object: {_beginning(answer)}"
        if answer.body.strip()[:1] in (b"", b"{"):  # truncated on its way
            raise _Trouble(message, "unknown", status)
        message = f"the service {message}. Is {self.base_url} the API itself?"
        raise UnexpectedResponse(message, status=status)

    def _refusal(self, answer: Answer, path: str) -> Exception:
        """Return the error for an answer whose status is not 2xx."""
        status = answer.status
        try:
            body = _json_object(answer.body) or {}
        except (ValueError, RecursionError):  # shown like a body that is not JSON
            body = {}
        message, code, retryable = wire.error_of(body)
        said = message or f"no JSON error message: {_beginning(answer)}"
        if status == 404 and self.base_url.endswith("/v1"):
            said += f" (at {self.base_url}{path}: give the base URL without /v1, with which every path begins)"
        request_id = body.get(wire.REQUEST_ID)
        request_id = request_id if isinstance(request_id, str) else None
        if _may_pass(status, retryable=retryable):
            outcome: Outcome = "unknown" if status >= 500 else "rejected"
            pause_s = _retry_after_s(answer.headers)
            return _Trouble(f"answered {status}: {said}", outcome, status, pause_s, code=code, request_id=request_id)
        facts: dict[str, Any] = {"status": status, "code": code, "request_id": request_id}
        if status < 300:  # 101 (Switching Protocols), which was not asked for
            return UnexpectedResponse(f"the service answered {status}: {said}", **facts)
        if status < 400:
            said = "a redirect, which is refused: it could carry the key elsewhere. Give the final base URL"
        if status >= 500:
            return ServiceUnavailable(f"the service answered {status}: {said}", **facts)
        return RequestRejected(f"the service refused: {said}", **facts)

    def _pause_or_give_up(self, trouble: _Trouble, deadline: float, facts: dict[str, Any]) -> None:
        now = time.monotonic()
        left_s, asked_s = deadline - now, trouble.retry_after_s
        pause_s = max(asked_s, _backoff_s(facts["attempts"]))
        if pause_s < left_s:
            if now >= self._quiet_until:  # threads that wait for results meet the same trouble at the same time
                self._quiet_until = now + pause_s
                again = f"attempt {facts['attempts']}, again in {pause_s:.1f} s"
                log(logging.WARNING, f"{facts['method']} {facts['path']}: {trouble}; {again}")
            time.sleep(pause_s)
            return
        if self._connections.ever_connected:
            asked = f"; it asks to wait {asked_s:.0f} s, and {max(left_s, 0):.0f} s are left" if asked_s else ""
            found = f"no usable answer from {self.base_url} within the time limit; last: {trouble}{asked}"
        else:
            found = (
                f"no connection to {self.base_url}: {trouble}. Check the base URL's host and port, the network and its "
                "proxy (https_proxy), and that the service runs"
            )
        facts = {**facts, **trouble.facts, "retryable": True}
        raise ServiceUnavailable(found, outcome=trouble.outcome, **facts) from trouble


class _Trouble(Exception):
    """A failed attempt, after which the request may be sent again. ``facts`` are attributes of the error, if any."""

    def __init__(
        self,
        message: str,
        outcome: Outcome,
        status: int | str | None = None,
        retry_after_s: float = 0,
        **facts: Any,
    ) -> None:
        super().__init__(redacted(message))
        self.outcome = outcome
        self.status = status
        self.retry_after_s = retry_after_s
        self.facts = {"status": status, **facts} if isinstance(status, int) else {}


def _may_pass(status: int, *, retryable: bool) -> bool:
    """Return whether the same request may succeed later. ``retryable``: the service says so."""
    if status in _NOT_TAKEN or (status >= 500 and status not in _NEVER_SERVED):
        return True
    return retryable and status >= 400 and status != _CONFLICT


def _beginning(answer: Answer) -> str:
    encoding = answer.headers.get("Content-Encoding")
    note = f" (encoded as {encoding:.20}, which was not asked for)" if encoding else ""
    text = answer.body[: 8 * _SHOWN_CHARACTERS].decode("utf-8", "replace")
    return repr(redacted(text)[:_SHOWN_CHARACTERS]) + note


def _json_object(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object, redacted, or None if the text is anything else.

    Raise ValueError or RecursionError if an integer is too long, or the nesting too deep, for Python. Answers are
    redacted here, on arrival, so that nothing made from them can show the key.
    """
    try:
        parsed = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return redacted_json(parsed) if isinstance(parsed, dict) else None


def _backoff_s(attempts: int) -> float:
    """Draw a pause from 0 to a ceiling that doubles with each attempt ("full jitter")."""
    return random.uniform(0, min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempts, 16)))


def _retry_after_s(headers: email.message.Message) -> float:
    """Return the seconds to wait, from either form of Retry-After. Return 0 for nonsense, or a date that has passed."""
    value = (headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)  # hundreds of digits give infinity, which is beyond any time limit
    until = _date(value)
    if until is None:
        return 0
    # Prefer the service's own clock: this machine's may be wrong.
    now = _date(headers.get("Date")) or datetime.datetime.now(datetime.timezone.utc)
    return max((until - now).total_seconds(), 0)


def _date(value: str | None) -> datetime.datetime | None:
    try:
        date = email.utils.parsedate_to_datetime(value or "")
    except (TypeError, ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=datetime.timezone.utc)


def _checked_base_url(base_url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(base_url.strip())
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError:
        parts, host = urllib.parse.urlsplit(""), None
    problem = None
    if parts.scheme not in ("http", "https") or not host:
        problem = "expected https://HOST or http://127.0.0.1:PORT"
    elif parts.username is not None or parts.password is not None:
        problem = "it holds a user name or password; the key belongs in WHITNEY_API_KEY"
    elif not re.fullmatch(r"[!-~]+", parts.netloc + parts.path):
        problem = "it holds a space or a character outside ASCII"
    elif parts.query or parts.fragment:
        problem = "it holds a query or a fragment; give scheme, host and path only"
    elif parts.scheme == "http" and not _is_loopback(host):
        problem = "the key is sent over https only, except to a loopback address"
    if problem:
        # Only scheme and host are shown: the rest may hold a password.
        shown = f"{parts.scheme}://{host}" if host else "given"
        raise ConfigurationError(f"base URL {shown} cannot be used: {problem}")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
