"""The HTTP front: malformed requests, limits, headers, the end of the server, the command line."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from local.bench import WAIT_S, in_thread
from whitney_loop.local import serve, server
from whitney_loop.local.byte_lm import ByteLMBackend
from whitney_loop.local.engine import EngineError
from whitney_loop.local.server import MAX_BODY_BYTES, Handler
from whitney_loop.local.service import Service

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("storage")) as running:
        yield running


def address(served):
    host, port = served.base_url.removeprefix("http://").split(":")
    return host, int(port)


def parsed(raw):
    """Return status, headers and body of an answer in bytes, which is always JSON."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    return int(status_line.split()[1]), headers, json.loads(body)


def send(served, *lines, body=b"", authorised=True):
    """Send the lines unchanged as a request, and read until the server closes."""
    if authorised:
        lines = (*lines, f"Authorization: Bearer {served.api_key}")
    request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
    with socket.create_connection(address(served), timeout=WAIT_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    return parsed(raw)


def post(served, body, *lines):
    head = ("POST /v1/training/sessions HTTP/1.1", f"Content-Length: {len(body)}", *lines)
    return send(served, *head, body=body)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("NONSENSE", 400),
        ("GET", 400),
        ("GET / HTTP/x.y", 400),
        ("GET / HTTP/3.0", 505),
        ("BREW / HTTP/1.1", 501),
        ("GET /" + "x" * 70_000 + " HTTP/1.1", 414),
        ("GET / HTTP/1.1\r\nX: " + "x" * 70_000, 431),
        ("GET / HTTP/1.1" + "\r\nX: y" * 200, 431),
    ],
)
def test_refusals_of_http_server_itself_are_json(served, line, status):
    found, _, body = send(served, line)
    assert found == status
    assert body["error"].keys() >= {"code", "message", "retryable"}


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("POST", "capabilities", "GET"),
        ("GET", "sessions", "POST"),
        ("DELETE", "sessions/ses-1", "GET"),
        ("PUT", "runs/run-1/operations", "POST"),
        ("PATCH", "runs/run-1", "GET"),
        ("OPTIONS", "runs/run-1/finish", "POST"),
    ],
)
def test_another_method_is_told_which_one_is_allowed(served, verb, path, allowed):
    status, headers, body = send(served, f"{verb} /v1/training/{path} HTTP/1.1", "Connection: close")
    assert (status, headers["allow"], body["error"]["code"]) == (405, allowed, "method_not_allowed")


def test_an_answer_to_head_has_no_body(served):
    with socket.create_connection(address(served), timeout=WAIT_S) as connection:
        connection.sendall(b"HEAD /v1/training/capabilities HTTP/1.1\r\nConnection: close\r\n\r\n")
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    assert raw.startswith(b"HTTP/1.1 401 ")
    assert raw.endswith(b"\r\n\r\n")


