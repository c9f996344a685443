"""The service may run for weeks: the memory for operations, samplers, sessions and connections is bounded."""

import os
import tracemalloc
from pathlib import Path

import pytest

from processes import start_service
from whitney_loop import WhitneyClient, adamw_optimizer, forward_backward_payload, rl_datum
from whitney_loop.local import service as service_module
from whitney_loop.local.byte_lm import ByteLMBackend
from whitney_loop.local.requests import ServiceError
from whitney_loop.local.service import Service

OPERATIONS = 10_000
WARM_UP = 2_000  # more than is kept: 256 operations and 17 samplers
LONGEST_WAIT_S = 20.0

SAMPLE = {"prompt": {"token_ids": [97]}, "num_samples": 2, "sampling_params": {"max_tokens": 4}}
PAYLOAD = forward_backward_payload([rl_datum([97], [98, 99], [-1.0, -2.0], 0.5)], "importance_sampling")
OPTIMIZER = {"optimizer": adamw_optimizer(1e-4)}


class Engine(ByteLMBackend):
    """Computes nothing, so that only the service's own memory can grow; each result takes a kilobyte."""

    version = 0

    def new_run(self, **_):
        return self

    def sampler(self):
        return self

    def close(self):
        pass

    def sample(self, request, seed):
        return [{"tokens": [1], "logprobs": [-1.0], "stop_reason": "x" * 1000}]

    def forward_backward(self, payload):
        return {"loss": 0.0, "metrics": {"x" * 1000: 0.0}, "outputs": []}

    def optim_step(self, optimizer):
        return {"step": 1, "grad_norm": 0.0, "x": "x" * 1000}


class Client:
    """One run of a service in this process."""

    def __init__(self, service):
        self.service = service
        session_id = service.create_session({"provider": "modal"}, None)["session_id"]
        self.run_id = service.create_run(session_id, {"model": "byte-lm", "lora": {"rank": 1}}, None)["run_id"]
        self.seq_id = 0

    def do(self, kind, payload, sampler_id=None):
        self.seq_id += 1
        body = {"kind": kind, "seq_id": self.seq_id, "payload": payload}
        operation = self.service.submit(self.run_id, body, sampler_id)
        ended = self.service.operation(self.run_id, operation["operation_id"], LONGEST_WAIT_S)
        assert ended["status"] == "succeeded"
        return ended["result"]


def cycles(count, of_run, of_sampler):
    for _ in range(count):
        sampler_id = of_run("save_weights_for_sampler", {})["sampler_id"]
        of_sampler(sampler_id)
        of_run("forward_backward", PAYLOAD)
        of_run("optim_step", OPTIMIZER)


@pytest.fixture
def traced():
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


@pytest.mark.long
def test_ten_thousand_operations_take_no_more_memory_than_two_thousand(tmp_path, traced):
    service = Service(tmp_path, Engine())
    client = Client(service)

    def sample(sampler_id):
        client.do("sample", SAMPLE, sampler_id)

    cycles(WARM_UP // 4, client.do, sample)
    warm = traced()
    cycles((OPERATIONS - WARM_UP) // 4, client.do, sample)
    assert client.seq_id == OPERATIONS
    assert traced() < warm + 100_000  # bytes; 8,000 operations of a kilobyte each, of which 1 % would be seen
    service.stop(LONGEST_WAIT_S)


def test_twice_as_many_sessions_as_are_kept_take_no_more_memory(tmp_path, traced, monkeypatch):
    monkeypatch.setattr(service_module, "_SESSIONS_KEPT", 100)
    service = Service(tmp_path, Engine())

    def use(number):
        session_id = service.create_session({"provider": "modal"}, f"key-{number}")["session_id"]
        service.create_run(session_id, {"model": "byte-lm", "lora": {"rank": 1}}, f"key-{number}")
        service.close_session(session_id)

    for number in range(120):
        use(number)
    warm = traced()
    for number in range(120, 200):
        use(number)
    assert traced() < warm + 50_000  # bytes; 80 sessions take 440 kB
    service.stop(LONGEST_WAIT_S)


def test_results_of_ended_sessions_are_kept_for_the_newest_only(tmp_path):
    service = Service(tmp_path, Engine())
    clients = []
    for _ in range(18):
        client = Client(service)
        client.do("save_weights_for_sampler", {})
        service.close_session(service.run(client.run_id)["session_id"])
        clients.append(client)

    def fetched(client):
        try:
            return service.operation(client.run_id, "op-" + client.run_id.removeprefix("run-") + "-1", 0)["status"]
        except ServiceError as error:
            return error.status

    assert [fetched(client) for client in clients] == [410] + ["succeeded"] * 17
    service.stop(LONGEST_WAIT_S)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the process's memory is read from /proc")
def test_ten_thousand_real_operations_over_http_stay_within_a_fixed_memory(tmp_path):
    with start_service(tmp_path) as service:
        client = WhitneyClient(service.base_url, service.api_key)
        run_id = client.create_lora_run(client.create_session("modal"), model="byte-lm", rank=1, seed=1)

        def of_run(kind, payload):
            return client.run_operation(run_id, kind, payload)

        def sample(sampler_id):
            client.sampler_operation(run_id, sampler_id, "sample", SAMPLE)

        cycles(WARM_UP // 4, of_run, sample)
        warm = resident(service.process.pid)
        cycles((OPERATIONS - WARM_UP) // 4, of_run, sample)
        assert resident(service.process.pid) < warm + 8 * 2**20  # the model's base, computed as bytes come up: 2 MB


def resident(pid):
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
