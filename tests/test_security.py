"""The key is sent to no other host and shown nowhere, TLS is always verified, and answers are limited in size."""

import hmac
import json
import logging
import select
import socket
import ssl
import threading
import traceback
import urllib.parse

import pytest

import scripted_server
from loop_runs import entries_of
from scripted_server import OFFER, ScriptedServer, drip, drop, operation, refusal, reply, reset_after, run, stall
from tls import ConnectProxy, TLSServer, needs_openssl
from whitney_loop import (
    ConfigurationError,
    RequestRejected,
    ServiceUnavailable,
    UnexpectedResponse,
    WhitneyClient,
    WhitneyError,
    connections,
    transport,
    waiting,
)
from whitney_loop import (
    client as client_module,
)
from whitney_loop.__main__ import main as close_main
from whitney_loop.lifecycle import close_command
from whitney_loop.local import serve

# It holds characters that a repr, JSON and a path escape, and is longer than the part of a value that is shown.
KEY = "k'\"\\/%-QpZ8vR3nTq7YwXb2LfKd9HsJm4CgUe6A-xN5rVzW1tBoPiSyEuDh"

WAIT_S = 20.0  # a test that fails ends; one that passes waits milliseconds


# TLS


@needs_openssl
def test_a_certificate_of_the_given_authority_is_trusted(authority):
    with TLSServer(authority.certificate("DNS:localhost"), reply({"providers": {}})) as server:
        client = WhitneyClient(server.base_url, KEY, ca_file=authority.ca_file)
        assert client.capabilities() == {"providers": {}}
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


@needs_openssl
@pytest.mark.parametrize(
    ("names", "days", "trusted", "message"),
    [
        (["DNS:localhost"], 2, False, "unable to get local issuer certificate"),
        (["DNS:elsewhere.test"], 2, True, "Hostname mismatch"),
        (["DNS:localhost"], -1, True, "certificate has expired"),
    ],
    ids=["untrusted", "wrong name", "expired"],
)
def test_an_invalid_certificate_is_refused_at_once_and_gets_no_key(authority, names, days, trusted, message):
    with TLSServer(authority.certificate(*names, days=days), reply({})) as server:
        client = WhitneyClient(server.base_url, KEY, ca_file=authority.ca_file if trusted else None)
        with pytest.raises(ConfigurationError, match=message) as caught:
            client.capabilities()
    assert server.requests == []
    assert (caught.value.outcome, caught.value.attempts) == ("not_sent", 1) and "--ca-file" in str(caught.value)


@needs_openssl
def test_a_lax_tls_context_for_all_of_python_is_not_used(authority, monkeypatch):
    monkeypatch.setattr(ssl, "_create_default_https_context", ssl._create_unverified_context)
    with TLSServer(authority.certificate("DNS:localhost"), reply({})) as server:
        with pytest.raises(ConfigurationError, match="not trusted"):
            WhitneyClient(server.base_url, KEY).capabilities()
    assert server.requests == []


@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_a_ca_file_that_holds_no_certificate_is_refused(tmp_path, text):
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match="ca.pem cannot be used: .*PEM"):
        WhitneyClient("https://localhost:1", KEY, ca_file=path)


@needs_openssl
def test_the_commands_take_a_ca_file_and_name_it_in_what_they_print(authority, monkeypatch, capsys):
    with TLSServer(authority.certificate("DNS:localhost"), refusal(404, "not_found")) as server:
        monkeypatch.setenv("WHITNEY_API_KEY", KEY)
        options = ["--base-url", server.base_url, "--ca-file", str(authority.ca_file)]
        assert close_main(["close", "ses-1", *options]) == 1
        assert "not_found" in capsys.readouterr().err
    client = WhitneyClient(server.base_url, KEY, ca_file=authority.ca_file)
    assert close_command(client, "ses-1").endswith(f"--ca-file {authority.ca_file}")


# Proxies