def test_the_key_is_asked_for_before_anything_else(served):
    for line in ("DELETE /nowhere HTTP/1.1", "POST /v1/training/sessions HTTP/1.1\r\nContent-Length: x"):
        status, headers, body = send(served, line, "Connection: close", authorised=False)
        assert (status, body["error"]["code"]) == (401, "unauthorized")
        assert headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/", "//", "/v1/training", "/v1/training/sessions/", "//[", "/v1/training/runs/a%2Fb/x"]
)
def test_an_unknown_path_is_not_found(served, path):
    status, _, body = send(served, f"GET {path} HTTP/1.1", "Connection: close")
    assert (status, body["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("lines", [["Transfer-Encoding: chunked"], ["Transfer-Encoding: chunked", "Content-Length: 2"]])
def test_a_body_in_chunks_is_refused(served, lines):
    status, _, body = send(served, "POST /v1/training/sessions HTTP/1.1", *lines, body=b"2\r\n{}\r\n0\r\n\r\n")
    assert (status, body["error"]["code"]) == (411, "length_required")


@pytest.mark.parametrize("length", ["-1", "x", "1_0", "+2", "0x2", "", "2\r\nContent-Length: 3", "9" * 5000])
def test_a_content_length_is_a_count(served, length):
    status, headers, body = send(served, "POST /v1/training/sessions HTTP/1.1", f"Content-Length: {length}", body=b"{}")
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert headers["connection"] == "close"


def test_a_body_beyond_the_limit_is_refused_unread(served):
    line = f"Content-Length: {MAX_BODY_BYTES + 1}"
    status, headers, body = send(served, "POST /v1/training/sessions HTTP/1.1", line, body=b"{")
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert headers["connection"] == "close"


def test_a_client_that_sends_a_body_beyond_the_limit_still_reads_the_answer(served):
    connection = http.client.HTTPConnection(*address(served), timeout=WAIT_S)
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {served.api_key}"}
        connection.request("POST", "/v1/training/sessions", body=bytes(MAX_BODY_BYTES + 1), headers=headers)
        assert connection.getresponse().status == 413


def test_a_body_that_ends_early_is_refused(served):
    status, _, body = send(served, "POST /v1/training/sessions HTTP/1.1", "Content-Length: 10", body=b"{}")
    assert (status, body["error"]["code"]) == (400, "invalid_json")
    assert "2 of 10 bytes" in body["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b"\xef\xbb\xbf{}",
        b"{'provider': 'modal'}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"provider": ' + b"9" * 5_000 + b"}",
        b'{"provider": NaN}',
        b'{"provider": "modal"} x',
    ],
)
def test_a_body_that_is_not_json_is_refused(served, raw):
    status, _, body = post(served, raw)
    assert (status, body["error"]["code"]) == (400, "invalid_json")


def test_a_body_nested_as_deeply_as_json_allows_is_no_fault_of_the_service(served):
    for depth in range(100, 1200, 100):
        raw = b'{"kind": "forward", "seq_id": 1, "payload": {"data": ' + b"[" * depth + b"]" * depth + b"}}"
        status, _, body = send(
            served,
            f"POST /v1/training/runs/{a_run(served)}/operations HTTP/1.1",
            f"Content-Length: {len(raw)}",
            body=raw,
        )
        assert status in (400, 422), body


def a_run(served):
    session_id = call(served, "POST", "sessions", {"provider": "modal"})["session_id"]
    return call(served, "POST", f"sessions/{session_id}/runs", {"model": "byte-lm", "lora": {"rank": 1}})["run_id"]


