"""The HTTP front of the embedded service: routes, authorisation, and a JSON body for every error."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from whitney_loop.local.engine import JSONObject
from whitney_loop.local.log import log
from whitney_loop.local.requests import ServiceError
from whitney_loop.local.service import Service

HOST = "127.0.0.1"  # this machine only by default, because there is no TLS
MAX_BODY_BYTES = 64 * 1024 * 1024

_SOCKET_TIMEOUT_S = 30.0  # the longest wait for the client to send or to read something
_REQUEST_S = 120.0  # the longest time for a whole request to arrive; enough for the largest body at 4 Mbit/s
_MOST_CONNECTIONS = 500  # each needs a thread; a process may usually have about 1,000 files and connections open
_PAUSE_S = 0.1  # after a failure to accept a connection, so that repeated failures do not take all the CPU time
_LINGER_S = 2.0  # the longest wait for more of a body that is not wanted
_LINGER_BYTES = 4 * MAX_BODY_BYTES  # the most that is read of it
_STOP_S = 2.0  # the longest wait for the workers to end, and then for the connections
_MAX_KEY_CHARS = 200
_RETRYABLE = frozenset({429, 500, 503})


class Request(NamedTuple):
    """The parts of a request that the service uses; ``raw`` is the body, ``key`` the Idempotency-Key."""

    raw: bytes
    key: str | None
    query: str

    def json(self) -> JSONObject:
        try:
            value = json.loads(self.raw.decode(), parse_constant=_refuse_constant)
        except ValueError as error:
            raise _invalid_json(f"it is not UTF-8 JSON: {error}") from error
        if not isinstance(value, dict):
            raise _invalid_json(f"it is a JSON {type(value).__name__}")
        return value

    def wait_s(self) -> float:
        text = parse_qs(self.query, keep_blank_values=True).get("wait_s", ["0"])[-1]
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ServiceError(400, "invalid_request", "wait_s must be a number of seconds, 0 or more")
        return seconds


_Action = Callable[..., JSONObject]  # takes the service, the request and the ids in the path
_ROUTES: list[tuple[str, str, _Action]] = [
    ("GET", "capabilities", lambda s, r: s.capabilities()),
    ("POST", "sessions", lambda s, r: s.create_session(r.json(), r.key)),
    ("GET", "sessions/{id}", lambda s, r, session_id: s.session(session_id)),
    ("POST", "sessions/{id}/close", lambda s, r, session_id: s.close_session(session_id)),
    ("POST", "sessions/{id}/runs", lambda s, r, session_id: s.create_run(session_id, r.json(), r.key)),
    ("GET", "runs/{id}", lambda s, r, run_id: s.run(run_id)),
    ("POST", "runs/{id}/finish", lambda s, r, run_id: s.finish_run(run_id)),
    ("POST", "runs/{id}/cancel", lambda s, r, run_id: s.cancel_run(run_id)),
    ("POST", "runs/{id}/operations", lambda s, r, run_id: s.submit(run_id, r.json())),
    ("POST", "runs/{id}/samplers/{id}/operations", lambda s, r, run_id, smp_id: s.submit(run_id, r.json(), smp_id)),
    ("GET", "runs/{id}/operations/{id}", lambda s, r, run_id, op_id: s.operation(run_id, op_id, r.wait_s())),
]
_PATTERNS = [
    (verb, re.compile("/v1/training/" + path.replace("{id}", "([^/]+)")), action) for verb, path, action in _ROUTES
]


class Handler(BaseHTTPRequestHandler):
    """One connection, which serves one request after the other."""

    server: LocalServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # with HTTP/0.9, the answer to a malformed first line would have no head
    server_version = "whitney-loop"
    sys_version = ""
    timeout = _SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True
    wbufsize = -1  # buffered, so that headers and body leave in one packet
    _body_is_unread = False

    def handle_one_request(self) -> None:
        self.server.reading[self.connection] = time.monotonic()
        super().handle_one_request()

    def do_GET(self) -> None:
        self._body_is_unread = "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"
        try:
            status, body = 200, self._result()
        except (ConnectionError, TimeoutError):
            raise  # the client has left or is too slow
        except ServiceError as error:
            status, body = error.status, _error_body(error)
        except RecursionError:
            status, body = 400, _error_body(_invalid_json("it is nested too deeply"))
        except Exception as error:
            log(logging.ERROR, f"{self.command} {self.path}", error)
            broken = ServiceError(500, "internal_error", "the service broke; see its log (whitney_loop.local)")
            status, body = broken.status, _error_body(broken)
        self._answer(status, body)
        if self._body_is_unread:
            self._linger()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = do_GET  # noqa: N815 - names of http.server

    def _result(self) -> JSONObject:
        self._authorise()
        path, _, query = self.path.partition("?")
        action, ids = self._route(path)
        key = self.headers.get("Idempotency-Key")
        if key is not None and not 0 < len(key) <= _MAX_KEY_CHARS:
            raise ServiceError(400, "invalid_request", f"Idempotency-Key must have 1 to {_MAX_KEY_CHARS} characters")
        raw = self._body() if self.command == "POST" else b""
        self.server.reading.pop(self.connection, None)
        return action(self.server.service, Request(raw, key, query), *ids)

    def _authorise(self) -> None:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        # http.server decodes headers as Latin-1. The time of compare_digest does not depend on where two keys differ.
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self.server.key_bytes):
            raise ServiceError(401, "unauthorized", "send Authorization: Bearer and the key of this service")

    def _route(self, path: str) -> tuple[_Action, tuple[str, ...]]:
        found = [(verb, match, action) for verb, pattern, action in _PATTERNS if (match := pattern.fullmatch(path))]
        for verb, match, action in found:
            if verb == self.command:
                return action, match.groups()
        if found:
            allowed = ", ".join(verb for verb, _, _ in found)
            message = f"this path takes {allowed}, not {self.command}"
            raise ServiceError(405, "method_not_allowed", message, allow=allowed)
        raise ServiceError(404, "not_found", "there is no such path; the training API is under /v1/training/")

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers:
            self._body_is_unread = True
            raise ServiceError(411, "length_required", "send the body with a Content-Length, not chunked")
        if not lengths:
            return b""  # by the rules of HTTP/1.1 there is no body
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
            raise ServiceError(400, "invalid_request", "Content-Length is not a number of bytes")
        length = int(lengths[0])
        if length > MAX_BODY_BYTES:
            raise ServiceError(413, "body_too_large", f"the body has {length} bytes; the limit is {MAX_BODY_BYTES}")
        raw = self.rfile.read(length)
        self._body_is_unread = len(raw) < length
        if self._body_is_unread:
            raise _invalid_json(f"it ended after {len(raw)} of {length} bytes")
        return raw

    def _answer(self, status: int, body: JSONObject) -> None:
        request_id = f"req-{secrets.token_hex(8)}"
        if status >= 400:
            body["request_id"] = request_id
        content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        self.close_connection = self.close_connection or self._body_is_unread
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Request-Id", request_id)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 405:
            self.send_header("Allow", body["error"]["allow"])
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def _linger(self) -> None:
        """Read and drop the rest of the body; closing at once could lose the answer before the client reads it."""
        self.connection.settimeout(_LINGER_S)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            dropped = 0
            while dropped < _LINGER_BYTES and (chunk := self.connection.recv(65536)):
                dropped += len(chunk)

    def handle_expect_100(self) -> bool:
        proceed = super().handle_expect_100()
        self.wfile.flush()  # otherwise the client waits for this line while the service waits for the body
        return proceed

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that http.server itself refuses, such as one with a malformed first line."""
        self.close_connection = True
        self._answer(code, _error_body(ServiceError(code, "bad_request", message or "the request is malformed")))

    def log_message(self, format: str, *args: Any) -> None:
        log(logging.DEBUG, format % args)


