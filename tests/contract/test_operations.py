"""whitney_loop/CONTRACT.md, section 4: what each kind takes and gives."""

from __future__ import annotations

import math
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from contract.deployment import OPERATION_FIELDS, assert_refused, error_code

EMPTY_PAYLOAD_KINDS = ["save_weights_for_sampler", "save_state", "export_lora"]


def tokens_of(sample):
    return [sequence["tokens"] for sequence in sample["sequences"]]


# In general


@pytest.mark.ours
def test_an_operation_says_what_and_where_it_is(run):
    operation = run.operation("save_weights_for_sampler", {})
    assert OPERATION_FIELDS - operation.keys() == set()
    assert operation["run_id"] == run.run_id
    assert (operation["kind"], operation["seq_id"]) == ("save_weights_for_sampler", run.seq_id - 1)
    assert (operation["status"], operation["error"]) == ("succeeded", None)


@pytest.mark.doc
def test_two_cycles_and_the_checkpoints_go_through_in_the_documented_order(own_run, build):
    for version in range(2):
        saved = own_run.result("save_weights_for_sampler", {})
        assert saved["version"] == version
        sample = own_run.result("sample", build.sample(), saved["sampler_id"])
        assert len(sample["sequences"]) == 2
        own_run.result("forward_backward", build.payload(build.policy_datum(), loss="importance_sampling"))
        own_run.result("optim_step", build.optimizer())
    own_run.result("save_state", {})
    own_run.result("export_lora", {})
    assert own_run.end("finish")["status"] == "finished"


@pytest.mark.ours
@pytest.mark.parametrize("kind", ["sample", "logprobs"])
def test_a_sampler_operation_is_refused_at_the_runs_own_path(run, build, kind):
    payload = build.sample() if kind == "sample" else build.logprobs(97)
    assert_refused(run.post(kind, payload), 422, "invalid_payload")


@pytest.mark.ours
def test_a_run_operation_is_refused_at_a_samplers_path(run, sampler_id):
    assert_refused(run.post("save_state", {}, sampler_id=sampler_id), 422, "invalid_payload")


@pytest.mark.doc
@pytest.mark.parametrize("kind", EMPTY_PAYLOAD_KINDS)
def test_saving_and_exporting_take_an_empty_payload(run, kind):
    run.result(kind, {})


@pytest.mark.ours
@pytest.mark.parametrize("kind", EMPTY_PAYLOAD_KINDS)
def test_saving_and_exporting_take_nothing_else(run, kind):
    assert_refused(run.post(kind, {"name": "mine"}), 422, "invalid_payload")


# save_weights_for_sampler


@pytest.mark.ours
def test_a_save_gives_a_sampler_id_and_as_version_the_number_of_optimizer_steps_taken(run):
    step = run.train(learning_rate=0.0)["step"]
    saved = run.result("save_weights_for_sampler", {})
    assert isinstance(saved["sampler_id"], str)
    assert saved["version"] == step


# sample


@pytest.mark.doc
def test_a_sample_has_the_tokens_logprobs_and_stop_reason_of_each_sequence(run, sampler_id, build):
    sample = run.result("sample", build.sample(num_samples=8), sampler_id)
    assert len(sample["sequences"]) == 8
    for sequence in sample["sequences"]:
        assert {type(token) for token in sequence["tokens"]} == {int}
        assert 1 <= len(sequence["tokens"]) <= 6
        assert len(sequence["logprobs"]) == len(sequence["tokens"])
        assert all(logprob <= 0 for logprob in sequence["logprobs"])
        assert sequence["stop_reason"] in ("stop", "length")


@pytest.mark.ours
def test_a_sample_names_the_version_it_came_from(run, build):
    step = run.train(learning_rate=0.0)["step"]
    assert run.result("sample", build.sample(num_samples=1), run.save())["version"] == step


@pytest.mark.ours
def test_a_sequence_stops_for_length_only_at_max_tokens(run, sampler_id, build):
    sample = run.result("sample", build.sample(num_samples=4, max_tokens=2), sampler_id)
    for sequence in sample["sequences"]:
        assert len(sequence["tokens"]) == 2 or sequence["stop_reason"] == "stop"


@pytest.mark.ours
def test_a_stop_token_that_was_sampled_is_part_of_the_tokens(run, sampler_id, build):
    request = build.sample(num_samples=1, temperature=0.0, max_tokens=2)
    first = run.result("sample", request, sampler_id)["sequences"][0]["tokens"][0]
    request["sampling_params"]["stop"] = [first]
    sequence = run.result("sample", request, sampler_id)["sequences"][0]
    assert (sequence["tokens"], sequence["stop_reason"]) == ([first], "stop")


@pytest.mark.ours
@pytest.mark.parametrize("params", [{"temperature": 0.5}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 1}])
def test_logprobs_of_a_sample_are_those_of_the_untempered_untruncated_policy(run, sampler_id, build, params):
    sequence = run.result("sample", build.sample(num_samples=1, **params), sampler_id)["sequences"][0]
    scored = run.result("logprobs", build.logprobs(97, 98, *sequence["tokens"]), sampler_id)["logprobs"][2:]
    assert sequence["logprobs"] == pytest.approx(scored, abs=0.1)