@needs_openssl
def test_a_proxy_of_the_environment_gets_connect_and_never_the_key(authority, monkeypatch):
    certificate = authority.certificate("DNS:whitney.test")
    with TLSServer(certificate, reply({"providers": {}}), host="whitney.test") as server:
        with ConnectProxy(server.port) as proxy:
            monkeypatch.setenv("https_proxy", proxy.base_url)
            client = WhitneyClient(server.base_url, KEY, ca_file=authority.ca_file)
            assert client.capabilities() == {"providers": {}}
    assert proxy.heard[0].startswith(f"CONNECT whitney.test:{server.port} ".encode())
    assert KEY.encode() not in b"".join(proxy.heard) and b"uthorization" not in b"".join(proxy.heard)
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_failed_handshake_is_reported_as_not_sent(gives_up_at_once, monkeypatch):
    monkeypatch.setattr(scripted_server, "_read_request", lambda connection: connection.recv(65536))  # no HTTP
    with ScriptedServer(reply("", 400)) as server:
        client = WhitneyClient(server.base_url.replace("http:", "https:"), KEY)
        with pytest.raises(ServiceUnavailable, match="SSLError") as caught:
            client.create_session("modal")
    assert caught.value.outcome == "not_sent" and len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 407 Who are you\r\n\r\n", "Tunnel connection failed: 407"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_a_request_that_a_proxy_refuses_is_reported_as_not_sent(gives_up_at_once, monkeypatch, answer, message):
    with ScriptedServer(answer) as proxy:
        monkeypatch.setenv("https_proxy", proxy.base_url)
        with pytest.raises(ServiceUnavailable, match=message) as caught:
            WhitneyClient("https://whitney.test", KEY).create_session("modal")
    assert caught.value.outcome == "not_sent"
    assert [request.method for request in proxy.requests] == ["CONNECT"]


@needs_openssl
def test_a_request_that_was_sent_within_tls_and_not_answered_may_have_arrived(authority, gives_up_at_once):
    with TLSServer(authority.certificate("DNS:localhost"), drop) as server:
        client = WhitneyClient(server.base_url, KEY, ca_file=authority.ca_file)
        with pytest.raises(ServiceUnavailable) as caught:
            client.create_session("modal")
    assert caught.value.outcome == "unknown" and len(server.requests) == 1


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_requests_to_loopback_go_to_no_proxy(monkeypatch, name, host):
    with ScriptedServer() as proxy, ScriptedServer(reply({})) as server:
        monkeypatch.setenv(name, proxy.base_url)
        WhitneyClient(server.base_url.replace("127.0.0.1", host), KEY).capabilities()
    assert proxy.requests == [] and len(server.requests) == 1


# Redirects


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize("verb", ["GET", "POST"])
def test_no_redirect_is_followed(status, verb):
    with ScriptedServer() as elsewhere:
        with ScriptedServer(reply("", status, [f"Location: {elsewhere.base_url}/"])) as server:
            client = WhitneyClient(server.base_url, KEY)
            with pytest.raises(RequestRejected, match="redirect"):
                client.capabilities() if verb == "GET" else client.create_session("modal")
    assert elsewhere.requests == [] and len(server.requests) == 1


# The size of an answer


def endless(head):
    def act(connection):
        connection.sendall(head)
        try:
            while True:
                connection.sendall(b"10\r\n" + b" " * 16 + b"\r\n" if b"chunked" in head else b" " * 4096)
        except OSError:
            pass

    return act


@pytest.mark.parametrize("status", [200, 404, 503])
@pytest.mark.parametrize("length", ["Content-Length: 9999999999", "Transfer-Encoding: chunked", "X-Until: the end"])
def test_an_answer_without_end_is_cut_off(monkeypatch, status, length):
    monkeypatch.setattr(connections, "LARGEST_BODY", 100_000)
    head = f"HTTP/1.1 {status} Whatever\r\n{length}\r\n\r\n".encode()
    with ScriptedServer(endless(head)) as server, pytest.raises(UnexpectedResponse, match="larger than 100000 bytes"):
        WhitneyClient(server.base_url, KEY).capabilities()


# The key is shown nowhere


