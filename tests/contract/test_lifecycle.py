"""CONTRACT.md, "Endpoints": capabilities, sessions and runs, from creation to the end."""

from __future__ import annotations

import threading

import pytest

TERMINAL = ("finished", "cancelled", "failed")
RUN_OPERATIONS = {"save_weights_for_sampler", "forward_backward", "optim_step", "save_state", "export_lora"}
SAMPLER_OPERATIONS = {"sample", "logprobs"}


def assert_refused(answer, status, code):
    assert answer.status == status, answer.raw
    assert answer.error["code"] == code


@pytest.mark.doc
def test_capabilities_confirm_the_operations_that_a_loop_needs(api):
    body = api.call("GET", "capabilities").body
    operations = body["providers"][api.provider]["operations"] if "providers" in body else body["operations"]
    assert set(operations) >= RUN_OPERATIONS | SAMPLER_OPERATIONS


@pytest.mark.doc
def test_capabilities_hold_no_loss_list(api):
    assert b"loss" not in api.call("GET", "capabilities").raw


@pytest.mark.ours
def test_capabilities_name_each_providers_operations_and_models(api):
    offer = api.call("GET", "capabilities").body["providers"][api.provider]
    assert "forward" in offer["operations"]
    assert all(isinstance(model, str) for model in offer["models"])


@pytest.mark.ours
def test_a_new_session_is_open_and_belongs_to_its_provider(api, session_id):
    body = api.call("GET", f"sessions/{session_id}").body
    assert body == {"session_id": session_id, "provider": api.provider, "status": "open", "runs": []}


@pytest.mark.ours
@pytest.mark.parametrize("body", [{}, {"provider": "nobody"}, {"provider": None}, {"provider": ["modal"]}])
def test_a_session_needs_a_known_provider(api, body):
    assert_refused(api.call("POST", "sessions", body), 422, "invalid_payload")


@pytest.mark.ours
def test_an_unknown_session_is_not_found(api):
    for verb, path in [("GET", ""), ("POST", "/close")]:
        assert_refused(api.call(verb, f"sessions/ses-unknown{path}"), 404, "not_found")
    assert_refused(api.create_run("ses-unknown"), 404, "not_found")


@pytest.mark.ours
def test_a_new_run_expects_seq_id_1(api, session_id):
    body = api.create_run(session_id).body
    assert body["next_seq_id"] == 1
    assert body["status"] in ("allocating", "active")


@pytest.mark.ours
def test_a_run_says_its_session_and_what_is_next(run, session_id):
    run.save()
    body = run.get()
    assert body["run_id"] == run.run_id
    assert body["session_id"] == session_id
    assert body["status"] == "active"
    assert body["next_seq_id"] == 2
    assert "error" not in body


@pytest.mark.ours
def test_a_session_lists_its_runs(api, session_id):
    runs = [api.run(session_id) for _ in range(2)]
    listed = api.call("GET", f"sessions/{session_id}").body["runs"]
    assert [each["run_id"] for each in listed] == [run.run_id for run in runs]
    assert {each["status"] for each in listed} == {"active"}


@pytest.mark.ours
@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"model": None},
        {"lora": None},
        {"lora": {}},
        {"lora": {"rank": 0}},
        {"lora": {"rank": True}},
        {"lora": {"rank": 4.0}},
        {"seed": -1},
        {"seed": 1.5},
        {"seed": True},
        {"resume_from": 1},
        {"unknown": 1},
    ],
)
def test_a_run_of_the_wrong_shape_is_refused(api, session_id, fields):
    assert_refused(api.create_run(session_id, **fields), 422, "invalid_payload")


@pytest.mark.ours
def test_an_unknown_run_is_not_found(api):
    for verb, path in [("GET", ""), ("POST", "/finish"), ("POST", "/cancel"), ("GET", "/operations/op-1")]:
        assert_refused(api.call(verb, f"runs/run-unknown{path}"), 404, "not_found")
    body = {"kind": "save_state", "seq_id": 1, "payload": {}}
    assert_refused(api.call("POST", "runs/run-unknown/operations", body), 404, "not_found")


@pytest.mark.ours
def test_an_unknown_operation_is_not_found(run):
    assert_refused(run.api.call("GET", f"{run.path()}/op-unknown"), 404, "not_found")


@pytest.mark.ours
def test_the_same_idempotency_key_gives_the_session_that_was_made_first(api):
    assert api.open_session(key="contract-key-1") == api.open_session(key="contract-key-1")
    assert api.open_session(key="contract-key-1") != api.open_session(key="contract-key-2")


