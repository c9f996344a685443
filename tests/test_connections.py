"""Connections: kept ones, interim answers, slow answers, proxies, and failed ones."""

import contextlib
import os
import select
import socket
import threading

import pytest

from listener import Listener
from scripted_client import KEY, client_of, step
from scripted_server import ScriptedServer, drip, drop, interrupt, operation, refusal, reply, reset_after, run
from tls import ConnectProxy, TLSServer, needs_openssl
from whitney_loop import ConfigurationError, RequestRejected, ServiceUnavailable, WhitneyClient, connections, transport

# Kept connections


def kept_by(client):
    return [sock for sock, _ in client._transport._connections._kept]


def answered_and_closed(answer):
    """Answer as if the connection were kept, and close it."""
    return lambda connection: connection.sendall(answer.replace(b"Connection: close\r\n", b""))


def wait_until_the_service_has_closed(client):
    assert select.select(kept_by(client), [], [], 10)[0], "the service has not closed the connection"


@pytest.mark.parametrize(
    "length", ["Content-Length: 2\r\n\r\n{}", "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_one_connection_serves_one_request_after_the_other(length):
    with ScriptedServer(*[f"HTTP/1.1 200 OK\r\n{length}".encode()] * 5, keeps=True) as server:
        client = client_of(server)
        for _ in range(5):
            assert client.capabilities() == {}
        client.close()
    assert len(server.requests) == 5 and len(server.connections) == 1


@pytest.mark.parametrize(
    "answer",
    [
        reply({}),  # with "Connection: close"
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        reply({}).replace(b"Connection: close", b"Keep-Alive: 5").replace(b"Content-Length", b"X-Length"),
    ],
)
def test_a_connection_that_the_service_does_not_keep_is_not_kept(answer):
    with ScriptedServer(answer) as server:
        client = client_of(server)
        client.capabilities()
        assert kept_by(client) == []


def test_a_connection_that_was_closed_meanwhile_is_not_used_and_nothing_is_sent_twice(pauses):
    with ScriptedServer(answered_and_closed(run()), operation(), keeps=True) as server:
        client = client_of(server)
        client.run("run-1")
        wait_until_the_service_has_closed(client)
        client.capabilities()
        client.close()
    assert len(server.requests) == len(server.connections) == 2 and pauses == []


@pytest.mark.parametrize("end", [drop, reset_after(b"")])
def test_a_kept_connection_that_ends_without_an_answer_is_replaced_and_the_same_bytes_are_sent_at_once(end, pauses):
    with ScriptedServer(run(), end, operation(), keeps=True) as server:
        client = client_of(server)
        assert step(client) == {"answer": 42}
        client.close()
    assert server.requests[1] == server.requests[2] and len(server.connections) == 2 and pauses == []


def test_a_connection_is_replaced_at_once_only_once_per_exchange(pauses):
    with ScriptedServer(run(), drop, drop, operation(), keeps=True) as server:
        client = client_of(server)
        assert step(client) == {"answer": 42}
        client.close()
    assert len(server.requests) == 4 and len(pauses) == 1


def test_a_request_whose_kept_connection_ended_may_have_arrived():
    with ScriptedServer(run(), drop, refusal(401, "unauthorized"), keeps=True) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            client.run("run-1") and client.cancel("run-1")
        client.close()
    assert (caught.value.outcome, caught.value.attempts) == ("unknown", 2)


def test_a_kept_connection_that_ends_after_a_byte_of_the_answer_is_trouble(pauses):
    with ScriptedServer(run(), reset_after(b"H"), operation(), keeps=True) as server:
        client = client_of(server)
        assert step(client) == {"answer": 42}
        client.close()
    assert len(server.requests) == 3 and len(pauses) == 1


def test_an_interrupted_exchange_does_not_keep_its_connection():
    with ScriptedServer(reply({}), interrupt, reply({"late": "no"}), keeps=True) as server:
        client = client_of(server)
        client.capabilities()
        with pytest.raises(KeyboardInterrupt):
            client.capabilities()
        assert kept_by(client) == [] and client.capabilities() == {"late": "no"}
        client.close()


def test_a_forked_process_leaves_its_parent_s_connections_alone(monkeypatch):
    with ScriptedServer(reply({}), reply({}), keeps=True) as server:
        client = client_of(server)
        client.capabilities()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        client.capabilities()
        client.close()
    assert len(server.connections) == 2


def test_a_connection_that_was_idle_for_too_long_is_not_used(monkeypatch):
    monkeypatch.setattr(connections, "_KEPT_S", 0)
    with ScriptedServer(reply({}), reply({}), keeps=True) as server:
        client = client_of(server)
        client.capabilities()
        client.capabilities()
        client.close()
    assert len(server.connections) == 2


@pytest.mark.parametrize("ends", ["with", "close", "forgotten"])
def test_a_client_that_ends_leaves_no_connection_open(ends):
    ended = []
    with ScriptedServer(reply({}), keeps=True) as server:
        client = client_of(server)
        with client if ends == "with" else contextlib.nullcontext():
            client.capabilities()
            [sock] = kept_by(client)
            ended = sock.fileno()
        if ends == "close":
            client.close()
        del client
        assert ended != -1 and sock.fileno() == -1


@needs_openssl
def test_a_tunnel_through_a_proxy_is_kept(authority, monkeypatch):
    certificate = authority.certificate("DNS:whitney.test")
    with TLSServer(certificate, *[reply({})] * 3, host="whitney.test", keeps=True) as server:
        with ConnectProxy(server.port) as proxy:
            monkeypatch.setenv("https_proxy", proxy.base_url)
            with WhitneyClient(server.base_url, KEY, ca_file=authority.ca_file) as client:
                for _ in range(3):
                    assert client.capabilities() == {}
    assert len(server.requests) == 3 and len(server.connections) == 1
    assert b"".join(proxy.heard).count(b"CONNECT ") == 1


# How a request is sent, and how an answer comes


def test_head_and_body_of_a_small_request_leave_in_one_segment():
    received = []

    def serve(connection):
        with connection:
            received.append(connection.recv(65536))
            connection.sendall(reply({"session_id": "ses-1"}))

    with Listener(serve) as server:
        client_of(server).create_session("modal")
    assert received[0].endswith(b'\r\n\r\n{"provider":"modal"}')


def test_a_body_that_is_sent_steadily_has_no_time_limit():
    text = "x" * 8_000_000

    def serve(connection):
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            received = b""
            while not received.endswith(b"}}"):
                received += connection.recv(200_000)
                threading.Event().wait(0.01)  # the pace: in all it takes longer than the limit for a silence
            connection.sendall(operation())
        assert len(received) > 8_000_000

    with Listener(serve) as server:
        client = client_of(server, exchange_timeout_s=0.3, submit_timeout_s=0.3)
        answer = client._transport.exchange("POST", "/x", [b'{"payload":{"x":"', text.encode(), b'"}}'], timeout_s=0.3)
    assert answer["status"] == "succeeded"


def test_an_answer_that_arrives_steadily_has_no_time_limit():
    def steady(connection):
        body = b'{"x": "' + b"y" * 40_000 + b'"}'
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), 1000):
            connection.sendall(body[start : start + 1000])
            threading.Event().wait(0.02)  # the pace

    with ScriptedServer(steady) as server:
        assert len(client_of(server, exchange_timeout_s=0.4).capabilities()["x"]) == 40_000


