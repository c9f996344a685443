"""The client against a service that misbehaves as a script says, over real connections."""

import contextlib
import email.utils
import json
import logging
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripted_server import ScriptedServer, drip, drop, operation, refusal, reply, reset_after, run, stall
from whitney_loop import (
    ConfigurationError,
    OperationFailed,
    OperationTimeout,
    RequestRejected,
    RunBroken,
    ServiceUnavailable,
    UnexpectedResponse,
    WhitneyClient,
    WhitneyError,
    lora_run,
    result_sampler_id,
    result_sequences,
    training_session,
    transport,
)
from whitney_loop import client as client_module
from whitney_loop.local import serve

KEY = "key-that-no-one-may-see"


@pytest.fixture
def pauses(monkeypatch):
    """The client's pauses, in seconds, which here take no time."""
    taken = []
    monkeypatch.setattr(time, "sleep", taken.append)
    return taken


@pytest.fixture
def gives_up_at_once(monkeypatch):
    """At the first trouble there is no time left for the pause."""
    monkeypatch.setattr(transport, "_backoff_s", lambda _: float("inf"))


def client_of(server, **seconds):
    return WhitneyClient(server.base_url, KEY, **seconds)


def step(client):
    return client.run_operation("run-1", "optim_step", {"optimizer": {}})


# What is asked again, and with which bytes


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(drop, id="reply lost"),
        pytest.param(reset_after(b""), id="reset before the reply"),
        pytest.param(reset_after(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"oper'), id="reset in mid-body"),
        pytest.param(reply('{"operation_id": "op', declared_length=99), id="shorter than declared"),
        pytest.param(reply('{"operation_id": "op', declared_length="none"), id="truncated JSON"),
        pytest.param(reply(""), id="no body"),
        pytest.param(b"nonsense\r\n\r\n", id="no HTTP"),
        *[pytest.param(refusal(status, "busy"), id=str(status)) for status in (408, 429, 500, 502, 503, 504)],
        pytest.param(reply("<html>Bad gateway</html>", 502), id="HTML 502"),
    ],
)
def test_an_operation_is_sent_again_with_the_same_bytes_until_it_is_answered(trouble, pauses):
    with ScriptedServer(run(), trouble, trouble, operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    sent = server.requests[1:]
    assert len(sent) == 3 and len(pauses) == 2
    assert {(request.method, request.path, request.body) for request in sent} == {
        ("POST", "/v1/training/runs/run-1/operations", sent[0].body)
    }
    assert sent[0].json == {"kind": "optim_step", "seq_id": 1, "payload": {"optimizer": {}}}
    assert sent[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_session_that_is_asked_for_again_carries_the_same_idempotency_key(pauses):
    with ScriptedServer(drop, reply({"session_id": "ses-1"}, 201)) as server:
        assert client_of(server).create_session("modal") == "ses-1"
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert keys[0] == keys[1] and len(keys[0]) >= 32


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422])
def test_a_refusal_is_not_asked_again(status):
    with ScriptedServer(run(), refusal(status, "no")) as server, pytest.raises(RequestRejected) as caught:
        step(client_of(server))
    error = caught.value
    assert (error.method, error.path) == ("POST", "/v1/training/runs/run-1/operations")
    assert (error.status, error.code, error.request_id, error.seq_id) == (status, "no", "req-7", 1)
    assert (error.attempts, error.outcome) == (1, "rejected")
    assert "this is no" in str(error) and len(server.requests) == 2


def test_a_redirect_is_refused_and_the_key_goes_nowhere_else():
    with ScriptedServer() as elsewhere:
        moved = reply("", 307, [f"Location: {elsewhere.base_url}/"])
        with ScriptedServer(run(), moved) as server, pytest.raises(RequestRejected, match="redirect"):
            step(client_of(server))
    assert elsewhere.requests == []


