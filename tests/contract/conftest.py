"""What the contract tests speak with: HTTP by urllib, and nothing of the package but the service it starts."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

JSON = dict[str, Any]


@dataclass
class Answer:
    status: int
    headers: Any
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> JSON:
        return self.body["error"]


@dataclass
class Api:
    """One deployment; paths are given from /v1/training/ on."""

    base_url: str
    key: str | None
    provider: str
    model: str
    patience_s: float = 600.0  # a deployment may allocate for minutes
    opened: list[str] = field(default_factory=list)

    def call(self, verb: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        if verb == "POST" and content is None:
            content = b""
        all_headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.base_url}/v1/training/{path}"
        request = urllib.request.Request(url, data=content, method=verb, headers=all_headers)
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as refusal:
            with refusal:
                return Answer(refusal.code, refusal.headers, refusal.read())

    def open_session(self, provider: str | None = None, key: str | None = None) -> str:
        body = {"provider": provider or self.provider}
        answer = self.call("POST", "sessions", body, Idempotency_Key=key or uuid.uuid4().hex)
        assert answer.status < 300, answer.raw
        session_id: str = answer.body["session_id"]
        self.opened.append(session_id)
        return session_id

    def create_run(self, session_id: str, key: str | None = None, **fields: Any) -> Answer:
        body = {"model": self.model, "lora": {"rank": 4}} | fields
        return self.call("POST", f"sessions/{session_id}/runs", body, Idempotency_Key=key or uuid.uuid4().hex)

    def run(self, session_id: str, **fields: Any) -> Run:
        answer = self.create_run(session_id, **fields)
        assert answer.status < 300, answer.raw
        run = Run(self, answer.body["run_id"])
        run.wait_until(lambda status: status != "allocating")
        return run


@dataclass
class Run:
    """A run and the ``seq_id`` that is next in it."""

    api: Api
    run_id: str
    seq_id: int = 1

    def path(self, sampler_id: str | None = None) -> str:
        return f"runs/{self.run_id}" + (f"/samplers/{sampler_id}" if sampler_id else "") + "/operations"

    def post(self, kind: Any, payload: Any, *, sampler_id: str | None = None, seq_id: Any = None) -> Answer:
        """One operation as it is answered at once; without ``seq_id`` it takes the next one."""
        body = {"kind": kind, "seq_id": self.seq_id if seq_id is None else seq_id, "payload": payload}
        answer = self.api.call("POST", self.path(sampler_id), body)
        if seq_id is None and answer.status < 300:
            self.seq_id += 1
        return answer

    def wait(self, operation_id: str) -> JSON:
        while True:
            answer = self.api.call("GET", f"runs/{self.run_id}/operations/{operation_id}?wait_s=20")
            assert answer.status == 200, answer.raw
            operation: JSON = answer.body
            if operation["status"] in ("succeeded", "failed", "cancelled"):
                return operation

    def operation(self, kind: str, payload: Any, sampler_id: str | None = None) -> JSON:
        """One operation, ended."""
        answer = self.post(kind, payload, sampler_id=sampler_id)
        assert answer.status < 300, answer.raw
        return self.wait(answer.body["operation_id"])

    def result(self, kind: str, payload: Any, sampler_id: str | None = None) -> JSON:
        operation = self.operation(kind, payload, sampler_id)
        assert operation["status"] == "succeeded", operation
        result: JSON = operation["result"]
        return result

    def save(self) -> str:
        sampler_id: str = self.result("save_weights_for_sampler", {})["sampler_id"]
        return sampler_id

    def train(self, learning_rate: float = 0.1) -> JSON:
        """One step on one datum."""
        self.result("forward_backward", build.payload(build.datum()))
        return self.result("optim_step", build.optimizer(learning_rate=learning_rate))

    def get(self) -> JSON:
        body: JSON = self.api.call("GET", f"runs/{self.run_id}").body
        return body

    def wait_until(self, reached: Any) -> JSON:
        """The run once its status satisfies ``reached``."""
        deadline = time.monotonic() + self.api.patience_s
        pause = 0.001
        while not reached((body := self.get())["status"]):
            assert time.monotonic() < deadline, body
            time.sleep(pause)
            pause = min(2 * pause, 2.0)
        return body


class build:  # noqa: N801 - used as the namespace of the payload builders
    """Payloads, written out here so that the tests do not lean on the package's own helpers."""

    @staticmethod
    def tensor(values: list[Any], dtype: str = "float32") -> JSON:
        return {"dtype": dtype, "shape": [len(values)], "values": values}

    @staticmethod
    def datum(**tensors: Any) -> JSON:
        """Three inputs, the first of them prompt; ``tensors`` are further ones, or None to leave one out."""
        inputs: JSON = {
            "target_tokens": build.tensor([98, 99, 100], "int64"),
            "weights": build.tensor([0.0, 1.0, 1.0]),
        }
        for name, values in tensors.items():
            inputs[name] = build.tensor(values) if isinstance(values, list) else values
        loss_inputs = {name: value for name, value in inputs.items() if value is not None}
        return {"input": {"token_ids": [97, 98, 99]}, "loss_inputs": loss_inputs}

    @staticmethod
    def policy_datum(**tensors: Any) -> JSON:
        policy: JSON = {"logprobs": [0.0, -2.0, -3.0], "advantages": [0.0, 1.0, -1.0]}
        return build.datum(**policy | tensors)

    @staticmethod
    def critic_datum(**tensors: Any) -> JSON:
        critic: JSON = {"values": [0.0, 0.5, 0.2], "returns": [0.0, 1.0, 0.0]}
        return build.datum(**critic | tensors)

    @staticmethod
    def payload(*data: Any, loss: Any = "cross_entropy", config: Any = None) -> JSON:
        return {"data": list(data), "loss_function": loss, "loss_config": config or {}}

    @staticmethod
    def optimizer(**fields: Any) -> JSON:
        adamw = {"type": "adamw", "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        return {"optimizer": adamw | {"weight_decay": 0.0, "grad_clip_norm": 0.0} | fields}

    @staticmethod
    def sample(num_samples: int = 2, **params: Any) -> JSON:
        sampling = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1} | params
        return {"prompt": {"token_ids": [97, 98]}, "num_samples": num_samples, "sampling_params": sampling}

    @staticmethod
    def logprobs(*token_ids: int) -> JSON:
        return {"input": {"token_ids": list(token_ids)}}


@pytest.fixture(scope="session", name="build")
def _build() -> type[build]:
    return build


@pytest.fixture(scope="session")
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    option = request.config.getoption
    provider, model = option("--contract-provider"), option("--contract-model")
    if option("--contract-url"):
        yield Api(option("--contract-url").rstrip("/"), option("--contract-key"), provider, model)
        return
    from whitney_loop.local import serve

    with serve(tmp_path_factory.mktemp("storage")) as served:
        yield Api(served.base_url, served.api_key, provider, model, patience_s=20.0)


@pytest.fixture
def api(deployment: Api) -> Iterator[Api]:
    """The deployment; the sessions that a test opened are closed after it."""
    yield deployment
    while deployment.opened:
        assert deployment.call("POST", f"sessions/{deployment.opened.pop()}/close").status == 200


@pytest.fixture
def session_id(api: Api) -> str:
    return api.open_session()


@pytest.fixture
def run(api: Api, session_id: str) -> Run:
    return api.run(session_id, seed=7)
