"""One run: its operations, executed in ``seq_id`` order and exactly once, and the worker thread that does this.

The state of a run is read and changed only while its condition ``_changed`` is held. The worker calls the engine
without it, so that a run answers requests while its engine computes. Only the worker makes, calls and closes the
engine and its samplers.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import deque

from whitney_loop.local.engine import Backend, BatchSampler, Engine, EngineError, JSONObject, Sampler
from whitney_loop.local.operations import (
    CHANGES_WEIGHTS,
    Cancelled,
    Operation,
    close_all,
    error_of,
    execute,
    fingerprint,
    sample_together,
)
from whitney_loop.local.requests import RunSettings, ServiceError, check_operation
from whitney_loop.local.storage import Storage

_LONGEST_POLL_S = 60.0
_ALLOCATION_WAIT_S = 2.0  # most engines are made in less time, so that the first answer is "active"
_FINISH_WAIT_S = 20.0  # like the client's long polls; if the answer is still "active", the client asks again
_OPERATIONS_KEPT = 256  # the newest; a client may rely on this number, and on that of samplers
_SAMPLERS_KEPT = 16  # the newest, besides the first one, which is often the reference policy
_GATHER_S = 0.02  # how long to wait for one more sample before a batch begins
_OPEN = frozenset({"allocating", "active"})  # the statuses in which operations are accepted
_TERMINAL = frozenset({"finished", "cancelled", "failed"})


class Run:
    """One model in training: its queue, its worker, and the operations and samplers that it keeps."""

    def __init__(self, session_id: str, settings: RunSettings, backend: Backend, storage: Storage) -> None:
        self._hex_id = secrets.token_hex(8)  # also in the ids of operations and samplers
        self.run_id = f"run-{self._hex_id}"
        self.session_id = session_id
        self.status = "allocating"
        self._settings = settings
        self._backend = backend
        self._storage = storage
        self._error: JSONObject | None = None
        self._next_seq_id = 1
        self._operations: dict[int, Operation] = {}  # by seq_id, the newest _OPERATIONS_KEPT
        self._queue: deque[Operation] = deque()
        self._running: list[Operation] = []
        self._samplers: dict[int, Sampler] = {}  # by number, oldest first
        self._samplers_made = 0
        self._to_close: list[Sampler] = []  # forgotten samplers that operations in the queue may still need
        self._finishing = False
        self._stopping = False  # the service ends, so that requests must not wait any longer
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name=f"worker of {self.run_id}", daemon=True)
        self._worker.start()

    # Requests

    def body(self) -> JSONObject:
        engine, model = self._backend.name, self._settings.model
        with self._changed:
            body: JSONObject = {
                "run_id": self.run_id,
                "session_id": self.session_id,
                "status": self.status,
                "next_seq_id": self._next_seq_id,
                "model": model,
                "lora": {"rank": self._settings.rank},
                "seed": self._settings.seed,
                "served_by": engine,
            }
            if self._error is not None:
                body["error"] = self._error
        if model != self._backend.model:
            body["note"] = (
                f"{engine} stands in for {model}: this embedded service is for rehearsal and trains no other model"
            )
        return body

    def allocated(self) -> JSONObject:
        """Return the run when its engine has been made or has failed; after two seconds, as ``allocating``."""
        with self._changed:
            self._changed.wait_for(lambda: self.status != "allocating" or self._stopping, timeout=_ALLOCATION_WAIT_S)
            return self.body()

    def submit(self, seq_id: int, kind: str, payload: JSONObject, sampler_id: str | None) -> JSONObject:
        """Return the operation with this ``seq_id``: the existing one, or a new one at the end of the queue."""
        own_fingerprint = fingerprint(sampler_id, kind, payload)
        with self._changed:
            if seq_id < self._next_seq_id:
                return self._existing(seq_id, own_fingerprint).body()
            if self.status not in _OPEN or self._finishing:
                raise self._not_active()
            sampler = None if sampler_id is None else self._sampler(sampler_id)
            check_operation(
                kind, payload, at_sampler=sampler is not None, provider=self._settings.provider, backend=self._backend
            )
            if seq_id > self._next_seq_id:
                raise ServiceError(
                    409,
                    "seq_gap",
                    f"seq_id {seq_id} leaves a gap; expected {self._next_seq_id}",
                    expected_seq_id=self._next_seq_id,
                )
            if len(self._queue) + len(self._running) >= _OPERATIONS_KEPT:
                raise ServiceError(
                    429, "queue_full", f"{_OPERATIONS_KEPT} operations are waiting; submit again when some have ended"
                )
            operation_id = f"op-{self._hex_id}-{seq_id}"
            operation = Operation(operation_id, self.run_id, kind, seq_id, own_fingerprint, payload, sampler)
            self._operations[seq_id] = operation
            # No more operations wait or run than are kept, so the operation that is forgotten has ended.
            self._operations.pop(seq_id - _OPERATIONS_KEPT, None)
            self._next_seq_id += 1
            self._queue.append(operation)
            self._changed.notify_all()
            return operation.body()

    def operation(self, operation_id: str, wait_s: float) -> JSONObject:
        """Return the operation when it has ended, or unfinished after ``wait_s`` seconds."""
        with self._changed:
            seq_id = self._number_in(operation_id, "op")
            if not 1 <= seq_id < self._next_seq_id:
                raise ServiceError(404, "not_found", f"run {self.run_id} has no operation {operation_id!r}")
            operation = self._kept(seq_id)
            self._changed.wait_for(lambda: operation.ended or self._stopping, timeout=min(wait_s, _LONGEST_POLL_S))
            return operation.body()

    def finish(self) -> JSONObject:
        """Accept no more operations. Return the run when the queue is done, or after 20 seconds."""
        with self._changed:
            if self.status in _OPEN:
                self._finishing = True
                self._settle()
            elif self.status != "finished":
                raise self._not_active()
            self._changed.wait_for(lambda: self.ended or self._stopping, timeout=_FINISH_WAIT_S)
            return self.body()

    def cancel(self) -> JSONObject:
        """Cancel the queue, and the running operations as soon as the engine calls ``proceed``.

        If the run has ended, change nothing.
        """
        with self._changed:
            if self.status in _OPEN:
                self.status = "cancelling"
                self._cancel_queue()
                self._settle()
            return self.body()

    def forget_operations(self) -> None:
        with self._changed:
            self._operations.clear()

    def stop(self) -> threading.Thread:
        """Cancel the run, wake the requests that wait, and return the worker so that the caller can join it."""
        with self._changed:
            self.cancel()
            self._stopping = True
            self._changed.notify_all()
            return self._worker

    @property
    def ended(self) -> bool:
        return self.status in _TERMINAL

    # Rules; called while the condition is held

    def _not_active(self) -> ServiceError:
        state = "finishing" if self.status in _OPEN else self.status
        reason = f" ({self._error['message']})" if self._error else ""
        return ServiceError(409, "run_not_active", f"run {self.run_id} is {state}{reason}; create another run")

    def _existing(self, seq_id: int, own_fingerprint: str) -> Operation:
        """Return the operation that took ``seq_id``. Raise ServiceError if it differs from the submitted one."""
        existing = self._kept(seq_id)
        if existing.fingerprint != own_fingerprint:
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
                f"operation {seq_id} is no longer kept: a run keeps its newest {_OPERATIONS_KEPT} operations, and "
                "loses them some time after its session has ended",
            )
        return self._operations[seq_id]

    def _sampler(self, sampler_id: str) -> Sampler:
        number = self._number_in(sampler_id, "smp")
        if not 1 <= number <= self._samplers_made:
            raise ServiceError(404, "not_found", f"run {self.run_id} has no sampler {sampler_id!r}")
        if number not in self._samplers:
            raise ServiceError(
                410,
                "expired",
                f"sampler {sampler_id} is no longer kept: a run keeps its first sampler and the newest "
                f"{_SAMPLERS_KEPT}; save the weights again",
            )
        return self._samplers[number]

    def _number_in(self, identifier: str, prefix: str) -> int:
        """Return the number in the id of a sampler or an operation (its ``seq_id``); 0 if it is not an id of this run.

        The number tells a forgotten one (410) from an unknown one (404), without a list of all ids.
        """
        match = re.fullmatch(rf"{prefix}-{self._hex_id}-([1-9][0-9]{{0,17}})", identifier)
        return int(match[1]) if match else 0

    def _cancel_queue(self) -> None:
        while self._queue:
            self._queue.popleft().end("cancelled")

    def _settle(self) -> None:
        """End the run if nothing is left to do, and wake the worker and the requests that wait."""
        if not self._running and not self._queue:
            if self.status == "cancelling":
                self.status = "cancelled"
            elif self.status == "active" and self._finishing:
                self.status = "finished"
        self._changed.notify_all()

    def _fail(self, error: JSONObject) -> None:
        self.status, self._error = "failed", error
        self._cancel_queue()

    # The worker

    def _work(self) -> None:
        engine, settings = None, self._settings
        try:
            engine = self._backend.new_run(rank=settings.rank, seed=settings.seed, proceed=self._proceed)
            self._storage.load_state(engine, settings)
        except Exception as failure:
            self._fail_allocation(failure)
        else:
            self._activate()
            while batch := self._next_batch():
                self._complete(batch, engine)
                self._close_forgotten_samplers()
        close_all([*self._samplers.values(), *self._to_close])
        self._samplers.clear()
        close_all([] if engine is None else [engine])

    def _activate(self) -> None:
        with self._changed:
            if self.status == "allocating":
                self.status = "active"
            self._settle()

    def _fail_allocation(self, failure: Exception) -> None:
        """Fail the run and the first operation in its queue with the error of the engine."""
        with self._changed:
            if self.status == "allocating":
                error = error_of(failure, self._backend.name, self.run_id)
                if self._queue:
                    self._queue.popleft().end("failed", error=error)
                self._fail(error)
            self._settle()

    def _next_batch(self) -> list[Operation]:
        """Return the next operation, with the samples behind it if they can be batched; [] if the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.ended)
            if self.ended:
                return []
            first = self._start_next()
            if first.kind == "sample" and isinstance(first.sampler, BatchSampler):
                while self._changed.wait_for(lambda: self._queue, timeout=_GATHER_S):
                    if self._queue[0].kind != "sample" or self._queue[0].sampler is not first.sampler:
                        break
                    self._start_next()
            return list(self._running)

    def _start_next(self) -> Operation:
        operation = self._queue.popleft()
        operation.status = "running"
        self._running.append(operation)
        return operation

    def _complete(self, batch: list[Operation], engine: Engine) -> None:
        results = sample_together(batch, self._settings)
        for operation in batch:
            result, failure = results.get(operation.seq_id), None
            try:
                if result is None:
                    result = self._execute(operation, engine)
                json.dumps(result, allow_nan=False)  # fails for NaN, which JSON does not have
            except Exception as error:
                failure = error
            with self._changed:
                self._end(operation, result, failure)
                self._running.remove(operation)
                self._settle()

    def _execute(self, operation: Operation, engine: Engine) -> JSONObject:
        self._proceed()
        if operation.kind == "save_weights_for_sampler":
            return self._keep_sampler(engine.sampler())
        return execute(operation, engine, self._settings, self._storage)

    def _end(self, operation: Operation, result: JSONObject | None, failure: Exception | None) -> None:
        if failure is None:
            operation.end("succeeded", result=result)
        elif isinstance(failure, Cancelled):
            operation.end("cancelled")
        else:
            error = error_of(failure, self._backend.name, operation.operation_id)
            operation.end("failed", error=error)
            weights_may_have_changed = operation.kind in CHANGES_WEIGHTS and not isinstance(failure, EngineError)
            if weights_may_have_changed and self.status in _OPEN:
                self._fail(error | {"operation_id": operation.operation_id})

    def _proceed(self) -> None:
        if self.status not in _OPEN:  # read without the condition, since this may be called for every token
            raise Cancelled

    def _keep_sampler(self, sampler: Sampler) -> JSONObject:
        with self._changed:
            self._samplers_made += 1
            self._samplers[self._samplers_made] = sampler
            if len(self._samplers) > _SAMPLERS_KEPT + 1:
                _first, oldest, *_newer = self._samplers
                self._to_close.append(self._samplers.pop(oldest))
            return {"sampler_id": f"smp-{self._hex_id}-{self._samplers_made}", "version": sampler.version}

    def _close_forgotten_samplers(self) -> None:
        """Close the forgotten samplers that no operation in the queue needs."""
        with self._changed:
            needed = {id(operation.sampler) for operation in self._queue}
            unneeded = [sampler for sampler in self._to_close if id(sampler) not in needed]
            self._to_close = [sampler for sampler in self._to_close if id(sampler) in needed]
        close_all(unneeded)
