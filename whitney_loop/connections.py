"""Connections to one service: kept for the next request, verified by TLS, limited in silence and in size."""

from __future__ import annotations

import base64
import contextlib
import email.message
import http.client
import io
import os
import re
import selectors
import socket
import ssl
import time
import urllib.parse
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from whitney_loop.errors import ConfigurationError, UnexpectedResponse

LARGEST_BODY = 256 * 2**20  # bytes of an answer; logprobs of 1,000 completions of 10,000 tokens fit
_PIECE = 64 * 2**10  # bytes that are sent or read at once
_SLOWEST = 20_000  # bytes a second; a transfer that is slower counts as silence
_STILL_TO_SEND = 4 * 2**20  # bytes of a body that may still be in the system's buffer when our last send returns
_CONNECT_S = 10.0  # for each of three steps: connect, hear from the proxy, shake hands
_MOST_KEPT = 9  # eight threads that wait for results, and one that submits
_KEPT_S = 25.0  # without a request; services and proxies close an idle connection after 30 s or more


class NotConnected(Exception):
    """There was no connection, so nothing of the request was sent."""


class KeptConnectionLost(Exception):
    """The service closed a kept connection and did not begin to answer. The request may have arrived."""


class HungUp(Exception):
    """Another thread has ended this exchange."""


class HangUp:
    """Ends the exchanges of other threads, present and later ones: they raise HungUp."""

    def __init__(self) -> None:
        self.done = False
        self.sockets: set[socket.socket] = set()  # on which an answer is awaited

    def __call__(self) -> None:
        self.done = True
        for sock in list(self.sockets):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which another thread is using


class Answer(NamedTuple):
    """The answer to one request. ``body`` may be truncated; that of a refusal may be missing."""

    status: int
    headers: email.message.Message
    body: bytes


