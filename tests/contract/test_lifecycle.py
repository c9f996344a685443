"""whitney_loop/CONTRACT.md, section 2: capabilities, sessions and runs, from creation to the end."""

from __future__ import annotations

import http.client
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.deployment import (
    ENDPOINTS,
    OPERATION_FIELDS,
    OPERATION_STATUSES,
    RUN_STATUSES,
    TERMINAL,
    Deviation,
    Run,
    accepted,
    assert_refused,
)

RUN_OPERATIONS = {"save_weights_for_sampler", "forward_backward", "optim_step", "save_state", "export_lora"}
SAMPLER_OPERATIONS = {"sample", "logprobs"}


def fresh_key():
    """Return a new Idempotency-Key: a deployment remembers those of earlier test runs."""
    return {"Idempotency_Key": f"contract-{uuid.uuid4().hex}"}


# Capabilities


@pytest.mark.doc
def test_capabilities_confirm_the_operations_that_a_loop_needs(api):
    body = accepted(api.call("GET", "capabilities"))
    operations = body["providers"][api.provider]["operations"] if "providers" in body else body["operations"]
    assert set(operations) >= RUN_OPERATIONS | SAMPLER_OPERATIONS


@pytest.mark.doc
def test_capabilities_hold_no_loss_list(api):
    def names(value):
        if isinstance(value, dict):
            return [*value, *(name for inner in value.values() for name in names(inner))]
        return [name for inner in value for name in names(inner)] if isinstance(value, list) else []

    assert [name for name in names(accepted(api.call("GET", "capabilities"))) if "loss" in name.lower()] == []


@pytest.mark.ours
def test_capabilities_name_each_providers_operations_and_models_or_operations_for_every_provider(api):
    body = accepted(api.call("GET", "capabilities"))
    offers = body["providers"].values() if "providers" in body else [body | {"models": []}]
    for offer in offers:
        assert {type(name) for name in offer["operations"]} == {str}
        assert {type(name) for name in offer["models"]} <= {str}


@pytest.mark.ours
def test_forward_is_offered(api):
    body = accepted(api.call("GET", "capabilities"))
    assert "forward" in (body["providers"][api.provider] if "providers" in body else body)["operations"]


# The rows of the table


@pytest.fixture(scope="module")
def answers(deployment, build):
    """The answer of each endpoint while two runs are created and ended; and the failure that stopped this, if any."""
    found = {}

    def ask(endpoint, body=None, **ids):
        verb, path = endpoint.split(" ")
        found[endpoint] = deployment.call(verb, path.removeprefix("/v1/training/").format(**ids), body)
        return accepted(found[endpoint])

    def active_run(session):
        made = ask("POST /v1/training/sessions/{session_id}/runs", model_and_rank, **session)
        run = Run(deployment, made["run_id"])
        run.wait_until(lambda status: status != "allocating")
        return run

    model_and_rank = {"model": deployment.model, "lora": {"rank": 4}}
    at_sampler = "POST /v1/training/runs/{run_id}/samplers/{sampler_id}/operations"
    try:
        ask("GET /v1/training/capabilities")
        made = ask("POST /v1/training/sessions", {"provider": deployment.provider})
        session = {"session_id": made["session_id"]}
        run = active_run(session)
        ids = {"run_id": run.run_id}
        save = {"kind": "save_weights_for_sampler", "seq_id": 1, "payload": {}}
        ids["operation_id"] = ask("POST /v1/training/runs/{run_id}/operations", save, **ids)["operation_id"]
        ids["sampler_id"] = run.result_of(ids["operation_id"])["sampler_id"]
        ask(at_sampler, {"kind": "logprobs", "seq_id": 2, "payload": build.logprobs(97, 98)}, **ids)
        ask("GET /v1/training/runs/{run_id}/operations/{operation_id}", **ids)
        ask("GET /v1/training/runs/{run_id}", **ids)
        ask("GET /v1/training/sessions/{session_id}", **session)
        ask("POST /v1/training/runs/{run_id}/finish", **ids)
        ask("POST /v1/training/runs/{run_id}/cancel", run_id=active_run(session).run_id)
        ask("POST /v1/training/sessions/{session_id}/close", **session)
    except (AssertionError, LookupError) as error:
        return found, f"not reached: {error!r} after {deployment.ledger.last}"
    return found, ""


@pytest.mark.doc
def test_the_path_of_the_capabilities_is_the_documented_one(answers):
    assert answers[0]["GET /v1/training/capabilities"].status == 200


