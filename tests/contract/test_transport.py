"""whitney_loop/CONTRACT.md, section 1."""

from __future__ import annotations

import json
import time

import pytest

from contract.deployment import ENDED, OPERATION_STATUSES, TERMINAL, Deviation, accepted, assert_refused

REFUSALS = [
    ("GET", "sessions/ses-unknown", None),
    ("GET", "runs/run-unknown", None),
    ("POST", "sessions", {"provider": "nobody"}),
    ("POST", "runs/run-unknown/operations", {"kind": "save_state", "seq_id": 1, "payload": {}}),
]


@pytest.fixture
def has_key(api):
    if api.key is None:
        pytest.skip("no --contract-key: a loopback deployment may ask for none")


@pytest.mark.ours
@pytest.mark.usefixtures("has_key")
@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong", "Basic d2hpdG5leTo="])
def test_a_missing_or_wrong_key_gets_401(api, authorization):
    assert_refused(api.call("GET", "capabilities", Authorization=authorization), 401)


@pytest.mark.ours
@pytest.mark.usefixtures("has_key")
def test_the_key_is_sent_as_a_bearer_token(api):
    accepted(api.call("GET", "capabilities"))
    assert_refused(api.call("GET", "capabilities", Authorization=f"Basic {api.key}"), 401)


@pytest.mark.ours
@pytest.mark.usefixtures("has_key")
def test_a_wrong_key_makes_nothing(api):
    body = {"provider": api.provider}
    assert_refused(api.call("POST", "sessions", body, Authorization="Bearer wrong"), 401)


@pytest.mark.ours
def test_bodies_are_utf_8_json_both_ways(run):
    """The second ``kind`` replaces the first, so that a service that reads Latin-1 would do the operation."""
    assert_refused(run.api.call("POST", "sessions", raw='{"provider": "ü"}'.encode()), 422, "invalid_payload")
    body = json.dumps({"kind": "save_weights_for_sampler", "seq_id": run.seq_id, "payload": {}})
    assert_refused(run.api.call("POST", run.path(), raw=body.replace("{", '{"kind": "ü", ', 1).encode("latin-1")))
    assert run.get()["next_seq_id"] == run.seq_id


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_the_embedded_service_reads_and_gives_a_models_name_in_utf_8(api, session_id):
    body = {"model": "modèle ü€", "lora": {"rank": 4}}
    raw = json.dumps(body, ensure_ascii=False).encode()
    assert accepted(api.call("POST", f"sessions/{session_id}/runs", raw=raw))["model"] == body["model"]
    [listed] = accepted(api.call("GET", f"sessions/{session_id}"))["runs"]
    assert listed["model"] == body["model"]


@pytest.mark.ours
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"modal"', b"null", b"<html>"])
def test_a_body_that_is_no_json_object_is_refused(api, text):
    assert_refused(api.call("POST", "sessions", raw=text))


@pytest.mark.ours
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_nan_and_infinities_are_refused(run, build, number):
    body = {"kind": "optim_step", "seq_id": run.seq_id, "payload": build.optimizer(learning_rate="§")}
    raw = json.dumps(body).replace(json.dumps("§"), number).encode()
    assert_refused(run.api.call("POST", run.path(), raw=raw))
    assert run.get()["next_seq_id"] == run.seq_id


@pytest.mark.ours
@pytest.mark.parametrize(("verb", "path", "body"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_error_has_a_code_a_message_whether_to_retry_and_a_request_id(api, verb, path, body):
    answer = api.call(verb, path, body)
    assert_refused(answer)
    assert {name: type(value) for name, value in answer.error.items() if name in ("code", "message", "retryable")} == {
        "code": str,
        "message": str,
        "retryable": bool,
    }
    assert answer.error["code"]
    assert answer.error["message"]
    assert answer.body["request_id"]


@pytest.mark.ours
def test_an_error_says_what_must_not_be_retried(api):
    assert api.call("POST", "sessions", {"provider": "nobody"}).error["retryable"] is False


@pytest.mark.ours
def test_no_answer_is_a_redirect(api):
    """The client refuses redirects. These tests do not follow one either, so a redirect would fail here."""
    for path in ("capabilities", f"sessions/{api.shared_session()}"):
        accepted(api.call("GET", path))


@pytest.mark.ours
def test_a_long_poll_answers_when_the_operation_ends_or_after_wait_s(run, build):
    """A poll without wait_s finds the operation unfinished; a poll with wait_s finds it ended."""
    for data in (1, 4, 16):  # an engine may have ended a small one before it can be asked about
        operation_id = run.submit("forward_backward", build.slow_payload(data))
        at_once = run.poll(operation_id, wait_s=0)["status"]
        started = time.monotonic()
        status = run.poll(operation_id, wait_s=20)["status"]
        if status not in ENDED and time.monotonic() - started < 19:
            raise Deviation(f"expected the end or an answer after 20 s, found {run.api.ledger.last} at once")
        if at_once not in ENDED:
            return
    raise Deviation("expected the state as it is after wait_s=0, found only operations that have ended")


@pytest.mark.ours
def test_a_poll_that_does_not_wait_answers_the_state_as_it_is(run):
    operation_id = run.submit("save_weights_for_sampler", {})
    assert run.poll(operation_id, wait_s=0)["status"] in OPERATION_STATUSES
    without_wait = run.api.call("GET", f"{run.path()}/{operation_id}")
    assert without_wait.body["status"] in OPERATION_STATUSES
    assert run.get()["status"] not in TERMINAL
