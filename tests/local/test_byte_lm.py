"""The embedded engine: gradients, optimizer, sampling, states and adapters."""

from __future__ import annotations

import json
import math
import random

import pytest

import safetensors_file
from local.byte_payloads import ADAMW, datum, payload, random_payload, request, state_of, text_payload, trained
from whitney_loop.local import byte_lm, byte_model
from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.byte_model import END
from whitney_loop.local.engine import EngineError
from whitney_loop.local.objectives import CLIPPING, OBJECTIVES, evaluate

ADAPTER = 771 * 4  # numbers in A and B at rank 4; 514 of the value head follow them


# Gradients and losses


def slopes_of(engine, batch):
    """Return d loss / d output of every token by the objectives, which have tests of their own."""
    outputs = engine.forward(batch)["outputs"]
    slopes = []
    for output, of_batch in zip(outputs, batch["data"], strict=True):
        tensors = {name: tensor["values"] for name, tensor in of_batch["loss_inputs"].items()}
        trained_output = output.get("values", output["logprobs"])
        slopes += evaluate(batch["loss_function"], trained_output, tensors, batch["loss_config"]).slopes
    return slopes


def outputs_of(engine, batch):
    """Return the outputs that the loss depends on, of all data in one list."""
    outputs = engine.forward(batch)["outputs"]
    return [x for output in outputs for x in output.get("values", output["logprobs"])]


LOSSES_WITH_CONFIG = [(loss, {}) for loss in sorted(OBJECTIVES)] + [
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("dppo", {"delta_low": 0.01, "delta_high": 0.02}),
    ("dro", {"beta": 0.3}),
    ("ppo_critic", {"value_clip": 0.3}),
]


@pytest.mark.parametrize(("loss", "config"), LOSSES_WITH_CONFIG)
def test_the_accumulated_gradient_is_that_of_the_loss_by_central_differences(loss, config):
    """In A, B and the head. Losses with a stop-gradient are differentiated by their outputs, with constant slopes."""
    engine = trained()
    batch = random_payload(loss, f"check {loss}", **config)
    engine.forward_backward(batch)
    gradient, weights = engine._gradient, engine._policy.weights
    slopes = slopes_of(engine, batch)
    rng = random.Random(f"entries {loss}")
    rows = [END, *b"abc"]
    rows += [byte_model.VOCABULARY + row for row in rows]  # as the current token, too
    entries = [ADAPTER + row for row in rows]
    rows += [byte_model.INPUTS + row for row in (*b"abcz", END)]  # rows of B
    entries += [row * 4 + rng.randrange(4) for row in rows] + rng.sample(range(len(weights)), 20)
    step = 1e-5
    error = 1e-7 + 1e-9 * sum(map(abs, slopes))  # gspo's ratio may be 1e7 here, and its tokens nearly cancel
    for entry in entries:
        losses, outputs = [], []
        for sign in (1, -1):
            moved = list(weights)
            moved[entry] += sign * step
            engine._policy = byte_lm.Policy(moved, 4)
            losses.append(engine.forward(batch)["loss"])
            outputs.append(outputs_of(engine, batch))
        followed = sum(slope * (above - below) for slope, above, below in zip(slopes, *outputs, strict=True))
        assert gradient[entry] == pytest.approx(followed / (2 * step), abs=error, rel=1e-6)
        if loss not in ("cispo", "gspo"):
            rounding = abs(losses[0]) * 1e-16 / step  # ratios of 5e8 leave few digits to their neighbours
            difference = (losses[0] - losses[1]) / (2 * step)
            assert gradient[entry] == pytest.approx(difference, abs=error + 8 * rounding, rel=1e-6)
    of_adapter, of_head = gradient[:ADAPTER], gradient[ADAPTER:]
    if loss == "ppo_critic":
        assert not any(of_adapter)
        assert sum(g != 0 for g in of_head) >= 5
    else:
        assert sum(g != 0 for g in of_adapter) > 500
        assert not any(of_head)


def test_two_batches_accumulate_the_sum_of_their_gradients():
    one, two = text_payload(b"one two"), text_payload(b"three")
    both, first, second = trained(), trained(), trained()
    first.forward_backward(one)
    second.forward_backward(two)
    both.forward_backward(one)
    both.forward_backward(two)
    assert both._gradient == [a + b for a, b in zip(first._gradient, second._gradient, strict=True)]


