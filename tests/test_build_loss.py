import pytest

from whitney_loop import NoGradientSignal, check_payload, clip_arguments, policy_payload, rl_datum

REQUEST = {"prompt": {"token_ids": [7, 8]}, "num_samples": 3, "sampling_params": {"max_tokens": 2}}
SAMPLE = {
    "sequences": [
        {"tokens": [1, 2], "logprobs": [-0.5, -1.0]},
        {"tokens": [], "logprobs": []},
        {"tokens": [3], "logprobs": [-2.0]},
    ]
}


def test_a_policy_payload_has_a_datum_for_each_completion_with_tokens():
    payload = policy_payload(SAMPLE, REQUEST, [1.0, 5.0, [-1.0]], "importance_sampling", provider="modal")
    assert payload == {
        "data": [rl_datum([7, 8], [1, 2], [-0.5, -1.0], 1.0), rl_datum([7, 8], [3], [-2.0], -1.0)],
        "loss_function": "importance_sampling",
        "loss_config": {},
    }


def test_a_clip_range_is_sent_as_the_provider_takes_it():
    clip = {"clip_low": 0.8, "clip_high": 1.2}
    on_tinker = policy_payload(SAMPLE, REQUEST, [1, 0, -1], "ppo", provider="tinker", **clip)
    assert on_tinker["loss_config"] == {}
    assert on_tinker["data"][1] == rl_datum([7, 8], [3], [-2.0], -1, **clip)
    on_modal = policy_payload(
        SAMPLE, REQUEST, [1, 0, -1], "ppo", provider="modal", loss_config={"value_clip": 1}, **clip
    )
    assert on_modal["loss_config"] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "value_clip": 1}
    assert on_modal["data"][1] == rl_datum([7, 8], [3], [-2.0], -1)
    for payload, provider in ((on_tinker, "tinker"), (on_modal, "modal")):
        check_payload(payload, provider)


def test_one_side_of_a_clip_range_may_be_left_to_the_provider():
    assert clip_arguments("modal", None, None) == clip_arguments("tinker", None, None) == ({}, {})
    assert clip_arguments("modal", None, 1.3) == ({}, {"clip_high_threshold": 1.3})
    assert clip_arguments("tinker", 0.0, None) == ({"clip_low": 0.0}, {})


def test_a_group_of_empty_completions_has_no_gradient_signal():
    sample = {"sequences": [{"tokens": [], "logprobs": []}] * 2}
    with pytest.raises(NoGradientSignal, match="every completion is empty"):
        policy_payload(sample, REQUEST, [1.0, -1.0], "ppo", provider="modal")


def test_advantages_of_another_length_than_the_group_are_refused():
    with pytest.raises(ValueError, match="advantages has 2 entries, but the group has 3 completions"):
        policy_payload(SAMPLE, REQUEST, [1.0, -1.0], "ppo", provider="modal")
