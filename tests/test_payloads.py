import copy
import math

import pytest

from whitney_loop import (
    adamw_optimizer,
    check_payload,
    forward_backward_payload,
    logprobs_request,
    rl_datum,
    sample_request,
    sft_datum,
    tensor,
)
from whitney_loop.payloads import check_logprobs_request, check_optimizer_payload, check_sample_request


def policy_payload(loss="importance_sampling", config=None, **clip):
    data = [rl_datum([1, 2], [3, 4, 5], [-0.5, -0.6, -0.7], advantage, **clip) for advantage in (1.0, -1.0)]
    return forward_backward_payload(data, loss, config)


def critic_payload():
    datum = sft_datum([1], [2, 3])
    datum["loss_inputs"] |= {name: tensor("float32", [0.5, 0.5]) for name in ("values", "returns")}
    return forward_backward_payload([datum], "ppo_critic", {"value_clip": 0.2})


def test_a_forward_payload_assembles_and_does_not_judge():
    assert forward_backward_payload([{"any": 1}], "no_such_loss") == {
        "data": [{"any": 1}], "loss_function": "no_such_loss", "loss_config": {},
    }  # fmt: skip
    with pytest.raises(ValueError, match="data is empty, expected a datum; .* raise NoGradientSignal"):
        forward_backward_payload([], "ppo")


@pytest.mark.parametrize(
    ("payload", "provider"),
    [
        (policy_payload(), "modal"),
        (policy_payload(), "tinker"),
        (policy_payload("ppo", {"clip_low_threshold": 0.8}), "modal"),
        (policy_payload("cispo", clip_low=0.0, clip_high=5.0), "tinker"),
        (policy_payload("dro", {"beta": 0.05}), "tinker"),
        (policy_payload("cross_entropy"), "modal"),
        (forward_backward_payload([sft_datum([1], [2])], "cross_entropy"), "tinker"),
        (critic_payload(), "modal"),
    ],
)
def test_payloads_of_the_builders_pass(payload, provider):
    assert check_payload(payload, provider) is None


def set_at(payload, path, value):
    """Return a copy of the payload with one place changed."""
    changed = copy.deepcopy(payload)
    *parents, last = path
    place = changed
    for key in parents:
        place = place[key]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return changed


DELETE = object()
INPUTS = ("data", 1, "loss_inputs")
LOGPROBS = (*INPUTS, "logprobs")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("data",), [], r"data is \[\], expected a list of at least one datum"),
        (("data",), {}, "data is {}, expected a list"),
        (("data",), DELETE, "payload.data is missing"),
        (("loss_config",), DELETE, "payload.loss_config is missing"),
        (("loss_fn",), "ppo", "payload.loss_fn is not a known field; known: data, loss_function, loss_config"),
        (("loss_function",), None, "loss_function of type NoneType is not advertised"),
        (("data", 1), None, r"data\[1\] is None, expected an object"),
        (("data", 1, "input"), DELETE, r"data\[1\].input is missing"),
        (("data", 1, "input", "token_ids", 2), True, r"data\[1\].input.token_ids\[2\] is True, expected a token id"),
        (("data", 1, "input", "token_ids", 2), -1, r"data\[1\].input.token_ids\[2\] is -1"),
        (("data", 1, "input", "token_ids", 2), 2**63, r"data\[1\].input.token_ids\[2\] is 9223"),
        (("data", 1, "input", "token_ids"), [], r"data\[1\].input.token_ids is \[\]"),
        ((*INPUTS, "advantages"), DELETE, r"data\[1\].loss_inputs.advantages is missing; importance_sampling needs"),
        ((*INPUTS, "advantage"), {}, r"data\[1\].loss_inputs.advantage is not a known field"),
        ((*INPUTS, "target_tokens", "dtype"), "float32", "target_tokens.dtype is 'float32', expected 'int64'"),
        ((*INPUTS, "target_tokens", "values", 0), 2.0, r"target_tokens.values\[0\] is 2.0, expected a token id"),
        ((*LOGPROBS, "dtype"), "float64", r"data\[1\].loss_inputs.logprobs.dtype is 'float64', expected 'float32'"),
        ((*LOGPROBS, "shape"), [3], r"logprobs.shape is \[3\], expected \[4\]"),
        ((*LOGPROBS, "shape"), [4.0], r"logprobs.shape is \[4.0\], expected \[4\]"),
        ((*LOGPROBS, "values"), [0.0], r"logprobs.values has 1 entries, but input.token_ids has 4"),
        ((*LOGPROBS, "values"), "abcd", r"logprobs.values is 'abcd', expected a list of 4 numbers"),
        ((*LOGPROBS, "values", 3), math.nan, r"data\[1\].loss_inputs.logprobs.values\[3\] is nan, expected a finite"),
        ((*LOGPROBS, "values", 3), -math.inf, r"logprobs.values\[3\] is -inf"),
        ((*LOGPROBS, "values", 3), 1e39, r"logprobs.values\[3\] is 1e\+39, expected a finite number within float32"),
        pytest.param((*LOGPROBS, "values", 3), 10**5000, r"logprobs.values\[3\] is an integer of \d+ bits", id="huge"),
        ((*LOGPROBS, "values", 3), None, r"logprobs.values\[3\] is None"),
        ((*LOGPROBS, "values", 3), False, r"logprobs.values\[3\] is False"),
        ((*LOGPROBS, "values", 3), "-0.5", r"logprobs.values\[3\] is '-0.5'"),
    ],
)
def test_a_payload_that_the_provider_would_refuse_is_refused_with_the_place(path, value, message):
    with pytest.raises(ValueError, match=message):
        check_payload(set_at(policy_payload(), path, value), "modal")