@pytest.mark.parametrize("key", ["a\r\nX: y", "a\nb", "schlüssel", "a\0"])
def test_a_header_that_cannot_be_sent_is_refused(key):
    with ScriptedServer() as server, pytest.raises(ValueError, match="Idempotency-Key holds a line break or"):
        client_of(server).create_session("modal", idempotency_key=key)
    assert server.requests == []


# Interim and slow answers


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("status", [100, 102, 103, 199])
def test_an_interim_answer_is_passed_over(status, count):
    interim = f"HTTP/1.1 {status} Wait\r\nLink: </x>\r\nContent-Length: 7\r\n\r\n".encode() * count
    with ScriptedServer(run(), interim + operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert len(server.requests) == 2


def test_interim_answers_without_a_final_one_leave_the_outcome_unknown(gives_up_at_once):
    with ScriptedServer(run(), b"HTTP/1.1 103 Early Hints\r\n\r\n" * 200) as server:
        with pytest.raises(ServiceUnavailable) as caught:
            step(client_of(server))
    assert caught.value.outcome == "unknown"


def test_endless_interim_answers_end_with_the_exchange_timeout(gives_up_at_once):
    def endless(connection):
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")

    with ScriptedServer(run(), endless) as server:
        with pytest.raises(ServiceUnavailable, match="TimeoutError") as caught:
            step(client_of(server, exchange_timeout_s=0.2))
    assert caught.value.outcome == "unknown"


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_a_dripping_answer_ends_with_the_exchange_timeout(head, pauses):
    dripping = drip(head)
    with ScriptedServer(run(), dripping, operation()) as server:
        step(client_of(server, exchange_timeout_s=0.3))
    assert len(server.requests) == 3
    assert 0 < dripping.sent < 100  # of the 500 bytes in the 10 s that the server would go on


def test_a_service_that_was_never_reached_fails_in_seconds_and_says_what_to_check(monkeypatch):
    monkeypatch.setattr(transport, "_FIRST_CONTACT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        ServiceUnavailable, match="ConnectionRefusedError.* Check the base URL's host and port"
    ) as caught:
        WhitneyClient(f"http://127.0.0.1:{port}", KEY).create_session("modal")
    assert caught.value.outcome == "not_sent"


UNUSABLE_PROXIES = [
    "http:/x",
    "http://user:pw@host:port",
    "socks5://127.0.0.1:1080",
    "http://",
    "https://user:pw@host:1",
]


@pytest.mark.parametrize("proxy", UNUSABLE_PROXIES)
def test_a_proxy_that_cannot_be_used_is_refused_at_once_without_showing_it(proxy, monkeypatch):
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ConfigurationError, match="https_proxy") as caught:
        WhitneyClient("https://whitney.invalid", KEY)
    assert "pw" not in str(caught.value)
    monkeypatch.setenv("no_proxy", "whitney.invalid")
    WhitneyClient("https://whitney.invalid", KEY)
