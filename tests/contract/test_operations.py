"""CONTRACT.md, "Operations": what each kind takes and gives."""

from __future__ import annotations

import math
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

EMPTY_PAYLOAD_KINDS = ["save_weights_for_sampler", "save_state", "export_lora"]


def assert_refused(answer, status, code):
    assert answer.status == status, answer.raw
    assert answer.error["code"] == code


def total(logprobs):
    return sum(number for number in logprobs if number is not None)


# In general


@pytest.mark.ours
def test_an_operation_says_what_and_where_it_is(run):
    operation = run.operation("save_weights_for_sampler", {})
    assert operation.keys() >= {"operation_id", "run_id", "kind", "seq_id", "status", "result", "error"}
    assert operation["run_id"] == run.run_id
    assert (operation["kind"], operation["seq_id"]) == ("save_weights_for_sampler", 1)
    assert (operation["status"], operation["error"]) == ("succeeded", None)


@pytest.mark.doc
def test_a_whole_cycle_goes_through_in_the_documented_order(run, build):
    for version in range(2):
        saved = run.result("save_weights_for_sampler", {})
        assert saved["version"] == version
        sample = run.result("sample", build.sample(), saved["sampler_id"])
        assert len(sample["sequences"]) == 2
        run.result("forward_backward", build.payload(build.policy_datum(), loss="importance_sampling"))
        run.result("optim_step", build.optimizer())
    assert run.result("save_state", {})["state_id"]
    assert run.result("export_lora", {})["artifact_id"]


@pytest.mark.ours
@pytest.mark.parametrize("kind", ["sample", "logprobs"])
def test_a_sampler_operation_is_refused_at_the_runs_own_path(run, build, kind):
    payload = build.sample() if kind == "sample" else build.logprobs(97)
    answer = run.post(kind, payload)
    assert_refused(answer, 422, "invalid_payload")
    assert "samplers" in answer.error["message"]


@pytest.mark.ours
def test_a_run_operation_is_refused_at_a_samplers_path(run):
    sampler_id = run.save()
    assert_refused(run.post("save_state", {}, sampler_id=sampler_id), 422, "invalid_payload")


@pytest.mark.doc
@pytest.mark.parametrize("kind", EMPTY_PAYLOAD_KINDS)
def test_saving_and_exporting_take_an_empty_payload(run, kind):
    assert run.operation(kind, {})["status"] == "succeeded"


@pytest.mark.ours
@pytest.mark.parametrize("kind", EMPTY_PAYLOAD_KINDS)
def test_saving_and_exporting_take_nothing_else(run, kind):
    assert_refused(run.post(kind, {"name": "mine"}), 422, "invalid_payload")


# save_weights_for_sampler


@pytest.mark.ours
def test_the_version_is_the_number_of_optimizer_steps_taken(run):
    for version in range(3):
        assert run.result("save_weights_for_sampler", {})["version"] == version
        run.train()


# sample


@pytest.mark.doc
def test_a_sample_has_the_tokens_logprobs_and_stop_reason_of_each_sequence(run, build):
    sample = run.result("sample", build.sample(num_samples=8), run.save())
    assert len(sample["sequences"]) == 8
    for sequence in sample["sequences"]:
        assert 1 <= len(sequence["tokens"]) <= 6
        assert len(sequence["logprobs"]) == len(sequence["tokens"])
        assert all(logprob <= 0 for logprob in sequence["logprobs"])
        assert sequence["stop_reason"] in ("stop", "length")


@pytest.mark.ours
def test_a_sample_names_the_version_it_came_from(run, build):
    run.train()
    assert run.result("sample", build.sample(), run.save())["version"] == 1


@pytest.mark.ours
def test_a_sequence_that_ran_out_of_tokens_stopped_for_length(run, build):
    sample = run.result("sample", build.sample(num_samples=8), run.save())
    for sequence in sample["sequences"]:
        if sequence["stop_reason"] == "length":
            assert len(sequence["tokens"]) == 6


