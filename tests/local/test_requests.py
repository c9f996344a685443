"""The rules for a body; the contract tests check most of them over HTTP."""

from __future__ import annotations

import json

import pytest

from local.bench import refusal, sample_of
from whitney_loop import connections
from whitney_loop.local import requests


def test_an_unknown_field_is_refused(bench):
    with refusal(422, "invalid_payload"):
        bench(unknown=1)


@pytest.mark.parametrize(("num_samples", "max_tokens"), [(3_000_000, 1), (1, 10**9), (257, 32_768)])
def test_a_sample_whose_answer_may_be_too_large_is_refused(bench, num_samples, max_tokens):
    made = bench()
    sampler_id = made.save()
    with refusal(422, "invalid_payload") as refused:
        made.post("sample", sample_of(num_samples, max_tokens=max_tokens), sampler_id)
    for part in (f"num_samples {num_samples}", f"max_tokens {max_tokens}", "lower"):
        assert part in str(refused.value)


def test_a_sample_that_mostly_stops_early_may_have_a_large_max_tokens(bench):
    made = bench()
    request = sample_of(8, max_tokens=32_768, stop=list(range(256)))
    assert made.do("sample", request, made.save())["status"] == "succeeded"


def test_the_client_reads_the_largest_sample_that_is_accepted():
    longest = {"tokens": [256] * 1000, "logprobs": [-2.2250738585072014e-308] * 1000, "stop_reason": "length"}
    assert len(json.dumps(longest)) <= requests._SEQUENCE_BYTES + 1000 * requests._TOKEN_BYTES
    assert len(json.dumps({**longest, "tokens": [], "logprobs": []}) + ", ") <= requests._SEQUENCE_BYTES
    assert requests._MAX_RESULT_BYTES <= connections.LARGEST_BODY


def test_a_loss_that_only_the_engine_lacks_is_refused_in_the_engines_name(bench):
    with refusal(422, "unsupported_loss") as refused:
        bench(limits={"losses": frozenset({"ppo"})}).post("forward_backward")
    assert "byte-lm does not compute it; it computes ppo" in str(refused.value)
