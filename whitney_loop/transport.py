"""One HTTP exchange with the service, by urllib: where it may go, when it is asked again, and when that ends.

Every request of this package may be sent twice without harm (a GET, an Idempotency-Key, a ``seq_id``), so each
retry sends the same bytes. Retrying is limited by time, not by count.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import io
import ipaddress
import json
import logging
import os
import random
import re
import socket
import ssl
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from whitney_loop.errors import (
    ConfigurationError,
    Outcome,
    RequestRejected,
    ServiceUnavailable,
    UnexpectedResponse,
    WhitneyError,
    keep_out_of_errors,
    redacted,
)

logger = logging.getLogger("whitney_loop")

_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_UNTOUCHED_STATUSES = frozenset({408, 429})  # the service says that it did not take the request
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 20.0
TIMEOUT = "timeout"  # of a read
_LARGEST_BODY = 256 * 2**20  # bytes; logprobs of 1,000 completions of 10,000 tokens fit
_CHUNK = 64 * 2**10
_MOST_INTERIM_ANSWERS = 100  # before the answer itself; a service has use for one or two
_SHOWN_BYTES = 200  # of a body that is no JSON of the contract


ReadError = Callable[[dict[str, Any]], dict[str, Any]]
"""From the body of a refusal to its ``message``, ``code`` and ``request_id``; what is no string counts as none."""


class Transport:
    """Sends to one base URL, with one key. Thread-safe: it holds no connection and no state."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        exchange_timeout_s: float,
        read_error: ReadError,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.base_url = _checked_base_url(base_url)
        self._key = _checked_key(api_key)
        if self._key:
            keep_out_of_errors(self._key)
        self._exchange_timeout_s = exchange_timeout_s
        self._read_error = read_error
        loopback = _is_loopback(urllib.parse.urlsplit(self.base_url).hostname or "")
        if not loopback and not self._key:
            raise ConfigurationError(
                f"no API key for {self.base_url}: set WHITNEY_API_KEY (only a loopback address is spoken to without)",
                outcome="not_sent",
            )
        # A proxy named in the environment is honoured, but never sees what goes to this machine itself. What goes
        # elsewhere goes by https, so that a proxy gets CONNECT with the host, and then sees TLS only.
        proxies = urllib.request.ProxyHandler({}) if loopback else urllib.request.ProxyHandler()
        if not loopback:
            _require_usable_proxy(urllib.parse.urlsplit(self.base_url).hostname or "")
        # Without a handler of redirects a 3xx is an HTTPError, and without others no scheme is spoken but this one.
        is_https = self.base_url.startswith("https:")
        scheme = _TimedHTTPSHandler(_verifying_context(ca_file)) if is_https else _TimedHTTPHandler()
        self._opener = urllib.request.OpenerDirector()
        for handler in (proxies, scheme, urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler()):
            self._opener.add_handler(handler)

    def exchange(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        budget_s: float,
        headers: Mapping[str, str] | None = None,
        seq_id: int | None = None,
        nothing_yet: Collection[int | str] = (),
    ) -> dict[str, Any] | None:
        """The JSON object that the service answers; None where ``nothing_yet`` came: one of these statuses, or TIMEOUT.

        Asks again on other connection trouble and on the statuses above until ``budget_s`` seconds have passed.
        Raises RequestRejected, UnexpectedResponse, or ServiceUnavailable when the time is up.
        """
        deadline = time.monotonic() + budget_s
        all_headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        if self._key:
            all_headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.base_url + path, data=body, headers=all_headers, method=method)
        facts: dict[str, Any] = {"method": method, "path": path, "seq_id": seq_id, "attempts": 0}
        may_have_arrived = False
        while True:
            facts["attempts"] += 1
            try:
                return self._attempt(request, deadline, facts)
            except _Trouble as trouble:
                if trouble.what in nothing_yet:
                    return None
                may_have_arrived |= trouble.may_have_arrived
                outcome: Outcome = "unknown" if may_have_arrived else trouble.outcome_if_untouched
                self._pause_or_give_up(trouble, deadline, facts, outcome)
            except WhitneyError as error:
                # Only the service itself, having let the request in, settles what became of an earlier attempt.
                if may_have_arrived and (error.code is None or error.status in (401, 403)):
                    error.outcome = "unknown"
                raise

    def _attempt(self, request: urllib.request.Request, deadline: float, facts: dict[str, Any]) -> dict[str, Any]:
        timeout = min(self._exchange_timeout_s, max(deadline - time.monotonic(), 0.001))
        try:
            with self._opener.open(request, timeout=timeout) as response:
                return self._parsed(_read(response, facts), response.status, facts)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error, facts) from None
        except (OSError, http.client.HTTPException) as error:
            # Not chained: what a server wrote in place of HTTP may hold the key that it was sent.
            raise self._connection_trouble(error, facts) from None

    def _parsed(self, raw: bytes, status: int, facts: dict[str, Any]) -> dict[str, Any]:
        try:
            parsed = _json_object(raw)
        except (ValueError, RecursionError) as error:
            raise UnexpectedResponse(
                f"the service answered {status} with JSON that Python can not read: {error}",
                outcome="unknown", status=status, **facts,
            ) from None  # fmt: skip
        if parsed is not None:
            return parsed
        message = f"answered {status} with a body that is no JSON object: {_shown(raw)}"
        if raw.strip()[:1] in (b"", b"{"):  # cut short on its way
            raise _Trouble(message, may_have_arrived=True, what=status, about={"status": status})
        raise UnexpectedResponse(
            f"the service {message}. Is {self.base_url} the API itself?",
            outcome="unknown", status=status, **facts,
        )  # fmt: skip

    def _refusal(self, answer: urllib.error.HTTPError, facts: dict[str, Any]) -> Exception:
        status = answer.code
        try:
            raw = _read(cast(http.client.HTTPResponse, answer.fp), facts)
        except OSError:
            raw = b""  # it did not come in time; the status alone says what to do
        body = None
        with contextlib.suppress(ValueError, RecursionError):  # shown as it is, like what is no JSON
            body = _json_object(raw)
        about = {"message": None, "code": None, "request_id": None, **self._read_error(body or {})}
        message = about.pop("message")
        said = message if isinstance(message, str) else f"no JSON error: {_shown(raw)}"
        about["status"] = status
        if status in _RETRIED_STATUSES:
            return _Trouble(
                f"answered {status}: {said}",
                may_have_arrived=status not in _UNTOUCHED_STATUSES,
                outcome_if_untouched="rejected",
                what=status,
                retry_after=_retry_after_s(answer.headers.get("Retry-After")),
                about=about,
            )
        if status < 300:  # 101, for which nobody asked
            return UnexpectedResponse(f"the service answered {status}: {said}", outcome="unknown", **about, **facts)
        if status < 400:
            said = "a redirect, which is refused: it could carry the key elsewhere. Give the final base URL"
        if status >= 500:
            return ServiceUnavailable(f"the service answered {status}: {said}", outcome="unknown", **about, **facts)
        return RequestRejected(f"the service refused: {said}", outcome="rejected", **about, **facts)

    def _connection_trouble(self, error: Exception, facts: dict[str, Any]) -> Exception:
        # urllib wraps what happens while connecting and sending; what happens while reading comes as it is.
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        name = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigurationError(
                f"the certificate of {self.base_url} is not trusted: {cause.verify_message}. Where its authority is "
                "your own, name that one's certificate with ca_file (--ca-file)",
                outcome="not_sent",
                **facts,
            )
        never_left = getattr(cause, "_whitney_while_connecting", False)
        return _Trouble(name, may_have_arrived=not never_left, what=TIMEOUT if isinstance(error, TimeoutError) else "")

    def _pause_or_give_up(self, trouble: _Trouble, deadline: float, facts: dict[str, Any], outcome: Outcome) -> None:
        left = deadline - time.monotonic()
        asked_s = trouble.retry_after or 0
        pause = max(asked_s, _backoff_s(facts["attempts"]))
        if pause >= left:
            asked = f"; it asks to wait {asked_s:.0f} s, and {max(left, 0):.0f} s are left" if asked_s else ""
            raise ServiceUnavailable(
                f"no usable answer from {self.base_url} in the time there was; last: {trouble}{asked}",
                outcome=outcome, retryable=True, **trouble.about, **facts,
            ) from trouble  # fmt: skip
        logger.warning(
            "%s %s: %s; attempt %d, again in %.1f s",
            facts["method"],
            redacted(facts["path"]),
            trouble,
            facts["attempts"],
            pause,
        )
        time.sleep(pause)


