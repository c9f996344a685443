"""CONTRACT.md, "Transport"."""

from __future__ import annotations

import pytest


def assert_refused(answer, status, code):
    assert answer.status == status, answer.raw
    assert answer.error["code"] == code


@pytest.mark.ours
@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", "Basic d2hpdG5leTo=", "Bearer \u00e9"])
def test_a_missing_or_wrong_key_gets_401(api, authorization):
    assert_refused(api.call("GET", "capabilities", Authorization=authorization), 401, "unauthorized")


@pytest.mark.ours
def test_the_key_is_a_bearer_token(api):
    assert_refused(api.call("GET", "capabilities", Authorization=f"Basic {api.key}"), 401, "unauthorized")


@pytest.mark.ours
def test_a_wrong_key_learns_nothing_of_which_paths_exist(api):
    answers = [
        api.call("GET", path, Authorization="Bearer wrong") for path in ("capabilities", "nowhere", "runs/run-1")
    ]
    assert [answer.status for answer in answers] == [401, 401, 401]


@pytest.mark.ours
def test_bodies_are_utf_8_json_both_ways(api):
    answer = api.call("POST", "sessions", raw='{"provider": "ü"}'.encode())
    assert_refused(answer, 422, "invalid_payload")
    assert "json" in answer.headers["Content-Type"]
    assert_refused(api.call("POST", "sessions", raw='{"provider": "ü"}'.encode("latin-1")), 400, "invalid_json")


@pytest.mark.ours
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"modal"', b"null", b"<html>"])
def test_a_body_that_is_no_json_object_is_refused(api, text):
    assert_refused(api.call("POST", "sessions", raw=text), 400, "invalid_json")


@pytest.mark.ours
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinities_are_refused(api, run, number):
    text = f'{{"kind": "optim_step", "seq_id": 1, "payload": {{"optimizer": {{"learning_rate": {number}}}}}}}'
    assert_refused(api.call("POST", run.path(), raw=text.encode()), 400, "invalid_json")
    assert run.get()["next_seq_id"] == 1


@pytest.mark.ours
def test_a_number_that_overflows_to_infinity_is_refused(api, run, build):
    text = f'{{"kind": "optim_step", "seq_id": 1, "payload": {build.optimizer(learning_rate="§")}}}'
    raw = text.replace("'§'", "1e999").replace("'", '"').encode()
    assert_refused(api.call("POST", run.path(), raw=raw), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [
        ("GET", "nowhere", None),
        ("GET", "sessions/ses-unknown", None),
        ("POST", "sessions", {"provider": "nobody"}),
        ("DELETE", "capabilities", None),
    ],
)
def test_an_error_has_a_code_a_message_whether_to_retry_and_a_request_id(api, verb, path, body):
    answer = api.call(verb, path, body)
    assert answer.status >= 400
    assert isinstance(answer.error["code"], str)
    assert answer.error["message"]
    assert answer.error["retryable"] is False
    assert answer.body["request_id"]


@pytest.mark.ours
def test_no_answer_is_a_redirect(api):
    for path in ("", "sessions/", "capabilities/"):
        assert not 300 <= api.call("GET", path).status < 400


@pytest.mark.ours
def test_a_long_poll_answers_when_the_operation_ends(run):
    operation = run.post("save_weights_for_sampler", {}).body
    answer = run.api.call("GET", f"{run.path()}/{operation['operation_id']}?wait_s=60")
    assert answer.body["status"] == "succeeded"


@pytest.mark.ours
def test_a_poll_without_wait_answers_the_operation_as_it_is(run):
    operation = run.post("save_weights_for_sampler", {}).body
    for query in ("", "?wait_s=0"):
        answer = run.api.call("GET", f"{run.path()}/{operation['operation_id']}{query}")
        assert answer.status == 200
        assert answer.body["status"] in ("queued", "running", "succeeded")
