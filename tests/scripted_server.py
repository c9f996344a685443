"""A server on a loopback port that answers each request as its script says: a service with faults."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass

from listener import GIVES_UP_S, Listener, reset_at_close


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class ScriptedServer(Listener):
    """``script``: for each request, bytes to answer before closing the connection, or a callable that gets it.

    With ``keeps`` a connection stays open after bytes, and is closed after a callable.
    """

    api_key = "key-of-the-test"

    def __init__(self, *script, keeps=False):
        self.script, self.keeps = list(script), keeps
        self.requests: list[Request] = []
        self.connections = []
        super().__init__()

    def __exit__(self, *_):
        for connection in self.connections if self.keeps else ():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        super().__exit__()

    @property
    def asked(self):
        """The last part of each request's path."""
        return [request.path.rpartition("/")[2] for request in self.requests]

    def serve(self, connection):
        self.connections.append(connection)
        with connection:
            connection.settimeout(GIVES_UP_S)
            while request := _read_request(connection):
                self.requests.append(request)
                action = self.script.pop(0) if self.script else refusal(400, "script_ended")
                if callable(action):
                    action(connection)
                    break
                if not self.keeps:
                    connection.sendall(action)
                    break
                connection.sendall(action.replace(b"Connection: close\r\n", b"", 1))


def _read_request(connection):
    stream = connection.makefile("rb")
    first = stream.readline().decode().split()
    if not first:
        return None
    headers = {}
    while line := stream.readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Request(first[0], first[1], headers, stream.read(int(headers.get("content-length", 0))))


def reply(body, status=200, headers=(), declared_length=None):
    """Return an HTTP answer as bytes; ``body`` may be JSON, text or bytes."""
    raw = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Whatever", "Connection: close", *headers]
    if declared_length != "none":
        lines.append(f"Content-Length: {len(raw) if declared_length is None else declared_length}")
    return "\r\n".join([*lines, "", ""]).encode() + raw


class drip:  # noqa: N801 - reads like the functions beside it
    """Answer a byte at a time, slowly, without an end: the pace is the fault, nothing waits for it."""

    def __init__(self, head):
        self.head, self.sent = head, 0

    def __call__(self, connection):
        with contextlib.suppress(OSError):  # the client leaves
            connection.sendall(self.head)
            gone = time.monotonic() + GIVES_UP_S
            while time.monotonic() < gone:
                connection.sendall(b"x")
                self.sent += 1
                threading.Event().wait(0.02)  # and not time.sleep, which a test may patch


def refusal(status, code, headers=(), **extra):
    error = {"code": code, "message": f"this is {code}", "retryable": False, **extra}
    return reply({"error": error, "request_id": "req-7"}, status, headers)


def operation(status="succeeded", result=None, seq_id=1, **fields):
    body = {"operation_id": "op-1", "run_id": "run-1", "kind": "optim_step", "seq_id": seq_id, "status": status}
    return reply(body | {"result": {"answer": 42} if result is None else result, "error": None} | fields)


def run(status="active", next_seq_id=1):
    return reply({"run_id": "run-1", "session_id": "ses-1", "status": status, "next_seq_id": next_seq_id})


# The answer of a service that offers what a loop needs.
OFFER = reply({"operations": ["forward_backward", "optim_step", "save_weights_for_sampler", "sample"]})


def drop(connection):
    """Close without an answer: the request arrived, the reply is lost."""


def reset_after(sent):
    def act(connection):
        connection.sendall(sent)
        reset_at_close(connection)

    return act


def stall(connection):
    """Say nothing until the client has given up."""
    connection.recv(1)


def interrupt(connection):
    """Say nothing until the client, which is in this process, was ended by Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    stall(connection)
