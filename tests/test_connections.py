"""One connection: interim answers, slow answers, proxies, and what is known if there was none."""

import contextlib
import socket

import pytest

from scripted_client import KEY, client_of, step
from scripted_server import ScriptedServer, drip, operation, reply, run
from whitney_loop import ConfigurationError, ServiceUnavailable, WhitneyClient


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("status", [100, 102, 103, 199])
def test_an_interim_answer_is_passed_over(status, count):
    interim = f"HTTP/1.1 {status} Wait\r\nLink: </x>\r\nContent-Length: 7\r\n\r\n".encode() * count
    with ScriptedServer(run(), interim + operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert len(server.requests) == 2


def test_interim_answers_after_which_nothing_comes_are_trouble_with_an_unknown_outcome(gives_up_at_once):
    with ScriptedServer(run(), b"HTTP/1.1 103 Early Hints\r\n\r\n" * 200) as server:
        with pytest.raises(ServiceUnavailable) as caught:
            step(client_of(server))
    assert caught.value.outcome == "unknown"


def test_interim_answers_without_end_are_ended_with_the_exchange(gives_up_at_once):
    def endless(connection):
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")

    with ScriptedServer(run(), endless) as server:
        with pytest.raises(ServiceUnavailable, match="TimeoutError") as caught:
            step(client_of(server, exchange_timeout_s=0.2))
    assert caught.value.outcome == "unknown"


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_an_answer_that_drips_is_ended_with_the_exchange(head, pauses):
    dripping = drip(head)
    with ScriptedServer(run(), dripping, operation()) as server:
        step(client_of(server, exchange_timeout_s=0.3))
    assert len(server.requests) == 3
    assert 0 < dripping.sent < 100  # of the 500 bytes in the 10 s that the server would go on


def test_a_proxy_of_the_environment_never_sees_what_goes_to_loopback(monkeypatch):
    with ScriptedServer() as proxy, ScriptedServer(reply({})) as server:
        monkeypatch.setenv("http_proxy", proxy.base_url)
        client_of(server).capabilities()
    assert proxy.requests == []


def test_a_port_where_nothing_listens_is_reported_as_not_sent(pauses):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServiceUnavailable) as caught:
        WhitneyClient(f"http://127.0.0.1:{port}", KEY, submit_timeout_s=0.2).capabilities()
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
