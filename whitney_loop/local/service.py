"""Sessions, runs and ordered operations: the contract's rules, without HTTP and without mathematics.

Each active run has one worker thread that takes its operations in ``seq_id`` order. A run's state is read and
changed under its own condition only; the engine works outside it, so a run can be asked while it computes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.engine import Engine, EngineError, JSONObject, Sampler
from whitney_loop.losses import LOSS_SUPPORT, require_advertised_loss
from whitney_loop.payloads import (
    check_logprobs_request,
    check_optimizer_payload,
    check_payload,
    check_sample_request,
)

MODEL = "byte-lm"
DEFAULT_STORAGE = ".whitney_local"
RUN_KINDS = (
    "save_weights_for_sampler",
    "forward",
    "forward_backward",
    "optim_step",
    "save_state",
    "export_lora",
)
SAMPLER_KINDS = ("sample", "logprobs")
MAX_WAIT_S = 60.0  # of one long poll

_FINISH_WAIT_S = 20.0  # as long as the client's long polls; who is answered "active" asks again
_OPERATIONS_KEPT = 256  # contract, order 7
_SAMPLERS_KEPT = 16  # contract, order 7; the first one is kept as well
_ENDED_SESSIONS_WITH_RESULTS = 16  # a run's results can take megabytes: those of older ended sessions are forgotten
_SESSIONS_KEPT = 1_000  # the service may run for weeks: beyond this the oldest closed one is forgotten
_RUNS_PER_SESSION = 256  # each active one is a thread and a model
_MAX_RESULT_BYTES = 256 * 2**20  # what the client reads of one answer
_SEQUENCE_BYTES = 64  # of JSON at most: its braces, its three names and its stop_reason take 57
_TOKEN_BYTES = 32  # of JSON at most: an id takes 5, a logprob 26, usually 20. So 8 million tokens go into one sample
_MAX_RANK = 256
_MAX_MODEL_CHARS = 200
_MAX_INTEGER = 2**63 - 1
_STATE_ID = re.compile(r"state-[0-9a-f]{16}")  # also keeps ".." out of file names
_TERMINAL = frozenset({"finished", "cancelled", "failed"})
_CHANGES_WEIGHTS = frozenset({"forward_backward", "optim_step"})

_log = logging.getLogger("whitney_loop.local")


class _Cancelled(Exception):
    """Raised through an engine: the run ends, and what it computes is not wanted any longer."""


class ServiceError(Exception):
    """A refusal: HTTP ``status``, ``code`` and message; ``extra`` are further fields of the error object."""

    def __init__(self, status: int, code: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.extra = extra


@dataclass
class Operation:
    """One accepted operation of a run."""

    operation_id: str
    run_id: str
    kind: str
    seq_id: int
    fingerprint: str
    payload: JSONObject
    sampler: Sampler | None
    status: str = "queued"
    result: JSONObject | None = None
    error: JSONObject | None = None

    def end(self, status: str, *, result: JSONObject | None = None, error: JSONObject | None = None) -> None:
        self.status, self.result, self.error = status, result, error
        self.payload, self.sampler = {}, None  # what it worked on can be large and is not needed again

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "running")

    def body(self) -> JSONObject:
        names = ("operation_id", "run_id", "kind", "seq_id", "status", "result", "error")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class RunSettings:
    """What a run was asked for."""

    provider: str
    model: str
    rank: int
    seed: int


class Storage:
    """The folder of saved states and exported adapters. Raises OSError where it can not be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self._folder).close()  # to fail here, and not after the training

    def save_state(self, engine: Engine, settings: RunSettings) -> JSONObject:
        state_id = _new_id("state")
        path = self._state_path(state_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        step = engine.save_state(path)
        path.with_suffix(".json").write_text(json.dumps(_kept_with_state(settings)), encoding="utf-8")
        return {"state_id": state_id, "step": step}

    def load_state(self, engine: Engine, state_id: str, settings: RunSettings) -> None:
        path = self._state_path(state_id)
        if not _STATE_ID.fullmatch(state_id) or not path.is_file():
            raise ServiceError(404, "not_found", f"resume_from: there is no state {_shown(state_id)} in this storage")
        try:
            saved = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            fits = saved == _kept_with_state(settings)
            if fits:
                engine.load_state(path)
        except (ValueError, OSError) as error:
            _log.warning("state %s cannot be read: %s", state_id, error)
            raise _invalid(f"resume_from: the files of {state_id} are damaged; resume from another state") from error
        if not fits:
            asked = _kept_with_state(settings)
            raise _invalid(f"resume_from: {state_id} was saved by a run of {saved}; this one asks for {asked}")

    def export_lora(self, engine: Engine, settings: RunSettings) -> JSONObject:
        artifact_id = _new_id("adapter")
        folder = self._folder / "adapters" / artifact_id
        folder.parent.mkdir(parents=True, exist_ok=True)
        engine.export_lora(folder, base_model=settings.model)
        return {"artifact_id": artifact_id, "uri": folder.as_uri()}

    def _state_path(self, state_id: str) -> Path:
        return self._folder / "states" / f"{state_id}.safetensors"


class Run:
    """One model in training: its queue, its worker and what is remembered of its operations."""

    def __init__(self, session_id: str, settings: RunSettings, engine: Engine, storage: Storage) -> None:
        self.run_id = _new_id("run")
        self.session_id = session_id
        self.settings = settings
        self.status = "active"
        self.losses = engine.losses
        self._error: JSONObject | None = None
        self._next_seq_id = 1
        self._operations: dict[int, Operation] = {}  # by seq_id, the newest _OPERATIONS_KEPT
        self._queue: deque[Operation] = deque()
        self._running: Operation | None = None
        self._samplers: dict[int, Sampler] = {}  # by the seq_id of the save, in that order
        self._forgotten = array("Q")  # the seq_ids of the other saves: 8 bytes each, so a million of them take 8 MB
        self._finishing = False
        self._stopping = False  # the whole service is: nobody waits any longer
        self._engine: Engine | None = engine
        self._storage = storage
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name=f"worker of {self.run_id}", daemon=True)
        self._worker.start()

    # What the outside asks for

    def body(self) -> JSONObject:
        with self._changed:
            body: JSONObject = {
                "run_id": self.run_id,
                "session_id": self.session_id,
                "status": self.status,
                "next_seq_id": self._next_seq_id,
                "model": self.settings.model,
                "lora": {"rank": self.settings.rank},
                "seed": self.settings.seed,
                "served_by": MODEL,
            }
            if self._error is not None:
                body["error"] = self._error
        if self.settings.model != MODEL:
            body["note"] = (
                f"{MODEL} stands in for {self.settings.model}: this embedded service is for rehearsal and "
                f"trains no other model"
            )
        return body

    def submit(
        self, seq_id: int, kind: str, payload: JSONObject, sampler_id: str | None, refusal: ServiceError | None
    ) -> JSONObject:
        """The operation with this ``seq_id``: the existing one, or a new one at the end of the queue.

        ``refusal`` is what the caller found wrong with kind and payload; it counts only for a new operation.
        """
        fingerprint = _fingerprint(sampler_id, kind, payload)
        with self._changed:
            if seq_id < self._next_seq_id:
                existing = self._operation(seq_id)
                if existing.fingerprint != fingerprint:
                    raise ServiceError(
                        409,
                        "seq_conflict",
                        f"seq_id {seq_id} was taken by a {existing.kind} operation with another path, kind or "
                        f"payload; the next one is {self._next_seq_id}",
                    )
                return existing.body()
            self._require_active()
            sampler = None if sampler_id is None else self._sampler(sampler_id)
            if refusal is not None:
                raise refusal
            if seq_id > self._next_seq_id:
                raise ServiceError(
                    409,
                    "seq_gap",
                    f"seq_id {seq_id} leaves a gap; expected {self._next_seq_id}",
                    expected_seq_id=self._next_seq_id,
                )
            if len(self._queue) + (self._running is not None) >= _OPERATIONS_KEPT:
                raise ServiceError(
                    429, "queue_full", f"{_OPERATIONS_KEPT} operations wait already; let some of them end first"
                )
            return self._accept(
                Operation(_operation_id(self.run_id, seq_id), self.run_id, kind, seq_id, fingerprint, payload, sampler)
            )

    def operation(self, operation_id: str, wait_s: float) -> JSONObject:
        """The operation once it has ended, or as it is after ``wait_s`` seconds."""
        with self._changed:
            seq_id = _number_of(operation_id, "op", self.run_id)
            if not 1 <= seq_id < self._next_seq_id:
                raise _not_found(f"operation {operation_id!r} of run {self.run_id}")
            operation = self._operation(seq_id)
            self._changed.wait_for(lambda: operation.ended or self._stopping, timeout=min(wait_s, MAX_WAIT_S))
            return operation.body()

    def finish(self) -> JSONObject:
        """Accept no more, let what is queued end; answers when it has, or after a while as it is."""
        with self._changed:
            if self.status == "active":
                self._finishing = True
                self._settle()
            elif self.status != "finished":
                self._require_active()
            self._changed.wait_for(lambda: self.ended or self._stopping, timeout=_FINISH_WAIT_S)
            return self.body()

    def cancel(self) -> JSONObject:
        """What is queued is cancelled, and a sample that runs; what else runs may complete.

        A run that has ended stays as it is.
        """
        with self._changed:
            if self.status == "active":
                self.status = "cancelling"
                self._cancel_queue()
                self._settle()
            return self.body()

    def forget_operations(self) -> None:
        with self._changed:
            self._operations.clear()

    def stop(self) -> threading.Thread:
        """Cancel, wake whoever waits, and give the worker to join."""
        with self._changed:
            self.cancel()
            self._stopping = True
            self._changed.notify_all()
            return self._worker

    @property
    def ended(self) -> bool:
        return self.status in _TERMINAL

    # Rules; called with the condition held

    def _require_active(self) -> None:
        if self.status != "active" or self._finishing:
            state = "finishing" if self.status == "active" else self.status
            raise ServiceError(409, "run_not_active", f"run {self.run_id} is {state}; create another run")

    def _operation(self, seq_id: int) -> Operation:
        if seq_id not in self._operations:
            raise ServiceError(
                410,
                "expired",
                f"operation {seq_id} is kept no more: a run's newest {_OPERATIONS_KEPT} are, and of ended sessions "
                f"those of the newest {_ENDED_SESSIONS_WITH_RESULTS}",
            )
        return self._operations[seq_id]

    def _sampler(self, sampler_id: str) -> Sampler:
        number = _number_of(sampler_id, "smp", self.run_id)
        if number in self._samplers:
            return self._samplers[number]
        if number in self._forgotten:
            raise ServiceError(
                410,
                "expired",
                f"sampler {sampler_id} is older than the newest {_SAMPLERS_KEPT}, which are kept along with the "
                f"first; save the weights again",
            )
        raise _not_found(f"sampler {sampler_id!r} of run {self.run_id}")

    def _accept(self, operation: Operation) -> JSONObject:
        self._operations[operation.seq_id] = operation
        # All that have not ended are among the newest: the queue is no longer than what is kept.
        self._operations.pop(operation.seq_id - _OPERATIONS_KEPT, None)
        self._next_seq_id += 1
        self._queue.append(operation)
        self._changed.notify_all()
        return operation.body()

    def _cancel_queue(self) -> None:
        while self._queue:
            self._queue.popleft().end("cancelled")

    def _settle(self) -> None:
        """End the run where nothing is left to do, and tell whoever waits that something has changed."""
        if self._running is None and not self._queue:
            if self.status == "cancelling":
                self.status = "cancelled"
            elif self.status == "active" and self._finishing:
                self.status = "finished"
        if self.ended:
            self._engine = None
            self._samplers.clear()
            self._forgotten = array("Q")
        self._changed.notify_all()

    # The worker

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self.ended)
                if self.ended or self._engine is None:
                    return
                operation, engine = self._queue.popleft(), self._engine
                operation.status, self._running = "running", operation
            self._complete(operation, engine)

    def _complete(self, operation: Operation, engine: Engine) -> None:
        status, result, error = "failed", None, None
        try:
            result = self._execute(operation, engine)
            json.dumps(result, allow_nan=False)  # NaN is never sent: an engine that made one is at fault here
            status = "succeeded"
        except _Cancelled:
            status = "cancelled"
        except EngineError as failure:
            error = _error(failure.code, str(failure))
        except OSError as failure:
            _log.exception("%s could not use the storage", operation.operation_id)
            error = _error("storage_failed", f"the storage could not be written: {failure.strerror}")
        except Exception:
            _log.exception("%s broke the engine", operation.operation_id)
            error = _error("internal_error", "the engine broke; the service's log (whitney_loop.local) says where")
        with self._changed:
            self._running = None
            operation.end(status, result=None if error else result, error=error)
            if error and error["code"] == "internal_error" and operation.kind in _CHANGES_WEIGHTS:
                self._fail(operation, error)
            self._settle()

    def _fail(self, operation: Operation, error: JSONObject) -> None:
        """End the run: its weights may be half changed, and a failed operation must leave them as they were."""
        self.status, self._error = "failed", error | {"operation_id": operation.operation_id}
        self._cancel_queue()

    def _execute(self, operation: Operation, engine: Engine) -> JSONObject:
        payload, sampler = operation.payload, operation.sampler
        if sampler is not None:
            if operation.kind == "logprobs":
                return {"logprobs": sampler.logprobs(payload["input"]["token_ids"])}
            seed = self._sampling_seed(payload, operation.seq_id)
            return {"sequences": sampler.sample(payload, seed, self._proceed), "version": sampler.version}
        if operation.kind == "save_weights_for_sampler":
            return self._keep_sampler(operation.seq_id, engine.sampler())
        if operation.kind == "forward":
            return engine.forward(payload)
        if operation.kind == "forward_backward":
            return engine.forward_backward(payload)
        if operation.kind == "optim_step":
            return engine.optim_step(payload["optimizer"])
        if operation.kind == "save_state":
            return self._storage.save_state(engine, self.settings)
        return self._storage.export_lora(engine, self.settings)

    def _proceed(self) -> None:
        if self.status == "cancelling":  # without the condition, as it is asked before every token
            raise _Cancelled

    def _sampling_seed(self, request: JSONObject, seq_id: int) -> str:
        seed = request.get("sampling_params", {}).get("seed")
        return f"run:{self.settings.seed}:{seq_id}" if seed is None else f"request:{seed}"

    def _keep_sampler(self, seq_id: int, sampler: Sampler) -> JSONObject:
        with self._changed:
            self._samplers[seq_id] = sampler
            if len(self._samplers) > _SAMPLERS_KEPT + 1:
                _first, oldest, *_newer = self._samplers
                del self._samplers[oldest]
                self._forgotten.append(oldest)
        return {"sampler_id": f"smp-{_hex_of(self.run_id)}-{seq_id}", "version": sampler.version}