def test_the_result_has_the_sum_of_the_losses_and_the_logprobs_in_the_order_of_data():
    engine = trained()
    first = datum(b"ab", b"bc", [1.0, 0.5])
    second = datum(b"c", b"a", [2.0])
    result = engine.forward(payload(first, second))
    (p0, p1), (p2,) = (output["logprobs"] for output in result["outputs"])
    assert result["loss"] == result["metrics"]["loss:sum"] == pytest.approx(-(p0 + 0.5 * p1 + 2 * p2))
    assert engine.sampler().logprobs(list(b"abc")) == [None, p0, p1]
    assert engine.sampler().logprobs(list(b"ca")) == [None, p2]


def test_forward_changes_nothing_and_agrees_with_forward_backward():
    engine = trained()
    before = state_of(engine)
    result = engine.forward(random_payload("importance_sampling", 1))
    assert state_of(engine) == before
    assert engine.forward_backward(random_payload("importance_sampling", 1)) == result


def test_a_nan_at_a_masked_position_does_not_leak():
    clean, dirty = trained(), trained()
    numbers = [1.0, 0.0], [-3.0, -3.0], [1.0, 1.0]
    clean.forward_backward(payload(datum(b"ab", b"bc", *numbers), loss="importance_sampling"))
    numbers = [1.0, 0.0], [-3.0, math.nan], [1.0, math.inf]
    dirty.forward_backward(payload(datum(b"ab", b"bc", *numbers), loss="importance_sampling"))
    assert state_of(dirty) == state_of(clean)


def test_the_metrics_of_losses_that_clip_have_the_share_of_clipped_tokens_over_all_data():
    engine = trained()
    tokens, targets = b"abc", b"bcd"
    (output,) = engine.forward(payload(datum(tokens, targets, [1.0] * 3)))["outputs"]
    q = [p - 0.5 for p in output["logprobs"]]  # so that every ratio is 1.65
    data = [
        datum(tokens, targets, [1.0, 0.0, 0.5], q, [1.0, 1.0, 1.0]),  # two that count, both clipped
        datum(tokens, targets, [0.0, 2.0, 0.0], q, [1.0, -1.0, 1.0]),  # one, not clipped: it is pushed down
        datum(tokens, targets, [0.0, 0.0, 0.0], q, [1.0, 1.0, 1.0]),
    ]
    assert {
        loss for loss in OBJECTIVES if "clip_frac" in engine.forward(random_payload(loss, 1))["metrics"]
    } == CLIPPING
    for loss in ("ppo", "gspo"):
        assert engine.forward(payload(*data, loss=loss))["metrics"]["clip_frac"] == pytest.approx(2 / 3)
    assert engine.forward(payload(*data, loss="cispo"))["metrics"]["clip_frac"] == 1.0
    assert engine.forward(payload(*data, loss="dppo", delta_high=0.0))["metrics"]["clip_frac"] == pytest.approx(2 / 3)
    assert engine.forward(payload(*data, loss="dppo", delta_high=1.0))["metrics"]["clip_frac"] == 0.0
    assert engine.forward(payload(data[2], loss="ppo"))["metrics"] == {"loss:sum": 0.0, "clip_frac": 0.0}


def test_a_rank_below_one_is_refused():
    with pytest.raises(ValueError, match="rank"):
        ByteLM(0, 0)


# The optimizer