# Some Pythons read any integer, and later ones nest deeper.
BEYOND_PYTHON = [b'{"x": ' + b"9" * 5000 + b"}", b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"]


@pytest.mark.parametrize("body", BEYOND_PYTHON, ids=["digits", "nesting"])
def test_json_that_python_can_not_read_is_reported_at_once(body):
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)
        pytest.skip("this Python reads it")
    with ScriptedServer(run(), reply(body)) as server, pytest.raises(UnexpectedResponse) as caught:
        step(client_of(server))
    assert "JSON that Python can not read: " in str(caught.value)
    assert (caught.value.outcome, caught.value.attempts, caught.value.status) == ("unknown", 1, 200)


@pytest.mark.parametrize("body", BEYOND_PYTHON, ids=["digits", "nesting"])
def test_a_refusal_in_json_that_python_can_not_read_is_a_refusal(body):
    with ScriptedServer(run(), reply(body, 422)) as server, pytest.raises(RequestRejected) as caught:
        step(client_of(server))
    assert (caught.value.outcome, caught.value.status) == ("rejected", 422)


@pytest.mark.parametrize("answered", [200, 400, 500])
def test_a_body_that_was_cut_off_is_reported_with_its_status_and_first_bytes(answered, gives_up_at_once):
    cut = reply('{"error": {"co', answered, declared_length=100)
    with ScriptedServer(cut) as server, pytest.raises(WhitneyError) as caught:
        client_of(server).capabilities()
    assert caught.value.status == answered and '{"error": {"co' in str(caught.value)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("status", [100, 102, 103, 199])
def test_an_interim_answer_is_passed_over(status, count):
    interim = f"HTTP/1.1 {status} Wait\r\nLink: </x>\r\nContent-Length: 7\r\n\r\n".encode() * count
    with ScriptedServer(run(), interim + operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert len(server.requests) == 2


def test_interim_answers_without_end_are_trouble_with_an_unknown_outcome(gives_up_at_once):
    with ScriptedServer(run(), b"HTTP/1.1 103 Early Hints\r\n\r\n" * 200) as server:
        with pytest.raises(ServiceUnavailable, match="more than 100 interim answers") as caught:
            step(client_of(server))
    assert caught.value.outcome == "unknown"


@pytest.mark.parametrize("answered", [101, 200, 201, 204, 299])
def test_no_answer_below_300_is_a_refusal(answered, gives_up_at_once):
    with ScriptedServer(run(), reply("", answered)) as server, pytest.raises(WhitneyError) as caught:
        step(client_of(server))
    assert caught.value.outcome == "unknown" and caught.value.status == answered


def test_a_page_in_place_of_the_api_is_reported_at_once_with_its_first_bytes():
    with ScriptedServer(reply("<html>Welcome</html>")) as server, pytest.raises(UnexpectedResponse) as caught:
        client_of(server).capabilities()
    assert "<html>Welcome" in str(caught.value) and caught.value.status == 200


# How long to wait before asking again


def http_date(seconds_from_now):
    return email.utils.formatdate(time.time() + seconds_from_now, usegmt=True)


def pause_after(retry_after, pauses):
    with ScriptedServer(run(), refusal(429, "busy", [f"Retry-After: {retry_after}"]), operation()) as server:
        step(client_of(server))
    return pauses[0]


def test_a_retry_after_shorter_than_the_pause_does_not_shorten_it(pauses, monkeypatch):
    monkeypatch.setattr(transport, "_backoff_s", lambda _: 0.4)
    assert pause_after("0.0001", pauses) == 0.4


@pytest.mark.parametrize("value", ["7", "1.5"])
def test_retry_after_is_honoured_in_seconds(value, pauses):
    assert pause_after(value, pauses) == float(value)


def test_retry_after_is_honoured_as_a_date(pauses):
    assert 30 <= pause_after(http_date(40), pauses) <= 40


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "soon", "", "1e3", "Mon, 99 Foo 2026", http_date(-40)])
def test_a_nonsensical_retry_after_is_ignored(value, pauses):
    assert 0 <= pause_after(value, pauses) <= 2 * transport._FIRST_BACKOFF_S


def test_a_retry_after_beyond_what_is_left_ends_the_retrying_and_says_so(pauses):
    with ScriptedServer(run(), refusal(429, "busy", ["Retry-After: 400"])) as server:
        client = client_of(server)
        with pytest.raises(ServiceUnavailable, match="asks to wait 400 s, and 300 s are left") as caught:
            step(client)
    assert pauses == [] and caught.value.outcome == "rejected" and caught.value.code == "busy"


