"""Samples of one sampler that wait together: taken as one batch, with the results that each has alone."""

from __future__ import annotations

import threading

import pytest

from local.bench import SAMPLE, WAIT_S, sample_of
from whitney_loop.local.byte_lm import ByteLM, ByteLMSampler
from whitney_loop.local.engine import EngineError


class ManySampler(ByteLMSampler):
    """Notes how many requests come together; ``failure`` is raised for more than one."""

    batches: list[int]
    failure: Exception | None

    def sample_many(self, requests):
        self.batches.append(len(requests))
        if self.failure is not None:
            raise self.failure
        return [self.sample(request, seed) for request, seed in requests]


class Batches(ByteLM):
    """Holds its ``forward`` until the gate opens, so that samples wait behind it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.batches, self.failure, self.gate = [], None, threading.Event()

    def forward(self, payload):
        assert self.gate.wait(WAIT_S)
        return {"loss": 0.0}

    def sampler(self):
        sampler = ManySampler(self._policy, self._step, self._proceed)
        sampler.batches, sampler.failure = self.batches, self.failure
        return sampler


def results_of_waiting_samples(made, sampler_ids, payloads):
    """Post the samples behind an operation that is held, then let it go."""
    made.post("forward")
    posted = [
        made.post("sample", payload, sampler_id) for payload, sampler_id in zip(payloads, sampler_ids, strict=True)
    ]
    for engine in made.engines:
        if isinstance(engine, Batches):
            engine.gate.set()
    return [made.wait(operation_id)["result"] for operation_id in posted]


REQUESTS = [SAMPLE, sample_of(1, max_tokens=3, seed=5), sample_of(3, max_tokens=2, temperature=0)]


def test_waiting_samples_of_one_sampler_go_to_the_engine_together_with_the_same_results(bench):
    together, alone = bench(Batches), bench(ByteLM)
    results = results_of_waiting_samples(together, [together.save()] * 3, REQUESTS)
    assert together.engines[0].batches == [3]
    assert results == results_of_waiting_samples(alone, [alone.save()] * 3, REQUESTS)


def test_samples_of_another_sampler_and_other_operations_end_a_batch(bench):
    made = bench(Batches)
    one, other = made.save(), made.save()
    results_of_waiting_samples(made, [one, one, other, other, other, one], [SAMPLE] * 6)
    assert made.engines[0].batches == [2, 3]  # the last one is alone


@pytest.mark.parametrize("failure", [EngineError("out_of_memory", "too many"), RuntimeError()])
def test_samples_of_a_batch_that_failed_are_taken_one_by_one(bench, failure):
    made, alone = bench(Batches), bench(ByteLM)
    made.engines[0].failure = failure
    results = results_of_waiting_samples(made, [made.save()] * 3, REQUESTS)
    assert made.engines[0].batches == [3]
    assert results == results_of_waiting_samples(alone, [alone.save()] * 3, REQUESTS)


def test_cancelling_reaches_every_sample_of_a_batch(bench):
    begun = threading.Event()

    class Endless(ManySampler):
        def sample_many(self, requests):
            while True:
                begun.set()
                self._proceed()

    class Engine(Batches):
        def sampler(self):
            return Endless(self._policy, self._step, self._proceed)

    made = bench(Engine)
    sampler_id = made.save()
    made.post("forward")
    posted = [made.post("sample", SAMPLE, sampler_id) for _ in range(3)]
    made.engines[0].gate.set()
    assert begun.wait(WAIT_S)
    made.service.cancel_run(made.run_id)
    assert [made.wait(operation_id)["status"] for operation_id in posted] == ["cancelled"] * 3