def reference_adamw(weights, gradients, optimizer):
    """AdamW as PyTorch's documentation has it, one number at a time."""
    lr, beta1, beta2 = optimizer["learning_rate"], optimizer["beta1"], optimizer["beta2"]
    w, m, v = weights, 0.0, 0.0
    for step, g in enumerate(gradients, start=1):
        w -= lr * optimizer["weight_decay"] * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w -= lr * (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + optimizer["eps"])
    return w


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_the_step_is_adamw_with_decoupled_decay_and_a_global_norm_clip(clip):
    optimizer = ADAMW | {"weight_decay": 0.1, "eps": 1e-3, "grad_clip_norm": clip}
    engine = ByteLM(4, 0)
    start, gradients = engine._policy.weights, []
    for step in range(3):
        engine.forward_backward(random_payload("importance_sampling", f"adamw {step}"))
        norm = math.sqrt(math.fsum(g * g for g in engine._gradient))
        scale = clip / norm if 0 < clip < norm else 1.0
        gradients.append([g * scale for g in engine._gradient])
        result = engine.optim_step(optimizer)
        assert result == {"step": step + 1, "grad_norm": pytest.approx(norm)}
    expected = [
        reference_adamw(w, of_weight, optimizer)
        for w, of_weight in zip(start, zip(*gradients, strict=True), strict=True)
    ]
    assert engine._policy.weights == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_step_needs_a_gradient_since_the_last_one():
    engine = trained()
    before = state_of(engine)
    with pytest.raises(EngineError) as failure:
        engine.optim_step(ADAMW)
    assert failure.value.code == "no_gradients"
    assert state_of(engine) == before


def test_a_gradient_that_is_zero_everywhere_is_a_gradient():
    engine = ByteLM(4, 0)
    before = engine._policy.weights
    engine.forward_backward(payload(datum(b"ab", b"bc", [0.0, 0.0])))
    assert engine.optim_step(ADAMW) == {"step": 1, "grad_norm": 0.0}
    assert engine._policy.weights == before


@pytest.mark.parametrize("operation", ["forward", "forward_backward"])
@pytest.mark.parametrize(("weight", "advantage"), [(1.0, math.nan), (1e308, 1e308), (math.inf, 1.0)])
def test_a_loss_that_is_not_finite_fails_and_changes_nothing(operation, weight, advantage):
    engine = trained()
    engine.forward_backward(text_payload(b"pending"))
    before = state_of(engine)
    good, bad = ([1.0], [-3.0], [1.0]), ([weight], [-3.0], [advantage])
    batch = payload(datum(b"a", b"b", *good), datum(b"a", b"b", *bad), loss="importance_sampling")
    with pytest.raises(EngineError, match=r"data\[1\]") as failure:
        getattr(engine, operation)(batch)
    assert failure.value.code == "non_finite_loss"
    assert state_of(engine) == before


def test_a_gradient_that_overflows_fails_and_changes_nothing():
    engine = trained()
    huge = payload(datum(b"aaaa", b"aaaa", [6e306, 6e306, 6e306, 6e306]))
    engine.forward_backward(huge)
    before = state_of(engine)
    with pytest.raises(EngineError) as failure:
        for _ in range(100):
            engine.forward_backward(huge)
            before = state_of(engine)
    assert failure.value.code == "non_finite_loss"
    assert state_of(engine) == before


@pytest.mark.parametrize("change", [{"learning_rate": 1e308, "weight_decay": 1e308}, {"eps": 0.0}])
def test_an_update_that_is_not_finite_fails_and_keeps_weights_and_gradients(change):
    engine = trained()
    engine.forward_backward(text_payload(b"some text"))
    before = state_of(engine)
    with pytest.raises(EngineError) as failure:
        engine.optim_step(ADAMW | change)
    assert failure.value.code == "non_finite_update"
    assert state_of(engine) == before
    assert engine.optim_step(ADAMW)["step"] == 4


def test_weights_grown_until_the_logits_overflow_fail_rather_than_sample_nonsense():
    engine = ByteLM(4, 0)
    for text, rate in ((b"aaaa", 1e120), (b"abab", 1e200)):
        engine.forward_backward(text_payload(text))
        engine.optim_step(ADAMW | {"learning_rate": rate})
    with pytest.raises(EngineError) as failure:
        engine.sampler().sample(request(b"aa"), "s")
    assert failure.value.code == "non_finite_logits"


# The critic


def critic_datum(text: bytes, returns, **further):
    return datum(text[:-1], text[1:], [1.0] * len(returns), returns=returns, **{"values": returns, **further})


def values_of(engine, text: bytes):
    batch = payload(datum(text, [0] * len(text), [0.0] * len(text)), loss="ppo_critic")
    return engine.forward(batch)["outputs"][0]["values"]


