"""whitney_loop/CONTRACT.md, section 4.4 (the datum) and section 5."""

from __future__ import annotations

import math

import pytest

from contract.deployment import assert_refused

# Whitney's table "Provider loss support", and "Scalar loss_config keys Modal actually validates"
LOSSES = {
    "modal": ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "ppo_critic", "dppo"],
    "tinker": ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"],
}
MODAL_KEYS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "value_clip": 0.2},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "ppo_critic": {"value_clip": 0.2},
    "dppo": {"delta_low": 0.2, "delta_high": 0.2},
}
POLICY_TENSORS = ("target_tokens", "weights", "logprobs", "advantages")
TENSORS = {
    "cross_entropy": ["target_tokens", "weights"],
    "ppo_critic": ["target_tokens", "weights", "values", "returns"],
} | dict.fromkeys(["importance_sampling", "ppo", "cispo", "gspo", "dro", "dppo"], POLICY_TENSORS)
PAIRS = [(provider, loss) for provider, losses in LOSSES.items() for loss in losses]


def datum_for(build, loss, **tensors):
    if loss == "cross_entropy":
        return build.datum(**tensors)
    return build.critic_datum(**tensors) if loss == "ppo_critic" else build.policy_datum(**tensors)


# The datum


@pytest.mark.doc
def test_a_datum_holds_input_and_tensors_of_one_length(run, build):
    run.result("forward_backward", build.payload(build.datum()))


@pytest.mark.doc
@pytest.mark.parametrize("name", POLICY_TENSORS)
def test_every_tensor_of_a_datum_has_the_length_of_its_input(run, build, name):
    dtype, values = ("int64", [98, 99]) if name == "target_tokens" else ("float32", [0.0, 1.0])
    datum = build.policy_datum(**{name: build.tensor(values, dtype)})
    payload = build.payload(datum, loss="importance_sampling")
    assert_refused(run.post("forward_backward", payload), 422, "invalid_payload")


@pytest.mark.doc
@pytest.mark.parametrize("shape", [[2], [3, 1], [], 3, ["3"]])
def test_a_tensors_shape_is_its_length(run, build, shape):
    datum = build.datum(weights=build.tensor([0.0, 1.0, 1.0]) | {"shape": shape})
    assert_refused(run.post("forward_backward", build.payload(datum)), 422, "invalid_payload")


