"""The contract tests as a tool: their report names broken sentences, nothing is left open, every row has a test."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading

import pytest

from contract.deployment import ENDPOINTS, Api, Unspeakable
from loop_runs import ROOT
from processes import contract_command
from whitney_loop import wire
from whitney_loop.local import requests as requests_module
from whitney_loop.local import run as run_module
from whitney_loop.local.requests import ServiceError
from whitney_loop.local.server import Handler, LocalServer
from whitney_loop.local.service import Service

pytestmark = pytest.mark.long

KEY = "the-key-of-this-test"
WAIT_S = 60.0  # a test that fails ends; one that passes waits about a second


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path / "storage")


@pytest.fixture
def base_url(service):
    server = LocalServer(service, KEY)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.base_url
    server.shutdown()
    thread.join()
    server.stop()


def command(base_url, selection, *options):
    return contract_command(base_url, KEY, "-k", selection, *options)


def run(base_url, selection, *options):
    """Return exit code and output, after a check that the output does not hold the key or half of it."""
    done = subprocess.run(
        command(base_url, selection, *options), cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    output = done.stdout + done.stderr
    assert KEY[: len(KEY) // 2] not in output
    assert "Traceback" not in output
    return done.returncode, output


def text_of(output):
    """Return the output with single spaces, as the table wraps sentences in columns."""
    return " ".join(output.split())


def open_sessions(service):
    return [session_id for session_id, session in service._sessions.items() if session.status != "closed"]


# The report


def test_the_report_says_in_one_line_that_all_holds_and_then_what_was_asked_for(base_url, service):
    code, output = run(base_url, "test_3 or formula")
    assert code == 0
    assert "All 3 sentences of the contract that were asked hold, in 3 cases." in output
    assert "not asked, 6 cases: formula values and files are the embedded service's own" in output
    assert re.search(r"What this run asked for:\n  1 sessions, 2 runs, \d+ requests\n  \d+ operations: ", output)
    assert "STILL OPEN" not in output
    assert len(service._sessions) == 1
    assert open_sessions(service) == []


def test_the_table_names_the_broken_sentence_and_no_other(base_url, service, monkeypatch):
    monkeypatch.setattr(run_module, "fingerprint", lambda *_: "the same for all")
    code, output = run(base_url, "test_3 or test_4")
    assert code == 1
    assert "1 of 5 sentences of the contract do not hold:" in output
    row = "[ours] order 4: the same seq_id with another kind expected 409 seq_conflict, found 200"
    assert row in text_of(output)
    assert "order 3" not in output
    assert "Error" not in output
    assert open_sessions(service) == []


def test_the_cases_of_a_sentence_share_a_row(base_url, monkeypatch):
    monkeypatch.setattr(requests_module, "check_optimizer_payload", lambda payload: None)
    code, output = run(base_url, "every_field_of_the_optimizer")
    assert code == 1
    assert "[type] expected 422 invalid_payload, found 200" in text_of(output)
    assert "and 6 more" in text_of(output)


def test_the_first_test_says_why_no_session_can_be_had_and_the_others_are_skipped(base_url):
    code, output = run(base_url, "test_3 or session_is_open", "--contract-provider", "nobody")
    assert code == 1
    assert "1 of 1 sentences of the contract do not hold:" in output
    assert "not asked, 3 cases: nothing can be asked without a session: expected success, found 422" in output


def test_a_deployment_that_cannot_be_reached_is_reported_in_one_sentence():
    code, output = run("http://127.0.0.1:1", "test_3")
    assert code == 2
    assert "this is no deployment that can be asked: GET capabilities: no answer" in output


@pytest.mark.parametrize(
    ("url", "key", "sentence"),
    [
        ("http://whitney.invalid", KEY, "only over https or to loopback"),
        ("https://user:word@whitney.invalid", KEY, "the key has its own option"),
        ("whitney.invalid", KEY, "expected https://HOST"),
        ("https://whitney.invalid", None, "needs --contract-key"),
        ("https://whitney.invalid", "a key\nof two lines", "holds what no header takes"),
    ],
)
def test_a_url_that_could_carry_the_key_astray_is_refused(url, key, sentence):
    with pytest.raises(Unspeakable, match=sentence):
        Api(url, key, "modal", "byte-lm", embedded=False)


def test_a_redirect_is_not_followed(base_url, monkeypatch):
    def redirect(handler, *_):
        handler.send_response(307)
        handler.send_header("Location", f"{base_url}/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(Handler, "_answer", redirect)
    assert Api(base_url, KEY, "modal", "byte-lm", embedded=False).call("GET", "capabilities").status == 307


def test_an_answer_that_is_not_json_is_shown(base_url, monkeypatch):
    answer = Handler._answer

    def answer_in_html(handler, status, body):
        if status != 404:
            answer(handler, status, body)
            return
        handler.send_response(404)
        handler.send_header("Content-Length", "6")
        handler.end_headers()
        handler.wfile.write(b"<html>")

    monkeypatch.setattr(Handler, "_answer", answer_in_html)
    code, output = run(base_url, "request_id")
    assert code == 1
    assert "404 '<html>'" in text_of(output)
    assert "and 2 more" in text_of(output)


def test_the_key_is_in_no_traceback_either(base_url, monkeypatch):
    monkeypatch.setattr(Handler, "_authorise", lambda handler: None)
    code, output = run(base_url, "bearer_token or missing_or_wrong", "--tb=long", "--showlocals")
    assert code == 1
    assert "test_transport.py" in output
    assert "[ours] transport: the key is sent as a bearer token expected 401, found 200" in text_of(output)


def echo(monkeypatch, verbs, words="", form="{}"):
    """Refuse requests with one of the verbs, and echo their key, each character in a form."""

    def refuse(handler, status, body):
        if handler.command not in verbs:
            answer(handler, status, body)
            return
        key = handler.headers["Authorization"].removeprefix("Bearer ")
        echoed = "".join(form.format(letter, ord(letter)) for letter in key)
        content = f'{{"error": {{"code": "unauthorized", "message": "{words}{echoed}"}}}}'.encode()
        handler.send_response(401)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    answer = Handler._answer
    monkeypatch.setattr(Handler, "_answer", refuse)


def test_an_echoed_key_is_not_in_the_sentence_that_ends_the_tests(base_url, monkeypatch):
    echo(monkeypatch, ("GET", "POST"))
    code, output = run(base_url, "test_3")
    assert code == 2
    assert "no deployment that can be asked: expected success, found 401 unauthorized: (key)" in output


@pytest.mark.parametrize("form", ["{}", "\\u{1:04x}", "%{1:02X}"], ids=["plain", "JSON", "percent"])
@pytest.mark.parametrize("words", ["", 135 * "x"], ids=["whole", "cut"])  # 160 characters of an answer are shown
def test_an_echoed_key_is_in_no_row_and_no_local_variable(base_url, monkeypatch, form, words):
    echo(monkeypatch, ("POST",), words, form)
    code, output = run(base_url, "session_is_open", "--tb=long", "--showlocals")
    assert code == 1
    assert "raw=b" in output
    assert f"found 401 unauthorized: {words}(key)" in re.sub(r"(?<=x) (?=[x(])", "", text_of(output))


@pytest.mark.parametrize("word", ["", "no status line, but "])
def test_a_key_in_an_answer_that_is_not_http_is_shown_nowhere(base_url, monkeypatch, word):
    def echo(handler, *_):
        handler.wfile.write(f"{word}{handler.headers['Authorization']}\r\n".encode())
        handler.close_connection = True

    monkeypatch.setattr(Handler, "_answer", echo)
    code, output = run(base_url, "test_3", "--tb=long", "--showlocals", "--full-trace")
    assert code == 2
    assert "GET capabilities: no answer" in output


# Nothing is left open


def test_a_session_that_does_not_close_is_named_with_the_command_that_closes_it(base_url, service, monkeypatch):
    def refuse(*_):
        raise ServiceError(409, "not_now", "not now")

    monkeypatch.setattr(Service, "close_session", refuse)
    code, output = run(base_url, "unknown_operation")
    assert code == 0
    [session_id] = open_sessions(service)
    assert f"STILL OPEN: session {session_id}; close it with: python -m whitney_loop close {session_id}" in output


def test_a_session_whose_creation_got_no_answer_is_found_by_its_key_and_closed(base_url, service, monkeypatch):
    answer, lost = Handler._answer, []

    def lose_the_first_session(handler, status, body):
        if handler.command == "POST" and not lost:
            lost.append(body["session_id"])
            handler.close_connection = True
            return
        answer(handler, status, body)

    monkeypatch.setattr(Handler, "_answer", lose_the_first_session)
    code, output = run(base_url, "session_is_open")
    assert code == 1
    assert "POST sessions: no answer" in output
    assert list(service._sessions) == lost
    assert open_sessions(service) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing_open(base_url, service, monkeypatch, number):
    submit, begun, go_on = Service.submit, threading.Event(), threading.Event()

    def wait_and_submit(*arguments):
        begun.set()
        assert go_on.wait(WAIT_S)
        return submit(*arguments)

    monkeypatch.setattr(Service, "submit", wait_and_submit)
    with subprocess.Popen(command(base_url, "test_3"), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert begun.wait(WAIT_S)
        assert len(open_sessions(service)) == 1
        process.send_signal(number)
        output, _ = process.communicate(timeout=WAIT_S)
        go_on.set()
    assert process.returncode == 2
    assert "KeyboardInterrupt" in output
    assert KEY not in output
    assert open_sessions(service) == []


# Complete


def test_every_path_that_the_client_knows_is_a_row_that_is_tested():
    paths = {value for value in vars(wire).values() if isinstance(value, str) and value.startswith("/v1/")}
    assert {endpoint.split()[1] for endpoint in ENDPOINTS} == paths


def test_every_contract_test_is_marked_doc_or_ours():
    unmarked = "not doc and not ours or doc and ours"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/contract", "--collect-only", "-m", unmarked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