@pytest.mark.ours
def test_the_same_sampler_request_and_explicit_seed_give_the_same_sequences(own_run, build):
    sampler_id = own_run.save()
    first = tokens_of(own_run.result("sample", build.sample(seed=5), sampler_id))
    own_run.train()
    assert tokens_of(own_run.result("sample", build.sample(seed=5), sampler_id)) == first
    assert tokens_of(own_run.result("sample", build.sample(seed=6), sampler_id)) != first


@pytest.mark.ours
def test_without_a_seed_the_runs_seed_and_the_seq_id_decide(api, build):
    def two_samples(seed):
        run = api.run(seed=seed)
        sampler_id = run.save()
        return [tokens_of(run.result("sample", build.sample(), sampler_id)) for _ in range(2)]

    first = two_samples(1)
    assert first[0] != first[1]
    assert two_samples(1) == first
    assert two_samples(2) != first


@pytest.mark.ours
@pytest.mark.parametrize("field", ["prompt", "num_samples"])  # without max_tokens it might sample long
def test_a_sample_request_needs_its_fields(run, sampler_id, build, field):
    request = build.sample(num_samples=1, max_tokens=1)
    del request[field]
    assert_refused(run.post("sample", request, sampler_id=sampler_id), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -1},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"seed": -1},
        {"seed": 0.5},
        {"stop": 10},
        {"stop": ["a"]},
    ],
    ids=str,
)
def test_sampling_params_out_of_range_are_refused(run, sampler_id, build, params):
    request = build.sample(num_samples=1, **{"max_tokens": 1} | params)
    assert_refused(run.post("sample", request, sampler_id=sampler_id), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("token_ids", [None, [], "ab", [-1], [1.5], [True], [None]], ids=str)
def test_token_ids_are_a_list_of_integers_from_0(run, sampler_id, build, token_ids):
    request = build.sample(num_samples=1, max_tokens=1) | {"prompt": {"token_ids": token_ids}}
    assert_refused(run.post("sample", request, sampler_id=sampler_id), 422, "invalid_payload")
    request = {"input": {"token_ids": token_ids}}
    assert_refused(run.post("logprobs", request, sampler_id=sampler_id), 422, "invalid_payload")


# logprobs


@pytest.mark.ours
def test_logprobs_are_one_per_token_and_the_first_is_null(run, sampler_id, build):
    logprobs = run.result("logprobs", build.logprobs(97, 98, 99), sampler_id)["logprobs"]
    assert logprobs[0] is None
    assert len(logprobs) == 3
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs[1:])


@pytest.mark.ours
def test_the_trainer_gives_the_tokens_of_a_sample_the_logprobs_of_the_sampler(own_run, build):
    own_run.train()
    sequence = own_run.result("sample", build.sample(num_samples=1), own_run.save())["sequences"][0]
    text = [97, 98, *sequence["tokens"]]
    targets = build.tensor(text[1:], "int64")
    weights = build.tensor([0.0] + [1.0] * len(sequence["tokens"]))
    datum = {"input": {"token_ids": text[:-1]}, "loss_inputs": {"target_tokens": targets, "weights": weights}}
    (output,) = own_run.result("forward", build.payload(datum))["outputs"]
    assert output["logprobs"][1:] == pytest.approx(sequence["logprobs"], abs=0.1)


# forward and forward_backward


def two_data(build):
    return [build.datum(), build.datum(target_tokens=build.tensor([120, 121, 122], "int64"))]


@pytest.mark.ours
def test_forward_backward_gives_the_loss_its_sum_and_a_logprob_per_input_token(run, build):
    result = run.result("forward_backward", build.payload(build.datum()))
    assert math.isfinite(result["loss"])
    assert math.isfinite(result["metrics"]["loss:sum"])
    assert [len(output["logprobs"]) for output in result["outputs"]] == [3]


@pytest.mark.ours
def test_outputs_are_in_the_order_of_data(run, build):
    together = run.result("forward", build.payload(*two_data(build)))["outputs"]
    for datum, output in zip(two_data(build), together, strict=True):
        (alone,) = run.result("forward", build.payload(datum))["outputs"]
        assert output["logprobs"] == pytest.approx(alone["logprobs"], abs=0.1)
    assert together[0]["logprobs"] != pytest.approx(together[1]["logprobs"], abs=0.1)


@pytest.mark.ours
def test_a_datum_gives_the_same_beside_one_of_another_length(run, build):
    (alone,) = run.result("forward", build.payload(build.datum()))["outputs"]
    _, beside = run.result("forward", build.payload(build.slow_datum(0), build.datum()))["outputs"]
    assert beside["logprobs"] == pytest.approx(alone["logprobs"], abs=0.1)


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_the_loss_of_the_embedded_service_is_the_sum_over_tokens_that_count(run, build):
    result = run.result("forward_backward", build.payload(*two_data(build)))
    by_hand = -sum(sum(output["logprobs"][1:]) for output in result["outputs"])
    assert result["loss"] == result["metrics"]["loss:sum"] == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.ours