@pytest.mark.ours
def test_a_stop_token_that_was_sampled_is_part_of_the_tokens(run, build):
    sampler_id = run.save()
    greedy = run.result("sample", build.sample(temperature=0.0), sampler_id)["sequences"][0]
    first = greedy["tokens"][0]
    for sequence in run.result("sample", build.sample(temperature=0.0, stop=[first]), sampler_id)["sequences"]:
        assert sequence["tokens"] == [first]
        assert sequence["stop_reason"] == "stop"


@pytest.mark.ours
@pytest.mark.parametrize("params", [{"temperature": 0.5}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 1}])
def test_logprobs_of_a_sample_are_those_of_the_untempered_untruncated_policy(run, build, params):
    sampler_id = run.save()
    sequence = run.result("sample", build.sample(num_samples=1, **params), sampler_id)["sequences"][0]
    scored = run.result("logprobs", build.logprobs(97, 98, *sequence["tokens"]), sampler_id)["logprobs"][2:]
    assert sequence["logprobs"] == pytest.approx(scored, abs=0.02)


@pytest.mark.ours
def test_the_same_sampler_request_and_explicit_seed_give_the_same_sequences(run, build):
    sampler_id = run.save()
    first = run.result("sample", build.sample(seed=5), sampler_id)
    run.train()
    assert run.result("sample", build.sample(seed=5), sampler_id) == first
    assert run.result("sample", build.sample(seed=6), sampler_id) != first


@pytest.mark.ours
def test_without_a_seed_the_runs_seed_and_the_seq_id_decide(api, session_id, build):
    def two_samples(seed):
        run = api.run(session_id, seed=seed)
        sampler_id = run.save()
        return [run.result("sample", build.sample(), sampler_id) for _ in range(2)]

    first = two_samples(1)
    assert first[0] != first[1]
    assert two_samples(1) == first
    assert two_samples(2) != first


@pytest.mark.ours
@pytest.mark.parametrize("field", ["prompt", "num_samples", "sampling_params"])
def test_a_sample_request_needs_its_fields(run, build, field):
    sampler_id = run.save()
    request = build.sample()
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
)
def test_sampling_params_out_of_range_are_refused(run, build, params):
    sampler_id = run.save()
    assert_refused(run.post("sample", build.sample(**params), sampler_id=sampler_id), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("token_ids", [None, [], "ab", [-1], [1.0], [True], [None]])
def test_token_ids_are_a_list_of_integers_from_0(run, build, token_ids):
    sampler_id = run.save()
    request = build.sample() | {"prompt": {"token_ids": token_ids}}
    assert_refused(run.post("sample", request, sampler_id=sampler_id), 422, "invalid_payload")
    request = {"input": {"token_ids": token_ids}}
    assert_refused(run.post("logprobs", request, sampler_id=sampler_id), 422, "invalid_payload")


@pytest.mark.ours
def test_an_unknown_sampler_is_not_found(api, session_id, run, build):
    foreign = api.run(session_id).save()
    for sampler_id in ("smp-unknown", foreign):
        assert_refused(run.post("logprobs", build.logprobs(97), sampler_id=sampler_id), 404, "not_found")


# logprobs


@pytest.mark.ours
def test_logprobs_are_one_per_token_and_the_first_is_null(run, build):
    logprobs = run.result("logprobs", build.logprobs(97, 98, 99), run.save())["logprobs"]
    assert logprobs[0] is None
    assert len(logprobs) == 3
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs[1:])


# forward and forward_backward


@pytest.mark.ours
def test_forward_backward_gives_the_loss_its_sum_and_outputs_in_the_order_of_data(run, build):
    data = [build.datum(), build.datum(target_tokens=build.tensor([120, 121, 122], "int64"))]
    result = run.result("forward_backward", build.payload(*data))
    assert result["metrics"]["loss:sum"] == pytest.approx(result["loss"])
    assert len(result["outputs"]) == 2
    by_hand = -sum(total(output["logprobs"][1:]) for output in result["outputs"])
    assert result["loss"] == pytest.approx(by_hand, rel=1e-3)
    alone = [run.result("forward", build.payload(datum))["outputs"][0] for datum in data]
    assert [output["logprobs"] for output in result["outputs"]] == [output["logprobs"] for output in alone]