def echoes():
    """Yield answers that hold the key in every place that an answer has."""
    error = {"error": {"code": KEY, "message": f"Bearer {KEY}", "retryable": False}, "request_id": KEY}
    for status in (400, 401, 404, 409, 410, 422, 500, 501, 503, 429):
        yield reply(error, status, [f"Retry-After: {KEY}"])
        yield reply(f"<html>{KEY}</html>", status)
    yield reply(f"<html>{KEY}</html>")
    for cut in (8, 20, len(KEY) - 1):  # by the network, or because only the first bytes are shown
        yield reply(f'{{"key": "{KEY[:cut]}', 500, declared_length=500)
        yield reply(f"{'x' * (transport._SHOWN_CHARACTERS - cut)}{KEY}")
    yield reply(f'{{"key": "{json.dumps(KEY)[1:-1][:20]}', 400, declared_length=500)
    yield f"Authorization: Bearer {KEY[:20]}".encode()
    yield reply({"operations": KEY, "session_id": [KEY], "run_id": {KEY: KEY}, "next_seq_id": KEY})
    yield reply({"providers": {KEY: {"operations": [KEY]}}})
    yield reply({"providers": {"modal": {"operations": [KEY]}}})
    yield reply({"operations": ["x" * (client_module._LONGEST_LISTING // 2 - 10)] * 2 + [f"y{KEY}"]})
    yield reply({"operations": [{f"x{KEY}": [f"{KEY}x"]}]})
    yield reply({"session_id": KEY, "run_id": KEY, "operation_id": KEY, "status": KEY, "next_seq_id": 1})
    yield reply("", 307, [f"Location: http://{KEY}/"])
    yield f"HTTP/1.1 {KEY} {KEY}\r\n\r\n".encode()
    yield f"HTTP/1.1 418 {KEY}\r\nContent-Length: 0\r\n\r\n".encode()
    yield f"Authorization: Bearer {KEY}\r\n\r\n".encode()
    yield f"HTTP/1.1 200 OK\r\nContent-Length: {KEY}\r\n\r\n{{".encode()
    yield f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{KEY}\r\n".encode()
    yield reply(f'{{"operation_id": "{KEY}', declared_length=500)
    yield operation("failed", error={"code": KEY, "message": KEY})
    yield operation(operation_id=KEY, status="failed", error={"code": KEY, "message": KEY})
    yield operation(result=KEY)
    yield operation(kind=KEY)
    yield operation(run_id=KEY)
    yield operation(status=[KEY])
    yield operation(status=KEY, operation_id=KEY)
    yield from (drop, reset_after(b"HTTP/1.1 200 OK\r\n"), stall, drip(b"HTTP/1.1 200 OK\r\n\r\n"))


CALLS = {
    "capabilities": lambda client: client.require_operations("modal", ["sample"]),
    "create_session": lambda client: client.create_session("modal"),
    "create_lora_run": lambda client: client.create_lora_run(KEY, model=KEY),
    "session": lambda client: client.session(KEY),
    "run": lambda client: client.run(KEY),
    "finish": lambda client: client.finish(KEY),
    "cancel": lambda client: client.cancel(KEY),
    "close": lambda client: client.close_session(KEY),
    "wait": lambda client: client.wait_until_terminal("run-1", timeout_s=0),
    "operation": lambda client: client.run_operation("run-1", "optim_step", {}),
    "sampler": lambda client: client.sampler_operation("run-1", KEY, "sample", {"prompt": KEY}),
    "no JSON": lambda client: client.run_operation("run-1", "optim_step", {"x": object()}),
}  # fmt: skip


def parts_of(text):
    """Return all substrings of eight characters: as many of the key count as a leak."""
    return {text[start : start + 8] for start in range(len(text) - 7)}


def parts_of_the_key_in(text):
    forms = (KEY, repr(KEY)[1:-1], json.dumps(KEY)[1:-1], urllib.parse.quote(KEY, safe=""))
    return parts_of(text) & set().union(*map(parts_of, forms))


def all_of(error):
    """Return all texts that an exception can show."""
    return "".join([str(error), repr(error), repr(vars(error)), *traceback.format_exception(error)])


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_no_error_and_no_log_line_holds_the_key_whatever_a_service_echoes(call, caplog, monkeypatch):
    monkeypatch.setattr(transport, "_FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(waiting, "PATIENCE_S", -1)  # waiting is logged at once
    caplog.set_level(logging.DEBUG)
    raised = 0
    for position, echo in enumerate(echoes()):
        # An operation asks for the run first: each echo comes once as that answer and once as the operation's.
        for before in ([], [run()], [run(), operation("running")]) if call in ("operation", "sampler") else ([],):
            with ScriptedServer(*before, echo, echo) as server:
                asking = WhitneyClient(
                    server.base_url, KEY, submit_timeout_s=0.02, exchange_timeout_s=0.02, operation_timeout_s=0.05
                )
                text = repr(asking)
                try:
                    CALLS[call](asking)
                except (WhitneyError, ValueError) as error:
                    raised += 1
                    text += all_of(error)
                assert not parts_of_the_key_in(text + caplog.text), (position, text, caplog.text)
                caplog.clear()
    assert raised > 20


def test_no_output_and_no_journal_of_the_loop_holds_a_key_that_the_service_echoes(loop, tmp_path):
    ids = {"session_id": f"ses-{KEY}", "run_id": f"run-{KEY}", "next_seq_id": 1, "note": KEY, "status": "active"}
    script = [OFFER, *[reply(ids)] * 4]
    script += [operation("failed", error={"code": KEY, "message": KEY})] + [drop] * 60
    with ScriptedServer(*script) as server:
        server.api_key = KEY
        code, summary, err = loop(server, 1, "--journal", "journal.json", submit_timeout_s=0.5)
    assert code == 1 and summary["session_id"] == "ses-[key]"
    assert "may still be open: run run-[key]" in err
    text = err + json.dumps(summary) + (tmp_path / "journal.json").read_text()
    assert not parts_of_the_key_in(text)


@pytest.mark.parametrize("key", ["33333333", "127.0.0.1", "base_url", "session_id", "optim_step", "never_saturates"])
def test_a_key_that_is_a_number_or_a_word_breaks_neither_journal_nor_metrics_nor_summary(
    loop, tmp_path, monkeypatch, key
):
    monkeypatch.setattr("secrets.token_urlsafe", lambda: key)
    files = ("--metrics", "m.jsonl", "--journal", "journal.json")
    with serve(tmp_path / "storage") as service:
        _, first, err = loop(service, 1, *files)
        more = ("--resume-from", first["state_id"])
        code, summary, err = loop(service, 1, *files, *more)
    assert code == 0 and summary["cycles_done"] == 1 and summary["operations"]["optim_step"] == 1, err
    assert summary["base_url"] == service.base_url and summary["session_id"].startswith("ses-")
    config, cycle, *_ = entries_of(tmp_path / "m.jsonl")
    assert config["config"]["base_url"] == service.base_url and cycle["cycle"] == 0


def test_the_close_command_shows_neither_the_key_nor_an_escape_that_a_service_lists_as_a_run(monkeypatch, capsys):
    ids = [f"run-{KEY}", "run-1\x1b[2J", "run-1\nclosed", "r" * 301, ""]
    listed = {"runs": [{"run_id": run_id, "status": "active"} for run_id in ids], "status": "open"}
    ended = reply({"status": "cancelled"})
    script = [reply(listed), ended, reply({"status": "closed"}), ended]
    monkeypatch.setenv("WHITNEY_API_KEY", KEY)
    with ScriptedServer(*script) as server:
        assert close_main(["close", f"ses-{KEY}", "--base-url", server.base_url]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("cancelled run run-[key]\nclosed session ses-[key]\n", "")


# The embedded service


def test_slow_clients_do_not_delay_others(service):
    host, port = service.base_url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(100)]
    for number, connection in enumerate(slow):
        connection.sendall(b"POST /v1/training/sessions HTTP/1.1\r\nContent-Length: 100\r\n"[: 5 + number])
    assert WhitneyClient(service.base_url, service.api_key).capabilities()["providers"]
    assert select.select(slow, [], [], 0)[0] == []  # none was let go first
    for connection in slow:
        connection.close()


def test_keys_are_compared_in_constant_time(service, monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    for key in ("wrong", service.api_key[:-1], service.api_key):
        try:
            WhitneyClient(service.base_url, key).capabilities()
        except RequestRejected as error:
            assert error.status == 401
    assert [given for given, _ in compared] == [b"wrong", service.api_key[:-1].encode(), service.api_key.encode()]


def test_clients_that_leave_take_their_threads_along(service):
    before = set(threading.enumerate())
    for _ in range(100):
        with WhitneyClient(service.base_url, service.api_key) as client:
            client.capabilities()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name
