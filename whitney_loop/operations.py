"""Operations: sent in their order, each exactly once, and polled until they end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whitney_loop import wire
from whitney_loop.connections import HangUp
from whitney_loop.errors import (
    OperationFailed,
    RequestRejected,
    RunBroken,
    UnexpectedResponse,
    WhitneyError,
    log,
    shortened,
)
from whitney_loop.transport import TIMEOUT, NotYet, Transport
from whitney_loop.waiting import LONG_POLL_S, wait_until

REPEAT_PAUSES_S = (1.0, 5.0, 25.0)  # before the three repetitions of an operation that failed
_MOST_STRAYS = 2  # stray answers in a row to the polls of one operation; the next one is believed
# Answers to a poll that mean "not finished yet". A held poll may also end in 504 or a read timeout. The poll after it
# is not held, and then both are errors.
_NOT_YET = frozenset({408})
_NOT_YET_IF_HELD = frozenset({408, 504, TIMEOUT})


@dataclass(eq=False)
class PendingOperation:
    """An operation that the service has accepted. ``result()`` waits for its end."""

    run_id: str
    sampler_id: str | None  # None: an operation of the run itself
    kind: str
    seq_id: int
    _operations: Operations = field(repr=False)
    _hang_up: HangUp | None = field(default=None, repr=False)  # of the operations that are awaited together
    _state: dict[str, Any] = field(default_factory=dict, repr=False)  # the newest answer about it
    _is_polled_held: bool = field(default=True, repr=False)  # whether the service is asked to hold the next poll
    _strays: int = field(default=0, repr=False)
    _is_fetched: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def path(self) -> str:
        """The path to which it was sent."""
        if self.sampler_id is None:
            return wire.path(wire.OPERATIONS, run_id=self.run_id)
        return wire.path(wire.SAMPLER_OPERATIONS, run_id=self.run_id, sampler_id=self.sampler_id)

    def __str__(self) -> str:
        return f"{self.kind} (seq_id {self.seq_id})"

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end, at most ``timeout_s`` (default: the client's ``operation_timeout_s``); return the result.

        Raise what ``run_operation`` raises. May be called again.
        """
        with self._lock:  # one thread polls: by the second answer the service may have forgotten the result
            if not self._is_fetched:
                self._state = wait_until(
                    "ended",
                    lambda status: status in wire.ENDED_OPERATION,
                    self._poll,
                    self._state,
                    str(self),
                    timeout_s=self._operations.timeout_s if timeout_s is None else timeout_s,
                    is_logged=self._hang_up is None,  # of those that are awaited together, one thread logs for all
                    **self._facts(),
                )
                self._is_fetched = True
                self._operations.count_end(self.kind, self._state[wire.STATUS])
        if self._state[wire.STATUS] != wire.SUCCEEDED:
            raise failure(self.kind, self._state, **self._facts())
        result = self._state.get(wire.RESULT)
        if not isinstance(result, dict):
            raise self._unexpected(wire.RESULT, result, "an object")
        return result

    def _poll(self, left_s: float) -> dict[str, Any] | None:
        operation_id, is_held = self._state[wire.OPERATION_ID], self._is_polled_held
        path = wire.path(wire.OPERATION, run_id=self.run_id, operation_id=operation_id)
        path += wire.WAIT.format(seconds=int(min(left_s, LONG_POLL_S)) if is_held else 0)
        not_yet = _NOT_YET_IF_HELD if is_held else _NOT_YET
        try:
            answer = self._operations.transport.poll(
                path, left_s, seq_id=self.seq_id, not_yet=not_yet, hang_up=self._hang_up
            )
            self.check(answer)
        except NotYet:
            self._is_polled_held = not is_held
            return None
        except WhitneyError as error:
            self._strays += 1
            if self._strays <= _MOST_STRAYS and _may_be_stray(error):
                return None
            error.outcome = "unknown"  # the operation was accepted: only its result is refused here
            raise
        self._is_polled_held, self._strays = True, 0
        return answer

    def check(self, answer: dict[str, Any]) -> None:
        """Raise UnexpectedResponse if the answer is not an operation, or is not this one."""
        found_id, status = answer.get(wire.OPERATION_ID), answer.get(wire.STATUS)
        if not wire.is_id(found_id):
            raise self._unexpected(wire.OPERATION_ID, found_id, "an id")
        if not isinstance(status, str):
            raise self._unexpected(wire.STATUS, status, "a string")
        own = {wire.RUN_ID: self.run_id, wire.SEQ_ID: self.seq_id, wire.KIND: self.kind}
        own[wire.OPERATION_ID] = self._state.get(wire.OPERATION_ID, found_id)
        for name, expected in own.items():
            require_same(answer, name, expected, self.kind, **self._facts())

    def _unexpected(self, name: str, found: object, expected: str) -> UnexpectedResponse:
        message = f"{self.kind}: {name} is {shortened(found)}, expected {expected}"
        return UnexpectedResponse(message, **self._facts())

    def _facts(self) -> dict[str, Any]:
        """Return the attributes of an error about this operation."""
        return {"method": "POST", "path": self.path, "seq_id": self.seq_id}