def test_values_start_at_zero_and_logprobs_come_with_them():
    engine = ByteLM(4, 0)
    result = engine.forward(payload(datum(b"ab", b"bc", [1.0, 1.0]), loss="ppo_critic"))
    plain = engine.forward(payload(datum(b"ab", b"bc", [1.0, 1.0])))
    assert result["outputs"] == [{"values": [0.0, 0.0], "logprobs": plain["outputs"][0]["logprobs"]}]
    assert "values" not in plain["outputs"][0]


def test_a_forward_of_the_critic_without_returns_has_the_loss_zero():
    bare = datum(b"ab", b"bc", [1.0, 1.0])
    engine = trained()
    result = engine.forward(payload(bare, loss="ppo_critic", value_clip=0.2))
    assert (result["loss"], result["metrics"]) == (0.0, {"loss:sum": 0.0, "clip_frac": 0.0})
    complete = critic_datum(b"abc", [1.0, 2.0])
    both = engine.forward(payload(bare, complete, loss="ppo_critic"))
    assert both["loss"] == engine.forward(payload(complete, loss="ppo_critic"))["loss"] > 0


def test_value_i_depends_on_the_prefix_that_ends_at_input_i():
    engine = trained()
    whole = values_of(engine, b"abcab")
    assert [values_of(engine, b"abcab"[: i + 1])[i] for i in range(5)] == whole
    assert values_of(engine, b"abcac")[:4] == whole[:4]
    assert values_of(engine, b"abcac")[4] != whole[4]


@pytest.mark.long
def test_the_critic_learns_returns_that_its_inputs_tell_apart():
    engine = ByteLM(4, 0)
    texts = {b"abab": [1.0, 0.25, 0.5], b"baba": [-0.5, 0.5, 0.25], b"acb": [1.0, -1.0]}
    for _ in range(150):
        data = [critic_datum(text, returns, values=values_of(engine, text[:-1])) for text, returns in texts.items()]
        result = engine.forward_backward(payload(*data, loss="ppo_critic", value_clip=0.2))
        engine.optim_step(ADAMW | {"learning_rate": 0.05})
    assert result["loss"] < 1e-3
    for text, returns in texts.items():
        assert values_of(engine, text[:-1]) == pytest.approx(returns, abs=0.02)


def test_the_critic_leaves_the_policy_alone_and_the_policy_the_critic():
    engine = ByteLM(4, 0)
    start = engine._policy.weights
    engine.forward_backward(random_payload("ppo_critic", "critic"))
    engine.optim_step(ADAMW)
    after_critic = engine._policy.weights
    assert after_critic[:ADAPTER] == start[:ADAPTER]
    assert after_critic[ADAPTER:] != start[ADAPTER:]
    engine = ByteLM(4, 0)
    train(engine, 0, 3)
    for numbers in (engine._policy.weights, engine._moment1, engine._moment2):
        assert numbers[ADAPTER:] == [0.0] * 514


def test_the_gradient_norm_and_its_limit_hold_for_policy_and_head_together():
    engine, policy, critic = ByteLM(4, 0), ByteLM(4, 0), ByteLM(4, 0)
    for one, losses in ((engine, ("ppo", "ppo_critic")), (policy, ["ppo"]), (critic, ["ppo_critic"])):
        for loss in losses:
            one.forward_backward(random_payload(loss, "norm"))
    norms = [one.optim_step(ADAMW | {"grad_clip_norm": 0.1})["grad_norm"] for one in (engine, policy, critic)]
    assert norms[0] == pytest.approx(math.hypot(*norms[1:]))
    assert engine._moment1[-514:] == pytest.approx([m * norms[2] / norms[0] for m in critic._moment1[-514:]])


def test_values_that_overflow_fail_rather_than_leave_json():
    engine = ByteLM(4, 0)
    engine.forward_backward(payload(critic_datum(b"aaa", [1.0, 1.0]), loss="ppo_critic"))
    engine.optim_step(ADAMW | {"learning_rate": 1.5e308, "beta1": 0.0})
    with pytest.raises(EngineError) as failure:
        values_of(engine, b"aa")
    assert failure.value.code == "non_finite_values"


# Sampling