def test_numbers_near_the_end_of_float32_and_integers_pass():
    payload = set_at(policy_payload(), (*INPUTS, "advantages", "values"), [3.4e38, 3.4e38, -3.4e38, 3])
    assert check_payload(payload, "modal") is None


def test_a_positive_logprob_is_refused_where_it_has_a_weight():
    check_payload(set_at(policy_payload(), (*LOGPROBS, "values"), [9.0, 1e-3, -1.0, -1.0]), "modal")
    with pytest.raises(
        ValueError, match=r"data\[1\].loss_inputs.logprobs.values\[2\] is 0.5, but a logprob is at most 0"
    ):
        check_payload(set_at(policy_payload(), (*LOGPROBS, "values", 2), 0.5), "modal")


@pytest.mark.parametrize("junk", [None, [], "payload", 3, object()])
def test_a_payload_that_is_not_an_object_is_refused(junk):
    with pytest.raises(ValueError, match="payload is .*expected an object"):
        check_payload(junk, "modal")


def test_a_loss_of_another_provider_is_refused():
    with pytest.raises(ValueError, match="'gspo' is not advertised by tinker"):
        check_payload(policy_payload("gspo"), "tinker")


def test_clip_tensors_are_tinkers_only():
    with pytest.raises(
        ValueError, match=r"data\[0\].loss_inputs.clip_low_threshold is a tensor that only tinker"
    ) as it:
        check_payload(policy_payload("ppo", clip_low=0.8), "modal")
    assert "send loss_config {'clip_low_threshold': …}" in str(it.value)
    with pytest.raises(ValueError, match="only tinker takes; on modal build the datum without it$"):
        check_payload(policy_payload("dppo", clip_low=0.8), "modal")
    check_payload(policy_payload(clip_low=0.8), "tinker")  # accepted, although this loss does not use it
    with pytest.raises(ValueError, match="loss_config.clip_low_threshold is no key of ppo on tinker"):
        check_payload(policy_payload("ppo", {"clip_low_threshold": 0.8}), "tinker")


def test_thresholds_are_judged_only_where_the_weight_is_not_zero():
    payload = policy_payload("ppo", clip_low=0.8, clip_high=1.2)
    assert payload["data"][0]["loss_inputs"]["clip_high_threshold"]["values"][0] == 0.0
    check_payload(payload, "tinker")
    with pytest.raises(ValueError, match=r"data\[0\].loss_inputs.clip_high_threshold.values\[2\] is 0.2.*ratios"):
        check_payload(set_at(payload, ("data", 0, "loss_inputs", "clip_high_threshold", "values", 2), 0.2), "tinker")
    with pytest.raises(ValueError, match=r"clip_low_threshold.values\[2\] is 1.5, expected 0…1"):
        check_payload(set_at(payload, ("data", 0, "loss_inputs", "clip_low_threshold", "values", 2), 1.5), "tinker")
    with pytest.raises(ValueError, match=r"clip_low_threshold.values\[2\] is -0.5"):
        check_payload(set_at(payload, ("data", 0, "loss_inputs", "clip_low_threshold", "values", 2), -0.5), "tinker")
    with pytest.raises(ValueError, match="kind is 'sample'"):
        check_payload(payload, "tinker", kind="sample")


def test_numbers_of_other_libraries_in_a_loss_config_come_out_plain():
    class Scalar:
        def item(self):
            return 0.8

    payload = policy_payload("ppo", {"clip_low_threshold": Scalar()})
    assert payload["loss_config"] == {"clip_low_threshold": 0.8}