@dataclass
class Session:
    """A provider's session and the runs in it."""

    provider: str
    key: str | None
    session_id: str = field(default_factory=lambda: _new_id("ses"))
    status: str = "open"
    runs: list[Run] = field(default_factory=list)
    runs_by_key: dict[str, Run] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.status == "closed" and all(run.ended for run in self.runs)

    def body(self) -> JSONObject:
        return {
            "session_id": self.session_id,
            "provider": self.provider,
            "status": self.status,
            "runs": [run.body() for run in self.runs],
        }


class Service:
    """Everything that the HTTP front can be asked for; bodies in, bodies out, ServiceError for a refusal."""

    def __init__(self, storage: Path, make_engine: Callable[[int, int], Engine] = ByteLM) -> None:
        self._storage = Storage(storage)
        self._make_engine = make_engine
        self._sessions: dict[str, Session] = {}
        self._sessions_by_key: dict[str, Session] = {}
        self._runs: dict[str, Run] = {}
        self._stopping = False
        self._lock = threading.Lock()  # for making, closing and forgetting sessions and runs

    def capabilities(self) -> JSONObject:
        offer = {"operations": [*RUN_KINDS, *SAMPLER_KINDS], "models": [MODEL]}
        return {"providers": dict.fromkeys(LOSS_SUPPORT, offer)}

    def create_session(self, body: JSONObject, key: str | None) -> JSONObject:
        with self._lock:
            if key in self._sessions_by_key:
                return self._sessions_by_key[key].body()
            provider = _session_request(body)
            self._make_room()
            session = Session(provider, key)
            self._sessions[session.session_id] = session
            if key is not None:
                self._sessions_by_key[key] = session
            return session.body()

    def session(self, session_id: str) -> JSONObject:
        return self._session(session_id).body()

    def close_session(self, session_id: str) -> JSONObject:
        with self._lock:
            session = self._session(session_id)
            session.status = "closed"
            for run in session.runs:
                run.cancel()
            return session.body()

    def create_run(self, session_id: str, body: JSONObject, key: str | None) -> JSONObject:
        with self._lock:
            session = self._session(session_id)
            if key in session.runs_by_key:
                return session.runs_by_key[key].body()
            if session.status != "open":
                raise ServiceError(409, "session_not_open", f"session {session_id} is closed; create another one")
            settings, resume_from = _run_request(session.provider, body)
            if len(session.runs) >= _RUNS_PER_SESSION:
                raise ServiceError(
                    409, "too_many_runs", f"session {session_id} holds {_RUNS_PER_SESSION} runs; create another one"
                )
            engine = self._make_engine(settings.rank, settings.seed)
            if resume_from is not None:
                self._storage.load_state(engine, resume_from, settings)
            run = Run(session_id, settings, engine, self._storage)
            self._runs[run.run_id] = run
            session.runs.append(run)
            if key is not None:
                session.runs_by_key[key] = run
            return run.body()

    def run(self, run_id: str) -> JSONObject:
        return self._run(run_id).body()

    def finish_run(self, run_id: str) -> JSONObject:
        return self._run(run_id).finish()

    def cancel_run(self, run_id: str) -> JSONObject:
        return self._run(run_id).cancel()

    def submit(self, run_id: str, body: JSONObject, sampler_id: str | None = None) -> JSONObject:
        run = self._run(run_id)
        seq_id, kind, payload = _operation_request(body)
        # Judged before the run's condition is taken: a large payload takes a second.
        refusal = _judge(kind, payload, sampler_id is not None, run.settings.provider, run.losses)
        return run.submit(seq_id, kind, payload, sampler_id, refusal)

    def operation(self, run_id: str, operation_id: str, wait_s: float) -> JSONObject:
        return self._run(run_id).operation(operation_id, wait_s)

    def stop(self, timeout_s: float) -> None:
        """Close every session and wait until the workers have ended, ``timeout_s`` at the most."""
        with self._lock:
            self._stopping = True
            for session in self._sessions.values():
                session.status = "closed"
            workers = [run.stop() for run in self._runs.values()]
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _session(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise _not_found(f"session {session_id!r}")
        return session

    def _run(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            raise _not_found(f"run {run_id!r}")
        return run

    def _make_room(self) -> None:
        if self._stopping:
            raise ServiceError(503, "shutting_down", "the service is ending; start it again")
        for session in list(self._sessions.values())[:-_ENDED_SESSIONS_WITH_RESULTS]:
            if session.has_ended:
                for run in session.runs:
                    run.forget_operations()
        if len(self._sessions) < _SESSIONS_KEPT:
            return
        oldest = next((session for session in self._sessions.values() if session.has_ended), None)
        if oldest is None:
            raise ServiceError(429, "too_many_sessions", f"{_SESSIONS_KEPT} sessions are open; close some of them")
        del self._sessions[oldest.session_id]
        if oldest.key is not None:
            del self._sessions_by_key[oldest.key]
        for run in oldest.runs:
            del self._runs[run.run_id]


# What a body must be


def _session_request(body: JSONObject) -> str:
    _check_fields(body, required={"provider"})
    provider = body["provider"]
    if not isinstance(provider, str) or provider not in LOSS_SUPPORT:
        raise _invalid(f"provider is {_shown(provider)}; expected one of {', '.join(sorted(LOSS_SUPPORT))}")
    return provider


def _run_request(provider: str, body: JSONObject) -> tuple[RunSettings, str | None]:
    _check_fields(body, required={"model", "lora"}, optional={"seed", "resume_from"})
    model, lora, resume_from = body["model"], body["lora"], body.get("resume_from")
    if not isinstance(model, str) or not model.isprintable() or not 0 < len(model) <= _MAX_MODEL_CHARS:
        raise _invalid(f"model is {_shown(model)}; expected a name of 1 to {_MAX_MODEL_CHARS} printable characters")
    if not isinstance(lora, dict):
        raise _invalid(f'lora is {_shown(lora)}; expected {{"rank": …}}')
    _check_fields(lora, required={"rank"}, where="lora.")
    rank = _integer("lora.rank", lora["rank"], 1, _MAX_RANK)
    seed = body.get("seed")
    seed = secrets.randbelow(2**31) if seed is None else _integer("seed", seed, 0, _MAX_INTEGER)
    if resume_from is not None and not isinstance(resume_from, str):
        raise _invalid(f"resume_from is {_shown(resume_from)}; expected a state_id")
    return RunSettings(provider, model, rank, seed), resume_from


def _operation_request(body: JSONObject) -> tuple[int, str, JSONObject]:
    _check_fields(body, required={"kind", "seq_id", "payload"})
    kind, payload = body["kind"], body["payload"]
    if not isinstance(kind, str):
        raise _invalid(f"kind is {_shown(kind)}; expected the name of an operation")
    if not isinstance(payload, dict):
        raise _invalid(f"payload is {_shown(payload)}; expected a JSON object")
    return _integer("seq_id", body["seq_id"], 1, _MAX_INTEGER), kind, payload


def _judge(
    kind: str, payload: JSONObject, at_sampler: bool, provider: str, losses: frozenset[str]
) -> ServiceError | None:
    """What is wrong with an operation on sight, or None."""
    try:
        _check_kind(kind, at_sampler)
        if kind in ("forward", "forward_backward"):
            _check_advertised(payload.get("loss_function"), provider)
            check_payload(payload, provider, kind=kind)
            _check_computed(payload["loss_function"], provider, losses)
        elif kind == "optim_step":
            check_optimizer_payload(payload)
        elif kind == "sample":
            check_sample_request(payload)
            _check_result_size(payload["num_samples"], payload["sampling_params"]["max_tokens"])
        elif kind == "logprobs":
            check_logprobs_request(payload)
        elif payload:
            raise ValueError(f"{kind} takes an empty payload, {{}}; found {', '.join(sorted(payload))}")
    except ValueError as error:
        return _invalid(str(error))
    except ServiceError as error:
        return error
    return None


def _check_kind(kind: str, at_sampler: bool) -> None:
    here, there = (SAMPLER_KINDS, RUN_KINDS) if at_sampler else (RUN_KINDS, SAMPLER_KINDS)
    if kind in there:
        right_path = "runs/{run_id}/operations" if at_sampler else "runs/{run_id}/samplers/{sampler_id}/operations"
        raise ValueError(f"{kind} does not belong to this path; send it to /v1/training/{right_path}")
    if kind not in here:
        raise ValueError(f"kind {_shown(kind)} is unknown; expected one of {', '.join(here)}")


def _check_advertised(loss: object, provider: str) -> None:
    if not isinstance(loss, str):
        return  # check_payload says what is wrong with it
    try:
        require_advertised_loss(provider, loss)
    except ValueError as error:
        raise ServiceError(422, "unsupported_loss", str(error)) from error


def _check_computed(loss: str, provider: str, losses: frozenset[str]) -> None:
    if loss in losses:
        return
    computed = ", ".join(sorted(LOSS_SUPPORT[provider] & losses))
    raise ServiceError(
        422,
        "unsupported_loss",
        f"{provider} has loss_function {loss!r}, but the embedded {MODEL} does not compute it; it computes {computed}",
    )


def _check_result_size(num_samples: int, max_tokens: int) -> None:
    if num_samples * (_SEQUENCE_BYTES + max_tokens * _TOKEN_BYTES) > _MAX_RESULT_BYTES:
        raise ValueError(
            f"num_samples {num_samples} with sampling_params.max_tokens {max_tokens} may give more than the "
            f"{_MAX_RESULT_BYTES} bytes that a client reads of one answer; lower one of them, or take several samples"
        )


def _check_fields(
    body: JSONObject, *, required: AbstractSet[str], optional: AbstractSet[str] = frozenset(), where: str = ""
) -> None:
    if missing := sorted(required - body.keys()):
        raise _invalid(f"missing: {', '.join(where + name for name in missing)}")
    if unknown := sorted(body.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise _invalid(f"unknown: {', '.join(where + _shown(name) for name in unknown)}; expected {known}")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(f"{name} is {_shown(value)}; expected an integer from {low} to {high}")
    return value


def _shown(value: object) -> str:
    """A value in a message: JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


# Ids and errors


def _kept_with_state(settings: RunSettings) -> JSONObject:
    """What a run must have in common with the state that it resumes from."""
    return {"model": settings.model, "rank": settings.rank}


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(8)}"


def _hex_of(run_id: str) -> str:
    return run_id.removeprefix("run-")


def _operation_id(run_id: str, seq_id: int) -> str:
    return f"op-{_hex_of(run_id)}-{seq_id}"


def _number_of(identifier: str, prefix: str, run_id: str) -> int:
    """The ``seq_id`` in an operation's or sampler's id of this run, 0 where it is no such id.

    An operation's tells what was forgotten from what never was, without a list of all ids.
    """
    match = re.fullmatch(rf"{prefix}-{_hex_of(run_id)}-([1-9][0-9]{{0,17}})", identifier)
    return int(match[1]) if match else 0


def _fingerprint(sampler_id: str | None, kind: str, payload: JSONObject) -> str:
    return hashlib.sha256(json.dumps([sampler_id, kind, payload], sort_keys=True).encode()).hexdigest()


def _invalid(message: str) -> ServiceError:
    return ServiceError(422, "invalid_payload", message)


def _not_found(what: str) -> ServiceError:
    return ServiceError(404, "not_found", f"there is no {what} here")


def _error(code: str, message: str) -> JSONObject:
    return {"code": code, "message": message, "retryable": False}