@pytest.mark.ours
def test_outputs_have_one_logprob_per_input_token(run, build):
    outputs = run.result("forward_backward", build.payload(build.datum()))["outputs"]
    assert [len(output["logprobs"]) for output in outputs] == [3]


@pytest.mark.ours
def test_forward_gives_what_forward_backward_gives_but_no_gradient(run, build):
    forward = run.result("forward", build.payload(build.datum()))
    assert run.operation("optim_step", build.optimizer())["error"]["code"] == "no_gradients"
    assert run.result("forward_backward", build.payload(build.datum())) == forward


@pytest.mark.ours
def test_training_lowers_the_loss(run, build):
    payload = build.payload(build.datum())
    before = run.result("forward", payload)["loss"]
    for _ in range(3):
        run.train()
    assert run.result("forward", payload)["loss"] < before


@pytest.mark.ours
def test_gradients_of_several_forward_backwards_add_up(api, session_id, build):
    one, two = api.run(session_id, seed=1), api.run(session_id, seed=1)
    data = [build.datum(), build.datum(target_tokens=build.tensor([120, 121, 122], "int64"))]
    one.result("forward_backward", build.payload(*data))
    for datum in data:
        two.result("forward_backward", build.payload(datum))
    norms = [run.result("optim_step", build.optimizer())["grad_norm"] for run in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


# optim_step


@pytest.mark.ours
def test_optim_step_counts_steps_and_gives_the_gradients_norm(run):
    steps = [run.train() for _ in range(2)]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["grad_norm"] > 0 for step in steps)


@pytest.mark.ours
def test_an_optimizer_of_learning_rate_0_changes_no_weight(run, build):
    before = run.result("forward", build.payload(build.datum()))
    run.train(learning_rate=0.0)
    assert run.result("forward", build.payload(build.datum())) == before


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
def test_a_state_holds_weights_and_optimizer(api, session_id, run, build):
    """The resumed run's next step is the one that the first run takes: moments and step count are there too."""
    for _ in range(2):
        run.train()
    state = run.result("save_state", {})
    assert state["step"] == 2
    resumed = api.run(session_id, resume_from=state["state_id"])
    assert resumed.train()["step"] == 3
    run.train()
    payload = build.payload(build.datum())
    assert resumed.result("forward", payload)["loss"] == pytest.approx(run.result("forward", payload)["loss"])


@pytest.mark.ours
@pytest.mark.parametrize("state_id", ["state-unknown", "state-0123456789abcdef", "../state", "state-\x00", ""])
def test_an_unknown_state_is_not_found(api, session_id, state_id):
    assert_refused(api.create_run(session_id, resume_from=state_id), 404, "not_found")


@pytest.mark.ours
def test_a_state_of_another_rank_is_refused(api, session_id, run):
    state_id = run.result("save_state", {})["state_id"]
    answer = api.create_run(session_id, resume_from=state_id, lora={"rank": 8})
    assert_refused(answer, 422, "invalid_payload")


@pytest.mark.ours
def test_an_export_gives_an_artifact_and_its_uri(run):
    first, second = run.result("export_lora", {}), run.result("export_lora", {})
    assert first["artifact_id"] != second["artifact_id"]
    assert urlsplit(first["uri"]).scheme


@pytest.mark.ours
def test_the_embedded_service_exports_to_a_folder(run, request):
    if request.config.getoption("--contract-url"):
        pytest.skip("only the embedded service exports to this machine")
    uri = urlsplit(run.result("export_lora", {})["uri"])
    assert uri.scheme == "file"
    names = {path.name for path in Path(url2pathname(uri.path)).iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
