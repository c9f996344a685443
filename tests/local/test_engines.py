"""Any engine behind the service: its names and limits, how it is made and closed, and how it fails."""

from __future__ import annotations

import threading

import pytest

from local.bench import FORWARD, SAMPLE, WAIT_S, FailingEngine, in_thread, refusal, sample_of
from local.byte_payloads import ADAMW, datum
from whitney_loop.local import run as run_module
from whitney_loop.local.byte_lm import ByteLM, ByteLMSampler
from whitney_loop.local.engine import EngineError

TINY = {"name": "tiny-engine", "model": "tiny-model", "stands_in": False}


# Names


def test_capabilities_runs_and_messages_name_the_engine_and_its_model(bench):
    made = bench(limits=TINY, model="tiny-model")
    offers = made.service.capabilities()["providers"]
    assert [offers[provider]["models"] for provider in ("modal", "tinker")] == [["tiny-model"]] * 2
    assert (made.run()["model"], made.run()["served_by"]) == ("tiny-model", "tiny-engine")
    assert "note" not in made.run()


def test_an_engine_refuses_a_model_that_it_does_not_have(bench):
    with refusal(422, "invalid_payload") as refused:
        bench(limits=TINY, model="another-model")
    assert str(refused.value) == 'model is "another-model"; tiny-engine trains only "tiny-model" here'


# Limits


def test_a_rank_above_the_engines_largest_is_refused(bench):
    with refusal(422, "invalid_payload") as refused:
        bench(limits={"largest_rank": 8}, lora={"rank": 32})
    assert str(refused.value) == "lora.rank is 32; expected an integer from 1 to 8"


def test_more_runs_than_the_engine_takes_are_refused_until_one_has_ended(bench):
    made = bench(limits={"most_runs": 1})
    with refusal(422, "too_many_runs") as refused:
        made.create()
    assert "1 runs are active, and byte-lm takes at most 1" in str(refused.value)
    made.service.cancel_run(made.run_id)
    assert made.create()["status"] == "active"


def forward_with(input_tokens=(97, 98), targets=(98, 99)):
    return FORWARD | {"data": [*FORWARD["data"], datum(input_tokens, targets, [0.0, 1.0])]}


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        (
            "forward",
            forward_with(input_tokens=[97, 300]),
            "data[1].input.token_ids[1] is 300; the token ids of byte-lm are",
        ),
        ("forward_backward", forward_with(targets=[98, 257]), "target_tokens.values[1] is 257"),
        ("sample", sample_of(1, max_tokens=1) | {"prompt": {"token_ids": [257]}}, "prompt.token_ids[0] is 257"),
        ("sample", sample_of(1, max_tokens=1, stop=[10, 999]), "sampling_params.stop[1] is 999"),
        (
            "sample",
            sample_of(1, max_tokens=8),
            "prompt.token_ids has 1 tokens and max_tokens is 8; byte-lm takes at most",
        ),
        ("logprobs", {"input": {"token_ids": [300]}}, "input.token_ids[0] is 300"),
        (
            "logprobs",
            {"input": {"token_ids": [97] * 9}},
            "input.token_ids has 9 tokens; byte-lm takes at most 8 tokens",
        ),
    ],
)
def test_tokens_that_the_model_cannot_take_are_refused_and_take_no_seq_id(bench, kind, payload, message):
    made = bench(limits={"vocabulary": 257, "context_length": 8})
    sampler_id = made.save()
    with refusal(422, "invalid_payload") as refused:
        made.post(kind, payload, sampler_id if kind in ("sample", "logprobs") else None)
    assert message in str(refused.value)
    assert made.run()["next_seq_id"] == 2


def test_tokens_at_the_limits_are_accepted(bench):
    made = bench(limits={"vocabulary": 257, "context_length": 8})
    sampler_id = made.save()
    assert made.do("sample", sample_of(1, max_tokens=7, stop=[256]), sampler_id)["status"] == "succeeded"
    assert made.do("logprobs", {"input": {"token_ids": [256] * 8}}, sampler_id)["status"] == "succeeded"


