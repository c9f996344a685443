"""A service without HTTP, with one run in it, and the engines and payloads that its tests use."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from local.byte_payloads import ADAMW, datum, payload
from whitney_loop.local.byte_lm import ByteLM, ByteLMBackend
from whitney_loop.local.requests import ServiceError
from whitney_loop.local.service import Service

WAIT_S = 20.0  # a test that fails ends; one that passes waits milliseconds


class GatedEngine(ByteLM):
    """Each ``forward`` says that it has begun and waits for its gate."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def forward(self, payload):
        self.begun.release()
        assert self.gate.acquire(timeout=WAIT_S)
        return {"loss": 0.0}


class FailingEngine(ByteLM):
    """Raises the ``failure`` that it is given."""

    failure: Exception | None = None

    def fail(self, *_):
        raise self.failure

    forward = forward_backward = save_state = fail


class BenchBackend(ByteLMBackend):
    """Makes engines of the class that it is given, and remembers them; ``limits`` replace byte-lm's own."""

    def __init__(self, engine_class=ByteLM, **limits):
        self.engines = []
        self.engine_class = engine_class
        for name, value in limits.items():
            setattr(self, name, value)

    def new_run(self, *, rank, seed, proceed):
        self.engines.append(self.engine_class(rank, seed, proceed))
        return self.engines[-1]


class Bench:
    """A service with one run; ``engines`` are those that its backend made."""

    def __init__(self, tmp_path, engine_class=ByteLM, limits=None, **fields):
        self.backend = BenchBackend(engine_class, **limits or {})
        self.engines = self.backend.engines
        self.service = Service(tmp_path / "storage", self.backend)
        self.session_id = self.service.create_session({"provider": "modal"}, None)["session_id"]
        self.run_id = self.create(**fields)["run_id"]
        self.seq_id = 1

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

    def save(self):
        return self.do("save_weights_for_sampler")["result"]["sampler_id"]

    def status(self, operation_id):
        return self.wait(operation_id, 0)["status"]

    def run(self):
        return self.service.run(self.run_id)


def in_thread(call, *arguments):
    """Call a function in a thread, and return the future of its result."""
    return ThreadPoolExecutor(1).submit(call, *arguments)


def sample_of(num_samples, **params):
    return {"prompt": {"token_ids": [97]}, "num_samples": num_samples, "sampling_params": params}


FORWARD = payload(datum(b"ab", b"bc", [0.0, 1.0]))
SAMPLE = sample_of(2, max_tokens=4)
PAYLOADS = {
    "forward": FORWARD,
    "forward_backward": FORWARD,
    "optim_step": {"optimizer": ADAMW},
    "sample": SAMPLE,
}


@contextlib.contextmanager
def refusal(status, code):
    with pytest.raises(ServiceError) as refused:
        yield refused
    found = refused.value.status, refused.value.code
    assert found == (status, code), f"found {found}"