class LocalServer(ThreadingHTTPServer):
    """The service on a port of ``host``. ``serve_forever`` runs it; call ``stop`` after that has returned.

    Raise OSError if the port is taken or the host is not an address of this machine.
    """

    request_queue_size = 128  # many clients may connect at once
    allow_reuse_address = os.name != "nt"  # on Windows this would let two servers share a port
    allow_reuse_port = False  # on other systems, this would

    def __init__(self, service: Service, api_key: str, port: int = 0, host: str = HOST) -> None:
        self.service = service
        self.key_bytes = api_key.encode()
        self._connections: dict[Any, threading.Thread] = {}
        self.reading: dict[Any, float] = {}  # connections without a whole request → since when they wait for it
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # that of HTTPServer looks up the host's name, which can take seconds

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._connections) < _MOST_CONNECTIONS  # beyond that it is closed, and the client tries again

    def service_actions(self) -> None:
        """Close connections that have not sent a whole request in time; ``serve_forever`` calls this repeatedly."""
        too_long_ago = time.monotonic() - _REQUEST_S
        for connection, since in list(self.reading.items()):
            if since < too_long_ago:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Cancel every run, answer every request that waits, and close all connections."""
        self.service.stop(_STOP_S)
        deadline = time.monotonic() + _STOP_S
        for connection, thread in list(self._connections.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # it may still send an answer
            thread.join(max(0.0, deadline - time.monotonic()))
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._connections.pop(request, None)
        self.reading.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log(logging.DEBUG, f"a client left: {error}")
        else:
            log(logging.ERROR, "a connection broke", error)


def _error_body(refusal: ServiceError) -> JSONObject:
    retryable = refusal.status in _RETRYABLE
    return {"error": {"code": refusal.code, "message": str(refusal), "retryable": retryable, **refusal.extra}}


def _invalid_json(why: str) -> ServiceError:
    return ServiceError(400, "invalid_json", f"the body must be a JSON object; {why}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