def test_a_retry_after_of_any_length_is_a_number(pauses):
    with ScriptedServer(run(), refusal(429, "busy", [f"Retry-After: {'9' * 400}"])) as server:
        with pytest.raises(ServiceUnavailable, match="asks to wait inf s"):
            step(client_of(server))


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_an_answer_that_drips_is_ended_with_the_exchange(head, pauses):
    with ScriptedServer(run(), drip(head), operation()) as server:
        monotonic = time.monotonic()
        step(client_of(server, exchange_timeout_s=0.3))
        assert time.monotonic() - monotonic < 3  # and not the 10 s that the server would go on
    assert len(server.requests) == 3


def test_the_pause_grows_at_random_up_to_a_ceiling(monkeypatch):
    monkeypatch.setattr(transport.random, "uniform", lambda low, high: (low, high))
    assert [transport._backoff_s(attempts) for attempts in (1, 2, 3, 50)] == [(0, 0.5), (0, 1), (0, 2), (0, 20)]


def test_retries_are_logged_without_the_key(pauses, caplog):
    echo = reply(f"<html>Authorization: Bearer {KEY}</html>", 502)
    with caplog.at_level(logging.WARNING, "whitney_loop"), ScriptedServer(run(), echo, operation()) as server:
        step(client_of(server))
    [record] = caplog.records
    assert record.name == "whitney_loop" and "answered 502" in record.getMessage()
    assert "[key]" in record.getMessage() and KEY not in caplog.text


# What is known when it ends


def test_where_the_answer_never_comes_the_outcome_is_unknown_and_the_run_is_broken():
    with ScriptedServer(run(), stall, reply({"run_id": "run-1", "status": "cancelled"})) as server:
        client = client_of(server, submit_timeout_s=0.3, exchange_timeout_s=0.3)
        with pytest.raises(ServiceUnavailable) as caught:
            step(client)
        assert caught.value.outcome == "unknown" and caught.value.seq_id == 1
        with pytest.raises(RunBroken, match=r"outcome of optim_step \(seq_id 1\) is unknown") as broken:
            step(client)
        assert broken.value.outcome == "not_sent"
        assert client.cancel("run-1")["status"] == "cancelled"
    assert len(server.requests) == 3


def test_where_no_connection_was_ever_made_nothing_was_sent_and_the_run_goes_on(pauses):
    with ScriptedServer(run()) as server:
        client = client_of(server, submit_timeout_s=0.5)
        client._order("run-1").next_seq_id = client._next_seq_id("run-1")
    with pytest.raises(ServiceUnavailable, match="ConnectionRefused") as caught:
        step(client)
    assert caught.value.outcome == "not_sent" and caught.value.attempts >= 1
    assert client._order("run-1").broken is None


def test_a_refused_operation_takes_no_number():
    with ScriptedServer(run(next_seq_id=5), refusal(422, "invalid_payload"), operation(seq_id=5)) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected):
            step(client)
        step(client)
    assert [request.json["seq_id"] for request in server.requests[1:]] == [5, 5]


def test_a_payload_that_is_no_json_takes_no_number_and_sends_nothing():
    with ScriptedServer(run(), operation()) as server:
        client = client_of(server)
        for payload in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises(ValueError, match="the payload is no JSON"):
                client.run_operation("run-1", "forward_backward", payload)
        step(client)
    assert [request.method for request in server.requests] == ["GET", "POST"]


@pytest.mark.parametrize(("code", "broken"), [("seq_conflict", True), ("seq_gap", True), ("run_not_active", False)])
def test_a_conflict_is_never_asked_again_and_a_lost_order_breaks_the_run(code, broken):
    with ScriptedServer(run(), refusal(409, code)) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert caught.value.attempts == 1
        assert (client._order("run-1").broken is not None) is broken


def test_a_key_that_is_refused_after_a_lost_reply_does_not_settle_the_outcome(pauses):
    with ScriptedServer(run(), drop, refusal(401, "unauthorized")) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert caught.value.outcome == "unknown"
        with pytest.raises(RunBroken):
            step(client)


