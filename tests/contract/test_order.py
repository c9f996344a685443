"""CONTRACT.md, "Order and exactly-once"; the numbers are its numbers."""

from __future__ import annotations

import pytest


def assert_refused(answer, status, code):
    assert answer.status == status, answer.raw
    assert answer.error["code"] == code


@pytest.mark.ours
def test_1_seq_ids_count_from_1(run):
    answers = [run.post("save_weights_for_sampler", {}).body for _ in range(3)]
    assert [answer["seq_id"] for answer in answers] == [1, 2, 3]
    assert run.get()["next_seq_id"] == 4


@pytest.mark.doc
def test_1_sampler_operations_take_their_turn_in_the_runs_order(run, build):
    sampler_id = run.save()
    answer = run.post("logprobs", build.logprobs(97, 98), sampler_id=sampler_id)
    assert answer.body["seq_id"] == 2
    assert run.get()["next_seq_id"] == 3
    assert_refused(run.post("save_state", {}, seq_id=2), 409, "seq_conflict")


@pytest.mark.ours
def test_2_operations_take_effect_in_order(run, build):
    """Posted without waiting: each save sees exactly the steps before it."""
    posted = []
    for _ in range(3):
        posted.append(run.post("save_weights_for_sampler", {}))
        run.post("forward_backward", build.payload(build.datum()))
        run.post("optim_step", build.optimizer())
    versions = [run.wait(answer.body["operation_id"])["result"]["version"] for answer in posted]
    assert versions == [0, 1, 2]


@pytest.mark.ours
def test_2_a_samplers_weights_are_frozen(run, build):
    sampler_id = run.save()
    before = run.result("logprobs", build.logprobs(97, 98, 99), sampler_id)
    run.train()
    assert run.result("logprobs", build.logprobs(97, 98, 99), sampler_id) == before
    assert run.result("logprobs", build.logprobs(97, 98, 99), run.save()) != before


@pytest.mark.ours
def test_3_the_same_operation_again_answers_the_one_that_exists(run, build):
    first = run.post("forward_backward", build.payload(build.datum())).body
    ended = run.wait(first["operation_id"])
    again = run.post("forward_backward", build.payload(build.datum()), seq_id=1)
    assert again.status < 300
    assert again.body == ended
    assert run.get()["next_seq_id"] == 2


@pytest.mark.ours
def test_3_nothing_runs_twice(run, build):
    run.post("forward_backward", build.payload(build.datum()))
    for _ in range(3):
        run.post("optim_step", build.optimizer(), seq_id=2)
    run.seq_id = 3
    assert run.result("save_weights_for_sampler", {})["version"] == 1


@pytest.mark.ours
def test_3_the_same_operation_is_answered_after_the_run_has_ended(run):
    ended = run.operation("save_weights_for_sampler", {})
    run.api.call("POST", f"runs/{run.run_id}/cancel")
    run.wait_until(lambda status: status == "cancelled")
    assert run.post("save_weights_for_sampler", {}, seq_id=1).body == ended


@pytest.mark.ours
def test_4_the_same_seq_id_with_another_kind_payload_or_path_is_a_conflict(run, build):
    sampler_id, other_id = run.save(), run.save()
    run.post("logprobs", build.logprobs(97), sampler_id=sampler_id)
    for kind, payload, at in [
        ("sample", build.sample(), sampler_id),
        ("logprobs", build.logprobs(98), sampler_id),
        ("logprobs", build.logprobs(97), other_id),
        ("save_state", {}, None),
        ("nonsense", {}, None),
    ]:
        assert_refused(run.post(kind, payload, sampler_id=at, seq_id=3), 409, "seq_conflict")
    assert run.get()["next_seq_id"] == 4


@pytest.mark.ours
def test_4_a_seq_id_beyond_the_next_one_is_a_gap_that_names_it(run):
    run.save()
    answer = run.post("save_weights_for_sampler", {}, seq_id=5)
    assert_refused(answer, 409, "seq_gap")
    assert answer.error["expected_seq_id"] == 2
    assert "2" in answer.error["message"]
    assert run.get()["next_seq_id"] == 2


@pytest.mark.ours
def test_5_a_refused_body_takes_no_seq_id(run, build):
    assert_refused(run.post("forward_backward", build.payload()), 422, "invalid_payload")
    assert_refused(run.post("nonsense", {}), 422, "invalid_payload")
    assert_refused(run.post("sample", build.sample(), sampler_id="smp-unknown"), 404, "not_found")
    assert run.get()["next_seq_id"] == 1
    assert run.post("save_weights_for_sampler", {}).status < 300


@pytest.mark.ours
@pytest.mark.parametrize("seq_id", [0, -1, 1.0, "1", True, None, [1]])
def test_5_a_seq_id_is_an_integer_from_1(run, seq_id):
    body = {"kind": "save_state", "seq_id": seq_id, "payload": {}}
    assert_refused(run.api.call("POST", run.path(), body), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("body", [{}, {"kind": "save_state", "seq_id": 1}, {"kind": 1, "seq_id": 1, "payload": {}}])
def test_5_an_operation_has_kind_seq_id_and_payload(run, body):
    assert_refused(run.api.call("POST", run.path(), body), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("payload", [None, [], "x", 1])
def test_5_a_payload_is_an_object(run, payload):
    assert_refused(run.post("save_state", payload), 422, "invalid_payload")


@pytest.mark.ours
def test_6_a_failed_operation_says_why(run, build):
    operation = run.operation("optim_step", build.optimizer())
    assert operation["status"] == "failed"
    assert operation["result"] is None
    assert operation["error"]["code"] == "no_gradients"
    assert operation["error"]["message"]


@pytest.mark.ours
def test_6_a_failed_operation_leaves_everything_as_it_was(run, build):
    assert run.operation("optim_step", build.optimizer())["status"] == "failed"
    assert run.get()["status"] == "active"
    assert run.train()["step"] == 1


@pytest.mark.ours
def test_6_a_step_without_a_gradient_since_the_last_one_fails(run, build):
    run.train()
    assert run.operation("optim_step", build.optimizer())["error"]["code"] == "no_gradients"
    assert run.result("save_weights_for_sampler", {})["version"] == 1


@pytest.mark.ours
def test_7_an_old_sampler_may_expire_but_the_first_and_the_newest_16_do_not(run, build):
    sampler_ids = [run.save() for _ in range(18)]
    for sampler_id in (sampler_ids[0], *sampler_ids[-16:]):
        run.result("logprobs", build.logprobs(97), sampler_id)
    answer = run.post("logprobs", build.logprobs(97), sampler_id=sampler_ids[1])
    if answer.status != 410:
        assert answer.status < 300
    else:
        assert answer.error["code"] == "expired"


@pytest.mark.ours
def test_7_an_old_result_may_expire_but_the_newest_256_do_not(run):
    for _ in range(257):
        run.operation("save_weights_for_sampler", {})
    operation_id = run.post("save_weights_for_sampler", {}, seq_id=2).body["operation_id"]
    assert run.api.call("GET", f"{run.path()}/{operation_id}").body["status"] == "succeeded"
    forgotten = run.post("save_weights_for_sampler", {}, seq_id=1)
    if forgotten.status != 410:
        assert forgotten.body["seq_id"] == 1
    else:
        assert forgotten.error["code"] == "expired"
