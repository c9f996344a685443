"""Errors can be kept and sent on, and nothing that a user can see holds the key."""

import json
import pickle
import traceback

import pytest

from scripted_client import KEY, client_of, step
from scripted_server import ScriptedServer, operation, refusal, reply, run
from whitney_loop import RequestRejected, ServiceUnavailable, WhitneyClient, WhitneyError, errors


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


def test_strings_of_an_answer_are_redacted_and_numbers_are_not(monkeypatch):
    monkeypatch.setattr(errors, "_secrets", ["33333333"])
    answer = {
        "note": "a 33333333 b",
        "third": 0.33333333333,
        "list": [33333333, "33333333", None, True, {"33333333": 1}],
    }
    assert errors.redacted_json(answer) == {
        "note": "a [key] b", "third": 0.33333333333, "list": [33333333, "[key]", None, True, {"[key]": 1}],
    }  # fmt: skip


def test_no_answer_that_the_client_returns_holds_the_key():
    with ScriptedServer(reply({"note": f"Bearer {KEY}", "\\u006b": KEY, "tokens": [1, 2]})) as server:
        assert client_of(server).capabilities() == {"note": "Bearer [key]", "\\u006b": "[key]", "tokens": [1, 2]}
    escaped = json.dumps({"note": KEY}).replace("k", "\\u006b")
    with ScriptedServer(reply(escaped)) as server:
        assert client_of(server).capabilities() == {"note": "[key]"}


def test_an_error_of_message_and_outcome_alone_has_no_further_facts():
    error = WhitneyError("no", outcome="failed")
    facts = ("method", "path", "status", "code", "request_id", "seq_id", "attempts")
    assert [getattr(error, name) for name in facts] == [None] * 7
    assert str(error) == "no [outcome failed]"


def test_the_services_own_words_are_shown_whole():
    words = " ".join(f"word{n}" for n in range(100))
    with ScriptedServer(run(), refusal(422, "invalid_payload", message=words)) as server:
        with pytest.raises(RequestRejected) as raised:
            step(client_of(server))
    assert words in str(raised.value)