def test_an_interrupt_while_sending_leaves_the_outcome_unknown():
    def interrupt(connection):
        os.kill(os.getpid(), signal.SIGINT)
        stall(connection)

    with ScriptedServer(run(), interrupt) as server:
        client = client_of(server)
        with pytest.raises(KeyboardInterrupt):
            step(client)
        with pytest.raises(RunBroken):
            step(client)


def test_a_failed_operation_says_why_and_the_run_goes_on():
    failed = operation("failed", error={"code": "no_gradients", "message": "nothing to step on", "retryable": False})
    with ScriptedServer(run(), failed, operation(seq_id=2)) as server:
        client = client_of(server)
        with pytest.raises(OperationFailed, match="optim_step failed: nothing to step on") as caught:
            step(client)
        assert (caught.value.code, caught.value.outcome, caught.value.seq_id) == ("no_gradients", "failed", 1)
        assert step(client) == {"answer": 42}


# Waiting for the result


def test_a_long_poll_past_the_read_timeout_is_asked_again_and_is_no_error(caplog):
    with ScriptedServer(run(), operation("queued"), stall, operation()) as server:
        assert step(client_of(server, exchange_timeout_s=0.2)) == {"answer": 42}
    assert polls(server) == ["wait_s=20", "wait_s=0"]
    assert caplog.records == []


def polls(server):
    paths = [request.path.partition("?") for request in server.requests[2:]]
    assert {path for path, _, _ in paths} == {"/v1/training/runs/run-1/operations/op-1"}
    return [query for _, _, query in paths]