def call(served, verb, path, body=None):
    request = urllib.request.Request(
        f"{served.base_url}/v1/training/{path}",
        data=None if body is None else json.dumps(body).encode(),
        method=verb,
        headers={"Authorization": f"Bearer {served.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.load(answer)


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_an_idempotency_key_is_of_limited_length(served, key):
    status, _, body = post(served, b'{"provider": "modal"}', f"Idempotency-Key: {key}")
    assert (status, body["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("key", ["x", "x" * 200])
def test_an_idempotency_key_of_1_to_200_characters_is_taken(served, key):
    made = [post(served, b'{"provider": "modal"}', f"Idempotency-Key: {key}")[2]["session_id"] for _ in range(2)]
    assert made[0] == made[1]


def test_without_an_idempotency_key_a_new_session_is_made(served):
    made = [post(served, b'{"provider": "modal"}')[2]["session_id"] for _ in range(2)]
    assert made[0] != made[1]


@pytest.mark.parametrize("wait", ["", "x", "-1", "nan", "inf", "1e999"])
def test_a_bad_wait_is_refused(served, wait):
    status, _, body = send(served, f"GET /v1/training/runs/r/operations/o?wait_s={wait} HTTP/1.1", "Connection: close")
    assert (status, body["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(("length", "sent"), [([], b""), (["Content-Length: 0"], b""), (["Content-Length: 2"], b"{}")])
def test_finish_cancel_and_close_need_no_body(served, length, sent):
    for verb, ended in (("finish", "finished"), ("cancel", "cancelled")):
        line = f"POST /v1/training/runs/{a_run(served)}/{verb} HTTP/1.1"
        status, headers, body = send(served, line, *length, body=sent)
        assert (status, body["status"]) == (200, ended)
        assert "connection" not in headers  # it is kept
    session_id = call(served, "POST", "sessions", {"provider": "modal"})["session_id"]
    status, _, body = send(served, f"POST /v1/training/sessions/{session_id}/close HTTP/1.1", *length, body=sent)
    assert (status, body["status"]) == (200, "closed")


def test_a_post_that_needs_an_object_and_has_no_body_is_invalid_json(served):
    run = f"runs/{a_run(served)}"
    for path in ("sessions", "sessions/ses-1/runs", f"{run}/operations", f"{run}/samplers/smp-1/operations"):
        status, headers, body = send(served, f"POST /v1/training/{path} HTTP/1.1")
        assert (status, body["error"]["code"]) == (400, "invalid_json")
        assert "connection" not in headers


def test_a_post_without_a_body_is_followed_by_the_next_request(served):
    head = f"POST /v1/training/runs/{a_run(served)}/cancel HTTP/1.1\r\nAuthorization: Bearer {served.api_key}\r\n\r\n"
    with socket.create_connection(address(served), timeout=WAIT_S) as connection:
        connection.sendall(2 * head.encode())
        connection.shutdown(socket.SHUT_WR)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+) ", raw) == [b"200", b"200"]


def test_the_request_id_of_an_error_is_that_of_the_header(served):
    status, headers, body = send(served, "GET /nowhere HTTP/1.1", "Connection: close")
    assert (status, body["request_id"]) == (404, headers["x-request-id"])


def test_a_fault_of_the_service_is_logged_and_shows_nothing_of_its_inside(served, monkeypatch, caplog):
    monkeypatch.setattr(Service, "capabilities", lambda self: 1 / 0)
    status, _, body = send(served, "GET /v1/training/capabilities HTTP/1.1", "Connection: close")
    assert (status, body["error"]["code"], body["error"]["retryable"]) == (500, "internal_error", True)
    assert "division" not in str(body)
    assert "ZeroDivisionError" in caplog.text


def test_one_connection_serves_one_request_after_the_other(served):
    connection = http.client.HTTPConnection(*address(served), timeout=WAIT_S)
    headers = {"Authorization": f"Bearer {served.api_key}"}
    with contextlib.closing(connection):
        connection.connect()
        kept = connection.sock
        for body, status in [(b"{", 400), (b'{"provider": "modal"}', 200), (b'{"provider": ""}', 422)]:
            connection.request("POST", "/v1/training/sessions", body=body, headers=headers)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)
            assert connection.sock is kept


def test_a_client_that_asks_whether_to_send_is_told_to(served):
    with socket.create_connection(address(served), timeout=WAIT_S) as connection:
        lines = ["POST /v1/training/sessions HTTP/1.1", "Content-Length: 2", "Expect: 100-continue"]
        head = "\r\n".join([*lines, f"Authorization: Bearer {served.api_key}", "", ""])
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 422 ")


def test_a_client_that_sends_nothing_more_is_let_go(served, monkeypatch):
    monkeypatch.setattr(Handler, "timeout", 0.05)
    with socket.create_connection(address(served), timeout=WAIT_S) as connection:
        connection.sendall(b"GET /v1")
        assert connection.recv(1) == b""


def test_a_client_that_sends_a_byte_now_and_then_is_let_go_too(served, monkeypatch):
    monkeypatch.setattr(server, "_REQUEST_S", 0.2)
    with socket.create_connection(address(served), timeout=WAIT_S) as connection:
        connection.sendall(b"GET /")
        connection.setblocking(False)
        gone = time.monotonic() + WAIT_S
        while time.monotonic() < gone:
            time.sleep(0.02)  # the pace is the trouble
            try:
                connection.sendall(b"x")
                if connection.recv(1) == b"":
                    return
            except BlockingIOError:
                continue
            except ConnectionError:
                return
    pytest.fail("it was served for ever")


def test_a_client_that_waits_for_an_answer_does_not_count_as_slow(tmp_path, monkeypatch):
    made, begin = [], server.LocalServer.__init__
    monkeypatch.setattr(server.LocalServer, "__init__", lambda self, *given: made.append(self) or begin(self, *given))
    monkeypatch.setattr(Service, "operation", lambda self, *_: {"reading": len(made[0].reading)})
    with serve(tmp_path) as served:
        assert call(served, "GET", "runs/run-1/operations/op-1?wait_s=20") == {"reading": 0}


def test_connections_are_limited_in_number(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 1)
    with serve(tmp_path) as served, socket.create_connection(address(served), timeout=WAIT_S) as first:
        first.sendall(b"GET /")
        with socket.create_connection(address(served), timeout=WAIT_S) as second:
            with contextlib.suppress(ConnectionError):
                assert second.recv(1) == b""


def test_accepting_pauses_if_no_connection_can_be_opened(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    listening = server.LocalServer(Service(tmp_path), "key")
    listening.socket.close()  # accept fails from now on
    with pytest.raises(OSError):
        listening.get_request()
    assert pauses == [server._PAUSE_S]


# The end of the server


def test_serve_leaves_no_thread_and_no_open_port(tmp_path):
    before = set(threading.enumerate())
    with serve(tmp_path) as served:
        a_run(served)
        idle = http.client.HTTPConnection(*address(served), timeout=WAIT_S)
        idle.request("GET", "/")
        idle.getresponse().read()
    assert set(threading.enumerate()) <= before
    with contextlib.closing(idle):
        assert idle.sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(served), timeout=WAIT_S)


def test_a_waiting_long_poll_is_answered_when_the_server_ends(tmp_path, monkeypatch):
    polling = threading.Event()
    wait = Service.operation

    def operation(self, *arguments):
        polling.set()
        return wait(self, *arguments)

    monkeypatch.setattr(Service, "operation", operation)
    gate = threading.Event()
    monkeypatch.setattr("whitney_loop.local.byte_lm.ByteLM.sampler", lambda self: gate.wait(WAIT_S) and 1 / 0)
    with serve(tmp_path) as served:
        run_id = a_run(served)
        posted = [
            call(served, "POST", f"runs/{run_id}/operations", {"kind": kind, "seq_id": seq_id, "payload": {}})
            for seq_id, kind in enumerate(["save_weights_for_sampler", "save_state"], start=1)
        ]
        path = f"runs/{run_id}/operations/{posted[1]['operation_id']}?wait_s=60"
        poll = in_thread(call, served, "GET", path)
        assert polling.wait(WAIT_S)
        gate.set()
    assert poll.result(WAIT_S)["status"] in ("cancelled", "running", "succeeded")  # as it was when the service ended


def test_serve_keeps_states_in_the_current_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve() as served:
        run_id = a_run(served)
        operation = call(
            served, "POST", f"runs/{run_id}/operations", {"kind": "save_state", "seq_id": 1, "payload": {}}
        )
        call(served, "GET", f"runs/{run_id}/operations/{operation['operation_id']}?wait_s=20")
    assert [path.name for path in tmp_path.iterdir()] == [".whitney_local"]


def test_an_engine_that_cannot_be_made_is_no_fault_of_the_service(tmp_path):
    """A 5xx would be retried; a 422 and a failed run give the engine's words at once."""

    class Full(ByteLMBackend):
        largest_rank = 8

        def new_run(self, **_):
            raise EngineError("out_of_memory", "no room for another adapter")

    with serve(tmp_path, engine=Full()) as served:
        path = f"sessions/{call(served, 'POST', 'sessions', {'provider': 'modal'})['session_id']}/runs"
        run = call(served, "POST", path, {"model": "byte-lm", "lora": {"rank": 8}})
        assert (run["status"], run["error"]["message"]) == ("failed", "no room for another adapter")
        body = json.dumps({"model": "byte-lm", "lora": {"rank": 9}}).encode()
        line = f"Content-Length: {len(body)}"
        status, _, refused = send(served, f"POST /v1/training/{path} HTTP/1.1", line, body=body)
        assert (status, refused["error"]["retryable"]) == (422, False)
        assert "lora.rank is 9; expected an integer from 1 to 8" in refused["error"]["message"]


def test_the_key_is_not_in_the_repr(served):
    assert served.api_key not in repr(served)
    assert served.base_url in repr(served)


def test_it_listens_on_loopback_only(served):
    assert address(served)[0] == "127.0.0.1"


# The command line


@contextlib.contextmanager
def command(tmp_path, *options, **environment):
    arguments = [sys.executable, "-m", "whitney_loop.local", "--storage", str(tmp_path), *options]
    inherited = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        arguments, env=inherited | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def served_by(process, key=None):
    """Return URL and key that the command printed, as an object like that of ``serve``; and the text so far."""
    printed = "".join(process.stdout.readline() for _ in range(3))
    url = re.search(r"^WHITNEY_BASE_URL=(\S+)$", printed, re.MULTILINE)[1]
    said_key = re.search(r"^WHITNEY_API_KEY=(.+)$", printed, re.MULTILINE)[1]

    class Served:
        base_url = url
        api_key = key or said_key

    return Served, printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(tmp_path, number):
    with command(tmp_path, "--port", "0") as process:
        served, _ = served_by(process)
        assert "modal" in call(served, "GET", "capabilities")["providers"]
        a_run(served)
        process.send_signal(number)
        rest = process.communicate(timeout=WAIT_S)
        assert (process.returncode, rest) == (0, ("", ""))


def test_the_command_ends_without_a_traceback_while_its_engine_loads(tmp_path):
    (tmp_path / "mine.py").write_text(
        'import threading\n\ndef make():\n    print("loading", flush=True)\n    threading.Event().wait()\n'
    )
    with command(tmp_path, "--engine", "mine:make", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}") as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WAIT_S) == ("", "") and process.returncode == 0


def test_the_command_serves_another_engine(tmp_path):
    options = ["--engine", "whitney_loop.local.byte_lm:ByteLMBackend"]
    with command(tmp_path, "--port", "0", *options) as process:
        served, printed = served_by(process)
        assert printed.startswith("Serving byte-lm by byte-lm. Storage: ")
        assert call(served, "GET", "capabilities")["providers"]["modal"]["models"] == ["byte-lm"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "nowhere:make"], "nowhere"),
        (["--engine", "whitney_loop.local.byte_lm:ByteLMBackend", "--engine-option", "x=1"], "has no 'x'"),
        (["--engine-option", "x=1"], "--engine-option needs --engine"),
    ],
)
def test_an_engine_that_cannot_be_made_ends_the_command_before_a_port_is_opened(tmp_path, options, message):
    with command(tmp_path, "--port", "0", *options) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "")
    assert message in err


