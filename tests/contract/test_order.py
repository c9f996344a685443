"""whitney_loop/CONTRACT.md, section 3; the numbers of the tests are its numbers."""

from __future__ import annotations

import pytest

from contract.deployment import accepted, assert_refused, error_code


@pytest.mark.ours
def test_1_every_operation_takes_the_next_seq_id_from_1_on(own_run):
    answers = [accepted(own_run.post("save_weights_for_sampler", {})) for _ in range(3)]
    assert [answer["seq_id"] for answer in answers] == [1, 2, 3]
    assert own_run.get()["next_seq_id"] == 4


@pytest.mark.doc
def test_1_sampler_operations_take_their_turn_in_the_runs_order(run, sampler_id, build):
    mine = run.seq_id
    assert accepted(run.post("logprobs", build.logprobs(97, 98), sampler_id=sampler_id))["seq_id"] == mine
    assert run.get()["next_seq_id"] == mine + 1
    assert_refused(run.post("save_state", {}, seq_id=mine), 409, "seq_conflict")


@pytest.mark.ours
def test_2_operations_take_effect_in_seq_id_order(run, build):
    """All are posted behind a slow one, without waiting: each save sees exactly the steps before it."""
    run.submit("forward_backward", build.slow_payload())
    saves = []
    for _ in range(3):
        saves.append(run.submit("save_weights_for_sampler", {}))
        run.submit("forward_backward", build.payload(build.datum()))
        run.submit("optim_step", build.optimizer(learning_rate=0.0))
    first, *later = (run.result_of(operation_id)["version"] for operation_id in saves)
    assert later == [first + 1, first + 2]


@pytest.mark.ours
def test_2_a_samplers_weights_are_frozen(own_run, build):
    def last_logprob(sampler_id):
        return own_run.result("logprobs", build.logprobs(97, 98, 99), sampler_id)["logprobs"][-1]

    sampler_id = own_run.save()
    before = last_logprob(sampler_id)
    own_run.train()
    assert last_logprob(sampler_id) == pytest.approx(before, abs=0.02)
    assert last_logprob(own_run.save()) != pytest.approx(before, abs=0.02)


@pytest.mark.ours
def test_2_operations_of_samplers_that_may_overlap_give_what_they_give_one_by_one(run, sampler_id, build):
    requests = [build.sample(num_samples=1, seed=seed) for seed in range(3)]

    def tokens(result):
        return [sequence["tokens"] for sequence in result["sequences"]]

    one_by_one = [tokens(run.result("sample", request, sampler_id)) for request in requests]
    posted = [run.submit("sample", request, sampler_id) for request in requests]
    assert [tokens(run.result_of(operation_id)) for operation_id in posted] == one_by_one


@pytest.mark.ours
def test_3_the_same_seq_id_path_kind_and_payload_answers_the_operation_that_exists(run, build):
    mine = run.seq_id
    ended = run.operation("forward_backward", build.payload(build.datum()))
    assert accepted(run.post("forward_backward", build.payload(build.datum()), seq_id=mine)) == ended
    assert run.get()["next_seq_id"] == mine + 1


@pytest.mark.ours
def test_3_nothing_runs_twice(run, build):
    """If the two repeated requests ran again, there would be two steps."""
    before = run.version()
    first = run.seq_id
    backward, step = build.payload(build.datum()), build.optimizer(learning_rate=0.0)
    run.submit("forward_backward", backward)
    run.submit("optim_step", step)
    accepted(run.post("forward_backward", backward, seq_id=first))
    accepted(run.post("optim_step", step, seq_id=first + 1))
    assert run.get()["next_seq_id"] == run.seq_id
    assert run.version() == before + 1


@pytest.mark.ours
def test_3_the_same_operation_is_answered_after_the_run_has_ended(ended_run):
    run, saved = ended_run("cancel")
    assert accepted(run.post("save_weights_for_sampler", {}, seq_id=saved["seq_id"])) == saved


@pytest.mark.ours
def test_4_the_same_seq_id_with_another_kind_payload_or_path_is_a_seq_conflict(run, sampler_id, build):
    other_id = run.save()
    mine = run.seq_id
    accepted(run.post("logprobs", build.logprobs(97), sampler_id=sampler_id))
    for kind, payload, at in [
        ("sample", build.sample(), sampler_id),
        ("logprobs", build.logprobs(98), sampler_id),
        ("logprobs", build.logprobs(97), other_id),
        ("save_state", {}, None),
        ("nonsense", {}, None),
    ]:
        assert_refused(run.post(kind, payload, sampler_id=at, seq_id=mine), 409, "seq_conflict")
    assert run.get()["next_seq_id"] == mine + 1


@pytest.mark.ours
def test_4_a_seq_id_beyond_the_next_one_is_a_seq_gap_that_names_the_expected_one(run):
    expected = run.seq_id
    answer = run.post("save_weights_for_sampler", {}, seq_id=expected + 3)
    assert_refused(answer, 409, "seq_gap")
    assert answer.error.get("expected_seq_id") == expected
    assert str(expected) in answer.error["message"]
    assert run.get()["next_seq_id"] == expected


@pytest.mark.ours
def test_5_a_body_that_is_refused_takes_no_seq_id(run, build):
    expected = run.seq_id
    assert_refused(run.post("forward_backward", build.payload()), 422, "invalid_payload")
    assert_refused(run.post("nonsense", {}), 422, "invalid_payload")
    assert_refused(run.post("sample", build.sample(), sampler_id="smp-unknown"), 404)
    assert run.get()["next_seq_id"] == expected
    assert accepted(run.post("save_weights_for_sampler", {}))["seq_id"] == expected