class _Trouble(Exception):
    """One attempt that may be made again."""

    def __init__(
        self,
        message: str,
        *,
        may_have_arrived: bool,
        what: int | str,
        outcome_if_untouched: Outcome = "not_sent",
        retry_after: float | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(redacted(message))
        self.may_have_arrived = may_have_arrived
        self.outcome_if_untouched = outcome_if_untouched
        self.what = what  # a status, TIMEOUT, or ""
        self.retry_after = retry_after
        self.about = about or {}


class _TimedReads(io.RawIOBase):
    """A socket's reads, all of which together take no longer than its timeout; urllib's own is for each one alone."""

    _raw: io.RawIOBase | None = None  # so that one whose making was interrupted can be closed

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._end = time.monotonic() + (sock.gettimeout() or 0)
        self._raw = cast(io.RawIOBase, sock.makefile("rb", buffering=0))

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer did not end in time")
        self._sock.settimeout(left)
        return cast(io.RawIOBase, self._raw).readinto(buffer)

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    fp: Any = None  # so that one whose making was interrupted can be closed

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(cast(socket.socket, _TimedReads(sock)), *arguments, **options)

    def begin(self, *arguments: Any, **options: Any) -> None:
        for _ in range(_MOST_INTERIM_ANSWERS):
            super().begin(*arguments, **options)
            if not 100 <= self.status < 200 or self.status == http.client.SWITCHING_PROTOCOLS:
                return
            self.headers = cast(Any, None)  # so that it begins again: http.client itself passes over 100 alone
        raise http.client.HTTPException(f"more than {_MOST_INTERIM_ANSWERS} interim answers")


class _TimedHTTPConnection(http.client.HTTPConnection):
    response_class = _TimedResponse

    def connect(self) -> None:
        try:
            super().connect()
        except Exception as error:
            # The address, the proxy's CONNECT, the handshake: nothing of the request is sent before all of it is done.
            error.__dict__["_whitney_while_connecting"] = True
            traceback.clear_frames(error.__traceback__)  # closes a proxy's refusal, which Python 3.10 leaves open
            raise


class _TimedHTTPSConnection(_TimedHTTPConnection, http.client.HTTPSConnection):
    pass


class _TimedHTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_TimedHTTPConnection, req)


