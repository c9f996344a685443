"""One run: its worker, what it keeps and forgets, and how an operation fails."""

from __future__ import annotations

import gc
import logging
import math
import threading
import weakref

import pytest

from local.bench import WAIT_S, FailingEngine, in_thread, refusal, sample_of
from whitney_loop.local import run as run_module
from whitney_loop.local.byte_lm import ByteLM, ByteLMSampler
from whitney_loop.local.engine import EngineError

# While an operation runs


def test_a_run_can_be_asked_while_it_computes(busy):
    assert busy.status(busy.first) == "running"
    assert busy.status(busy.second) == "queued"
    assert busy.run()["status"] == "active"
    assert busy.run()["next_seq_id"] == 3


def test_a_long_poll_ends_with_its_operation(busy):
    poll = in_thread(busy.wait, busy.first)
    busy.engine.gate.release()
    assert poll.result(WAIT_S)["status"] == "succeeded"


def test_a_long_poll_is_limited(busy, monkeypatch):
    monkeypatch.setattr(run_module, "_LONGEST_POLL_S", 0.0)
    assert busy.wait(busy.first, wait_s=1e9)["status"] == "running"


def test_cancel_cancels_the_queue_and_lets_an_operation_complete_that_does_not_ask_to_proceed(busy):
    assert busy.service.cancel_run(busy.run_id)["status"] == "cancelling"
    assert busy.service.cancel_run(busy.run_id)["status"] == "cancelling"
    assert busy.status(busy.first) == "running"
    assert busy.status(busy.second) == "cancelled"
    with refusal(409, "run_not_active"):
        busy.post()
    with refusal(409, "run_not_active"):
        busy.service.finish_run(busy.run_id)
    busy.engine.gate.release()
    assert busy.wait(busy.first)["status"] == "succeeded"
    assert busy.run()["status"] == "cancelled"


MANY_SEQUENCES = sample_of(num_samples=2_000_000, max_tokens=1)
ONE_LONG_SEQUENCE = sample_of(num_samples=1, max_tokens=4_000_000, temperature=0)  # the likeliest token is no end


@pytest.mark.parametrize("payload", [MANY_SEQUENCES, ONE_LONG_SEQUENCE], ids=["many sequences", "a long one"])
@pytest.mark.parametrize("end", ["cancel_run", "stop"])
def test_a_running_sample_stops_with_its_run(bench, monkeypatch, payload, end):
    begun, sample_of_byte_lm = threading.Event(), ByteLMSampler.sample
    monkeypatch.setattr(ByteLMSampler, "sample", lambda *given: begun.set() or sample_of_byte_lm(*given))
    made = bench()
    sample = made.post("sample", payload, made.save())
    assert begun.wait(WAIT_S)
    made.service.cancel_run(made.run_id) if end == "cancel_run" else made.service.stop(WAIT_S)
    operation = made.wait(sample)
    assert (operation["status"], operation["result"], operation["error"]) == ("cancelled", None, None)
    assert made.run()["status"] == "cancelled"


def test_a_finishing_run_takes_no_more_and_is_active_until_its_queue_is_done(busy, monkeypatch):
    monkeypatch.setattr(run_module, "_FINISH_WAIT_S", 0.0)
    assert busy.service.finish_run(busy.run_id)["status"] == "active"
    with refusal(409, "run_not_active"):
        busy.post()
    busy.engine.gate.release(2)
    assert busy.wait(busy.second)["status"] == "succeeded"
    assert busy.run()["status"] == "finished"


def test_finish_answers_when_the_queue_is_done(busy):
    finish = in_thread(busy.service.finish_run, busy.run_id)
    busy.engine.gate.release(2)
    assert finish.result(WAIT_S)["status"] == "finished"


def test_a_finishing_run_can_still_be_cancelled(busy, monkeypatch):
    monkeypatch.setattr(run_module, "_FINISH_WAIT_S", 0.0)
    busy.service.finish_run(busy.run_id)
    assert busy.service.cancel_run(busy.run_id)["status"] == "cancelling"
    busy.engine.gate.release()
    assert busy.wait(busy.first)["status"] == "succeeded"
    assert busy.run()["status"] == "cancelled"


def test_stopping_wakes_a_long_poll_even_if_the_engine_does_not_end(busy):
    poll = in_thread(busy.wait, busy.first, 60)
    busy.service.stop(0.0)
    assert poll.result(WAIT_S)["status"] == "running"


def test_no_more_operations_may_wait_than_are_kept(busy, monkeypatch):
    monkeypatch.setattr(run_module, "_OPERATIONS_KEPT", 2)
    with refusal(429, "queue_full"):
        busy.post()
    busy.engine.gate.release()
    busy.wait(busy.first)
    busy.post()
    assert busy.status(busy.second) in ("queued", "running")


def test_a_queued_operation_that_is_cancelled_has_neither_result_nor_error(busy):
    busy.service.cancel_run(busy.run_id)
    operation = busy.wait(busy.second)
    assert (operation["status"], operation["result"], operation["error"]) == ("cancelled", None, None)


# Forgotten operations and samplers


