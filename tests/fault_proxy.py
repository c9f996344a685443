"""A proxy between client and service that adds faults drawn from a seed, as of a bad network.

The client's connections are kept, so that a fault may also hit one that was in use before. Which exchange meets which
fault depends only on the seed and on the order of the requests.
"""

import contextlib
import email.utils
import random
import socket
import threading
import time

from listener import GIVES_UP_S, Listener, reset_at_close

DELAY_S = 0.01

RETRY_AFTER = ["1", "0.5", "0", "-1", "soon", None, "date", "past date"]


class FaultProxy(Listener):
    """``rate``: the share of exchanges with a fault, one of ``kinds``. ``only``: path → whether faults may meet it."""

    def __init__(self, service, *, seed=0, rate=0.2, kinds=None, only=lambda method, path: True):
        host, port = service.base_url.removeprefix("http://").split(":")
        self._upstream = (host, int(port))
        self.api_key = service.api_key
        self._random = random.Random(seed)
        self._rate, self._kinds, self._only = rate, list(kinds or FAULTS), only
        self._held = None  # a request that arrives a second time once the next one has come
        self._lock = threading.Lock()
        self._threads = []
        self.exchanges = 0
        self.connections = 0
        self._open = set()  # connections of the client
        self.faults = []  # (kind, method, path)
        super().__init__()

    def __exit__(self, *_):
        super().__exit__()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # a kept one that nobody uses
        for thread in self._threads:
            thread.join()

    def serve(self, connection):
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._exchange, args=(connection,))
        self._threads.append(thread)
        self._open.add(connection)
        self.connections += 1
        thread.start()

    def _exchange(self, connection):
        with connection, contextlib.suppress(OSError):  # the client may leave at any time
            while request := _read_request(connection):
                connection.settimeout(GIVES_UP_S)
                method, path = request.split(b" ", 2)[:2]
                fault, held = self._draw(method.decode(), path.decode())
                if held is not None:
                    self.ask(held)
                if fault:
                    fault(self, connection, request)
                    break
                connection.sendall(self.ask(request))
                connection.settimeout(None)
        self._open.discard(connection)

    def _draw(self, method, path):
        with self._lock:
            self.exchanges += 1
            held, self._held = self._held, None
            # Both are drawn in any case, so that one fault more or less does not shift those after it.
            hit, kind = self._random.random() < self._rate, self._random.choice(self._kinds)
            if not hit or not self._only(method, path):
                return None, held
            self.faults.append((kind, method, path))
            return FAULTS[kind], held

    def hold(self, request):
        with self._lock:
            self._held = request

    def pick(self, values):
        with self._lock:
            return self._random.choice(values)

    def ask(self, request):
        """Return the service's whole answer to a request, over a connection of its own."""
        with socket.create_connection(self._upstream, timeout=GIVES_UP_S) as service:
            service.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            answer = b"".join(iter(lambda: service.recv(65536), b""))
            return answer.replace(b"Connection: close\r\n", b"", 1)


def _read_request(connection):
    raw = b""
    while b"\r\n\r\n" not in raw:
        chunk = connection.recv(65536)
        if not chunk:
            return b""
        raw += chunk
    head, _, body = raw.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(lengths[0]) - len(body) if lengths else 0
    while left > 0:
        chunk = connection.recv(65536)
        if not chunk:
            return b""
        raw += chunk
        left -= len(chunk)
    return raw


def _answer(status, body=b"", headers=()):
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _drop_request(proxy, connection, request):
    """It never arrives."""


def _drop_reply(proxy, connection, request):
    proxy.ask(request)


def _reset_in_body(proxy, connection, request):
    answer = proxy.ask(request)
    body = answer.index(b"\r\n\r\n") + 4
    connection.sendall(answer[: (body + len(answer)) // 2])
    reset_at_close(connection)


def _truncate_json(proxy, connection, request):
    body = proxy.ask(request).partition(b"\r\n\r\n")[2]
    connection.sendall(_answer(200, body[: len(body) // 2]))


def _status(status, body, arrives):
    def act(proxy, connection, request):
        if arrives:
            proxy.ask(request)
        connection.sendall(_answer(status, body))

    return act


def _too_many(proxy, connection, request):
    value = proxy.pick(RETRY_AFTER)
    if value in ("date", "past date"):
        value = email.utils.formatdate(time.time() + (2 if value == "date" else -60), usegmt=True)
    connection.sendall(_answer(429, b"", [] if value is None else [f"Retry-After: {value}"]))


def _stall(proxy, connection, request):
    proxy.ask(request)
    connection.recv(1)  # until the client has given up


def _delay(proxy, connection, request):
    answer = proxy.ask(request)
    threading.Event().wait(DELAY_S)
    connection.sendall(answer)


def _duplicate(proxy, connection, request):
    """It arrives twice at the same time."""
    twin = threading.Thread(target=proxy.ask, args=(request,))
    twin.start()
    connection.sendall(proxy.ask(request))
    twin.join()


def _half_close(proxy, connection, request):
    """It is answered, and then the proxy says that it sends no more, but goes on listening."""
    connection.sendall(proxy.ask(request))
    connection.shutdown(socket.SHUT_WR)
    _read_request(connection)


def _reset_after_answer(proxy, connection, request):
    """It is answered, and then the connection is reset before the next request."""
    connection.sendall(proxy.ask(request))
    reset_at_close(connection)


def _close_at_next(proxy, connection, request):
    """It is answered, and the next request on the same connection arrives without an answer."""
    connection.sendall(proxy.ask(request))
    if following := _read_request(connection):
        proxy.ask(following)


def _restart(proxy, connection, request):
    """It is answered, and then every connection of the proxy is closed."""
    connection.sendall(proxy.ask(request))
    for each in list(proxy._open):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _late_duplicate(proxy, connection, request):
    """It arrives a second time when the next request has been sent."""
    proxy.hold(request)
    connection.sendall(proxy.ask(request))


FAULTS = {
    "drop request": _drop_request,
    "drop reply": _drop_reply,
    "reset in mid-body": _reset_in_body,
    "truncated JSON": _truncate_json,
    "500": _status(500, b'{"error": {"code": "oops", "message": "oops"}}', True),
    "502 HTML": _status(502, b"<html>Bad gateway</html>", False),
    "503": _status(503, b"", False),
    "504": _status(504, b"", True),
    "429": _too_many,
    "408": _status(408, b"", False),
    "stall": _stall,
    "delay": _delay,
    "duplicate": _duplicate,
    "half-closed": _half_close,
    "reset between requests": _reset_after_answer,
    "closed at the next request": _close_at_next,
    "restart": _restart,
    "late duplicate": _late_duplicate,
}
