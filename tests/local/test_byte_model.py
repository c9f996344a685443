"""The embedded model: its distribution, how a token is drawn, and the ids of another tokenizer."""

from __future__ import annotations

import math

import pytest

from local.byte_payloads import datum, payload, random_payload, request, state_of, text_payload, trained
from whitney_loop.local import byte_model
from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.byte_model import END


def test_every_context_is_a_distribution_without_zeros():
    engine = trained()
    for context in [(257 + END,), (0, 257 + 255), (ord("t"), 257 + ord("h"))]:
        logprobs = engine._policy.logprobs(context)
        assert len(logprobs) == 257
        assert math.fsum(map(math.exp, logprobs)) == pytest.approx(1.0, abs=1e-12)
        assert min(logprobs) > -30


def test_training_starts_at_the_base_model_whatever_rank_and_seed():
    engines = [ByteLM(1, 0), ByteLM(16, "seven"), ByteLM(256, 5)]
    logprobs = [engine.sampler().logprobs(list(b"the mill")) for engine in engines]
    assert logprobs[0] == logprobs[1] == logprobs[2]
    assert all(0 > logprob > -9.1 for logprob in logprobs[0][1:])


def test_the_seed_decides_the_initial_weights():
    assert ByteLM(4, 1)._policy.weights == ByteLM(4, 1)._policy.weights == ByteLM(4, "1")._policy.weights
    assert ByteLM(4, 1)._policy.weights != ByteLM(4, 2)._policy.weights


def test_the_cache_of_contexts_stays_within_its_limit_and_changes_no_result(monkeypatch):
    whole, small = trained(), trained()
    batch = random_payload("importance_sampling", "cache")
    expected = whole.forward_backward(batch)
    monkeypatch.setattr(byte_model, "CACHED_CONTEXTS", 2)
    assert small.forward_backward(batch) == expected
    assert len(small._policy._logprobs) <= 2
    assert state_of(small) == state_of(whole)


# Drawing a token


def test_temperature_zero_takes_the_likeliest_token():
    sampler = ByteLM(4, 0).sampler()
    sequences = sampler.sample(request(b"t", num_samples=3, max_tokens=1, temperature=0), "s")
    row = byte_model.base_logprobs(ord("t"))
    assert [sequence["tokens"] for sequence in sequences] == [[row.index(max(row))]] * 3
    assert sequences[0]["logprobs"] == pytest.approx([max(row)])


def drawn(**params):
    """The tokens that follow ``t`` in many draws."""
    sequences = ByteLM(4, 0).sampler().sample(request(b"t", num_samples=3000, max_tokens=1, **params), "s")
    return [sequence["tokens"][0] for sequence in sequences]


def ranked_after_t():
    row = byte_model.base_logprobs(ord("t"))
    return sorted(range(257), key=lambda token: -row[token]), [math.exp(x) for x in row]


def test_tokens_are_drawn_as_often_as_the_policy_says():
    ranked, probability = ranked_after_t()
    tokens = drawn()
    for token in ranked[:5]:
        assert tokens.count(token) / 3000 == pytest.approx(probability[token], abs=0.03)


def test_temperature_sharpens_and_flattens_as_a_power_of_the_probability():
    ranked, probability = ranked_after_t()
    for temperature in (0.5, 2.0):
        powers = [p ** (1 / temperature) for p in probability]
        expected = powers[ranked[0]] / sum(powers)
        assert drawn(temperature=temperature).count(ranked[0]) / 3000 == pytest.approx(expected, abs=0.03)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    ranked, _ = ranked_after_t()
    assert set(drawn(temperature=1e-310)) == {ranked[0]}


def test_top_k_keeps_the_k_likeliest():
    ranked, _ = ranked_after_t()
    assert set(drawn(top_k=3)) == set(ranked[:3])


def test_top_p_keeps_the_fewest_tokens_that_hold_the_share():
    ranked, probability = ranked_after_t()
    share = probability[ranked[0]] + probability[ranked[1]]
    assert set(drawn(top_p=share - 1e-6)) == set(ranked[:2])
    assert set(drawn(top_p=share + 1e-6)) == set(ranked[:3])
    assert set(drawn(top_p=1e-9)) == {ranked[0]}


def test_top_p_is_a_share_of_what_temperature_and_top_k_left():
    ranked, probability = ranked_after_t()
    powers = [probability[token] ** 2 for token in ranked[:3]]
    share = powers[0] / sum(powers)
    assert set(drawn(temperature=0.5, top_k=3, top_p=share - 1e-6)) == {ranked[0]}
    assert set(drawn(temperature=0.5, top_k=3, top_p=share + 1e-6)) == set(ranked[:2])


# Another tokenizer's ids


def test_larger_ids_are_folded_onto_bytes_in_prompts_inputs_targets_and_logprobs():
    engine = trained()
    far = [256 * 400 + byte for byte in b"the "]
    sampler = engine.sampler()
    assert sampler.sample(request(far), "s") == sampler.sample(request(b"the "), "s")
    assert sampler.logprobs(far) == sampler.logprobs(list(b"the "))
    batch = payload(datum(far[:-1], far[1:], [1.0] * 3))
    assert engine.forward(batch) == engine.forward(text_payload(b"the "))


def test_the_end_is_not_folded():
    sampler = trained().sampler()
    assert sampler.logprobs([ord("a"), END]) != sampler.logprobs([ord("a"), 0])
    assert sampler.logprobs([ord("a"), END + 1]) == sampler.logprobs([ord("a"), 1])


def test_foreign_stop_ids_are_ignored():
    sampler = trained().sampler()
    assert sampler.sample(request(stop=[256 * 7 + ord("e")]), "s") == sampler.sample(request(), "s")