def test_the_newest_256_operations_are_kept(bench):
    made = bench()
    operation_ids = [made.post("save_weights_for_sampler") for _ in range(200)]
    made.wait(operation_ids[-1])
    operation_ids += [made.post("save_weights_for_sampler") for _ in range(57)]
    with refusal(410, "expired"):
        made.wait(operation_ids[0])
    with refusal(410, "expired"):
        made.seq_id = 1
        made.post("save_weights_for_sampler")
    assert made.wait(operation_ids[1])["status"] == "succeeded"
    with refusal(404, "not_found"):
        made.wait(operation_ids[0] + "999")


def test_the_newest_16_samplers_and_the_first_are_kept(bench):
    made = bench()
    sampler_ids = [made.save() for _ in range(18)]
    for sampler_id in (sampler_ids[0], *sampler_ids[2:]):
        assert made.do("sample", sampler_id=sampler_id)["status"] == "succeeded"
    with refusal(410, "expired"):
        made.post("sample", sampler_id=sampler_ids[1])
    with refusal(404, "not_found"):
        made.post("sample", sampler_id=sampler_ids[-1] + "0")


def test_an_unknown_sampler_is_not_found_and_a_forgotten_one_has_expired(bench):
    made = bench()
    first = made.save()
    made.do("optim_step")
    for _ in range(18):
        made.do("save_weights_for_sampler")
    with refusal(404, "not_found"):
        made.post("sample", sampler_id=first[:-1] + "20")
    with refusal(410, "expired"):
        made.post("sample", sampler_id=first[:-1] + "2")


def test_an_ended_run_keeps_no_engine_and_no_thread(bench):
    made = bench()
    made.do("save_weights_for_sampler")
    engine = weakref.ref(made.engines.pop())
    made.service.finish_run(made.run_id)
    made.service.stop(WAIT_S)  # the worker, which holds the engine until it has seen the end
    gc.collect()
    assert engine() is None


def test_an_ended_operation_keeps_no_payload(bench):
    made = bench()
    made.do("forward_backward")
    operation = made.service._runs[made.run_id]._operations[1]
    assert (operation.payload, operation.sampler) == ({}, None)


# Failures


@pytest.mark.parametrize("failure", [RuntimeError("/secret/path"), MemoryError(), ZeroDivisionError()])
def test_an_engine_that_breaks_in_training_fails_the_run(bench, failure, caplog):
    """Its weights may be half changed, and nothing may be trained on top of them."""
    made = bench(FailingEngine)
    made.engines[0].failure = failure
    operation = made.do("forward_backward")
    assert operation["status"] == "failed"
    assert operation["error"]["code"] == "internal_error"
    assert "secret" not in str(operation)
    run = made.run()
    assert (run["status"], run["error"]["code"]) == ("failed", "internal_error")
    assert run["error"]["operation_id"] == operation["operation_id"]
    assert [record.name for record in caplog.records if record.levelno >= logging.ERROR] == ["whitney_loop.local"]
    with refusal(409, "run_not_active"):
        made.service.finish_run(made.run_id)
    assert made.service.cancel_run(made.run_id)["status"] == "failed"


def test_an_engine_that_breaks_without_training_fails_the_operation_only(bench):
    made = bench(FailingEngine)
    made.engines[0].failure = RuntimeError()
    assert made.do("forward")["error"]["code"] == "internal_error"
    assert made.run()["status"] == "active"
    assert made.do("save_weights_for_sampler")["status"] == "succeeded"


def test_an_engines_own_refusal_fails_the_operation_with_its_words(bench, caplog):
    made = bench(FailingEngine)
    made.engines[0].failure = EngineError("non_finite_loss", "the loss is infinite")
    operation = made.do("forward_backward")
    assert operation["error"] == {"code": "non_finite_loss", "message": "the loss is infinite", "retryable": False}
    assert made.run()["status"] == "active"
    assert not caplog.records


def test_a_storage_that_cannot_be_written_fails_the_operation_only(bench):
    made = bench(FailingEngine)
    made.engines[0].failure = OSError(28, "No space left on device", "/secret/path")
    operation = made.do("save_state")
    assert operation["error"]["code"] == "storage_failed"
    assert "No space left" in operation["error"]["message"]
    assert "secret" not in str(operation)
    assert made.run()["status"] == "active"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_nan_never_leaves_the_service(bench, monkeypatch, number):
    monkeypatch.setattr(ByteLM, "forward", lambda self, payload: {"loss": number})
    operation = bench().do("forward")
    assert (operation["status"], operation["result"]) == ("failed", None)


# Seeds


@pytest.mark.parametrize(("params", "is_repeated"), [({}, False), ({"seed": 0}, True)])
def test_a_sample_is_seeded_by_its_own_seed_or_by_run_and_seq_id(bench, params, is_repeated):
    def two_samples(**fields):
        made = bench(**fields)
        sampler_id = made.save()
        return [made.do("sample", sample_of(8, max_tokens=8, **params), sampler_id)["result"] for _ in range(2)]

    first, second = two_samples()
    assert (first == second) == is_repeated
    assert two_samples() == [first, second]
    assert (two_samples(seed=2) == [first, second]) == is_repeated


def test_the_same_run_twice_gives_the_same_results(bench):
    def history():
        made = bench()
        sampler_id = made.save()
        kinds = [("sample", sampler_id), ("forward_backward", None), ("optim_step", None), ("forward", None)]
        return [made.do(kind, sampler_id=at)["result"] for kind, at in kinds]

    assert history() == history()