@pytest.mark.doc
@pytest.mark.parametrize(("name", "dtype"), [("target_tokens", "float32"), ("weights", "int64"), ("weights", "x")])
def test_target_tokens_are_int64_and_the_rest_float32(run, build, name, dtype):
    datum = build.datum()
    datum["loss_inputs"][name]["dtype"] = dtype
    assert_refused(run.post("forward_backward", build.payload(datum)), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("value", ["1.0", None, True, [1.0], 1e39])
def test_the_values_of_a_tensor_are_finite_numbers(run, build, value):
    datum = build.datum(weights=[0.0, 1.0, value])
    assert_refused(run.post("forward_backward", build.payload(datum)), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_the_message_says_which_datum_and_tensor_is_wrong(run, build):
    data = [build.datum(), build.datum(weights=[0.0, 1.0, "x"])]
    message = run.post("forward_backward", build.payload(*data)).error["message"]
    assert "data[1]" in message
    assert "weights" in message


@pytest.mark.ours
@pytest.mark.parametrize("field", ["data", "loss_function", "loss_config"])
def test_a_forward_payload_needs_its_fields(run, build, field):
    payload = build.payload(build.datum())
    del payload[field]
    assert_refused(run.post("forward_backward", payload), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize("data", [[], None, {}, [1], [{}]])
def test_data_is_a_list_of_at_least_one_datum(run, build, data):
    payload = build.payload() | {"data": data}
    assert_refused(run.post("forward_backward", payload), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_the_embedded_service_keeps_the_numbers_it_is_sent(run, build):
    """float32 names what a provider may round to: 0.1 is not a float32."""
    loss = run.result("forward", build.payload(build.datum(weights=[0.0, 0.1, 0.0])))
    assert loss["loss"] == -0.1 * loss["outputs"][0]["logprobs"][1]


# What is accepted, by loss


@pytest.mark.doc
@pytest.mark.parametrize(("provider", "loss"), PAIRS)
def test_a_provider_takes_each_loss_of_its_table(run_of, build, provider, loss):
    run_of(provider).result("forward_backward", build.payload(datum_for(build, loss), loss=loss))


@pytest.mark.doc
@pytest.mark.parametrize(
    ("provider", "loss"),
    [("modal", "dro"), ("tinker", "gspo"), ("tinker", "ppo_critic"), ("tinker", "dppo"), ("modal", "grpo")],
)
def test_a_loss_outside_the_providers_table_is_unsupported(run_of, build, provider, loss):
    answer = run_of(provider).post("forward_backward", build.payload(datum_for(build, loss), loss=loss))
    assert_refused(answer, 422, "unsupported_loss")


@pytest.mark.ours
@pytest.mark.parametrize("loss", [None, 1, ["ppo"]])
def test_a_loss_function_is_a_name(run, build, loss):
    answer = run.post("forward_backward", build.payload(build.datum()) | {"loss_function": loss})
    assert_refused(answer, 422, "invalid_payload")


@pytest.mark.doc
@pytest.mark.parametrize("loss", LOSSES["modal"])
def test_modal_takes_the_config_keys_of_its_table(run_of, build, loss):
    run = run_of("modal")
    run.result("forward_backward", build.payload(datum_for(build, loss), loss=loss, config=MODAL_KEYS[loss]))


@pytest.mark.doc
@pytest.mark.parametrize("loss", LOSSES["modal"])
def test_modal_takes_no_other_config_key(run_of, build, loss):
    run = run_of("modal")
    others = {key: 1.0 for keys in MODAL_KEYS.values() for key in keys} | {"beta": 0.1}
    for key in others.keys() - MODAL_KEYS[loss].keys():
        answer = run.post("forward_backward", build.payload(datum_for(build, loss), loss=loss, config={key: 1.0}))
        assert_refused(answer, 422, "invalid_payload")


@pytest.mark.doc
@pytest.mark.parametrize(("provider", "loss"), PAIRS)
def test_each_tensor_that_a_loss_needs_is_required(run_of, build, provider, loss):
    run = run_of(provider)
    for name in TENSORS[loss]:
        answer = run.post("forward_backward", build.payload(datum_for(build, loss, **{name: None}), loss=loss))
        assert_refused(answer, 422, "invalid_payload")


@pytest.mark.ours
def test_a_forward_with_ppo_critic_needs_only_targets_and_weights_and_gives_values(run_of, build):
    result = run_of("modal").result("forward", build.payload(build.datum(), loss="ppo_critic"))
    assert len(result["outputs"][0]["values"]) == 3


@pytest.mark.ours
def test_value_i_of_a_critic_belongs_to_the_prefix_that_ends_at_input_i(run_of, build):
    """Changing a later input leaves the earlier values as they are."""
    data = [build.datum(), build.datum()]
    data[1]["input"]["token_ids"] = [97, 98, 120]
    result = run_of("modal").result("forward", build.payload(*data, loss="ppo_critic"))
    one, other = (output["values"] for output in result["outputs"])
    assert one[:2] == pytest.approx(other[:2], abs=0.02)


@pytest.mark.doc
@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_tinker_takes_clip_thresholds_as_tensors(run_of, build, loss):
    run = run_of("tinker")
    clips = {"clip_low_threshold": [0.0, 0.8, 0.8], "clip_high_threshold": [0.0, 1.2, 1.2]}
    run.result("forward_backward", build.payload(build.policy_datum(**clips), loss=loss))


@pytest.mark.doc
@pytest.mark.parametrize("key", ["clip_low_threshold", "clip_high_threshold"])
def test_tinker_takes_no_clip_threshold_in_loss_config(run_of, build, key):
    payload = build.payload(build.policy_datum(), loss="ppo", config={key: 1.0})
    assert_refused(run_of("tinker").post("forward_backward", payload), 422, "invalid_payload")


@pytest.mark.doc
@pytest.mark.parametrize("key", ["clip_low_threshold", "clip_high_threshold"])
def test_modal_takes_no_clip_tensor(run_of, build, key):
    payload = build.payload(build.policy_datum(**{key: [1.0, 1.0, 1.0]}), loss="ppo")
    assert_refused(run_of("modal").post("forward_backward", payload), 422, "invalid_payload")


@pytest.mark.ours
def test_dro_takes_beta_in_loss_config(run_of, build):
    payload = build.payload(build.policy_datum(), loss="dro", config={"beta": 0.1})
    run_of("tinker").result("forward_backward", payload)


EPSILONS = [("clip_low_threshold", 1.1), ("clip_high_threshold", 0.2)]


@pytest.mark.ours
@pytest.mark.parametrize(("key", "value"), EPSILONS)
def test_clip_thresholds_of_modal_are_ratios_around_1(run_of, build, key, value):
    payload = build.payload(build.policy_datum(), loss="ppo", config={key: value})
    assert_refused(run_of("modal").post("forward_backward", payload), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize(("key", "value"), EPSILONS)
def test_clip_thresholds_of_tinker_are_ratios_around_1(run_of, build, key, value):
    payload = build.payload(build.policy_datum(**{key: [0.0, 1.0, value]}), loss="ppo")
    assert_refused(run_of("tinker").post("forward_backward", payload), 422, "invalid_payload")


@pytest.mark.ours
@pytest.mark.parametrize(("key", "padding"), [("clip_low_threshold", 9.0), ("clip_high_threshold", 0.0)])
def test_clip_tensors_are_judged_only_where_the_weight_is_not_0(run_of, build, key, padding):
    payload = build.payload(build.policy_datum(**{key: [padding, 1.0, 1.0]}), loss="ppo")
    run_of("tinker").result("forward_backward", payload)


@pytest.mark.ours
def test_a_policy_run_accepts_value_clip_and_does_not_use_it(run_of, build):
    run = run_of("modal")
    losses = [
        run.result("forward", build.payload(build.policy_datum(), loss="ppo", config=config))["loss"]
        for config in ({}, {"value_clip": 0.001})
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


# What the embedded service computes


def moved_datum(run, build, **tensors):
    """A policy datum whose two tokens that count have the ratio 1.65 and the advantages 1 and -1."""
    (output,) = run.result("forward", build.payload(build.datum()))["outputs"]
    return build.policy_datum(logprobs=[p - 0.5 for p in output["logprobs"]], **tensors)


def near(number):
    return pytest.approx(number, abs=1e-9)


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    ("provider", "loss", "config", "loss_of"),
    [
        ("modal", "importance_sampling", {}, lambda r, p1, p2: -r + r),
        ("modal", "ppo", {}, lambda r, p1, p2: -1.2 + r),
        ("modal", "gspo", {"clip_high_threshold": 1.5}, lambda r, p1, p2: -1.5 + r),
        ("modal", "cispo", {}, lambda r, p1, p2: -1.2 * p1 + 1.2 * p2),
        ("modal", "dppo", {"delta_high": 0.0}, lambda r, p1, p2: 0.0 + r),
        ("tinker", "dro", {"beta": 0.4}, lambda r, p1, p2: -(p1 - 0.05) + (p2 + 0.05)),
    ],
)
def test_a_loss_is_the_sum_over_tokens_that_its_formula_says(run_of, build, provider, loss, config, loss_of):
    run = run_of(provider)
    result = run.result("forward", build.payload(moved_datum(run, build), loss=loss, config=config))
    _, p1, p2 = result["outputs"][0]["logprobs"]
    assert result["loss"] == result["metrics"]["loss:sum"] == near(loss_of(math.exp(0.5), p1, p2))


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
    ],
)
def test_clip_tensors_of_tinker_and_config_keys_of_modal_lead_to_the_same_step(api, build, loss, config):
    tensors = {key: [0.0, threshold, threshold] for key, threshold in config.items()}
    ends = []
    for provider, clips, keys in (("tinker", tensors, {}), ("modal", {}, config)):
        run = api.run(api.open_session(provider), seed=7)
        payload = build.payload(moved_datum(run, build, **clips), loss=loss, config=keys)
        result = run.result("forward_backward", payload)
        step = run.result("optim_step", build.optimizer())
        ends.append((result, step, run.result("forward", build.payload(build.datum()))))
    assert ends[0] == ends[1]
    assert ends[0][0]["metrics"]["clip_frac"] > 0


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_without_thresholds_cispo_clips_at_0_and_4_on_tinker(run_of, build):
    tinker, modal = run_of("tinker"), run_of("modal")
    result = tinker.result("forward", build.payload(moved_datum(tinker, build), loss="cispo"))
    _, p1, p2 = result["outputs"][0]["logprobs"]
    assert result["loss"] == near(math.exp(0.5) * (p2 - p1))
    assert result["metrics"]["clip_frac"] == 0.0
    result = modal.result("forward", build.payload(moved_datum(modal, build), loss="cispo"))
    assert result["metrics"]["clip_frac"] == 1.0


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    ("loss", "config", "share"),
    [
        ("ppo", {}, 0.5),
        ("ppo", {"clip_high_threshold": 2.0}, 0.0),
        ("gspo", {}, 0.5),
        ("cispo", {}, 1.0),
        ("dppo", {"delta_high": 0.0}, 0.5),
        ("importance_sampling", {}, None),
        ("cross_entropy", {}, None),
    ],
)
def test_clip_frac_is_the_share_of_tokens_that_count_whose_clip_acted(run_of, build, loss, config, share):
    run = run_of("modal")
    result = run.result("forward", build.payload(moved_datum(run, build), loss=loss, config=config))
    assert result["metrics"].get("clip_frac") == share


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_a_critic_has_its_loss_and_clip_frac_and_learns_its_returns(api, build):
    run = api.run(api.open_session("modal"))
    data = [build.critic_datum(values=[9.0, 1.0, 0.1], returns=[9.0, 0.0, 1.0])]
    payload = build.payload(*data, loss="ppo_critic", config={"value_clip": 0.2})
    first = run.result("forward_backward", payload)
    assert first["outputs"][0]["values"] == [0.0, 0.0, 0.0]
    assert first["loss"] == near(0.5 * 0.8**2 + 0.5 * 1.0**2)
    assert first["metrics"]["clip_frac"] == 0.5
    payload = build.payload(*data, loss="ppo_critic")
    for _ in range(60):
        run.result("forward_backward", payload)
        run.result("optim_step", build.optimizer())
    state_id = run.result("save_state", {})["state_id"]
    resumed = run.api.run(run.get()["session_id"], resume_from=state_id)
    last = resumed.result("forward", payload)
    assert last["loss"] < 0.01
    assert last["outputs"][0]["values"][1:] == pytest.approx([0.0, 1.0], abs=0.1)


@pytest.mark.ours
@pytest.mark.usefixtures("embedded")
def test_a_forward_of_a_critic_without_returns_has_the_loss_zero(run_of, build):
    result = run_of("modal").result("forward", build.payload(build.datum(), loss="ppo_critic"))
    assert (result["loss"], result["metrics"]["clip_frac"]) == (0.0, 0.0)
