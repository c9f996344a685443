"""One request over one HTTP connection: TLS, a proxy, and limits on the time and the size of an answer."""

from __future__ import annotations

import base64
import contextlib
import email.message
import http.client
import io
import os
import socket
import ssl
import time
import urllib.parse
from typing import Any, NamedTuple, cast

from whitney_loop.errors import ConfigurationError

LARGEST_BODY = 256 * 2**20  # bytes; logprobs of 1,000 completions of 10,000 tokens fit
_CHUNK = 64 * 2**10  # bytes


class NotConnected(Exception):
    """There was no connection, so nothing of the request was sent."""


class NotTrusted(NotConnected):
    """The service's certificate could not be verified."""


class AnswerTooLarge(Exception):
    """The body of the answer is larger than LARGEST_BODY allows."""


class Answer(NamedTuple):
    """The answer to one request. ``body`` may be cut short; of a refusal it may be missing."""

    status: int
    headers: email.message.Message
    body: bytes


class Connections:
    """Opens the connections to one base URL. TLS is always verified: by ``ca_file``, or by the system's authorities.

    A proxy that the environment names is used for https, unless ``direct``. It gets CONNECT with the host's name and
    then sees TLS only. Raises ConfigurationError if the proxy or the file cannot be used.
    """

    def __init__(self, base_url: str, *, ca_file: str | os.PathLike[str] | None, direct: bool) -> None:
        parts = urllib.parse.urlsplit(base_url)
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path
        self._tls = _verifying_context(ca_file) if parts.scheme == "https" else None
        self._proxy = None if direct else _proxy_for(parts.netloc)

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float) -> Answer:
        """Send one request and read its answer; each of connecting, sending and reading takes at most ``timeout_s``.

        Raises NotConnected, AnswerTooLarge, and OSError or HTTPException if the answer is lost.
        """
        connection = self._new_connection(timeout_s)
        with contextlib.closing(connection):
            _connect(connection)
            connection.request(method, self._path + path, body, {**headers, "Connection": "close"})
            with connection.getresponse() as response:
                return Answer(response.status, response.headers, _read_body(response))

    def _new_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return _Connection(self._host, self._port, timeout=timeout_s)
        if self._proxy is None:
            return _TLSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        connection = _TLSConnection(self._proxy.host, self._proxy.port, timeout=timeout_s, context=self._tls)
        connection.set_tunnel(self._host, self._port, self._proxy.headers)
        return connection


def _connect(connection: http.client.HTTPConnection) -> None:
    """Find the address, connect, ask the proxy, shake hands. Raise NotConnected or NotTrusted."""
    problem: NotConnected | None = None
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        problem = NotTrusted(error.verify_message)
    except (OSError, http.client.HTTPException) as error:
        problem = NotConnected(f"{type(error).__name__}: {error}")
    if problem is not None:  # raised here: the context of an error would keep a proxy's answer open on Python 3.10
        raise problem


class _TimedReads(io.RawIOBase):
    """A socket's reads. All of them together take at most the socket's timeout, which by itself limits each one."""

    _raw: io.RawIOBase | None = None  # so that close() works if a signal comes before it is set

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


class _Response(http.client.HTTPResponse):
    fp: Any = None  # so that close() works if a signal comes before it is set

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(cast(socket.socket, _TimedReads(sock)), *arguments, **options)

    def begin(self, *arguments: Any, **options: Any) -> None:
        super().begin(*arguments, **options)
        while 100 <= self.status < 200 and self.status != http.client.SWITCHING_PROTOCOLS:
            self.headers = cast(Any, None)  # an interim answer: begin again. http.client itself passes over 100 only
            super().begin(*arguments, **options)


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _TLSConnection(http.client.HTTPSConnection):
    response_class = _Response


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
        # What a proxy is told goes over plain HTTP, a password too: not where the user wrote https.
        usable = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:  # the URL is not shown: it may hold a password
        raise ConfigurationError(
            "the proxy that https_proxy names cannot be used: expected http://HOST:PORT (a proxy that is itself "
            "spoken to by https is not supported)",
            outcome="not_sent",
        )
    headers = {}
    if parts.username and parts.password:
        credentials = urllib.parse.unquote(f"{parts.username}:{parts.password}").encode()
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
    return _Proxy(parts.hostname or "", parts.port, headers)


def _verifying_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        why = f"{error.strerror or error}; expected a file of certificates in PEM"
        raise ConfigurationError(f"ca_file {ca_file} cannot be used: {why}", outcome="not_sent") from None


def _read_body(response: http.client.HTTPResponse) -> bytes:
    """Read the body. A truncated one is returned as it came: parsing it fails later."""
    chunks = []
    size = 0
    try:
        while chunk := response.read1(_CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            if size > LARGEST_BODY:
                raise AnswerTooLarge(f"the answer is larger than {LARGEST_BODY} bytes")
    except (http.client.HTTPException, ConnectionError):
        pass
    except OSError:  # it did not come in time
        if response.status < 300:
            raise
        return b""  # the status alone says what to do
    return b"".join(chunks)