def test_a_poll_that_ends_with_408_is_no_trouble_however_often(pauses, caplog):
    with ScriptedServer(run(), operation("queued"), *[refusal(408, "not_yet")] * 6, operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert pauses == [0.02 * 2**k for k in range(6)] and caplog.records == []


def test_a_gateway_that_cuts_held_polls_off_is_asked_for_short_ones_in_between(pauses, caplog):
    cut = refusal(504, "gateway_timeout")
    with ScriptedServer(run(), operation("queued"), cut, operation("running"), cut, operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert polls(server) == ["wait_s=20", "wait_s=0"] * 2
    assert caplog.records == []


def test_a_poll_that_was_not_held_and_has_no_answer_is_trouble(pauses):
    with ScriptedServer(run(), operation("queued"), *[refusal(504, "gateway_timeout")] * 2) as server:
        with pytest.raises(RequestRejected, match="script_ended"):
            step(client_of(server))
    assert polls(server) == ["wait_s=20", "wait_s=0", "wait_s=0"]


def test_a_server_that_does_not_hold_the_poll_is_polled_with_a_growing_pause(pauses):
    running = [operation("running")] * 6
    with ScriptedServer(run(), operation("queued"), *running, operation()) as server:
        step(client_of(server))
    assert pauses == [0.02 * 2**k for k in range(6)]


def test_trouble_while_waiting_is_ridden_out(pauses):
    with ScriptedServer(run(), operation("running"), drop, refusal(503, "busy"), operation()) as server:
        assert step(client_of(server)) == {"answer": 42}


def test_operations_are_submitted_in_order_before_the_first_result_is_awaited():
    script = [operation("queued", seq_id=seq_id, operation_id=f"op-{seq_id}") for seq_id in (1, 2)]
    script += [operation(seq_id=seq_id, operation_id=f"op-{seq_id}", result={"n": seq_id}) for seq_id in (1, 2)]
    with ScriptedServer(run(), *script) as server:
        client = client_of(server)
        pending = [client.submit_operation("run-1", "optim_step", {}) for _ in range(2)]
        assert [handle.seq_id for handle in pending] == [1, 2]
        assert [handle.result() for handle in pending] == [{"n": 1}, {"n": 2}]
        assert pending[0].result() == {"n": 1}  # kept: not asked for again
    assert [request.method for request in server.requests] == ["GET", "POST", "POST", "GET", "GET"]


def test_two_threads_that_wait_for_one_result_ask_for_it_once():
    asked, answer = threading.Event(), threading.Event()

    def held(connection):
        asked.set()
        answer.wait(10)
        connection.sendall(operation())

    with ScriptedServer(run(), operation("queued"), held) as server, ThreadPoolExecutor(2) as pool:
        pending = client_of(server).submit_operation("run-1", "optim_step", {})
        first = pool.submit(pending.result)
        asked.wait(10)
        second = pool.submit(pending.result)
        answer.set()
        assert first.result() == second.result() == {"answer": 42}
    assert [request.method for request in server.requests] == ["GET", "POST", "GET"]


def test_a_result_whose_poll_failed_can_be_asked_for_again():
    with ScriptedServer(run(), operation("queued"), refusal(404, "not_found"), operation()) as server:
        pending = client_of(server).submit_operation("run-1", "optim_step", {})
        with pytest.raises(RequestRejected):
            pending.result()
        assert pending.result() == {"answer": 42}


def test_an_operation_that_does_not_end_in_time_is_reported_as_accepted_and_unknown():
    with ScriptedServer(run(), operation("running"), stall) as server:
        client = client_of(server, operation_timeout_s=0.3)
        with pytest.raises(OperationTimeout, match="accepted and is 'running'") as caught:
            step(client)
    assert caught.value.outcome == "unknown" and caught.value.seq_id == 1


def test_a_result_that_has_expired_leaves_the_outcome_unknown_but_not_the_order():
    with ScriptedServer(run(), operation("running"), refusal(410, "expired"), operation(seq_id=2)) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert (caught.value.code, caught.value.outcome) == ("expired", "unknown")
        step(client)


def test_a_run_status_that_is_not_known_is_not_terminal(pauses):
    with ScriptedServer(run("resting"), run("cancelling"), run("cancelled")) as server:
        assert client_of(server).wait_until_terminal("run-1")["status"] == "cancelled"


def test_a_run_that_does_not_end_in_time_is_reported():
    with ScriptedServer(run("cancelling")) as server, pytest.raises(OperationTimeout, match="'cancelling' after 0 s"):
        client_of(server).wait_until_terminal("run-1", timeout_s=0)


CLOSED = reply({"session_id": "ses-1", "status": "closed"})


@pytest.mark.parametrize("answer", [{"status": "open"}, {"status": "closing"}, {"status": ["closed"]}, {}])
def test_a_session_is_closed_once_it_says_so_and_is_polled_until_then(answer, pauses):
    with ScriptedServer(*[reply(answer)] * 5, CLOSED) as server:
        client = client_of(server)
        assert client.close_session("ses-1")["status"] == "closed"
    assert [(request.method, request.path.rpartition("/")[2]) for request in server.requests] == [
        ("POST", "close"), *[("GET", "ses-1")] * 5,
    ]  # fmt: skip
    assert pauses == [0.02 * 2**k for k in range(5)] and client.closed_sessions == {"ses-1"}


@pytest.mark.parametrize("status", [404, 410])
def test_a_session_that_is_gone_after_its_close_is_closed(status, pauses):
    with ScriptedServer(reply({}), refusal(status, "gone")) as server:
        client = client_of(server)
        client.close_session("ses-1")
    assert client.closed_sessions == {"ses-1"}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([refusal(404, "gone")], RequestRejected),
        ([reply({}), refusal(403, "no")], RequestRejected),
        ([reply({"status": "open"})], OperationTimeout),
    ],
)
def test_a_session_of_which_it_is_not_known_that_it_is_closed_does_not_count_as_closed(script, error, monkeypatch):
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0 if len(script) > 1 else 1000)
    with ScriptedServer(*script) as server:
        client = client_of(server)
        with pytest.raises(error):
            client.close_session("ses-1")
    assert client.closed_sessions == set()


# Answers of the wrong shape


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply([1, 2]), "no JSON object"),
        (reply({"status": "queued"}), "optim_step: operation_id is None"),
        (operation(operation_id=7), "optim_step: operation_id is 7"),
        (operation(status=None), "optim_step: status is None"),
        (operation(seq_id=9), "optim_step: seq_id is 9 in the answer, expected 1"),
        (operation(seq_id=True), "seq_id is True"),
        (operation(run_id="run-2"), "optim_step: run_id is 'run-2' in the answer, expected 'run-1'"),
        (operation(kind="sample"), "kind is 'sample' in the answer, expected 'optim_step'"),
        (operation(result="done"), "optim_step: result is 'done', expected an object"),
        (operation("failed", error="oh"), "optim_step failed: the service gives no reason"),
    ],
)
def test_an_answer_of_the_wrong_shape_names_the_operation_and_the_field(answer, message):
    with ScriptedServer(run(), answer) as server, pytest.raises(WhitneyError, match=message):
        step(client_of(server))


