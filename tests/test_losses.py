import pytest

from whitney_loop import LOSS_CONFIG_KEYS, LOSS_SUPPORT, require_advertised_loss, require_loss_config


def test_the_tables_are_those_of_the_documentation():
    assert {
        "modal": {"cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "ppo_critic", "dppo"},
        "tinker": {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"},
    } == LOSS_SUPPORT
    clip = {"clip_low_threshold", "clip_high_threshold"}
    assert {
        "cross_entropy": set(), "importance_sampling": set(), "ppo": clip | {"value_clip"}, "gspo": clip, "cispo": clip,
        "ppo_critic": {"value_clip"}, "dppo": {"delta_low", "delta_high"},
    } == LOSS_CONFIG_KEYS  # fmt: skip


@pytest.mark.parametrize("provider", LOSS_SUPPORT)
def test_an_advertised_loss_passes_and_any_other_is_refused_with_what_there_is(provider):
    for loss in LOSS_SUPPORT[provider]:
        require_advertised_loss(provider, loss)
    with pytest.raises(ValueError, match=f"'grpo' is not advertised by {provider}.*importance_sampling"):
        require_advertised_loss(provider, "grpo")


def test_an_unknown_provider_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'azure' is not known; known: modal, tinker"):
        require_advertised_loss("azure", "ppo")


def test_a_table_of_ones_own_may_be_given():
    require_advertised_loss("mine", "special", {"mine": frozenset({"special"})})


@pytest.mark.parametrize(
    ("provider", "loss", "config"),
    [
        ("modal", "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "value_clip": 0.2}),
        ("modal", "cispo", {"clip_low_threshold": 0, "clip_high_threshold": 5.0}),
        ("modal", "gspo", {"clip_low_threshold": 1, "clip_high_threshold": 1.0}),
        ("modal", "dppo", {"delta_low": 0.1, "delta_high": 0.2}),
        ("tinker", "dro", {"beta": 0.05}),
        ("tinker", "ppo", {}),
    ],
)
def test_the_keys_of_a_loss_pass(provider, loss, config):
    require_loss_config(provider, loss, config)


@pytest.mark.parametrize(
    ("provider", "loss", "config", "message"),
    [
        ("modal", "ppo", {"clip_low": 0.8}, "loss_config.clip_low is no key of ppo on modal"),
        ("modal", "cross_entropy", {"beta": 1}, "takes no keys"),
        ("tinker", "ppo", {"clip_low_threshold": 0.8}, "clip_low=…"),
        ("modal", "ppo", {"clip_high_threshold": 0.2}, "ratios around 1, not epsilons"),
        ("modal", "ppo", {"clip_low_threshold": 1.2}, "ratios around 1, not epsilons"),
        ("modal", "dppo", {"delta_low": -0.1}, "at least 0"),
        ("modal", "dppo", {"delta_low": float("nan")}, "not finite"),
        ("modal", "dppo", {"delta_low": 10**400}, "not finite"),
        ("modal", "dppo", {"delta_low": True}, "bool"),
        ("modal", "dppo", {"delta_low": "0.2"}, "str"),
        ("modal", "dppo", None, "NoneType"),
        ("tinker", "gspo", {}, "not advertised"),
    ],
)
def test_a_config_that_the_provider_would_refuse_is_refused_with_the_key(provider, loss, config, message):
    with pytest.raises(ValueError, match=message):
        require_loss_config(provider, loss, config)
