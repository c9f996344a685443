"""One exchange: what is retried, with which bytes and for how long, and where the key may go."""

import contextlib
import email.utils
import gzip
import json
import logging
import time

import pytest

import whitney_loop
from scripted_client import KEY, client_of, step
from scripted_server import ScriptedServer, drop, operation, refusal, reply, reset_after, run
from tls import ConnectProxy, TLSServer, needs_openssl
from whitney_loop import (
    ConfigurationError,
    RequestRejected,
    ServiceUnavailable,
    UnexpectedResponse,
    WhitneyClient,
    WhitneyError,
    transport,
)

# What is retried, and with which bytes

RETRIED = (408, 425, 429, 500, 502, 503, 504, 507, 520, 529, 530, 598, 599)


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
        *[pytest.param(refusal(status, "busy"), id=str(status)) for status in RETRIED],
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


@pytest.mark.parametrize("status", [501, 505])
def test_a_service_that_cannot_serve_this_at_all_is_not_asked_again(status):
    with ScriptedServer(run(), refusal(status, "no")) as server, pytest.raises(ServiceUnavailable) as caught:
        step(client_of(server))
    assert (caught.value.attempts, caught.value.outcome) == (1, "unknown")


@pytest.mark.parametrize("status", [400, 404, 422, 423, 501])
def test_an_error_that_the_service_calls_retryable_is_asked_again(status, pauses):
    with ScriptedServer(run(), refusal(status, "soon", retryable=True), operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert len(pauses) == 1


@pytest.mark.parametrize(("status", "retryable"), [(409, True), (307, True), (400, "true"), (400, 1), (422, None)])
def test_a_conflict_a_redirect_and_anything_but_true_are_never_asked_again(status, retryable):
    with ScriptedServer(run(), refusal(status, "no", retryable=retryable)) as server:
        with pytest.raises(RequestRejected) as caught:
            step(client_of(server))
    assert caught.value.attempts == 1


def test_a_refusal_that_stays_retryable_until_the_timeout_is_rejected(gives_up_at_once):
    with ScriptedServer(run(), refusal(423, "locked", retryable=True)) as server:
        with pytest.raises(ServiceUnavailable) as caught:
            step(client_of(server))
    assert (caught.value.outcome, caught.value.code, caught.value.retryable) == ("rejected", "locked", True)


# Some versions of Python read integers of any length, or nest deeper.
BEYOND_PYTHON = [b'{"x": ' + b"9" * 5000 + b"}", b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"]


@pytest.mark.parametrize("body", BEYOND_PYTHON, ids=["digits", "nesting"])
def test_json_that_python_cannot_read_is_reported_at_once(body):
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)
        pytest.skip("this Python reads it")
    with ScriptedServer(run(), reply(body)) as server, pytest.raises(UnexpectedResponse) as caught:
        step(client_of(server))
    assert "JSON that Python cannot read: " in str(caught.value)
    assert (caught.value.outcome, caught.value.attempts, caught.value.status) == ("unknown", 1, 200)


@pytest.mark.parametrize("body", BEYOND_PYTHON, ids=["digits", "nesting"])
def test_a_refusal_in_json_that_python_cannot_read_is_a_refusal(body):
    with ScriptedServer(run(), reply(body, 422)) as server, pytest.raises(RequestRejected) as caught:
        step(client_of(server))
    assert (caught.value.outcome, caught.value.status) == ("rejected", 422)


@pytest.mark.parametrize("answered", [200, 400, 500])
def test_a_body_that_was_cut_off_is_reported_with_its_status_and_first_bytes(answered, gives_up_at_once):
    cut = reply('{"error": {"co', answered, declared_length=100)
    with ScriptedServer(cut) as server, pytest.raises(WhitneyError) as caught:
        client_of(server).capabilities()
    assert caught.value.status == answered and '{"error": {"co' in str(caught.value)


@pytest.mark.parametrize("answered", [101, 200, 201, 204, 299])
def test_no_answer_below_300_is_a_refusal(answered, gives_up_at_once):
    with ScriptedServer(run(), reply("", answered)) as server, pytest.raises(WhitneyError) as caught:
        step(client_of(server))
    assert caught.value.outcome == "unknown" and caught.value.status == answered


def test_a_body_in_an_encoding_that_was_not_asked_for_is_named():
    packed = reply(gzip.compress(b"{}"), headers=["Content-Encoding: gzip"])
    with ScriptedServer(packed) as server, pytest.raises(UnexpectedResponse, match="encoded as gzip, which was not"):
        client_of(server).capabilities()


def test_a_404_names_a_base_url_that_already_has_the_first_part_of_the_paths():
    with ScriptedServer(refusal(404, "not_found")) as server, pytest.raises(RequestRejected) as caught:
        WhitneyClient(f"{server.base_url}/v1", KEY).capabilities()
    assert f"at {server.base_url}/v1/v1/training/capabilities: give the base URL without /v1" in str(caught.value)


def test_each_request_names_this_client_and_its_version():
    with ScriptedServer(reply({})) as server:
        client_of(server).capabilities()
    assert server.requests[0].headers["user-agent"] == f"whitney-loop/{whitney_loop.__version__}"


def test_a_page_in_place_of_the_api_is_reported_at_once_with_its_first_bytes():
    with ScriptedServer(reply("<html>Welcome</html>")) as server, pytest.raises(UnexpectedResponse) as caught:
        client_of(server).capabilities()
    assert "<html>Welcome" in str(caught.value) and caught.value.status == 200


# The pause before a retry


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


@pytest.mark.parametrize("hours_off", [-5, 5])
def test_a_date_is_compared_with_the_service_s_own_clock(hours_off, pauses):
    now = hours_off * 3600
    headers = [f"Date: {http_date(now)}", f"Retry-After: {http_date(now + 40)}"]
    with ScriptedServer(run(), refusal(429, "busy", headers), operation()) as server:
        step(client_of(server))
    assert 39 <= pauses[0] <= 41


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


def test_the_pause_grows_at_random_up_to_a_ceiling(pauses, monkeypatch):
    drawn = []
    monkeypatch.setattr(transport.random, "uniform", lambda low, high: drawn.append(low) or high)
    with ScriptedServer(run(), *[drop] * 8, operation()) as server:
        step(client_of(server))
    assert pauses == [0.5, 1, 2, 4, 8, 16, 20, 20] and drawn == [0] * 8


def test_an_outage_that_ends_before_the_operation_timeout_is_waited_out(pauses):
    answers = [operation("running"), refusal(503, "down", ["Retry-After: 400"]), operation()]
    with ScriptedServer(run(), *answers) as server:
        assert step(client_of(server, submit_timeout_s=300, operation_timeout_s=500)) == {"answer": 42}
    assert 400 in pauses


def test_retries_are_logged_without_the_key(pauses, caplog):
    echo = reply(f"<html>Authorization: Bearer {KEY}</html>", 502)
    with caplog.at_level(logging.WARNING, "whitney_loop"), ScriptedServer(run(), echo, operation()) as server:
        step(client_of(server))
    [record] = caplog.records
    assert record.name == "whitney_loop" and "answered 502" in record.getMessage()
    assert "[key]" in record.getMessage() and KEY not in caplog.text


@needs_openssl
def test_a_request_that_is_sent_again_is_the_same_behind_a_proxy_too(authority, pauses, monkeypatch):
    certificate = authority.certificate("DNS:whitney.test")
    with TLSServer(certificate, drop, drop, drop, reply({"providers": {}}), host="whitney.test") as server:
        with ConnectProxy(server.port) as proxy:
            monkeypatch.setenv("https_proxy", proxy.base_url)
            client = WhitneyClient(server.base_url, KEY, ca_file=authority.ca_file)
            assert client.capabilities() == {"providers": {}}
    assert [(request.path, request.headers) for request in server.requests] == [
        ("/v1/training/capabilities", server.requests[0].headers)
    ] * 4


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