@pytest.mark.ours
def test_the_same_idempotency_key_gives_the_run_that_was_made_first(api, session_id):
    first, again, other = (api.create_run(session_id, key=key).body["run_id"] for key in ("a", "a", "b"))
    assert first == again != other


@pytest.mark.ours
def test_an_idempotency_key_belongs_to_one_path(api):
    runs = [api.create_run(api.open_session(), key="same").body["run_id"] for _ in range(2)]
    assert runs[0] != runs[1]


@pytest.mark.ours
def test_two_requests_at_once_with_one_idempotency_key_make_one_run(api, session_id):
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(api.create_run(session_id, key="race").body["run_id"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == 1


@pytest.mark.doc
def test_several_runs_may_live_in_one_session(api, session_id):
    policy, teacher = api.run(session_id), api.run(session_id)
    policy.train()
    assert policy.result("save_weights_for_sampler", {})["version"] == 1
    assert teacher.result("save_weights_for_sampler", {})["version"] == 0


@pytest.mark.doc
def test_finish_then_close_ends_a_loop(run, session_id):
    assert run.api.call("POST", f"runs/{run.run_id}/finish").status == 200
    run.wait_until(lambda status: status == "finished")
    closed = run.api.call("POST", f"sessions/{session_id}/close").body
    assert closed["status"] == "closed"
    assert closed["session_id"] == session_id
    assert closed["runs"][0]["status"] == "finished"


@pytest.mark.ours
def test_finish_lets_what_was_accepted_end(run):
    posted = [run.post("save_weights_for_sampler", {}).body["operation_id"] for _ in range(5)]
    run.api.call("POST", f"runs/{run.run_id}/finish")
    run.wait_until(lambda status: status in TERMINAL)
    assert [run.wait(operation_id)["status"] for operation_id in posted] == ["succeeded"] * 5


@pytest.mark.ours
def test_finish_may_be_asked_again_once_finished(run):
    run.api.call("POST", f"runs/{run.run_id}/finish")
    run.wait_until(lambda status: status == "finished")
    again = run.api.call("POST", f"runs/{run.run_id}/finish")
    assert (again.status, again.body["status"]) == (200, "finished")


@pytest.mark.ours
def test_finish_of_a_cancelled_run_is_refused(run):
    run.api.call("POST", f"runs/{run.run_id}/cancel")
    run.wait_until(lambda status: status == "cancelled")
    assert_refused(run.api.call("POST", f"runs/{run.run_id}/finish"), 409, "run_not_active")


@pytest.mark.doc
def test_cancel_then_polling_until_terminal_ends_a_run(run):
    answer = run.api.call("POST", f"runs/{run.run_id}/cancel")
    assert answer.status == 200
    assert answer.body["status"] in ("cancelling", "cancelled")
    assert run.wait_until(lambda status: status in TERMINAL)["status"] == "cancelled"


@pytest.mark.ours
@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_cancel_may_be_asked_again_and_gives_the_state_as_it_is(run, end):
    run.api.call("POST", f"runs/{run.run_id}/{end}")
    ended = run.wait_until(lambda status: status in TERMINAL)
    again = run.api.call("POST", f"runs/{run.run_id}/cancel")
    assert (again.status, again.body["status"]) == (200, ended["status"])


@pytest.mark.ours
@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_an_operation_on_a_run_that_is_not_active_is_refused(run, build, end):
    sampler_id = run.save()
    run.api.call("POST", f"runs/{run.run_id}/{end}")
    run.wait_until(lambda status: status in TERMINAL)
    assert_refused(run.post("save_state", {}), 409, "run_not_active")
    assert_refused(run.post("sample", build.sample(), sampler_id=sampler_id), 409, "run_not_active")


@pytest.mark.ours
def test_close_may_be_asked_again_and_gives_the_state_as_it_is(api, session_id):
    answers = [api.call("POST", f"sessions/{session_id}/close") for _ in range(2)]
    assert [(answer.status, answer.body["status"]) for answer in answers] == [(200, "closed")] * 2
    assert api.call("GET", f"sessions/{session_id}").body["status"] == "closed"


@pytest.mark.ours
def test_closing_a_session_cancels_what_still_runs_in_it(api, session_id):
    finished, active = api.run(session_id), api.run(session_id)
    api.call("POST", f"runs/{finished.run_id}/finish")
    finished.wait_until(lambda status: status == "finished")
    api.call("POST", f"sessions/{session_id}/close")
    assert active.wait_until(lambda status: status in TERMINAL)["status"] == "cancelled"
    assert finished.get()["status"] == "finished"


@pytest.mark.ours
def test_a_closed_session_takes_no_more_runs(api, session_id):
    api.call("POST", f"sessions/{session_id}/close")
    assert_refused(api.create_run(session_id), 409, "session_not_open")