def test_sampled_logprobs_are_the_trainers_on_the_same_version():
    engine = trained()
    prompt = b"the "
    sequences = engine.sampler().sample(request(prompt, temperature=0.7, top_k=20, top_p=0.9), "seed")
    for sequence in sequences:
        tokens = [*prompt, *sequence["tokens"]]
        batch = payload(datum(tokens[:-1], tokens[1:], [1.0] * (len(tokens) - 1)))
        assert engine.forward(batch)["outputs"][0]["logprobs"][len(prompt) - 1 :] == sequence["logprobs"]


def test_the_same_seed_and_request_give_the_same_sequences_and_another_seed_others():
    sampler = trained().sampler()
    first = sampler.sample(request(), "seed 1")
    assert trained().sampler().sample(request(), "seed 1") == first
    assert sampler.sample(request(), "seed 2") != first
    assert len({tuple(sequence["tokens"]) for sequence in first}) == 4
    assert sampler.sample(request(num_samples=2), "seed 1") == first[:2]
    assert sampler.sample(request(seed=5), "seed 1") == first  # the service folds that seed into its own


def test_training_does_not_change_a_sampler():
    engine = trained()
    sampler = engine.sampler()
    before = sampler.sample(request(), "s"), sampler.logprobs(list(b"the mill"))
    engine.forward_backward(text_payload(b"the mill"))
    engine.optim_step(ADAMW)
    assert (sampler.sample(request(), "s"), sampler.logprobs(list(b"the mill"))) == before
    assert (sampler.version, engine.sampler().version) == (3, 4)
    assert engine.sampler().logprobs(list(b"the mill")) != before[1]


def test_a_sequence_ends_at_a_stop_token_which_it_keeps_or_at_its_length():
    sequences = trained().sampler().sample(request(num_samples=40, max_tokens=12, stop=[ord("e")]), "s")
    assert {sequence["stop_reason"] for sequence in sequences} == {"stop", "length"}
    for sequence in sequences:
        *body, last = sequence["tokens"]
        assert not {ord("e"), END} & set(body)
        assert len(sequence["logprobs"]) == len(sequence["tokens"]) <= 12
        if sequence["stop_reason"] == "stop":
            assert last in (ord("e"), END)
        else:
            assert len(sequence["tokens"]) == 12
            assert last not in (ord("e"), END)


# States


def train(engine, first, last, *losses):
    for step in range(first, last):
        for loss in losses or ["importance_sampling"]:
            engine.forward_backward(random_payload(loss, f"step {step}"))
        engine.optim_step(ADAMW | {"weight_decay": 0.01})


def test_three_steps_and_three_after_a_reload_are_six(tmp_path):
    straight, interrupted, resumed = ByteLM(4, 0), ByteLM(4, 0), ByteLM(4, "another")
    train(straight, 0, 6, "importance_sampling", "ppo_critic")
    train(interrupted, 0, 3, "importance_sampling", "ppo_critic")
    assert interrupted.save_state(tmp_path) == 3
    resumed.load_state(tmp_path)
    assert resumed.sampler().version == 3
    train(resumed, 3, 6, "importance_sampling", "ppo_critic")
    assert state_of(resumed) == state_of(straight)
    assert values_of(resumed, b"abc") == values_of(straight, b"abc") != [0.0] * 3
    assert resumed.sampler().sample(request(), "s") == straight.sampler().sample(request(), "s")


def test_a_state_holds_no_gradients_and_saving_keeps_those_that_wait(tmp_path):
    engine, other = trained(), trained()
    engine.forward_backward(text_payload(b"pending"))
    other.forward_backward(text_payload(b"other"))
    before = state_of(engine)
    engine.save_state(tmp_path)
    assert state_of(engine) == before
    other.load_state(tmp_path)
    with pytest.raises(EngineError) as failure:
        other.optim_step(ADAMW)
    assert failure.value.code == "no_gradients"


