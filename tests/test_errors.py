"""Errors can be kept and sent on, and nothing that a user can see holds the key."""

import html
import json
import pickle
import re
import traceback
import urllib.parse

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


def test_strings_of_an_answer_are_redacted_and_numbers_ids_urls_and_names_of_fields_are_not():
    for key in ("33333333", "localhost"):
        errors.keep_out_of_errors(key)
    answer = {
        "note": "a 33333333 b", "third": 1 / 3, "list": [33333333, "33333333", None, True, {"33333333": 1}],
        "run_id": "run-33333333", "uri": "file://localhost/a", "base_url": "http://localhost:1",
    }  # fmt: skip
    redacted = {"note": "a [key] b", "list": [33333333, "[key]", None, True, {"33333333": 1}]}
    assert errors.redacted_json(answer) == answer | redacted


def test_a_key_that_is_no_word_is_redacted_in_ids_urls_and_names_of_fields_too():
    errors.keep_out_of_errors(KEY)
    answer = {KEY: 1, "run_id": f"run-{KEY}", "uri": f"http://{KEY}"}
    assert errors.redacted_json(answer) == {"[key]": 1, "run_id": "run-[key]", "uri": "http://[key]"}


ODD_KEY = "a/b+c=d&e\"f'g<h>i%j\\k"
ECHOES = {
    "as it is": ODD_KEY,
    "repr": repr(ODD_KEY)[1:-1],
    "HTML": html.escape(ODD_KEY),
    "HTML without quotes": html.escape(ODD_KEY, quote=False),
    "HTML by numbers": "".join(f"&#{ord(character)};" for character in ODD_KEY),
    "HTML by hexadecimal numbers": "".join(f"&#x{ord(character):X};" for character in ODD_KEY),
    "JSON": json.dumps(ODD_KEY)[1:-1],
    "JSON with escaped slashes": json.dumps(ODD_KEY)[1:-1].replace("/", "\\/"),
    "JSON by numbers": "".join(f"\\u{ord(character):04x}" for character in ODD_KEY),
    "JSON within JSON": json.dumps(json.dumps(ODD_KEY))[1:-1],
    "a path": urllib.parse.quote(ODD_KEY, safe=""),
    "a path with slashes": urllib.parse.quote(ODD_KEY),
    "a path in lower case": re.sub("%..", lambda found: found[0].lower(), urllib.parse.quote(ODD_KEY, safe="")),
}


@pytest.mark.parametrize("form", ECHOES)
def test_a_key_is_recognised_however_an_echo_escapes_it_and_if_its_end_is_cut_off(form):
    errors.keep_out_of_errors(ODD_KEY)
    echo = ECHOES[form]
    assert errors.redacted(f"<p>{echo}</p>").replace('\\"', "") == "<p>[key]</p>"
    for length in range(len(echo)):
        shown = errors.redacted(f"<p>{echo[:length]}").removesuffix("[key]")
        assert len(shown) < len("<p>") + 8 * 7  # seven characters of the key, each in as many as eight


def test_a_text_that_only_begins_like_a_key_is_not_changed():
    errors.keep_out_of_errors("localhost1234")
    assert errors.redacted("http://localhost:80/") == "http://localhost:80/"


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
