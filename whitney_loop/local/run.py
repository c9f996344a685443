"""One run: operations in ``seq_id`` order, each exactly once, and the worker thread that executes them.

A run's state is read and changed under its own condition only. The engine works outside it, so a run can be asked
while it computes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import threading
from array import array
from collections import deque
from dataclasses import dataclass

from whitney_loop.local.byte_lm import MODEL
from whitney_loop.local.engine import Engine, EngineError, JSONObject, Sampler
from whitney_loop.local.requests import RunSettings, ServiceError, check_operation
from whitney_loop.local.storage import Storage

_LONGEST_POLL_S = 60.0
_FINISH_WAIT_S = 20.0  # like the client's long polls; a client that is answered "active" asks again
_OPERATIONS_KEPT = 256  # a client may rely on the newest 256 results and the newest 16 samplers
_SAMPLERS_KEPT = 16  # and on the first one, which is often the reference policy
_TERMINAL = frozenset({"finished", "cancelled", "failed"})
_CHANGES_WEIGHTS = frozenset({"forward_backward", "optim_step"})

_log = logging.getLogger("whitney_loop.local")


class _Cancelled(Exception):
    """Raised through an engine to stop it: the run is being cancelled, and nobody wants the result."""


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
        self.payload, self.sampler = {}, None  # they can be large, and are not needed again

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "running")

    def body(self) -> JSONObject:
        names = ("operation_id", "run_id", "kind", "seq_id", "status", "result", "error")
        return {name: getattr(self, name) for name in names}


class Run:
    """One model in training: its queue, its worker, and the operations and samplers that are kept."""

    def __init__(self, session_id: str, settings: RunSettings, engine: Engine, storage: Storage) -> None:
        self.run_id = f"run-{secrets.token_hex(8)}"
        self.session_id = session_id
        self.status = "active"
        self._settings = settings
        self._error: JSONObject | None = None
        self._next_seq_id = 1
        self._operations: dict[int, Operation] = {}  # by seq_id, the newest _OPERATIONS_KEPT
        self._queue: deque[Operation] = deque()
        self._running: Operation | None = None
        self._samplers: dict[int, Sampler] = {}  # by the seq_id of the save, in that order
        self._forgotten_samplers = array("Q")  # their seq_ids: 8 bytes each, so a million of them take 8 MB
        self._finishing = False
        self._stopping = False  # the whole service stops: nobody waits any longer
        self._losses = engine.losses
        self._engine: Engine | None = engine
        self._storage = storage
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name=f"worker of {self.run_id}", daemon=True)
        self._worker.start()

    # Requests

    def body(self) -> JSONObject:
        with self._changed:
            body: JSONObject = {
                "run_id": self.run_id,
                "session_id": self.session_id,
                "status": self.status,
                "next_seq_id": self._next_seq_id,
                "model": self._settings.model,
                "lora": {"rank": self._settings.rank},
                "seed": self._settings.seed,
                "served_by": MODEL,
            }
            if self._error is not None:
                body["error"] = self._error
        if self._settings.model != MODEL:
            body["note"] = (
                f"{MODEL} stands in for {self._settings.model}: this embedded service is for rehearsal and "
                f"trains no other model"
            )
        return body

    def submit(self, seq_id: int, kind: str, payload: JSONObject, sampler_id: str | None) -> JSONObject:
        """Return the operation with this ``seq_id``: the existing one, or a new one at the end of the queue."""
        fingerprint = _fingerprint(sampler_id, kind, payload)
        with self._changed:
            if seq_id < self._next_seq_id:
                return self._existing(seq_id, fingerprint).body()
            self._require_active()
            sampler = None if sampler_id is None else self._sampler(sampler_id)
            check_operation(
                kind,
                payload,
                at_sampler=sampler is not None,
                provider=self._settings.provider,
                losses=self._losses,
            )
            if seq_id > self._next_seq_id:
                raise ServiceError(
                    409,
                    "seq_gap",
                    f"seq_id {seq_id} leaves a gap; expected {self._next_seq_id}",
                    expected_seq_id=self._next_seq_id,
                )
            if len(self._queue) + (self._running is not None) >= _OPERATIONS_KEPT:
                raise ServiceError(
                    429, "queue_full", f"{_OPERATIONS_KEPT} operations are waiting; submit again when some have ended"
                )
            operation_id = f"op-{self._hex_id()}-{seq_id}"
            operation = Operation(operation_id, self.run_id, kind, seq_id, fingerprint, payload, sampler)
            self._operations[seq_id] = operation
            # The queue is no longer than what is kept, so the forgotten operation has ended.
            self._operations.pop(seq_id - _OPERATIONS_KEPT, None)
            self._next_seq_id += 1
            self._queue.append(operation)
            self._changed.notify_all()
            return operation.body()

    def operation(self, operation_id: str, wait_s: float) -> JSONObject:
        """Return the operation when it has ended, or unfinished after ``wait_s`` seconds."""
        with self._changed:
            seq_id = self._seq_id_in(operation_id, "op")
            if not 1 <= seq_id < self._next_seq_id:
                raise ServiceError(404, "not_found", f"run {self.run_id} has no operation {operation_id!r}")
            operation = self._kept(seq_id)
            self._changed.wait_for(lambda: operation.ended or self._stopping, timeout=min(wait_s, _LONGEST_POLL_S))
            return operation.body()

    def finish(self) -> JSONObject:
        """Accept no more operations and let the queue end. Return the run when it has finished, or after a while."""
        with self._changed:
            if self.status == "active":
                self._finishing = True
                self._settle()
            elif self.status != "finished":
                self._require_active()
            self._changed.wait_for(lambda: self.ended or self._stopping, timeout=_FINISH_WAIT_S)
            return self.body()

    def cancel(self) -> JSONObject:
        """Cancel the queue, and a running sample; let any other running operation complete.

        A run that has ended stays unchanged.
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
        """Cancel, wake everybody who waits, and return the worker, to be joined."""
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

    def _existing(self, seq_id: int, fingerprint: str) -> Operation:
        """The operation that took ``seq_id``. Raises ServiceError unless it is the same operation."""
        existing = self._kept(seq_id)
        if existing.fingerprint != fingerprint:
            raise ServiceError(
                409,
                "seq_conflict",
                f"seq_id {seq_id} was taken by a {existing.kind} operation with another path, kind or "
                f"payload; the next one is {self._next_seq_id}",
            )
        return existing

    def _kept(self, seq_id: int) -> Operation:
        if seq_id not in self._operations:
            raise ServiceError(
                410,
                "expired",
                f"operation {seq_id} is no longer kept: only a run's newest {_OPERATIONS_KEPT} are, and only as long "
                "as their session is open or among the newest that have ended",
            )
        return self._operations[seq_id]

    def _sampler(self, sampler_id: str) -> Sampler:
        seq_id = self._seq_id_in(sampler_id, "smp")
        if seq_id in self._samplers:
            return self._samplers[seq_id]
        if seq_id in self._forgotten_samplers:
            raise ServiceError(
                410,
                "expired",
                f"sampler {sampler_id} is no longer kept: only the first and the newest {_SAMPLERS_KEPT} are; "
                "save the weights again",
            )
        raise ServiceError(404, "not_found", f"run {self.run_id} has no sampler {sampler_id!r}")

    def _hex_id(self) -> str:
        return self.run_id.removeprefix("run-")

    def _seq_id_in(self, identifier: str, prefix: str) -> int:
        """The ``seq_id`` in an id of an operation or sampler; 0 if it is not an id of this run.

        The id contains the seq_id, so an expired operation (410) differs from an unknown one (404) without a list of
        all ids.
        """
        match = re.fullmatch(rf"{prefix}-{self._hex_id()}-([1-9][0-9]{{0,17}})", identifier)
        return int(match[1]) if match else 0

    def _cancel_queue(self) -> None:
        while self._queue:
            self._queue.popleft().end("cancelled")

    def _settle(self) -> None:
        """End the run if nothing is left to do, and wake everybody who waits."""
        if self._running is None and not self._queue:
            if self.status == "cancelling":
                self.status = "cancelled"
            elif self.status == "active" and self._finishing:
                self.status = "finished"
        if self.ended:
            self._engine = None
            self._samplers.clear()
            self._forgotten_samplers = array("Q")
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
            json.dumps(result, allow_nan=False)  # NaN is never sent: an engine that returns one is broken
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
            error = _error("internal_error", "the engine broke; see the service's log (whitney_loop.local)")
        with self._changed:
            self._running = None
            operation.end(status, result=None if error else result, error=error)
            if error and error["code"] == "internal_error" and operation.kind in _CHANGES_WEIGHTS:
                self._fail(operation, error)
            self._settle()

    def _fail(self, operation: Operation, error: JSONObject) -> None:
        """End the run: its weights may be half changed, and a failed operation must leave them unchanged."""
        self.status, self._error = "failed", error | {"operation_id": operation.operation_id}
        self._cancel_queue()

    def _execute(self, operation: Operation, engine: Engine) -> JSONObject:
        payload, sampler = operation.payload, operation.sampler
        if sampler is not None:
            if operation.kind == "logprobs":
                return {"logprobs": sampler.logprobs(payload["input"]["token_ids"])}
            seed = self._sampling_seed(operation)
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
            return self._storage.save_state(engine, self._settings)
        return self._storage.export_lora(engine, self._settings)

    def _proceed(self) -> None:
        if self.status == "cancelling":  # without the condition, since it is asked before every token
            raise _Cancelled

    def _sampling_seed(self, operation: Operation) -> str:
        seed = operation.payload["sampling_params"].get("seed")
        return f"run:{self._settings.seed}:{operation.seq_id}" if seed is None else f"request:{seed}"

    def _keep_sampler(self, seq_id: int, sampler: Sampler) -> JSONObject:
        with self._changed:
            self._samplers[seq_id] = sampler
            if len(self._samplers) > _SAMPLERS_KEPT + 1:
                _first, oldest, *_newer = self._samplers
                del self._samplers[oldest]
                self._forgotten_samplers.append(oldest)
        return {"sampler_id": f"smp-{self._hex_id()}-{seq_id}", "version": sampler.version}


def _fingerprint(sampler_id: str | None, kind: str, payload: JSONObject) -> str:
    return hashlib.sha256(json.dumps([sampler_id, kind, payload], sort_keys=True).encode()).hexdigest()


def _error(code: str, message: str) -> JSONObject:
    return {"code": code, "message": message, "retryable": False}