@pytest.mark.ours
def test_5_an_unknown_sampler_or_one_of_another_run_is_404(run, ended_run, build):
    _, saved = ended_run("cancel")
    for sampler_id in ("smp-unknown", saved["result"]["sampler_id"]):
        assert_refused(run.post("logprobs", build.logprobs(97), sampler_id=sampler_id), 404)


@pytest.mark.ours
@pytest.mark.parametrize("seq_id", [0, -1, 1.5, "1", True, None, [1]])
def test_5_a_seq_id_is_an_integer_from_1(run, seq_id):
    body = {"kind": "save_weights_for_sampler", "seq_id": seq_id, "payload": {}}
    assert_refused(run.api.call("POST", run.path(), body), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("field", ["kind", "seq_id", "payload"])
def test_5_an_operation_has_kind_seq_id_and_payload(run, field):
    body = {"kind": "save_weights_for_sampler", "seq_id": run.seq_id, "payload": {}}
    del body[field]
    assert_refused(run.api.call("POST", run.path(), body), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("payload", [None, [], "x", 1], ids=str)
def test_5_a_payload_is_an_object(run, payload):
    assert_refused(run.post("save_weights_for_sampler", payload), 422, "invalid_payload")


@pytest.mark.ours
def test_6_a_failed_operation_says_why_and_has_no_result(settled_run, build):
    operation = settled_run.operation("optim_step", build.optimizer())
    assert (operation["status"], operation["result"]) == ("failed", None)
    assert error_code(operation) == "no_gradients"
    assert operation["error"]["message"]


@pytest.mark.ours
def test_6_a_failed_operation_leaves_weights_and_optimizer_as_they_were(settled_run, build):
    run, version = settled_run, settled_run.version()
    before = run.result("forward", build.payload(build.datum()))["loss"]
    assert run.operation("optim_step", build.optimizer())["status"] == "failed"
    assert run.get()["status"] == "active"
    assert run.result("forward", build.payload(build.datum()))["loss"] == pytest.approx(before, rel=0.01)
    assert run.train(learning_rate=0.0)["step"] == version + 1


@pytest.mark.ours
@pytest.mark.parametrize(
    "fields",
    [{"beta2": 0.0, "eps": 1e-320}, {"learning_rate": 1e30, "weight_decay": 1e30}],
    ids=["eps", "weight_decay"],
)
def test_6_a_step_that_overflows_is_undone_and_every_other_step_leaves_a_model_that_computes(own_run, build, fields):
    """In float32 this eps is 0, which gives 0/0 if an input never had a gradient; this decay is infinite."""

    def loss():
        return own_run.result("forward", build.payload(build.datum()))["loss"]

    for _ in range(2):
        own_run.train()
    before = loss()
    own_run.result("forward_backward", build.payload(build.datum() | {"input": {"token_ids": [120, 121, 122]}}))
    failed = own_run.operation("optim_step", build.optimizer(**fields))["status"] == "failed"
    after = loss()
    if failed:
        assert after == pytest.approx(before, rel=0.01)
        step = own_run.result("optim_step", build.optimizer(learning_rate=0.0))
        assert step["step"] == 3
        assert step["grad_norm"] > 0


@pytest.mark.ours
def test_6_a_gradient_whose_square_is_beyond_float32_is_refused_or_clipped_as_any_other(own_run, build):
    def loss():
        return own_run.result("forward", build.payload(build.datum()))["loss"]

    before = loss()
    payload = build.payload(build.datum(weights=[0.0, 1e25, 1e25]))
    own_run.operation("forward_backward", payload)
    step = own_run.operation("optim_step", build.optimizer(grad_clip_norm=1.0))
    after = loss()
    if step["status"] == "succeeded":
        assert after < before
    else:
        assert after == pytest.approx(before, rel=0.01)


@pytest.mark.ours
def test_6_optim_step_without_a_gradient_since_the_last_one_fails_with_no_gradients(run, build):
    step = run.train(learning_rate=0.0)["step"]
    operation = run.operation("optim_step", build.optimizer())
    assert (operation["status"], error_code(operation)) == ("failed", "no_gradients")
    assert run.version() == step


@pytest.mark.ours
def test_7_samplers_are_kept_but_for_those_older_than_the_newest_16_the_first_excepted(own_run, build):
    sampler_ids = [own_run.save() for _ in range(18)]
    for sampler_id in (sampler_ids[0], sampler_ids[2], sampler_ids[-1]):
        own_run.result("logprobs", build.logprobs(97), sampler_id)
    forgotten = own_run.post("logprobs", build.logprobs(97), sampler_id=sampler_ids[1])
    if forgotten.status >= 300:
        assert_refused(forgotten, 410, "expired")


@pytest.mark.ours
def test_7_results_are_kept_but_for_those_older_than_the_newest_256(own_run, build):
    """The 255 that come between are steps without a gradient: they fail, and cost nothing."""
    forgotten_id = own_run.operation("save_weights_for_sampler", {})["operation_id"]
    kept = own_run.operation("save_weights_for_sampler", {})
    for _ in range(255):
        operation = own_run.operation("optim_step", build.optimizer(learning_rate=0.0))
        assert operation["status"] == "failed"
    assert own_run.poll(kept["operation_id"]) == kept
    assert accepted(own_run.post("save_weights_for_sampler", {}, seq_id=2)) == kept
    for forgotten in (
        own_run.post("save_weights_for_sampler", {}, seq_id=1),
        own_run.api.call("GET", f"{own_run.path()}/{forgotten_id}"),
    ):
        if forgotten.status >= 300:
            assert_refused(forgotten, 410, "expired")