@pytest.mark.parametrize(("field", "other", "own"), [("operation_id", "op-2", "op-1"), ("run_id", "run-2", "run-1")])
def test_a_poll_that_answers_for_another_operation_is_not_believed(field, other, own):
    with ScriptedServer(run(), operation("queued"), operation(**{field: other})) as server:
        with pytest.raises(UnexpectedResponse, match=f"{field} is '{other}' in the answer, expected '{own}'"):
            step(client_of(server))


def test_an_operation_that_does_not_name_its_run_is_taken_for_the_run_s_own():
    answer = {"operation_id": "op-1", "status": "succeeded", "result": {"answer": 42}}
    with ScriptedServer(run(), reply(answer)) as server:
        assert step(client_of(server)) == {"answer": 42}


def test_a_run_without_a_usable_next_seq_id_is_reported():
    with ScriptedServer(run(next_seq_id="1")) as server, pytest.raises(UnexpectedResponse, match="next_seq_id is '1'"):
        step(client_of(server))


def test_a_created_session_without_an_id_is_reported():
    with ScriptedServer(reply({"id": "x"})) as server, pytest.raises(UnexpectedResponse, match="session_id is None"):
        client_of(server).create_session("modal")


SEQUENCE = {"tokens": [1, 2], "logprobs": [-0.1, -0.2], "stop_reason": "stop"}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "result.sequences is None"),
        ({"sequences": []}, "result.sequences is \\[\\]"),
        ({"sequences": [SEQUENCE, "x"]}, r"result.sequences\[1\] is 'x'"),
        ({"sequences": [SEQUENCE | {"tokens": ["1", "2"]}]}, r"sequences\[0\].tokens is .*token ids"),
        ({"sequences": [SEQUENCE | {"tokens": None}]}, r"sequences\[0\].tokens is None"),
        ({"sequences": [SEQUENCE | {"logprobs": None}]}, r"sequences\[0\].logprobs is None"),
        ({"sequences": [SEQUENCE | {"logprobs": [-0.1, None]}]}, r"sequences\[0\].logprobs is \[-0.1, None\]"),
        (
            {"sequences": [SEQUENCE | {"logprobs": [-0.1]}]},
            r"logprobs is \[-0.1\], expected 2 .*, not 1",
        ),
        ({"sequences": [{"tokens": [1, 2]}]}, r"sequences\[0\].logprobs is None"),
    ],
)
def test_a_sample_that_can_not_be_trained_on_is_refused_with_the_field(result, message):
    with pytest.raises(UnexpectedResponse, match=message):
        result_sequences(result)


def test_a_sample_that_can_be_trained_on_gives_its_sequences():
    empty = {"tokens": [], "logprobs": []}
    assert result_sequences({"sequences": [SEQUENCE, empty]}) == [SEQUENCE, empty]


def test_a_save_without_a_sampler_id_is_reported():
    assert result_sampler_id({"sampler_id": "smp-1"}) == "smp-1"
    with pytest.raises(UnexpectedResponse, match="result.sampler_id is None"):
        result_sampler_id({})


# What the service offers


@pytest.mark.parametrize("body", [{"operations": ["sample"]}, {"providers": {"modal": {"operations": ["sample"]}}}])
def test_offered_operations_are_read_in_both_forms(body):
    with ScriptedServer(reply(body), reply(body)) as server:
        client_of(server).require_operations("modal", ["sample"])
        with pytest.raises(ConfigurationError, match="does not offer logprobs for modal; it has sample"):
            client_of(server).require_operations("modal", ["sample", "logprobs"])


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ({"providers": {"tinker": {}}}, ConfigurationError, "does not offer provider 'modal'; it has tinker"),
        ({"providers": {"modal": {}}}, UnexpectedResponse, "modal.operations is not a list"),
        ({"providers": []}, UnexpectedResponse, "providers is not an object"),
        ({}, UnexpectedResponse, "providers is not an object"),
    ],
)
def test_capabilities_that_do_not_serve_are_refused(body, error, message):
    with ScriptedServer(reply(body)) as server, pytest.raises(error, match=message):
        client_of(server).require_operations("modal", ["sample"])