def test_a_gradient_clip_is_refused_if_the_engine_has_none(bench):
    made = bench(limits={"clips_gradients": False})
    made.do("forward_backward")
    with refusal(422, "invalid_payload") as refused:
        made.post("optim_step", {"optimizer": ADAMW | {"grad_clip_norm": 0.5}})
    assert "grad_clip_norm is 0.5, but byte-lm does not clip gradients; send 0" in str(refused.value)
    assert made.do("optim_step")["status"] == "succeeded"


# Allocation


class Allocation:
    """Called as an engine class: an allocation that waits for its gate and asks whether to proceed."""

    def __init__(self, failure=None):
        self.begun, self.gate, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.failure = failure

    def __call__(self, rank, seed, proceed):
        self.begun.set()
        assert self.gate.wait(WAIT_S)
        try:
            proceed()
            if self.failure is not None:
                raise self.failure
            return ByteLM(rank, seed, proceed)
        finally:
            self.ended.set()


@pytest.fixture
def at_once(monkeypatch):
    """A run is answered as ``allocating`` at once, without waiting for its engine."""
    monkeypatch.setattr(run_module, "_ALLOCATION_WAIT_S", 0.0)


OUT_OF_MEMORY = EngineError("out_of_memory", "the adapter needs 3 GB; 1 GB is free")


@pytest.mark.usefixtures("at_once")
def test_operations_wait_while_the_engine_is_made_and_nobody_else_does(bench):
    allocation = Allocation()
    made = bench(allocation)
    assert made.run()["status"] == "allocating"
    saved = made.post("save_weights_for_sampler")
    assert made.status(saved) == "queued"
    assert made.service.create_session({"provider": "modal"}, None)["status"] == "open"
    allocation.gate.set()
    assert made.wait(saved)["status"] == "succeeded"
    assert made.run()["status"] == "active"


@pytest.mark.usefixtures("at_once")
def test_a_failed_allocation_fails_the_first_operation_and_the_run_with_the_engines_words(bench):
    allocation = Allocation(OUT_OF_MEMORY)
    made = bench(allocation)
    first, second = made.post("save_weights_for_sampler"), made.post("save_state")
    allocation.gate.set()
    error = made.wait(first)["error"]
    assert error == {"code": "out_of_memory", "message": str(OUT_OF_MEMORY), "retryable": False}
    assert made.wait(second)["status"] == "cancelled"
    assert (made.run()["status"], made.run()["error"]) == ("failed", error)
    with refusal(409, "run_not_active") as refused:
        made.post("save_state")
    assert str(OUT_OF_MEMORY) in str(refused.value)


def test_an_allocation_that_fails_soon_is_answered_as_a_failed_run(bench, caplog):
    def broken(*_):
        raise RuntimeError("/secret/path")

    run = bench(broken).run()
    assert (run["status"], run["error"]["code"]) == ("failed", "internal_error")
    assert "byte-lm broke (RuntimeError)" in run["error"]["message"]
    assert "/secret/path" in caplog.text


@pytest.mark.usefixtures("at_once")
def test_cancelling_reaches_an_allocation(bench):
    allocation = Allocation()
    made = bench(allocation)
    assert allocation.begun.wait(WAIT_S)
    assert made.service.cancel_run(made.run_id)["status"] == "cancelled"
    allocation.gate.set()
    assert allocation.ended.wait(WAIT_S)
    assert made.engines == []
    assert "error" not in made.run()


@pytest.mark.usefixtures("at_once")
def test_a_run_that_is_finished_while_it_is_allocated_completes_its_operations(bench):
    allocation = Allocation()
    made = bench(allocation)
    saved = made.post("save_state")
    finish = in_thread(made.service.finish_run, made.run_id)
    allocation.gate.set()
    assert finish.result(WAIT_S)["status"] == "finished"
    assert made.status(saved) == "succeeded"


# Failures


def test_an_engine_that_loses_its_connection_in_training_fails_the_run_in_its_own_name(bench):
    made = bench(FailingEngine)
    made.engines[0].failure = ConnectionRefusedError(111, "Connection refused", "/secret")
    error = made.do("forward_backward")["error"]
    assert error["code"] == "internal_error"
    assert "byte-lm broke (ConnectionRefusedError)" in error["message"]
    assert made.run()["status"] == "failed"