@pytest.mark.ours
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_endpoint_answers_with_its_fields(answers, endpoint):
    found, why_no_further = answers
    if endpoint not in found:
        raise Deviation(why_no_further)
    if missing := sorted(ENDPOINTS[endpoint] - accepted(found[endpoint]).keys()):
        raise Deviation(f"without {', '.join(missing)}: {found[endpoint]}")


@pytest.mark.ours
def test_statuses_are_those_of_the_contract(answers):
    for endpoint, answer in answers[0].items():
        known = {"open", "closed"}
        if "run_id" in ENDPOINTS[endpoint]:
            known = OPERATION_STATUSES if ENDPOINTS[endpoint] == OPERATION_FIELDS else RUN_STATUSES
        if "status" in ENDPOINTS[endpoint] and answer.status < 300 and answer.body.get("status") not in known:
            raise Deviation(f"{endpoint}: expected one of {', '.join(sorted(known))}, found {answer}")


# Sessions


@pytest.mark.ours
def test_a_new_session_is_open_belongs_to_its_provider_and_has_no_runs(api, session_id):
    body = accepted(api.call("GET", f"sessions/{session_id}"))
    expected = {"session_id": session_id, "provider": api.provider, "status": "open", "runs": []}
    assert {name: body.get(name) for name in expected} == expected


@pytest.mark.ours
@pytest.mark.parametrize("body", [{}, {"provider": "nobody"}, {"provider": None}, {"provider": ["modal"]}])
def test_a_session_needs_a_known_provider(api, body):
    assert_refused(api.call("POST", "sessions", body), 422, "invalid_payload")


@pytest.mark.ours
def test_an_unknown_session_is_refused(api):
    for verb, path in [("GET", ""), ("POST", "/close")]:
        assert_refused(api.call(verb, f"sessions/ses-unknown{path}"))
    assert_refused(api.create_run("ses-unknown"))


# Runs


@pytest.mark.ours
def test_a_new_run_expects_seq_id_1_and_may_leave_out_seed_and_resume_from(api):
    body = accepted(api.create_run(api.shared_session()))
    assert body["next_seq_id"] == 1
    assert body["status"] in ("allocating", "active")


@pytest.mark.ours
def test_a_run_says_its_session_its_status_and_what_is_next(run):
    run.save()
    body = run.get()
    expected = {
        "run_id": run.run_id,
        "session_id": run.api.shared_session(),
        "status": "active",
        "next_seq_id": run.seq_id,
    }
    assert {name: body.get(name) for name in expected} == expected
    assert not body.get("error")


@pytest.mark.doc
def test_several_runs_may_live_in_one_session_and_are_listed_and_apart(api, session_id):
    policy, teacher = api.run(session_id), api.run(session_id)
    policy.train()
    assert policy.result("save_weights_for_sampler", {})["version"] == 1
    assert teacher.result("save_weights_for_sampler", {})["version"] == 0
    listed = accepted(api.call("GET", f"sessions/{session_id}"))["runs"]
    assert {each["run_id"] for each in listed} == {policy.run_id, teacher.run_id}
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
        {"lora": {"rank": 4.5}},
        {"seed": -1},
        {"seed": 1.5},
        {"resume_from": 1},
    ],
    ids=str,
)
def test_a_run_of_the_wrong_shape_is_refused(api, fields):
    assert_refused(api.create_run(api.shared_session(), **fields), 422, "invalid_payload")


@pytest.mark.ours
def test_an_unknown_run_is_refused(api):
    for verb, path in [("GET", ""), ("POST", "/finish"), ("POST", "/cancel"), ("GET", "/operations/op-1")]:
        assert_refused(api.call(verb, f"runs/run-unknown{path}"))
    body = {"kind": "save_state", "seq_id": 1, "payload": {}}
    assert_refused(api.call("POST", "runs/run-unknown/operations", body))


@pytest.mark.ours
def test_an_unknown_operation_is_refused(run):
    assert_refused(run.api.call("GET", f"{run.path()}/op-unknown"))


# Idempotency keys


@pytest.mark.ours
def test_the_same_idempotency_key_gives_the_session_that_was_made_first(api):
    key = fresh_key()
    first = api.open_session(**key)
    assert api.open_session(**key) == first
    assert api.open_session(**fresh_key()) != first


@pytest.mark.ours
def test_the_same_idempotency_key_gives_the_run_that_was_made_first(api, session_id):
    key = fresh_key()
    first, again, other = (
        accepted(api.create_run(session_id, headers=headers))["run_id"] for headers in (key, key, fresh_key())
    )
    assert first == again != other


