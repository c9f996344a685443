"""The HTTP client of the contract tests: urllib, and nothing of the package that they judge."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import random
import re
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

JSON = dict[str, Any]

OPERATION_FIELDS = {"operation_id", "run_id", "kind", "seq_id", "status", "result", "error"}
ENDED = {"succeeded", "failed", "cancelled"}
OPERATION_STATUSES = {"queued", "running"} | ENDED
RUN_STATUSES = {"allocating", "active", "cancelling", "finished", "cancelled", "failed"}
TERMINAL = {"finished", "cancelled", "failed"}

# CONTRACT.md, "Endpoints": each row, and the fields of its answer.
ENDPOINTS: dict[str, set[str]] = {
    "GET /v1/training/capabilities": set(),  # in two forms
    "POST /v1/training/sessions": {"session_id", "provider", "status"},
    "GET /v1/training/sessions/{session_id}": {"session_id", "provider", "status", "runs"},
    "POST /v1/training/sessions/{session_id}/runs": {"run_id", "status", "next_seq_id"},
    "GET /v1/training/runs/{run_id}": {"run_id", "session_id", "status", "next_seq_id"},
    "POST /v1/training/runs/{run_id}/operations": OPERATION_FIELDS,
    "POST /v1/training/runs/{run_id}/samplers/{sampler_id}/operations": OPERATION_FIELDS,
    "GET /v1/training/runs/{run_id}/operations/{operation_id}": OPERATION_FIELDS,
    "POST /v1/training/runs/{run_id}/finish": {"run_id", "session_id", "status", "next_seq_id"},
    "POST /v1/training/runs/{run_id}/cancel": {"run_id", "session_id", "status", "next_seq_id"},
    "POST /v1/training/sessions/{session_id}/close": {"session_id", "provider", "status", "runs"},
}

_BUSY = (429, 502, 503, 504)  # retried, as a client would: to be busy is no deviation
_PAUSES_S = (1.0, 4.0, 10.0, 30.0)
_SILENCES = 5  # requests without any answer, after which nothing more is asked
_EXCHANGE_S = 90.0
_SHORTEST_SECRET = 8  # characters, as in the client; to redact a shorter key would hide half of every answer
_SHORT_PATIENCE_S = 20.0  # after a first wait ran out: do not wait as long again


class Deviation(AssertionError):
    """A difference from the contract, in words: expected … found …."""


class Unspeakable(Exception):
    """No contract test can be run against this URL."""


@dataclass
class Answer:
    """An answer from which the key was removed, so that no message about it can hold the key."""

    status: int
    raw: bytes

    @property
    def body(self) -> Any:
        try:
            return json.loads(self.raw.decode(), parse_constant=_refuse_constant)
        except ValueError as error:
            text = shortened(self.raw.decode(errors="replace"), 160)
            raise Deviation(f"an answer is no UTF-8 JSON ({error}): {self.status} {text!r}") from error

    @property
    def error(self) -> JSON:
        """The error object of a refusal; empty if there is none."""
        body = self.body
        error = body.get("error") if isinstance(body, dict) else None
        return error if isinstance(error, dict) else {}

    def __str__(self) -> str:
        text = self.raw.decode(errors="replace")
        with contextlib.suppress(Deviation):
            if "code" in self.error:
                text = f"{self.error['code']}: {self.error.get('message')}"
        return f"{self.status} {shortened(text, 160)}"


def accepted(answer: Answer) -> JSON:
    """Return the body of an answer that must be a success."""
    if not 200 <= answer.status < 300:
        raise Deviation(f"expected success, found {answer}")
    body = answer.body
    if not isinstance(body, dict):
        raise Deviation(f"expected a JSON object, found {answer}")
    return body


def error_code(operation: JSON) -> Any:
    """Return the code of an operation that failed, else None."""
    return (operation["error"] or {}).get("code")


def assert_refused(answer: Answer, status: int | None = None, code: str | None = None) -> None:
    """Raise Deviation unless the answer is this refusal; without ``status``, any 4xx."""
    fits = 400 <= answer.status < 500 if status is None else answer.status == status
    if not fits or (code is not None and answer.error.get("code") != code):
        raise Deviation(f"expected {status or 'a refusal (4xx)'}{' ' + code if code else ''}, found {answer}")


@dataclass
class Ledger:
    """What a deployment was asked for, and which sessions are open there."""

    requests: int = 0
    sessions: int = 0
    runs: set[str] = field(default_factory=set)
    operations: dict[str, str] = field(default_factory=dict)  # id → kind
    sampled_tokens: int = 0  # at most: num_samples times max_tokens
    trained_tokens: int = 0  # that went through the model in forward, forward_backward and logprobs
    open_sessions: list[str] = field(default_factory=list)
    unanswered: dict[str, bytes] = field(default_factory=dict)  # Idempotency-Key → body that may have made a session
    last: str = ""  # the last exchange, for the report
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, verb: str, path: str, content: bytes | None, answer: Answer) -> None:
        with self._lock, contextlib.suppress(ValueError, LookupError, AttributeError, TypeError, Deviation):
            self.requests += 1
            self.last = f"{verb} {path} {shortened((content or b'').decode(errors='replace'), 80)} → {answer}"
            if verb == "POST" and answer.status < 300:
                self._note_what_was_made(path, content or b"", answer.body)

    def _note_what_was_made(self, path: str, content: bytes, made: JSON) -> None:
        if path == "sessions" and made["session_id"] not in self.open_sessions:
            self.sessions += 1
            self.open_sessions.append(made["session_id"])
        elif path.endswith("/close") and made["status"] == "closed" and made["session_id"] in self.open_sessions:
            self.open_sessions.remove(made["session_id"])
        elif path.endswith("/runs"):
            self.runs.add(made["run_id"])
        elif path.endswith("/operations") and made["operation_id"] not in self.operations:
            self.operations[made["operation_id"]] = made["kind"]
            self._note_tokens(made["kind"], json.loads(content)["payload"])

    def _note_tokens(self, kind: str, payload: JSON) -> None:
        if kind == "sample":
            self.sampled_tokens += payload["num_samples"] * payload["sampling_params"]["max_tokens"]
        elif kind in ("forward", "forward_backward"):
            self.trained_tokens += sum(len(datum["input"]["token_ids"]) for datum in payload["data"])
        elif kind == "logprobs":
            self.trained_tokens += len(payload["input"]["token_ids"])

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(self.operations.values()).items()))
        return [
            f"{self.sessions} sessions, {len(self.runs)} runs, {self.requests} requests",
            f"{len(self.operations)} operations: {kinds or 'none'}",
            f"at most {self.sampled_tokens} tokens sampled, {self.trained_tokens} scored or trained on",
        ]


@dataclass
class Api:
    """One deployment; paths are given from /v1/training/ on."""

    base_url: str
    key: str | None = field(repr=False)
    provider: str
    model: str
    embedded: bool
    patience_s: float = 600.0  # a deployment may allocate for minutes
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    unusable: str | None = None  # why no session or no run can be had, once that has shown
    pauses_s: tuple[float, ...] = _PAUSES_S  # before a busy deployment is asked again
    silences: int = 0
    _shared_sessions: dict[str, str] = field(default_factory=dict, repr=False)
    _shared_runs: dict[str, Run] = field(default_factory=dict, repr=False)
    _own_runs: list[Run] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        loopback = _is_loopback(url.hostname or "")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise Unspeakable(f"--contract-url is {self.base_url!r}; expected https://HOST or http://127.0.0.1:PORT")
        if url.username or url.password or url.query or url.fragment:
            raise Unspeakable("--contract-url holds more than scheme, host, port and path; the key has its own option")
        if url.scheme == "http" and not loopback:
            raise Unspeakable("--contract-url is http to another machine: the key goes only over https or to loopback")
        if self.key is None and not loopback:
            raise Unspeakable("a deployment on another machine needs --contract-key")
        if self.key is not None and not re.fullmatch("[!-~]+", self.key):
            raise Unspeakable("--contract-key is empty or holds what no header takes: spaces, line ends, no ASCII")
        self._key_pattern = _pattern_of(self.key or "")
        proxies = [urllib.request.ProxyHandler({})] if loopback else []
        self._opener = urllib.request.build_opener(_NoRedirect, *proxies)

    def call(
        self, verb: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str | None
    ) -> Answer:
        """Make one exchange. A request that creates a session or a run always has an Idempotency-Key.

        ``headers`` replace the default ones; a header that is None is not sent.
        """
        __tracebackhide__ = True  # what a test gives as headers may hold the key
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        if verb == "POST" and content is None:
            content = b""
        all_headers: dict[str, Any] = {"Content-Type": "application/json"}
        if verb == "POST" and (path == "sessions" or path.endswith("/runs")):
            all_headers["Idempotency-Key"] = uuid.uuid4().hex
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        if verb == "POST" and path == "sessions":
            self.ledger.unanswered[all_headers["Idempotency-Key"]] = content or b""
        answer = self._answer(verb, path, content, all_headers)
        self.ledger.note(verb, path, content, answer)
        if verb == "POST" and path == "sessions":
            self.ledger.unanswered.pop(all_headers["Idempotency-Key"], None)
        return answer

    def _answer(self, verb: str, path: str, content: bytes | None, headers: dict[str, Any]) -> Answer:
        __tracebackhide__ = True
        url = f"{self.base_url}/v1/training/{path}"
        for pause_s in (*self.pauses_s, None):
            sent = {name: value for name, value in headers.items() if value is not None}
            request = urllib.request.Request(url, data=content, method=verb, headers=sent)
            if self.key is not None and "Authorization" not in headers:
                request.add_header("Authorization", f"Bearer {self.key}")  # in no variable, where a traceback shows it
            try:
                with self._opener.open(request, timeout=_EXCHANGE_S) as answer:
                    return Answer(answer.status, self._without_key(answer.read()))
            except urllib.error.HTTPError as refusal:
                with refusal:
                    found = Answer(refusal.code, self._without_key(refusal.read()))
                if found.status not in _BUSY:
                    return found
                if pause_s is None:
                    self.pauses_s = ()  # it was waited for once; later refusals count at once
                    return found
                asked = refusal.headers.get("Retry-After", "")
                time.sleep(min(int(asked), 60) if asked.isdecimal() else pause_s)
            except (OSError, http.client.HTTPException) as error:  # show the cause of a URLError, not its request
                reason = self._without_key(f"{getattr(error, 'reason', error)}".encode()).decode()
                silence = f"{verb} {path}: no answer ({reason})"
                self.silences += 1
                if self.silences == _SILENCES:
                    self.unusable = f"answers: {silence}"
                raise Deviation(silence) from None
        raise AssertionError("unreachable")

    def _without_key(self, content: bytes) -> bytes:
        return self._key_pattern.sub(b"(key)", content)

    # Sessions and runs

    def open_session(self, provider: str | None = None, **headers: str) -> str:
        """Open a session. If that is not possible, the first test that tries fails and the others are skipped."""
        self._skip_if_unusable()
        answer = self.call("POST", "sessions", {"provider": provider or self.provider}, **headers)
        try:
            session_id = accepted(answer).get("session_id")
            if not isinstance(session_id, str):
                raise Deviation(f"a new session has no session_id: {answer}")
        except Deviation as deviation:
            self.unusable = f"a session: {deviation}"
            raise
        return session_id

    def shared_session(self, provider: str | None = None) -> str:
        """Return a session for all tests that do not end it."""
        provider = provider or self.provider
        if provider not in self._shared_sessions:
            self._shared_sessions[provider] = self.open_session(provider)
        return self._shared_sessions[provider]

    def create_run(self, session_id: str, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": self.model, "lora": {"rank": 4}} | fields
        answer = self.call("POST", f"sessions/{session_id}/runs", body, **headers or {})
        if answer.status < 300 and isinstance(answer.body.get("run_id"), str):
            self._own_runs.append(Run(self, answer.body["run_id"]))
        return answer

    def run(self, session_id: str | None = None, **fields: Any) -> Run:
        """Create a run and wait until it is active. If that fails, the first test fails and the others are skipped."""
        self._skip_if_unusable()
        session_id = session_id or self.shared_session()
        try:
            answer = self.create_run(session_id, **fields)
            run_id = accepted(answer).get("run_id")
            if not isinstance(run_id, str):
                raise Deviation(f"a new run has no run_id: {answer}")
            run = Run(self, run_id)
            status = run.wait_until(lambda status: status != "allocating")["status"]
            if status != "active":
                raise Deviation(f"a new run is {status}: {self.ledger.last}")
        except Deviation as deviation:
            if not fields.keys() - {"seed"}:
                self.unusable = f"a run: {deviation}"
            raise
        return run

    def _skip_if_unusable(self) -> None:
        if self.unusable:
            pytest.skip(f"nothing can be asked without {shortened(self.unusable, 200)}")

    def shared_run(self, provider: str | None = None) -> Run:
        """Return an active run, with its next ``seq_id``, for tests that do not end it or expect certain seq_ids."""
        self._skip_if_unusable()
        provider = provider or self.provider
        run = self._shared_runs.get(provider)
        if run is None or run.get().get("status") != "active":
            run = self._shared_runs[provider] = self.run(self.shared_session(provider), seed=7)
            with contextlib.suppress(Deviation, LookupError):
                run.first_sampler_id = run.save()
        run.seq_id = run.get()["next_seq_id"]
        return run

    def clean_up_after_test(self) -> None:
        """Cancel the runs and close the sessions that were the test's own; a failure waits for ``close_all``."""
        shared_runs = {run.run_id for run in self._shared_runs.values()}
        while self._own_runs:
            if (run := self._own_runs.pop()).run_id not in shared_runs:
                with contextlib.suppress(Deviation):
                    run.ask("cancel")
        for session_id in set(self.ledger.open_sessions) - set(self._shared_sessions.values()):
            with contextlib.suppress(Deviation):
                self.close(session_id)

    def close(self, session_id: str) -> Answer:
        return self.call("POST", f"sessions/{session_id}/close")

    def close_all(self) -> None:
        """Close every session, also those whose creation got no answer; the ledger keeps those that stay open."""
        for key, content in list(self.ledger.unanswered.items()):
            with contextlib.suppress(Deviation):
                self.call("POST", "sessions", raw=content, Idempotency_Key=key)
        for session_id in 2 * list(self.ledger.open_sessions):
            if session_id in self.ledger.open_sessions:
                with contextlib.suppress(Deviation):
                    self.close(session_id)