class Connections:
    """The connections to one base URL. TLS is always verified: by ``ca_file``, or by the system's authorities.

    The environment's proxy for https is used, unless ``direct``. It gets CONNECT with the host's name, and then sees
    only TLS. Raise ConfigurationError if the proxy or the file cannot be used. Thread-safe: each exchange has a
    connection to itself.
    """

    def __init__(self, base_url: str, *, ca_file: str | os.PathLike[str] | None, direct: bool) -> None:
        parts = urllib.parse.urlsplit(base_url)
        self._netloc, self._path = parts.netloc, parts.path
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = _verifying_context(ca_file) if parts.scheme == "https" else None
        self._proxy = None if direct else _proxy_for(parts.netloc)
        self.ever_connected = False
        self._process = os.getpid()
        self._kept: list[tuple[socket.socket, float]] = []  # with the time of the last answer; the newest is the last
        weakref.finalize(self, _close_all, self._kept)  # nobody has to call close()

    def ask(
        self,
        method: str,
        path: str,
        body: Sequence[bytes],
        headers: dict[str, str],
        timeout_s: float,
        *,
        new_connection: bool = False,
        hang_up: HangUp | None = None,
    ) -> Answer:
        """Send one request and read its answer. ``body`` is a list of parts; a request without a body has none.

        ``timeout_s`` limits silence: the wait for the head of the answer after the body was sent, and each wait for the
        next bytes of a body. A transfer that flows may take as long as it needs.
        Raise NotConnected, KeptConnectionLost (never with ``new_connection``), HungUp, ValueError if a header cannot be
        sent, OSError or HTTPException if the answer is lost, UnexpectedResponse if it is too large, and
        ConfigurationError if the certificate is not trusted.
        """
        size = sum(map(len, body))
        head = self._head(method, path, {**headers, "Content-Length": str(size)} if body else headers)
        hang_up = hang_up or HangUp()
        kept = None if new_connection else self._take_kept()
        sock = kept or self._connected(timeout_s)
        response = _Response(sock, method=method)
        try:
            hang_up.sockets.add(sock)
            if hang_up.done:
                raise HungUp
            sock.settimeout(timeout_s)
            _send(sock, head, body)
            response.reads.start(timeout_s + min(size, _STILL_TO_SEND) / _SLOWEST)
            answer, may_be_kept = response.read_answer(timeout_s)
        except BaseException as error:  # the answer may still be on its way, so the connection cannot be kept
            sock.close()
            if hang_up.done:
                raise HungUp from None
            if kept and isinstance(error, (ConnectionError, ssl.SSLError)) and not response.reads.received:
                raise KeptConnectionLost(f"{type(error).__name__}: {error}") from None
            raise
        finally:
            hang_up.sockets.discard(sock)
        if may_be_kept and len(self._kept) < _MOST_KEPT:
            self._kept.append((sock, time.monotonic()))
        else:
            sock.close()
        return answer

    def close(self) -> None:
        """Close the connections that no exchange is using."""
        _close_all(self._kept)

    def _take_kept(self) -> socket.socket | None:
        if self._process != os.getpid():  # this process was forked, and the connections are its parent's
            self._process = os.getpid()
            self.close()
        while self._kept:
            with contextlib.suppress(IndexError):  # another thread took it
                sock, since = self._kept.pop()
                if time.monotonic() - since < _KEPT_S and _is_quiet(sock):
                    return sock
                sock.close()
        return None

    def _connected(self, timeout_s: float) -> socket.socket:
        """Find the address, connect, ask the proxy, shake hands. Raise NotConnected or ConfigurationError."""
        host, port = (self._proxy.host, self._proxy.port) if self._proxy else (self._host, self._port)
        timeout_s = min(timeout_s, _CONNECT_S)
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
        if self._proxy:
            connection.set_tunnel(self._host, self._port, self._proxy.headers)
        connection.response_class = _Response
        problem: Exception | None = None
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            problem = ConfigurationError(
                f"the certificate of https://{self._netloc} is not trusted: {error.verify_message}. If you run the "
                "authority that signed it, name the authority's certificate with ca_file (--ca-file)"
            )
        except (OSError, http.client.HTTPException) as error:
            problem = NotConnected(f"{type(error).__name__}: {error}")
        except BaseException:
            connection.close()
            raise
        if problem is not None:  # raised here: the context of an error would keep a proxy's answer open on Python 3.10
            connection.close()
            raise problem
        self.ever_connected = True
        return cast(socket.socket, connection.sock)

    def _head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        headers = {"Host": self._netloc, "Accept-Encoding": "identity", **headers}
        for name, value in headers.items():
            if not re.fullmatch("[ -~]*", value):
                raise ValueError(f"{name} holds a line break or a character outside ASCII")
        lines = [f"{method} {self._path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()


def _close_all(kept: list[tuple[socket.socket, float]]) -> None:
    while kept:
        with contextlib.suppress(IndexError):  # another thread took it
            kept.pop()[0].close()


def _is_quiet(sock: socket.socket) -> bool:
    """Return whether the service has neither closed a kept connection nor sent anything on it."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return not selector.select(0)


def _send(sock: socket.socket, head: bytes, body: Sequence[bytes]) -> None:
    """Send a small request in one segment. Send a large one piece by piece, without a copy of it."""
    parts = [head, *body]
    if sum(map(len, body)) < _PIECE:
        parts = [b"".join(parts)]
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _PIECE):
            sock.sendall(view[start : start + _PIECE])  # the socket's time-out limits each piece, not the whole


class _TimedReads(io.RawIOBase):
    """A socket's reads, each limited by ``timeout_s``, and all of them by ``end``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.received = 0  # bytes
        self.start(sock.gettimeout() or 0)

    def start(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = min(self._timeout_s, self.end - time.monotonic())
        if left <= 0:
            raise TimeoutError("the answer did not end in time")
        self._sock.settimeout(left)
        count = self._sock.recv_into(buffer)
        self.received += count
        return count


class _Response(http.client.HTTPResponse):
    fp: Any = None  # so that close() works if a signal comes before it is set

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        self.reads = _TimedReads(sock)
        super().__init__(cast(socket.socket, self.reads), *arguments, **options)

    def begin(self, *arguments: Any, **options: Any) -> None:
        super().begin(*arguments, **options)
        while 100 <= self.status < 200 and self.status != http.client.SWITCHING_PROTOCOLS:
            self.headers = cast(Any, None)  # an interim answer: begin again. http.client itself passes over 100 only
            super().begin(*arguments, **options)

    def read_answer(self, timeout_s: float) -> tuple[Answer, bool]:
        """Return the answer, and whether the connection may be kept. Parsing fails later if the body is truncated."""
        with self:
            self.begin()
            self.reads.start(timeout_s)
            chunks, size, is_whole = [], 0, False
            try:
                while chunk := self.read1(_PIECE):
                    chunks.append(chunk)
                    size += len(chunk)
                    self.reads.end += len(chunk) / _SLOWEST
                    if size > LARGEST_BODY:
                        raise UnexpectedResponse(f"the answer is larger than {LARGEST_BODY} bytes")
                is_whole = self.chunked or self.length == 0
            except (http.client.HTTPException, ConnectionError):
                pass
            except OSError:  # it did not come in time
                if self.status < 300:
                    raise
                chunks = []  # the status alone says what to do
            may_be_kept = is_whole and not self.will_close and self.status >= 200
            return Answer(self.status, self.headers, b"".join(chunks)), may_be_kept


class _Proxy(NamedTuple):
    host: str
    port: int | None
    headers: dict[str, str]


def _proxy_for(netloc: str) -> _Proxy | None:
    """Return the proxy that the environment names for https, if any. Raise ConfigurationError if it cannot be used."""
    import urllib.request  # only here: it would slow down every import of whitney_loop

    url = urllib.request.getproxies().get("https")
    if not url or urllib.request.proxy_bypass(netloc):
        return None
    try:
        parts = urllib.parse.urlsplit(url if ":/" in url else f"http://{url}")
        # Only plain HTTP can be spoken to a proxy. If the user wrote https, a password must not go over it.
        usable = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:  # the URL is not shown: it may hold a password
        message = "the proxy that https_proxy names cannot be used: only the form http://HOST:PORT is supported"
        raise ConfigurationError(message)
    headers = {}
    if parts.username and parts.password:
        credentials = urllib.parse.unquote(f"{parts.username}:{parts.password}").encode()
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
    return _Proxy(parts.hostname or "", parts.port, headers)


def _verifying_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # or its subclass ssl.SSLError
        why = f"{error.strerror or error}; expected a file of certificates in PEM"
        raise ConfigurationError(f"ca_file {ca_file} cannot be used: {why}") from None