@pytest.mark.parametrize("failure", [ConnectionResetError(104, "reset"), TimeoutError(), OSError("no number")])
def test_a_lost_connection_while_saving_is_not_the_storages(bench, failure):
    made = bench(FailingEngine)
    made.engines[0].failure = failure
    assert made.do("save_state")["error"]["code"] == "internal_error"
    assert made.run()["status"] == "active"


def test_out_of_memory_fails_the_operation_and_leaves_the_run_usable(bench):
    made = bench(FailingEngine)
    made.engines[0].failure = OUT_OF_MEMORY
    assert made.do("forward_backward")["error"]["code"] == "out_of_memory"
    assert made.run()["status"] == "active"
    assert made.do("optim_step")["error"]["code"] == "no_gradients"  # nothing was added
    assert made.do("save_weights_for_sampler")["status"] == "succeeded"


# Cancelling


class Waits(ByteLM):
    """A ``forward_backward`` that asks whether to proceed until it must not."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.begun = threading.Event()

    def forward_backward(self, payload):
        while True:
            self.begun.set()
            self._proceed()


@pytest.mark.parametrize("end", ["cancel_run", "close_session", "stop"])
def test_cancelling_reaches_a_forward_backward(bench, end):
    made = bench(Waits)
    operation = made.post("forward_backward")
    assert made.engines[0].begun.wait(WAIT_S)
    argument = {"cancel_run": made.run_id, "close_session": made.session_id, "stop": WAIT_S}[end]
    getattr(made.service, end)(argument)
    ended = made.wait(operation)
    assert (ended["status"], ended["error"], made.run()["status"]) == ("cancelled", None, "cancelled")


def test_byte_lm_asks_whether_to_proceed_for_each_datum():
    asked = []
    engine = ByteLM(1, 0, lambda: asked.append(1))
    engine.forward_backward(FORWARD | {"data": 3 * FORWARD["data"]})
    assert len(asked) == 3


# Closing


class Sampler(ByteLMSampler):
    """Notes when it is closed."""

    def __init__(self, policy, version, proceed, closed):
        super().__init__(policy, version, proceed)
        self.closed = closed

    def close(self):
        self.closed.append(self.version)


class Closes(ByteLM):
    """Numbers its samplers, and notes in which order they and it are closed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.closed, self.made = [], 0

    def sampler(self):
        self.made += 1
        return Sampler(self._policy, self.made, self._proceed, self.closed)

    def close(self):
        self.closed.append("engine")


@pytest.mark.parametrize("end", ["finish_run", "cancel_run"])
def test_the_samplers_and_then_the_engine_of_an_ended_run_are_closed(bench, end):
    made = bench(Closes)
    made.save(), made.save()
    getattr(made.service, end)(made.run_id)
    made.service.stop(WAIT_S)  # waits for the worker
    assert made.engines[0].closed == [1, 2, "engine"]


def test_a_forgotten_sampler_is_closed_when_no_operation_needs_it(bench, monkeypatch):
    monkeypatch.setattr(run_module, "_SAMPLERS_KEPT", 1)
    made = bench(Closes)
    closed = made.engines[0].closed
    _, second = made.save(), made.save()
    saved, sample = made.post("save_weights_for_sampler"), made.post("sample", SAMPLE, second)
    assert made.wait(sample)["status"] == "succeeded"  # accepted before the save forgot its sampler
    assert made.do("save_state")["status"] == "succeeded"
    assert (made.status(saved), closed) == ("succeeded", [2])


def test_an_engine_is_closed_after_it_broke_and_a_close_that_fails_is_only_logged(bench, caplog):
    class Broken(Closes):
        def forward_backward(self, payload):
            raise RuntimeError

        def close(self):
            super().close()
            raise RuntimeError("cannot be closed")

    made = bench(Broken)
    made.do("forward_backward")
    made.service.stop(WAIT_S)
    assert made.engines[0].closed == ["engine"]
    assert "Broken could not be closed" in caplog.text


def test_an_engine_whose_state_cannot_be_loaded_is_closed(bench):
    made = bench(Closes)
    state_id = made.do("save_state")["result"]["state_id"]
    made.backend.engine_class = type("Unloadable", (Closes,), {"load_state": lambda self, folder: 1 / 0})
    assert made.create(resume_from=state_id)["status"] == "failed"
    made.service.stop(WAIT_S)
    assert made.engines[1].closed == ["engine"]