# Where the key goes


@pytest.mark.parametrize(
    ("base_url", "message"),
    [
        ("http://example.com", "https only"),
        ("http://10.0.0.1:80", "https only"),
        ("https://user:secret-word@example.com", "user name or password"),
        ("https://example.com/?key=secret-word", "query or a fragment"),
        ("ftp://example.com", "expected https://HOST"),
        ("example.com", "expected https://HOST"),
        ("https://", "expected https://HOST"),
        ("https://example.com:port", "expected https://HOST"),
        ("https://exa mple.com", "a space"),
        ("https://[::1", "expected https://HOST"),
    ],
)
def test_a_base_url_that_could_carry_the_key_astray_is_refused(base_url, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        WhitneyClient(base_url, KEY)
    assert "secret-word" not in str(caught.value) and KEY not in str(caught.value)


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:1", "http://localhost:1/", "http://[::1]:1", "https://a.b/c/"])
def test_https_and_loopback_are_spoken_to(base_url):
    assert WhitneyClient(base_url, KEY).base_url == base_url.rstrip("/")


def test_without_a_key_only_a_loopback_address_is_spoken_to():
    with ScriptedServer(reply({})) as server:
        WhitneyClient(server.base_url, "").capabilities()
    assert "authorization" not in server.requests[0].headers
    with pytest.raises(ConfigurationError, match="set WHITNEY_API_KEY"):
        WhitneyClient("https://example.com", "")


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key):
    with pytest.raises(ConfigurationError) as caught:
        WhitneyClient("https://example.com", key)
    assert key not in str(caught.value)


def test_url_and_key_come_from_the_environment(monkeypatch):
    with pytest.raises(ConfigurationError, match="set WHITNEY_BASE_URL"):
        WhitneyClient()
    with ScriptedServer(reply({})) as server:
        monkeypatch.setenv("WHITNEY_BASE_URL", server.base_url)
        monkeypatch.setenv("WHITNEY_API_KEY", "from-the-environment")
        WhitneyClient().capabilities()
    assert server.requests[0].headers["authorization"] == "Bearer from-the-environment"


def test_a_proxy_of_the_environment_never_sees_what_goes_to_loopback(monkeypatch):
    with ScriptedServer() as proxy, ScriptedServer(reply({})) as server:
        monkeypatch.setenv("http_proxy", proxy.base_url)
        client_of(server).capabilities()
    assert proxy.requests == []


def test_a_failed_operation_carries_where_it_was_sent():
    failed = operation("failed", error={"code": "no_gradients", "message": "nothing to step on"})
    with ScriptedServer(run(), failed) as server, pytest.raises(OperationFailed) as caught:
        step(client_of(server))
    assert (caught.value.method, caught.value.path) == ("POST", "/v1/training/runs/run-1/operations")


@pytest.mark.parametrize(
    "answer",
    [
        operation("failed", error={"code": KEY, "message": f"Authorization: Bearer {KEY}"}),
        operation(operation_id=[KEY]),
        operation(status=[KEY]),
        operation(kind=KEY),
        operation(result=KEY),
    ],
)
def test_no_error_holds_a_key_that_an_operation_echoes(answer):
    with ScriptedServer(run(), answer) as server, pytest.raises(WhitneyError) as caught:
        step(client_of(server))
    assert KEY not in f"{caught.value}{caught.value!r}{caught.value.__dict__}"