@dataclass
class _Order:
    """The order of a run's operations, as this client knows it."""

    process: int = field(default_factory=os.getpid)  # a forked process does not see which seq_ids are taken later
    lock: threading.RLock = field(default_factory=threading.RLock)
    next_seq_id: int = 0  # 0: the service was not asked yet
    # By seq_id. Weak: a result that nobody can ask for any more need not be fetched, nor kept.
    accepted: weakref.WeakValueDictionary[int, PendingOperation] = field(default_factory=weakref.WeakValueDictionary)
    newest_of_run: int = 0  # seq_id of the newest operation that is not a sampler's
    broken: str | None = None  # why no operation may follow
    lost: str | None = None  # kind of the operation that was sent as next_seq_id and may have been taken


class Operations:
    """The operations of all runs of one client, which documents the counters ``accepted`` and ``undone``."""

    def __init__(self, transport: Transport, *, timeout_s: float) -> None:
        self.transport = transport
        self.timeout_s = timeout_s  # from a submission to the result
        self.accepted: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()
        self._orders: dict[str, _Order] = {}
        self._lock = threading.Lock()  # guards the counters and _orders

    def run(
        self, run_id: str, sampler_id: str | None, kind: str, payload: Mapping[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Submit an operation and return its result. Submit it again, up to three times, if it fails and may be."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        operation = self.submit(run_id, sampler_id, kind, payload, timeout_s)
        for pause_s in REPEAT_PAUSES_S:
            try:
                return operation.result(_left_s(deadline))
            except OperationFailed as error:
                operation = self.repeat(operation, payload, error, pause_s, deadline)
        return operation.result(_left_s(deadline))

    def submit(
        self,
        run_id: str,
        sampler_id: str | None,
        kind: str,
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        hang_up: HangUp | None = None,
    ) -> PendingOperation:
        """Serialise the payload, take the next seq_id and send, under the run's lock.

        Raise RunBroken if the run's order is not known here, ValueError if the payload cannot be written as JSON, and
        what ``Transport.exchange`` raises.
        """
        serialised = as_json(payload if sampler_id is None else wire.wire_request(payload), kind)
        with self._lock:
            order = self._orders.setdefault(run_id, _Order())
        if order.process != os.getpid():
            raise RunBroken(
                f"{kind} is not sent: this process was forked from the one that operates {run_id}, and only that one "
                "keeps its order. Open a run of its own here, or return the data to that process"
            )
        with order.lock:
            if order.broken:
                message = f"{kind} is not sent: {order.broken}. Only finish, cancel and close can follow"
                raise RunBroken(message)
            if not order.next_seq_id:
                order.next_seq_id = self._next_seq_id(run_id)
                if order.next_seq_id != 1:
                    log(logging.WARNING, f"{run_id} was operated by another client before: a run has one client")
            # The service drops the oldest result that it keeps when it accepts the next operation: fetch it before.
            if expiring := order.accepted.get(order.next_seq_id - wire.RESULTS_KEPT):
                with contextlib.suppress(WhitneyError):  # raised again for whoever asks for its result
                    expiring.result(timeout_s)
            operation = PendingOperation(run_id, sampler_id, kind, order.next_seq_id, self, hang_up)
            if sampler_id is None:
                order.newest_of_run = operation.seq_id
            try:
                self._send(operation, serialised, timeout_s)
                self._accept(order, kind)
            except BaseException as error:  # a Ctrl-C too leaves the outcome unknown
                self._note_loss(order, operation, error)
                raise
            order.accepted[operation.seq_id] = operation
        return operation

    def _send(self, operation: PendingOperation, payload: bytes, timeout_s: float | None) -> None:
        kind, seq_id = operation.kind, operation.seq_id
        head = as_json({wire.KIND: kind, wire.SEQ_ID: seq_id}, kind)[:-1] + f',"{wire.PAYLOAD}":'.encode()
        body = [head, payload, b"}"]  # in parts: a payload may have 100 MB, and is not copied
        answer = self.transport.exchange("POST", operation.path, body, timeout_s=timeout_s, seq_id=seq_id)
        operation.check(answer)
        operation._state = answer

    def _accept(self, order: _Order, kind: str) -> None:
        """Count an operation, and only then its seq_id, so that an interrupt in between does not hide it."""
        with self._lock:
            self.accepted[kind] += 1
        order.next_seq_id += 1
        order.lost = None

    def _note_loss(self, order: _Order, operation: PendingOperation, error: BaseException) -> None:
        """Break the order, unless it is certain that the service did not take the operation."""
        if isinstance(error, WhitneyError) and error.code in wire.ORDER_LOST:
            disagreement = f"service and client disagree about the order since {operation}: {error.code}"
            order.broken = f"{disagreement}. A run has one client"
            return
        if isinstance(error, WhitneyError) and error.outcome in ("not_sent", "rejected"):
            return
        order.broken = f"the outcome of {operation} is unknown until client.settle() has asked for it"
        order.lost = operation.kind
        if isinstance(error, RequestRejected):
            # A later attempt was refused. Ask whether an earlier one was taken; without an answer, it may have been.
            with contextlib.suppress(WhitneyError):
                if self._next_seq_id(operation.run_id) == order.next_seq_id:
                    error.outcome, order.broken = "rejected", None

    def repeat(
        self,
        failed: PendingOperation,
        payload: Mapping[str, Any],
        error: OperationFailed,
        pause_s: float,
        deadline: float | None = None,
    ) -> PendingOperation:
        """Pause, then submit a failed operation again, as a new one.

        Raise its ``error`` if the service does not say that it may be repeated, if there is no time, or if a later
        operation of the run was submitted. A sampler's weights are frozen, so its operations have no order.
        """
        left_s = _left_s(deadline)
        if not error.retryable or (left_s is not None and left_s <= pause_s):
            raise error
        log(logging.WARNING, f"{error.message} (seq_id {failed.seq_id}); submitted again in {pause_s:g} s")
        time.sleep(pause_s)
        order, hang_up = self._orders[failed.run_id], failed._hang_up
        with order.lock:
            is_too_late = failed.sampler_id is None and order.newest_of_run != failed.seq_id
            if is_too_late or (hang_up and hang_up.done):
                raise error
            return self.submit(failed.run_id, failed.sampler_id, failed.kind, payload, _left_s(deadline), hang_up)

    def count_end(self, kind: str, status: str) -> None:
        """Count an operation that ended without effect."""
        if status != wire.SUCCEEDED:
            with self._lock:
                self.undone[kind] += 1

    def settle(self, timeout_s: float) -> None:
        """Ask which of the operations whose outcome is unknown were taken, so that others can follow them.

        If the service has not taken such an operation, its seq_id is free for the next one. If it arrives after that,
        the service refuses it, because the seq_id is taken.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            orders = list(self._orders.items())
        for run_id, order in orders:
            with order.lock:
                if order.lost is None:
                    continue
                next_seq_id = self._next_seq_id(run_id, _left_s(deadline))
                if next_seq_id == order.next_seq_id + 1:
                    self._accept(order, order.lost)
                if next_seq_id == order.next_seq_id:
                    order.broken = None

    def _next_seq_id(self, run_id: str, timeout_s: float | None = None) -> int:
        answer = self.transport.exchange("GET", wire.path(wire.RUN, run_id=run_id), timeout_s=timeout_s)
        require_same(answer, wire.RUN_ID, run_id, f"run {run_id}")
        seq_id = answer.get(wire.NEXT_SEQ_ID)
        if type(seq_id) is not int or seq_id < 1:
            message = f"run {run_id}: next_seq_id is {shortened(seq_id)}, not an integer ≥ 1"
            raise UnexpectedResponse(message, outcome="not_sent")
        return seq_id


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0)


def as_json(value: object, name: str) -> bytes:
    """Return the value as JSON. Raise ValueError, with the ``name`` of what it is for, if that is impossible."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        message = f"{name}: the payload cannot be written as JSON: {error}. check_payload says which entry it is"
        raise ValueError(message) from None


def require_same(answer: dict[str, Any], field_name: str, expected: object, name: str, **facts: Any) -> None:
    """Raise UnexpectedResponse if an answer names another run, session or operation. It need not name any."""
    found = answer.get(field_name, expected)
    if type(found) is not type(expected) or found != expected:
        message = f"{name}: {field_name} is {shortened(found)} in the answer, expected {expected!r}"
        raise UnexpectedResponse(message, **facts)


def failure(name: str, answer: dict[str, Any], **facts: Any) -> OperationFailed:
    """Return the error that says why an operation, or a run, has not succeeded."""
    message, code, retryable = wire.error_of(answer)
    text = f"{name} {answer[wire.STATUS]}: {message or 'the service gives no reason'}"
    return OperationFailed(text, code=code, retryable=retryable, **facts)


def _may_be_stray(error: WhitneyError) -> bool:
    """Return whether the answer to a poll may be that of a gateway, or of a server that was just replaced."""
    is_no_api = error.status is not None and error.code is None
    return error.status == 404 or is_no_api