def test_forward_gives_what_forward_backward_gives_but_no_gradient(settled_run, build):
    forward = settled_run.result("forward", build.payload(build.datum()))
    assert error_code(settled_run.operation("optim_step", build.optimizer())) == "no_gradients"
    backward = settled_run.result("forward_backward", build.payload(build.datum()))
    assert backward["loss"] == pytest.approx(forward["loss"], rel=0.01)
    assert backward["outputs"][0]["logprobs"] == pytest.approx(forward["outputs"][0]["logprobs"], abs=0.1)


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_gradients_of_several_forward_backwards_add_up(api, build):
    one, two = api.run(seed=1), api.run(seed=1)
    one.result("forward_backward", build.payload(*two_data(build)))
    for datum in two_data(build):
        two.result("forward_backward", build.payload(datum))
    norms = [run.result("optim_step", build.optimizer())["grad_norm"] for run in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


# optim_step


@pytest.mark.ours
def test_optim_step_gives_the_step_and_the_gradients_norm_and_lowers_the_loss(own_run, build):
    before = own_run.result("forward", build.payload(build.datum()))["loss"]
    steps = [own_run.train() for _ in range(2)]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["grad_norm"] > 0 for step in steps)
    assert own_run.result("forward", build.payload(build.datum()))["loss"] < before


@pytest.mark.ours
def test_grad_clip_norm_bounds_the_gradient_0_is_off_and_learning_rate_0_changes_no_weight(own_run, build):
    """With a tiny grad_clip_norm nothing is learned. beta1 is 0, so that no step depends on the ones before it."""

    def loss_after(**fields):
        own_run.result("forward_backward", build.payload(build.datum()))
        own_run.result("optim_step", build.optimizer(**{"beta1": 0.0} | fields))
        return own_run.result("forward", build.payload(build.datum()))["loss"]

    still = loss_after(learning_rate=0.0)
    assert loss_after(learning_rate=0.0) == pytest.approx(still, rel=1e-3)
    assert loss_after(learning_rate=0.1, grad_clip_norm=1e-6) == pytest.approx(still, rel=1e-3)
    assert loss_after(learning_rate=0.1, grad_clip_norm=0.0) != pytest.approx(still, rel=1e-2)


@pytest.mark.ours
@pytest.mark.parametrize("field", ["type", "learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_every_field_of_the_optimizer_is_always_sent(run, build, field):
    payload = build.optimizer()
    del payload["optimizer"][field]
    assert_refused(run.post("optim_step", payload), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize(
    "fields", [{"type": "sgd"}, {"learning_rate": -1}, {"beta1": 1}, {"eps": "x"}, {"grad_clip_norm": -1}, {"lr": 1}]
)
def test_an_optimizer_out_of_range_is_refused(run, build, fields):
    assert_refused(run.post("optim_step", build.optimizer(**fields)), 422, "invalid_payload")


@pytest.mark.doc
def test_the_optimizer_stands_under_its_key(run, build):
    assert_refused(run.post("optim_step", build.optimizer()["optimizer"]), 422, "invalid_payload")


# save_state and export_lora


@pytest.mark.ours
def test_a_state_that_is_resumed_from_holds_weights_and_optimizer(api, own_run, build):
    """The next step of both runs is the same: its gradient is tiny, so the optimizer's moments determine it."""

    def loss_of(run):
        return run.result("forward", build.payload(build.datum()))["loss"]

    def step(run):
        other = build.datum(target_tokens=build.tensor([120, 121, 122], "int64"), weights=[0.0, 1e-3, 1e-3])
        run.result("forward_backward", build.payload(other))
        return run.result("optim_step", build.optimizer())["step"]

    for _ in range(2):
        own_run.train()
    saved = loss_of(own_run)
    state = own_run.result("save_state", {})
    assert state["step"] == 2
    resumed = api.run(resume_from=state["state_id"])
    assert (step(resumed), step(own_run)) == (3, 3)
    moved = loss_of(own_run) - saved
    assert loss_of(resumed) - saved == pytest.approx(moved, rel=0.1, abs=0.02)


@pytest.mark.ours
@pytest.mark.parametrize("state_id", ["state-0123456789abcdef", "../state"])
def test_an_unknown_state_is_refused(api, state_id):
    assert_refused(api.create_run(api.shared_session(), resume_from=state_id))


@pytest.mark.ours
def test_a_state_of_another_rank_is_refused(api, run):
    state_id = run.result("save_state", {})["state_id"]
    assert_refused(api.create_run(api.shared_session(), resume_from=state_id, lora={"rank": 8}))


@pytest.mark.ours
def test_an_export_gives_an_artifact_and_its_uri(run):
    first, second = run.result("export_lora", {}), run.result("export_lora", {})
    assert first["artifact_id"] != second["artifact_id"]
    assert urlsplit(first["uri"]).scheme


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_the_embedded_service_exports_to_a_folder_of_the_adapter(run):
    uri = urlsplit(run.result("export_lora", {})["uri"])
    assert uri.scheme == "file"
    names = {path.name for path in Path(url2pathname(uri.path)).iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