class _TimedHTTPSHandler(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._verifying = context

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_TimedHTTPSConnection, req, context=self._verifying)


def _require_usable_proxy(host: str) -> None:
    """ConfigurationError where the environment names a proxy for this https host that urllib can not use."""
    proxy = urllib.request.getproxies().get("https")
    if not proxy or urllib.request.proxy_bypass(host):
        return
    try:
        parts = urllib.parse.urlsplit(proxy if ":/" in proxy else f"http://{proxy}")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:  # not shown: it may hold a password
        raise ConfigurationError(
            "the proxy that https_proxy names can not be used: expected http://HOST:PORT", outcome="not_sent"
        )


def _verifying_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Certificates and names are always verified; by ``ca_file`` where it is given, else by the system's."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        why = f"{error.strerror or error}; expected a file of certificates in PEM"
        raise ConfigurationError(f"ca_file {ca_file} can not be used: {why}", outcome="not_sent") from None


def _read(response: http.client.HTTPResponse, facts: dict[str, Any]) -> bytes:
    """The body, up to a limit. Of one that was cut off what came: an object without its end is seen to be none."""
    chunks = []
    size = 0
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        while chunk := response.read1(_CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            if size > _LARGEST_BODY:
                raise UnexpectedResponse(
                    f"the answer is larger than {_LARGEST_BODY} bytes",
                    outcome="unknown",
                    status=response.status,
                    **facts,
                )
    return b"".join(chunks)


def _shown(raw: bytes) -> str:
    return repr(redacted(raw.decode("utf-8", "replace"))[:_SHOWN_BYTES])


def _json_object(raw: bytes) -> dict[str, Any] | None:
    """The object; None for anything else, ValueError or RecursionError for JSON beyond Python's limits."""
    try:
        parsed = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _backoff_s(attempts: int) -> float:
    """Full jitter: anything from 0 to a ceiling that doubles."""
    return random.uniform(0, min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempts, 16)))


def _retry_after_s(value: str | None) -> float | None:
    """Seconds to wait from either form of Retry-After; None for nonsense, 0, and what is past."""
    value = (value or "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value) or None  # of hundreds of digits: infinity, which is beyond any budget
    try:
        when = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.timezone.utc)
    seconds = (when - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    return seconds if seconds > 0 else None


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
        # Not shown whole: what stands where a password may stand is never printed.
        shown = f"{parts.scheme}://{host}" if host else "given"
        raise ConfigurationError(f"base URL {shown} can not be used: {problem}", outcome="not_sent")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))


def _checked_key(api_key: str | None) -> str | None:
    if api_key and not re.fullmatch(r"[!-~]+", api_key):
        raise ConfigurationError(
            "the API key holds a space, a line break or a character outside ASCII; copy it again",
            outcome="not_sent",
        )
    return api_key or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