@dataclass
class Run:
    """A run and the ``seq_id`` that is next in it."""

    api: Api
    run_id: str
    seq_id: int = 1
    first_sampler_id: str | None = None  # the one that is never forgotten

    def path(self, sampler_id: str | None = None) -> str:
        return f"runs/{self.run_id}" + (f"/samplers/{sampler_id}" if sampler_id else "") + "/operations"

    def post(self, kind: Any, payload: Any, *, sampler_id: str | None = None, seq_id: Any = None) -> Answer:
        """Submit one operation and return the first answer; without ``seq_id`` it takes the next one."""
        body = {"kind": kind, "seq_id": self.seq_id if seq_id is None else seq_id, "payload": payload}
        answer = self.api.call("POST", self.path(sampler_id), body)
        if seq_id is None and answer.status < 300:
            self.seq_id += 1
        return answer

    def poll(self, operation_id: str, wait_s: int = 20) -> JSON:
        return accepted(self.api.call("GET", f"runs/{self.run_id}/operations/{operation_id}?wait_s={wait_s}"))

    def wait(self, operation_id: str) -> JSON:
        return self._wait(lambda: self.poll(operation_id), lambda status: status in ENDED)

    def wait_until(self, reached: Any) -> JSON:
        """Return the run once its status satisfies ``reached``."""
        return self._wait(self.get, reached)

    def _wait(self, ask: Any, reached: Any) -> JSON:
        deadline = time.monotonic() + self.api.patience_s
        pause_s = 0.002
        while not reached((body := ask()).get("status")):
            if time.monotonic() > deadline:
                waited_s, self.api.patience_s = self.api.patience_s, min(self.api.patience_s, _SHORT_PATIENCE_S)
                raise Deviation(f"after {waited_s:.0f} s still: {self.api.ledger.last}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
        found: JSON = body
        return found

    def submit(self, kind: str, payload: Any, sampler_id: str | None = None) -> str:
        """Submit an operation that must be accepted, and return its id without waiting."""
        operation_id: str = accepted(self.post(kind, payload, sampler_id=sampler_id))["operation_id"]
        return operation_id

    def operation(self, kind: str, payload: Any, sampler_id: str | None = None) -> JSON:
        """Submit an operation and return it once it has ended."""
        return self.wait(self.submit(kind, payload, sampler_id))

    def result(self, kind: str, payload: Any, sampler_id: str | None = None) -> JSON:
        return self.result_of(self.submit(kind, payload, sampler_id))

    def result_of(self, operation_id: str) -> JSON:
        operation = self.wait(operation_id)
        if operation["status"] != "succeeded" or not isinstance(operation["result"], dict):
            raise Deviation(f"expected a result, found {shortened(json.dumps(operation), 200)}")
        result: JSON = operation["result"]
        return result

    def version(self) -> int:
        """Return the number of optimizer steps taken, which only a save tells."""
        version: int = self.result("save_weights_for_sampler", {})["version"]
        return version

    def save(self) -> str:
        sampler_id: str = self.result("save_weights_for_sampler", {})["sampler_id"]
        return sampler_id

    def train(self, learning_rate: float = 0.05) -> JSON:
        """Make one step on one datum, large enough to be seen in a logprob."""
        self.result("forward_backward", build.payload(build.datum()))
        return self.result("optim_step", build.optimizer(learning_rate=learning_rate))

    def get(self) -> JSON:
        return accepted(self.api.call("GET", f"runs/{self.run_id}"))

    def ask(self, end: str) -> Answer:
        """Ask for ``finish`` or ``cancel``, and return the answer."""
        return self.api.call("POST", f"runs/{self.run_id}/{end}")

    def end(self, end: str) -> JSON:
        """Ask for ``finish`` or ``cancel``, and return the run once it has ended."""
        answer = self.ask(end)
        body = accepted(answer)
        return body if body.get("status") in TERMINAL else self.wait_until(lambda status: status in TERMINAL)


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
    def slow_payload(data: int = 1) -> JSON:
        """A payload that keeps an engine busy: the embedded one for a tenth of a second per datum."""
        return build.payload(*(build.slow_datum(number) for number in range(data)))

    @staticmethod
    def slow_datum(number: int) -> JSON:
        *inputs, last = random.Random(number).choices(range(256), k=257)
        tensors = {"target_tokens": build.tensor([*inputs[1:], last], "int64"), "weights": build.tensor(256 * [1.0])}
        return {"input": {"token_ids": inputs}, "loss_inputs": tensors}

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


def shortened(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def _pattern_of(key: str) -> re.Pattern[bytes]:
    """Match the key as it may be echoed: each character unchanged, escaped for JSON, or percent-encoded."""
    if len(key) < _SHORTEST_SECRET:
        return re.compile(b"(?!)")  # matches nothing
    forms = (rf"(?:\\?{re.escape(letter)}|\\u00{ord(letter):02x}|%{ord(letter):02x})" for letter in key)
    return re.compile("".join(forms).encode(), re.IGNORECASE)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Return a redirect as the answer: to follow it would send the key elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