def test_no_printed_traceback_holds_a_key_that_stands_in_place_of_http(gives_up_at_once):
    with ScriptedServer(f"Authorization: Bearer {KEY}\r\n\r\n".encode()) as server:
        client = client_of(server)
        with pytest.raises(ServiceUnavailable) as caught:
            client.capabilities()
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_no_error_and_no_repr_holds_the_key(pauses):
    echoes = [
        reply({"session_id": [KEY], "providers": [KEY], "next_seq_id": KEY}),
        reply({"error": {"code": KEY, "message": f"bad key {KEY}"}, "request_id": KEY}, 401),
        reply(f"<p>{'x' * 190}{KEY}", 403),
        reply(f"<p>{KEY}"),
    ]
    for echo in echoes:
        with ScriptedServer(echo) as server, pytest.raises(WhitneyError) as caught:
            client_of(server).require_operations("modal", [])
        assert KEY[:8] not in f"{caught.value}{caught.value!r}{caught.value.__dict__}"
    assert KEY not in repr(WhitneyClient("https://example.com", KEY))


def test_errors_can_be_pickled():
    with ScriptedServer(refusal(422, "invalid_payload")) as server, pytest.raises(RequestRejected) as caught:
        client_of(server).capabilities()
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is RequestRejected and copied.__dict__ == caught.value.__dict__


# With the embedded service


def test_threads_may_share_a_run_and_each_operation_takes_effect_once(tmp_path):
    with serve(tmp_path) as service:
        client = WhitneyClient(service.base_url, service.api_key)
        session_id = client.create_session("modal")
        run_id = client.create_lora_run(session_id, model="byte-lm", rank=2)
        sampler_id = result_sampler_id(client.run_operation(run_id, "save_weights_for_sampler", {}))
        results = []

        def ask():
            for _ in range(5):
                payload = {"input": {"token_ids": [1, 2]}}
                results.append(client.sampler_operation(run_id, sampler_id, "logprobs", payload))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 20
        assert client.run(run_id)["next_seq_id"] == 22
        assert client.accepted == {"save_weights_for_sampler": 1, "logprobs": 20}
        client.finish(run_id)
        client.close_session(session_id)


def test_two_threads_submit_more_than_a_service_keeps_the_results_of_and_none_is_lost(tmp_path):
    payloads = [{"input": {"token_ids": [1] * (1 + n % 7)}} for n in range(200)]
    lengths = [1 + n % 7 for n in range(200)]
    with serve(tmp_path) as service:
        client = WhitneyClient(service.base_url, service.api_key)
        with training_session(client, provider="modal") as session_id:
            with lora_run(client, session_id, model="byte-lm", rank=1) as run_id:
                sampler_id = result_sampler_id(client.run_operation(run_id, "save_weights_for_sampler", {}))

                def ask(_):
                    return client.sampler_operations(run_id, sampler_id, "logprobs", payloads)

                with ThreadPoolExecutor(2) as pool:
                    for results in pool.map(ask, range(2)):
                        assert [len(result["logprobs"]) for result in results] == lengths
                assert client.run_operations(run_id, "save_weights_for_sampler", []) == []


def test_what_is_known_of_fetched_results_is_not_kept(tmp_path):
    with serve(tmp_path) as service:
        client = WhitneyClient(service.base_url, service.api_key)
        with training_session(client, provider="modal") as session_id:
            with lora_run(client, session_id, model="byte-lm", rank=1) as run_id:
                pending = client.submit_operation(run_id, "save_weights_for_sampler", {})
                assert client._orders[run_id].pending == {1: pending}
                pending.result()
                assert client._orders[run_id].pending == {}


def test_a_port_where_nothing_listens_is_reported_as_not_sent(pauses):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServiceUnavailable) as caught:
        WhitneyClient(f"http://127.0.0.1:{port}", KEY, submit_timeout_s=0.2).capabilities()
    assert caught.value.outcome == "not_sent"


@pytest.mark.parametrize("proxy", ["http:/x", "http://user:pw@host:port", "socks5://127.0.0.1:1080", "http://"])
def test_a_proxy_that_can_not_be_used_is_refused_at_once_without_showing_it(proxy, monkeypatch):
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ConfigurationError, match="https_proxy") as caught:
        WhitneyClient("https://whitney.invalid", KEY)
    assert "pw" not in str(caught.value)
    monkeypatch.setenv("no_proxy", "whitney.invalid")
    WhitneyClient("https://whitney.invalid", KEY)
