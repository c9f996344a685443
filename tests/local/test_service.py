"""What is the embedded service's own: threads and gates, what it forgets, what it keeps on disk, how it fails."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import threading
import time
import weakref

import pytest

from whitney_loop import connections
from whitney_loop.local import service as service_module
from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.engine import EngineError
from whitney_loop.local.service import Service, ServiceError

WAIT_S = 20.0  # for what takes milliseconds: a test that fails ends


class GatedEngine(ByteLM):
    """Each ``forward`` says that it has begun and waits for its gate."""

    def __init__(self, rank, seed):
        super().__init__(rank, seed)
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def forward(self, payload):
        self.begun.release()
        assert self.gate.acquire(timeout=WAIT_S)
        return {"loss": 0.0}


class BrokenEngine(ByteLM):
    """Fails as it is told to."""

    failure: Exception | None = None

    def fail(self, *_):
        raise self.failure

    forward = forward_backward = save_state = fail


class Bench:
    """A service with one run, and the engine in it."""

    def __init__(self, tmp_path, engine_class=ByteLM, **fields):
        self.engines = []
        self.service = Service(tmp_path / "storage", self.make)
        self.engine_class = engine_class
        self.session_id = self.service.create_session({"provider": "modal"}, None)["session_id"]
        self.run_id = self.create(**fields)["run_id"]
        self.seq_id = 1

    def make(self, rank, seed):
        self.engines.append(self.engine_class(rank, seed))
        return self.engines[-1]

    def create(self, **fields):
        body = {"model": "byte-lm", "lora": {"rank": 2}, "seed": 1} | fields
        return self.service.create_run(self.session_id, body, None)

    def post(self, kind="forward", payload=None, sampler_id=None):
        payload = PAYLOADS.get(kind, {}) if payload is None else payload
        body = {"kind": kind, "seq_id": self.seq_id, "payload": payload}
        operation = self.service.submit(self.run_id, body, sampler_id)
        self.seq_id += 1
        return operation["operation_id"]

    def wait(self, operation_id, wait_s=WAIT_S):
        return self.service.operation(self.run_id, operation_id, wait_s)

    def do(self, kind, payload=None, sampler_id=None):
        return self.wait(self.post(kind, payload, sampler_id))

    def status(self, operation_id):
        return self.wait(operation_id, 0)["status"]

    def run(self):
        return self.service.run(self.run_id)


def tensor(dtype, *values):
    return {"dtype": dtype, "shape": [len(values)], "values": list(values)}


FORWARD = {
    "data": [
        {
            "input": {"token_ids": [97, 98]},
            "loss_inputs": {"target_tokens": tensor("int64", 98, 99), "weights": tensor("float32", 0.0, 1.0)},
        }
    ],
    "loss_function": "cross_entropy",
    "loss_config": {},
}
ADAMW = {"type": "adamw", "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
SAMPLE = {"prompt": {"token_ids": [97]}, "num_samples": 2, "sampling_params": {"max_tokens": 4}}


def sample_of(num_samples, **params):
    return {"prompt": {"token_ids": [97]}, "num_samples": num_samples, "sampling_params": params}


PAYLOADS = {
    "forward": FORWARD,
    "forward_backward": FORWARD,
    "optim_step": {"optimizer": ADAMW | {"grad_clip_norm": 0.0}},
    "sample": SAMPLE,
}


@pytest.fixture
def bench(tmp_path):
    made = []

    def create(engine_class=ByteLM, **fields):
        made.append(Bench(tmp_path, engine_class, **fields))
        return made[-1]

    yield create
    for each in made:
        for engine in each.engines:
            if isinstance(engine, GatedEngine):
                engine.gate.release(1000)
        each.service.stop(WAIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("worker of"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def gated(bench):
    """A bench whose first operation runs and whose second one waits for it."""
    made = bench(GatedEngine)
    made.engine = made.engines[0]
    made.first, made.second = made.post(), made.post()
    assert made.engine.begun.acquire(timeout=WAIT_S)
    return made


@contextlib.contextmanager
def refusal(status, code):
    with pytest.raises(ServiceError) as refused:
        yield refused
    assert (refused.value.status, refused.value.code) == (status, code)


# While an operation runs


def test_a_run_can_be_asked_while_it_computes(gated):
    assert gated.status(gated.first) == "running"
    assert gated.status(gated.second) == "queued"
    assert gated.run()["status"] == "active"
    assert gated.run()["next_seq_id"] == 3


def test_a_long_poll_ends_with_its_operation(gated):
    answers = []
    poll = threading.Thread(target=lambda: answers.append(gated.wait(gated.first)["status"]))
    poll.start()
    gated.engine.gate.release()
    poll.join(WAIT_S)
    assert answers == ["succeeded"]


def test_a_long_poll_is_cut_to_what_the_service_grants(gated, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_WAIT_S", 0.0)
    assert gated.wait(gated.first, wait_s=1e9)["status"] == "running"


def test_cancel_lets_the_running_operation_complete_and_cancels_the_queue(gated):
    assert gated.service.cancel_run(gated.run_id)["status"] == "cancelling"
    assert gated.service.cancel_run(gated.run_id)["status"] == "cancelling"
    assert gated.status(gated.first) == "running"
    assert gated.status(gated.second) == "cancelled"
    with refusal(409, "run_not_active"):
        gated.post()
    with refusal(409, "run_not_active"):
        gated.service.finish_run(gated.run_id)
    gated.engine.gate.release()
    assert gated.wait(gated.first)["status"] == "succeeded"
    assert gated.run()["status"] == "cancelled"


MANY_SEQUENCES = sample_of(num_samples=2_000_000, max_tokens=1)
ONE_LONG_SEQUENCE = sample_of(num_samples=1, max_tokens=4_000_000, temperature=0)  # the likeliest token is no end


@pytest.mark.parametrize("payload", [MANY_SEQUENCES, ONE_LONG_SEQUENCE], ids=["many sequences", "a long one"])
@pytest.mark.parametrize("end", ["cancel_run", "stop"])
def test_a_sample_that_runs_stops_with_its_run(bench, payload, end):
    made = bench()
    sampler_id = made.do("save_weights_for_sampler")["result"]["sampler_id"]
    sample = made.post("sample", payload, sampler_id)
    deadline = time.monotonic() + WAIT_S
    while made.status(sample) == "queued" and time.monotonic() < deadline:
        time.sleep(0.001)
    made.service.cancel_run(made.run_id) if end == "cancel_run" else made.service.stop(WAIT_S)
    operation = made.wait(sample)
    assert (operation["status"], operation["result"], operation["error"]) == ("cancelled", None, None)
    assert made.run()["status"] == "cancelled"


def test_finish_takes_no_more_and_stays_active_until_the_queue_is_done(gated, monkeypatch):
    monkeypatch.setattr(service_module, "_FINISH_WAIT_S", 0.0)
    assert gated.service.finish_run(gated.run_id)["status"] == "active"
    with refusal(409, "run_not_active"):
        gated.post()
    gated.engine.gate.release(2)
    assert gated.wait(gated.second)["status"] == "succeeded"
    assert gated.run()["status"] == "finished"


def test_finish_answers_when_the_queue_is_done(gated):
    answers = []
    finish = threading.Thread(target=lambda: answers.append(gated.service.finish_run(gated.run_id)["status"]))
    finish.start()
    gated.engine.gate.release(2)
    finish.join(WAIT_S)
    assert answers == ["finished"]


def test_a_run_that_is_finishing_can_still_be_cancelled(gated, monkeypatch):
    monkeypatch.setattr(service_module, "_FINISH_WAIT_S", 0.0)
    gated.service.finish_run(gated.run_id)
    assert gated.service.cancel_run(gated.run_id)["status"] == "cancelling"
    gated.engine.gate.release()
    assert gated.wait(gated.first)["status"] == "succeeded"
    assert gated.run()["status"] == "cancelled"


def test_closing_a_session_cancels_its_runs_and_does_not_wait(gated):
    closed = gated.service.close_session(gated.session_id)
    assert (closed["status"], closed["runs"][0]["status"]) == ("closed", "cancelling")


def test_stopping_wakes_who_waits_even_if_the_engine_does_not_end(gated):
    answers = []
    poll = threading.Thread(target=lambda: answers.append(gated.wait(gated.first, wait_s=60)["status"]))
    poll.start()
    gated.service.stop(0.0)
    poll.join(WAIT_S / 2)
    assert answers == ["running"]
    with refusal(503, "shutting_down"):
        gated.service.create_session({"provider": "modal"}, None)


def test_no_more_may_wait_than_is_remembered(gated, monkeypatch):
    monkeypatch.setattr(service_module, "_OPERATIONS_KEPT", 2)
    with refusal(429, "queue_full"):
        gated.post()
    gated.engine.gate.release()
    gated.wait(gated.first)
    gated.post()
    assert gated.status(gated.second) in ("queued", "running")


# What is forgotten


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
    sampler_ids = [made.do("save_weights_for_sampler")["result"]["sampler_id"] for _ in range(18)]
    for sampler_id in (sampler_ids[0], *sampler_ids[2:]):
        assert made.do("sample", sampler_id=sampler_id)["status"] == "succeeded"
    with refusal(410, "expired"):
        made.post("sample", sampler_id=sampler_ids[1])
    with refusal(404, "not_found"):
        made.post("sample", sampler_id=sampler_ids[-1] + "0")


def test_a_sampler_that_never_was_is_not_found_whatever_lies_around_it(bench):
    made = bench()
    first = made.do("save_weights_for_sampler")["result"]["sampler_id"]
    made.do("optim_step")
    for _ in range(18):
        made.do("save_weights_for_sampler")
    with refusal(404, "not_found"):
        made.post("sample", sampler_id=first[:-1] + "2")
    with refusal(410, "expired"):
        made.post("sample", sampler_id=first[:-1] + "3")


def test_a_run_that_has_ended_keeps_no_engine_and_no_thread(bench):
    made = bench()
    made.do("save_weights_for_sampler")
    engine = weakref.ref(made.engines.pop())
    made.service.finish_run(made.run_id)
    made.service.stop(WAIT_S)  # the worker, which holds the engine until it has seen the end
    gc.collect()
    assert engine() is None


def test_an_operation_that_has_ended_keeps_no_payload(bench):
    made = bench()
    made.do("forward_backward")
    operation = made.service._runs[made.run_id]._operations[1]
    assert (operation.payload, operation.sampler) == ({}, None)


@pytest.mark.parametrize(
    ("ask", "arguments"),
    [
        ("session", ["ses-unknown"]),
        ("close_session", ["ses-unknown"]),
        ("create_run", ["ses-unknown", {}, None]),
        ("run", ["run-unknown"]),
        ("finish_run", ["run-unknown"]),
        ("cancel_run", ["run-unknown"]),
        ("submit", ["run-unknown", {}]),
        ("operation", ["run-unknown", "op-1", 0.0]),
    ],
)
def test_what_was_never_made_is_not_found(bench, ask, arguments):
    with refusal(404, "not_found"):
        getattr(bench().service, ask)(*arguments)


def test_a_closed_session_takes_no_more_runs(bench):
    closed = bench()
    closed.service.close_session(closed.session_id)
    with refusal(409, "session_not_open"):
        closed.create()


def test_a_field_that_is_not_known_is_refused(bench):
    with refusal(422, "invalid_payload"):
        bench(unknown=1)


def test_the_oldest_closed_session_is_forgotten_beyond_the_limit(bench, monkeypatch):
    monkeypatch.setattr(service_module, "_SESSIONS_KEPT", 2)
    made = bench()
    second = made.service.create_session({"provider": "modal"}, "key")["session_id"]
    with refusal(429, "too_many_sessions"):
        made.service.create_session({"provider": "modal"}, None)
    made.service.close_session(second)
    third = made.service.create_session({"provider": "modal"}, "key")["session_id"]
    assert third == second  # the key still belongs to it
    fourth = made.service.create_session({"provider": "modal"}, None)["session_id"]
    with refusal(404, "not_found"):
        made.service.session(second)
    assert made.service.session(fourth)["status"] == "open"
    assert made.run()["status"] == "active"


def test_a_session_is_not_forgotten_while_an_operation_of_it_runs(gated, monkeypatch):
    monkeypatch.setattr(service_module, "_SESSIONS_KEPT", 1)
    gated.service.close_session(gated.session_id)
    with refusal(429, "too_many_sessions"):
        gated.service.create_session({"provider": "modal"}, None)
    assert gated.run()["status"] == "cancelling"


def test_a_forgotten_session_takes_its_runs_along(bench, monkeypatch):
    monkeypatch.setattr(service_module, "_SESSIONS_KEPT", 1)
    made = bench()
    made.service.close_session(made.session_id)
    made.service.create_session({"provider": "modal"}, None)
    with refusal(404, "not_found"):
        made.run()


def test_a_session_holds_a_limited_number_of_runs(bench, monkeypatch):
    monkeypatch.setattr(service_module, "_RUNS_PER_SESSION", 1)
    with refusal(409, "too_many_runs"):
        bench().create()


def test_two_requests_at_once_with_one_key_make_one_run(bench):
    made = bench()
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def slow_engine(rank, seed):
        entered.release()
        assert gate.acquire(timeout=WAIT_S)
        return ByteLM(rank, seed)

    made.engine_class = slow_engine
    body = {"model": "byte-lm", "lora": {"rank": 1}}
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(made.service.create_run(made.session_id, body, "key")["run_id"]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=WAIT_S)
    assert not entered.acquire(timeout=0.05)  # the other one waits; were it not to, it would be here at once
    gate.release(2)
    for thread in threads:
        thread.join(WAIT_S)
    assert answers[0] == answers[1]


# How it fails


@pytest.mark.parametrize("failure", [RuntimeError("/secret/path"), MemoryError(), ZeroDivisionError()])
def test_an_engine_that_breaks_in_training_fails_the_run(bench, failure, caplog):
    """Its weights may be half changed, and nothing may be trained on top of them."""
    made = bench(BrokenEngine)
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


def test_an_engine_that_breaks_without_training_fails_the_operation_only(bench, caplog):
    made = bench(BrokenEngine)
    made.engines[0].failure = RuntimeError()
    assert made.do("forward")["error"]["code"] == "internal_error"
    assert made.run()["status"] == "active"
    assert made.do("save_weights_for_sampler")["status"] == "succeeded"


def test_an_engines_own_refusal_fails_the_operation_with_its_words(bench, caplog):
    made = bench(BrokenEngine)
    made.engines[0].failure = EngineError("non_finite_loss", "the loss is infinite")
    operation = made.do("forward_backward")
    assert operation["error"] == {"code": "non_finite_loss", "message": "the loss is infinite", "retryable": False}
    assert made.run()["status"] == "active"
    assert not caplog.records


def test_a_storage_that_cannot_be_written_fails_the_operation_only(bench, caplog):
    made = bench(BrokenEngine)
    made.engines[0].failure = OSError(28, "No space left on device", "/secret/path")
    operation = made.do("save_state")
    assert operation["error"]["code"] == "storage_failed"
    assert "No space left" in operation["error"]["message"]
    assert "secret" not in str(operation)
    assert made.run()["status"] == "active"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_nan_never_leaves_the_service(bench, monkeypatch, number, caplog):
    monkeypatch.setattr(ByteLM, "forward", lambda self, payload: {"loss": number})
    operation = bench().do("forward")
    assert (operation["status"], operation["result"]) == ("failed", None)


@pytest.mark.parametrize(("num_samples", "max_tokens"), [(3_000_000, 1), (1, 10**9), (257, 32_768)])
def test_a_sample_that_may_be_too_large_to_be_answered_is_refused(bench, num_samples, max_tokens):
    made = bench()
    sampler_id = made.do("save_weights_for_sampler")["result"]["sampler_id"]
    with refusal(422, "invalid_payload") as refused:
        made.post("sample", sample_of(num_samples, max_tokens=max_tokens), sampler_id)
    for part in (f"num_samples {num_samples}", f"max_tokens {max_tokens}", "lower"):
        assert part in str(refused.value)


def test_a_sample_that_mostly_stops_early_may_have_a_large_max_tokens(bench):
    made = bench()
    sampler_id = made.do("save_weights_for_sampler")["result"]["sampler_id"]
    request = sample_of(8, max_tokens=32_768, stop=list(range(256)))
    assert made.do("sample", request, sampler_id)["status"] == "succeeded"


def test_the_largest_result_of_a_sample_is_one_that_the_client_reads():
    longest = {"tokens": [256] * 1000, "logprobs": [-2.2250738585072014e-308] * 1000, "stop_reason": "length"}
    assert len(json.dumps(longest)) <= service_module._SEQUENCE_BYTES + 1000 * service_module._TOKEN_BYTES
    assert len(json.dumps({**longest, "tokens": [], "logprobs": []}) + ", ") <= service_module._SEQUENCE_BYTES
    assert service_module._MAX_RESULT_BYTES <= connections.LARGEST_BODY


def test_a_loss_that_the_engine_lacks_is_said_to_be_the_engines_lack(bench, monkeypatch):
    monkeypatch.setattr(ByteLM, "losses", frozenset({"ppo"}))
    with refusal(422, "unsupported_loss") as refused:
        bench().post("forward_backward")
    assert "embedded byte-lm does not compute" in str(refused.value)


# What a run is made of


def test_a_model_that_byte_lm_stands_in_for_is_said(bench):
    body = bench(model="Qwen/Qwen3.5-0.8B").run()
    assert body["model"] == "Qwen/Qwen3.5-0.8B"
    assert body["served_by"] == "byte-lm"
    assert body["note"].startswith("byte-lm stands in for Qwen/Qwen3.5-0.8B")


def test_byte_lm_stands_in_for_nothing(bench):
    body = bench().run()
    assert (body["model"], body["served_by"]) == ("byte-lm", "byte-lm")
    assert "note" not in body


def test_a_seed_that_is_not_given_is_drawn_and_said(bench):
    seeds = [bench(seed=None).run()["seed"] for _ in range(2)]
    assert all(isinstance(seed, int) for seed in seeds)
    assert seeds[0] != seeds[1]


def test_rank_and_seed_reach_the_engine(bench):
    made = bench(lambda rank, seed: setattr(made_with, "value", (rank, seed)) or ByteLM(rank, seed), seed=9)
    assert made_with.value == (2, 9)
    assert made.run()["lora"] == {"rank": 2}


class made_with:  # noqa: N801 - a place to keep one value
    value = None


@pytest.mark.parametrize(("params", "expected"), [({}, "run:1:2"), ({"seed": 0}, "request:0")])
def test_what_seeds_a_sample(bench, params, expected):
    made = bench()
    sampler_id = made.do("save_weights_for_sampler")["result"]["sampler_id"]
    sampler = made.service._runs[made.run_id]._samplers[1]
    plain = made.do("sample", SAMPLE | {"sampling_params": {"max_tokens": 4} | params}, sampler_id)
    assert plain["result"]["sequences"] == sampler.sample(SAMPLE, expected)


def test_the_same_run_twice_gives_the_same_results(bench):
    def history():
        made = bench()
        sampler_id = made.do("save_weights_for_sampler")["result"]["sampler_id"]
        kinds = [("sample", sampler_id), ("forward_backward", None), ("optim_step", None), ("forward", None)]
        return [made.do(kind, sampler_id=at)["result"] for kind, at in kinds]

    assert history() == history()


# The storage


def test_a_storage_that_can_not_be_written_is_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError):
        Service(tmp_path / "file")


def test_the_storage_holds_the_saved_states(bench, tmp_path):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    assert (tmp_path / "storage" / "states" / f"{state_id}.safetensors").is_file()


def test_a_state_outlives_the_service(bench):
    first = bench()
    first.do("forward_backward")
    first.do("optim_step")
    state_id = first.do("save_state")["result"]["state_id"]
    loss = first.do("forward")["result"]["loss"]
    first.service.stop(WAIT_S)
    second = bench(resume_from=state_id)
    assert second.do("forward")["result"]["loss"] == loss
    assert second.do("save_state")["result"]["step"] == 1


@pytest.mark.parametrize("fields", [{"model": "another"}, {"lora": {"rank": 3}}])
def test_a_state_of_another_model_or_rank_is_refused(bench, fields):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    with refusal(422, "invalid_payload") as refused:
        made.create(resume_from=state_id, **fields)
    assert state_id in str(refused.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_damaged_state_is_refused_without_its_path(bench, tmp_path, suffix):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    (tmp_path / "storage" / "states" / f"{state_id}{suffix}").write_bytes(b"damaged")
    with refusal(422, "invalid_payload") as refused:
        made.create(resume_from=state_id)
    assert str(tmp_path) not in str(refused.value)
    assert made.service.session(made.session_id)["runs"] == [made.run()]


@pytest.mark.parametrize("state_id", ["../../etc/passwd", "state-0123456789abcdeF", "state-0123456789abcdef\n", "x\0"])
def test_a_state_id_is_no_path(bench, state_id):
    with refusal(404, "not_found"):
        bench().create(resume_from=state_id)


def test_a_state_outside_the_storage_cannot_be_reached(bench, tmp_path):
    made = bench()
    state_id = made.do("save_state")["result"]["state_id"]
    for path in (tmp_path / "storage" / "states").iterdir():
        path.rename(tmp_path / path.name)
    with refusal(404, "not_found"):
        made.create(resume_from=f"../../{state_id}")