def test_the_command_never_prints_the_key_of_the_environment(tmp_path):
    with command(tmp_path, "--port", "0", WHITNEY_API_KEY="from-the-environment") as process:
        served, printed = served_by(process, key="from-the-environment")
        assert "modal" in call(served, "GET", "capabilities")["providers"]
        process.send_signal(signal.SIGTERM)
        assert "from-the-environment" not in printed + "".join(process.communicate(timeout=WAIT_S))


def test_the_command_listens_on_the_given_host_and_warns(tmp_path):
    with command(tmp_path, "--port", "0", "--host", "127.0.0.2", WHITNEY_API_KEY="key-of-the-test") as process:
        served, _ = served_by(process, key="key-of-the-test")
        assert address(served)[0] == "127.0.0.2"
        assert "modal" in call(served, "GET", "capabilities")["providers"]
        process.send_signal(signal.SIGTERM)
        assert "warning: the key and all data cross the network unencrypted" in process.communicate(timeout=WAIT_S)[1]


def test_a_taken_port_is_one_line_and_exit_2(tmp_path, served):
    port = str(address(served)[1])
    with command(tmp_path, "--port", port) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "")
    assert port in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_an_invalid_port_is_refused(tmp_path, port):
    with command(tmp_path, f"--port={port}") as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "--port" in err


def test_a_state_survives_a_restart(tmp_path):
    with command(tmp_path, "--port", "0") as process:
        served, _ = served_by(process)
        path = f"runs/{a_run(served)}/operations"
        operation = call(served, "POST", path, {"kind": "save_state", "seq_id": 1, "payload": {}})
        state_id = call(served, "GET", f"{path}/{operation['operation_id']}?wait_s=20")["result"]["state_id"]
    with command(tmp_path, "--port", "0") as process:
        served, _ = served_by(process)
        session_id = call(served, "POST", "sessions", {"provider": "modal"})["session_id"]
        body = {"model": "byte-lm", "lora": {"rank": 1}, "resume_from": state_id}
        assert call(served, "POST", f"sessions/{session_id}/runs", body)["status"] == "active"