def test_a_critics_forward_needs_no_values_and_its_backward_does():
    payload = forward_backward_payload([sft_datum([1], [2, 3])], "ppo_critic")
    check_payload(payload, "modal", kind="forward")
    with pytest.raises(ValueError, match=r"loss_inputs.returns is missing; ppo_critic needs"):
        check_payload(payload, "modal")


def test_an_optimizer_always_has_every_field():
    assert adamw_optimizer(1e-4) == {
        "type": "adamw", "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
        "weight_decay": 0.0, "grad_clip_norm": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-4), ("learning_rate", math.nan), ("learning_rate", "1e-4"), ("beta1", 1.0),
        ("beta2", -0.1), ("eps", 0), ("weight_decay", -1), ("grad_clip_norm", math.inf), ("grad_clip_norm", True),
    ],
)  # fmt: skip
def test_an_optimizer_out_of_range_is_refused_with_the_field(field, value):
    with pytest.raises(ValueError, match=f"optimizer.{field} is .*expected a "):
        adamw_optimizer(**{"learning_rate": 1e-4, field: value})


def test_an_optim_step_without_a_field_is_refused():
    with pytest.raises(ValueError, match="optimizer.beta1 is missing"):
        check_optimizer_payload({"optimizer": {"type": "adamw", "learning_rate": 1e-4}})
    with pytest.raises(ValueError, match="optimizer.type is 'sgd', expected 'adamw'"):
        check_optimizer_payload({"optimizer": adamw_optimizer(1e-4) | {"type": "sgd"}})


def test_a_sample_request_has_every_parameter_and_leaves_out_what_was_not_given():
    assert sample_request([1, 2], num_samples=4, max_tokens=8) == {
        "prompt": {"token_ids": [1, 2]},
        "num_samples": 4,
        "sampling_params": {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
    }
    params = sample_request([1], num_samples=1, max_tokens=1, seed=3, stop=range(2))["sampling_params"]
    assert params["seed"] == 3 and params["stop"] == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": []}, "prompt.token_ids is"),
        ({"prompt_tokens": None}, "prompt.token_ids is None"),
        ({"prompt_tokens": [1, -2]}, r"prompt.token_ids\[1\] is -2"),
        ({"prompt_tokens": "ab"}, r"prompt.token_ids\[0\] is 'a'"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": True}, "num_samples is True"),
        ({"num_samples": 2.0}, "num_samples is 2.0"),
        ({"max_tokens": 0}, "sampling_params.max_tokens is 0"),
        ({"temperature": -0.1}, "sampling_params.temperature is -0.1"),
        ({"temperature": math.nan}, "sampling_params.temperature is nan"),
        ({"top_p": 0}, "sampling_params.top_p is 0"),
        ({"top_p": 1.1}, "sampling_params.top_p is 1.1"),
        ({"top_k": 0}, "sampling_params.top_k is 0.*or -1 for off"),
        ({"top_k": -1.0}, "sampling_params.top_k is -1.0"),
        ({"top_k": -2}, "sampling_params.top_k is -2"),
        ({"seed": -1}, "sampling_params.seed is -1"),
        ({"seed": 1.5}, "sampling_params.seed is 1.5"),
        ({"stop": [1.5]}, r"sampling_params.stop\[0\] is 1.5"),
        ({"stop": 5}, "sampling_params.stop is 5"),
    ],
)
def test_a_sample_request_out_of_range_is_refused_with_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        sample_request(**{"prompt_tokens": [1], "num_samples": 2, "max_tokens": 3} | change)


def test_a_sample_request_from_a_file_is_judged_by_the_same_rules():
    request = sample_request([1], num_samples=2, max_tokens=3)
    check_sample_request({**request, "sampling_params": {"max_tokens": 3}})
    with pytest.raises(ValueError, match="sampling_params.max_new_tokens is not a known field"):
        check_sample_request({**request, "sampling_params": {"max_tokens": 3, "max_new_tokens": 3}})
    with pytest.raises(ValueError, match="request.metadata is not a known field"):
        check_sample_request(request | {"metadata": {}})
    check_sample_request(request | {"metadata": {}}, in_file=True)
    with pytest.raises(ValueError, match="request.num_samples is missing"):
        check_sample_request({"prompt": {"token_ids": [1]}, "sampling_params": {"max_tokens": 3}})


def test_a_logprobs_request_is_token_ids():
    assert logprobs_request([1, 2]) == {"input": {"token_ids": [1, 2]}}
    with pytest.raises(ValueError, match=r"input.token_ids\[0\] is 0.5"):
        logprobs_request([0.5])
    with pytest.raises(ValueError, match="request is None"):
        check_logprobs_request(None)