def test_loading_does_not_change_a_sampler(tmp_path):
    ByteLM(4, 0).save_state(tmp_path)
    engine = trained()
    sampler = engine.sampler()
    before = sampler.logprobs(list(b"abc"))
    engine.load_state(tmp_path)
    assert sampler.logprobs(list(b"abc")) == before != engine.sampler().logprobs(list(b"abc"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "whitney-loop byte_lm 1"}, "no state of the format 'whitney-loop byte_lm 3'"),
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"weights": None}, "weights is of type NoneType; expected a list of 3598 for rank 4"),
        ({"weights": [0.0] * 4369}, "weights is 4369 numbers; expected a list of 3598 for rank 4"),
        ({"moment1": ["0"] * 3598}, "moment1 holds an entry that is not a finite float"),
        ({"moment2": [math.nan] * 3598}, "moment2 holds an entry that is not a finite float"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, change, complaint):
    engine = trained()
    engine.save_state(tmp_path)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    engine.forward_backward(text_payload(b"pending"))
    before = state_of(engine)
    with pytest.raises(ValueError, match=complaint):
        engine.load_state(tmp_path)
    assert state_of(engine) == before


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_a_damaged_state_is_refused(tmp_path, content):
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(ValueError):
        ByteLM(4, 0).load_state(tmp_path)


# Adapters


def test_the_adapter_is_the_model(tmp_path):
    """base + alpha/r · lora_B · lora_A · onehots, from the exported folder alone, gives the sampler's logprobs."""
    engine = trained()
    engine.export_lora(tmp_path, base_model="some/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors, metadata = safetensors_file.read((tmp_path / "adapter_model.safetensors").read_bytes())
    assert metadata == {"format": "pt", "rehearsed_model": "some/model"}
    a_shape, a = tensors["base_model.model.bigram.lora_A.weight"]
    b_shape, b = tensors["base_model.model.bigram.lora_B.weight"]
    assert (a_shape, b_shape) == ([4, 514], [257, 4])
    assert b == pytest.approx(engine._policy.weights[514 * 4 : ADAPTER], rel=1e-6)
    prev, cur, token = b"abc"
    h = [a[k * 514 + prev] + a[k * 514 + 257 + cur] for k in range(4)]
    logits = [
        base + scale * sum(b[output * 4 + k] * h[k] for k in range(4))
        for output, base in enumerate(byte_model.base_logprobs(cur))
    ]
    logprob = logits[token] - math.log(math.fsum(map(math.exp, logits)))
    assert engine.sampler().logprobs(list(b"abc"))[2] == pytest.approx(logprob, abs=1e-5)


def test_the_adapters_files_and_config_are_what_peft_reads(tmp_path):
    trained().export_lora(tmp_path, base_model="some/model")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "byte-lm"  # not the model that it stands in for
    assert config["target_modules"] == ["bigram"]
    assert (config["r"], config["lora_alpha"]) == (4, 2)


def test_weights_beyond_f32_are_not_exported(tmp_path):
    engine = trained()
    engine.forward_backward(text_payload(b"aa"))
    engine.optim_step(ADAMW | {"learning_rate": 1e40})
    with pytest.raises(EngineError) as failure:
        engine.export_lora(tmp_path, base_model="some/model")
    assert failure.value.code == "non_finite_export"


# Learning


def vowel_share(tokens):
    return sum(token in b"aeiou" for token in tokens if token != END) / len(tokens)


@pytest.mark.long
def test_importance_sampling_with_group_mean_advantages_learns_vowels():
    engine = ByteLM(8, 1)
    prompt = b"the "
    rewards_by_cycle = []
    for cycle in range(35):
        sequences = engine.sampler().sample(request(prompt, num_samples=16, max_tokens=16), f"cycle {cycle}")
        rewards = [vowel_share(sequence["tokens"]) for sequence in sequences]
        mean = sum(rewards) / 16
        rewards_by_cycle.append(mean)
        data = []
        for sequence, reward in zip(sequences, rewards, strict=True):
            tokens, n, pad = [*prompt, *sequence["tokens"]], len(sequence["tokens"]), len(prompt) - 1
            padded = ([0.0] * pad + values for values in ([1.0] * n, sequence["logprobs"], [reward - mean] * n))
            data.append(datum(tokens[:-1], tokens[1:], *padded))
        engine.forward_backward(payload(*data, loss="importance_sampling"))
        engine.optim_step(ADAMW)
    assert rewards_by_cycle[0] < 0.3
    assert min(rewards_by_cycle[-5:]) > 0.9