@pytest.mark.ours
def test_an_idempotency_key_belongs_to_one_path(api):
    key = fresh_key()
    session_id = api.open_session(**key)
    runs = [accepted(api.create_run(each, headers=key)).get("run_id") for each in (session_id, api.open_session())]
    assert None not in runs
    assert runs[0] != runs[1]
    assert api.open_session(**key) == session_id


@pytest.mark.ours
def test_two_requests_at_once_with_one_idempotency_key_make_one_run(api, session_id):
    key = fresh_key()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: api.create_run(session_id, headers=key), range(2)))
    one, other = (accepted(answer)["run_id"] for answer in answers)
    assert one == other


# The end


@pytest.mark.doc
def test_finish_then_close_ends_a_loop(api, session_id):
    run = api.run(session_id)
    assert run.end("finish")["status"] == "finished"
    assert accepted(api.close(session_id))["status"] == "closed"
    assert run.get()["status"] == "finished"


@pytest.mark.ours
def test_finish_lets_what_was_accepted_end_and_may_be_asked_again(own_run):
    posted = [own_run.submit("save_weights_for_sampler", {}) for _ in range(3)]
    assert own_run.end("finish")["status"] == "finished"
    assert [own_run.wait(operation_id)["status"] for operation_id in posted] == ["succeeded"] * 3
    assert accepted(own_run.ask("finish"))["status"] == "finished"


@pytest.mark.doc
def test_cancel_then_polling_until_terminal_ends_a_run(own_run):
    assert accepted(own_run.ask("cancel"))["status"] in ("cancelling", "cancelled")
    assert own_run.wait_until(lambda status: status in TERMINAL)["status"] == "cancelled"


@pytest.fixture
def without_length(monkeypatch):
    """Send no Content-Length with an empty body, as ``curl -X POST`` does; urllib would send Content-Length: 0."""
    putheader = http.client.HTTPConnection.putheader

    def put_unless_empty(connection, header, *values):
        if (header, values) != ("Content-Length", ("0",)):
            putheader(connection, header, *values)

    with monkeypatch.context() as patch:
        patch.setattr(http.client.HTTPConnection, "putheader", put_unless_empty)
        yield


@pytest.mark.ours
@pytest.mark.usefixtures("without_length")
def test_finish_cancel_and_close_need_no_body(api, session_id, ended_run):
    for end in ("finish", "cancel"):  # both may be asked again
        run, _ = ended_run(end)
        accepted(run.ask(end))
    accepted(api.close(session_id))


@pytest.mark.ours
def test_operations_that_a_cancel_takes_from_the_queue_end_as_cancelled(own_run, build):
    """Operations that ran before the cancel came may have succeeded."""
    posted = [own_run.submit("forward_backward", build.slow_payload())]
    posted += [own_run.submit("save_weights_for_sampler", {}) for _ in range(2)]
    accepted(own_run.ask("cancel"))
    statuses = [own_run.wait(operation_id)["status"] for operation_id in posted]
    first_cancelled = (*statuses, "cancelled").index("cancelled")
    assert set(statuses[:first_cancelled]) <= {"succeeded"}
    assert set(statuses[first_cancelled:]) <= {"cancelled"}


@pytest.mark.ours
def test_finish_of_a_cancelled_run_is_run_not_active(ended_run):
    run, _ = ended_run("cancel")
    assert_refused(run.ask("finish"), 409, "run_not_active")


@pytest.mark.ours
@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_cancel_may_be_asked_again_and_gives_the_state_as_it_is(ended_run, end):
    run, _ = ended_run(end)
    assert accepted(run.ask("cancel"))["status"] == {"cancel": "cancelled", "finish": "finished"}[end]


@pytest.mark.ours
@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_any_operation_on_a_run_that_is_not_active_is_run_not_active(ended_run, build, end):
    run, saved = ended_run(end)
    assert_refused(run.post("save_state", {}), 409, "run_not_active")
    sampler_id = saved["result"]["sampler_id"]
    assert_refused(run.post("sample", build.sample(), sampler_id=sampler_id), 409, "run_not_active")


@pytest.mark.ours
def test_close_may_be_asked_again_and_gives_the_state_as_it_is(api, session_id):
    for _ in range(2):
        assert accepted(api.close(session_id))["status"] == "closed"
    assert accepted(api.call("GET", f"sessions/{session_id}"))["status"] == "closed"


@pytest.mark.ours
def test_closing_a_session_cancels_what_still_runs_in_it(api, session_id):
    active = api.run(session_id)
    accepted(api.close(session_id))
    assert active.wait_until(lambda status: status in TERMINAL)["status"] == "cancelled"


@pytest.mark.ours
def test_a_closed_session_takes_no_more_runs(api, session_id):
    accepted(api.close(session_id))
    assert_refused(api.create_run(session_id))
