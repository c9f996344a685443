"""Operations: sent in their order, each exactly once, and polled until they end."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

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

_LAST_POLL_S = 5.0  # for the poll after the deadline, retries included
# Before an operation that failed, but may be submitted again, is: three times, in half a minute.
REPEAT_AFTER_S = (1.0, 5.0, 25.0)
_STRAY_ANSWERS = 2  # in a row: 404s and pages of a gateway that do not count as the end of an accepted operation
# Poll answers that mean "not finished yet". A long poll may also end in 504 or a read timeout; the next poll is a short
# one, and for a short one both are errors.
_NOT_YET = frozenset({408})
_NOT_YET_HELD = frozenset({408, 504, TIMEOUT})


@dataclass(eq=False)
class PendingOperation:
    """An operation that the service has accepted. ``result()`` waits for its end."""

    run_id: str
    kind: str
    seq_id: int
    path: str  # to which it was sent
    _operation: dict[str, Any] = field(repr=False)  # its newest known state
    _wait: Callable[[PendingOperation, dict[str, Any], float | None], dict[str, Any]] = field(repr=False)
    # Submits it again after that error, within the seconds that are left; None if that must not be.
    _repeat: Callable[[PendingOperation, OperationFailed, float | None], PendingOperation | None] | None = field(
        default=None, repr=False
    )
    _hang_up: HangUp | None = field(default=None, repr=False)  # of the operations that are awaited together
    _is_fetched: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end, at most ``timeout_s`` (default: the client's ``operation_timeout_s``); return the result.

        Raises what ``run_operation`` raises. May be called again.
        """
        started = time.monotonic()

        def left_s() -> float | None:
            return None if timeout_s is None else max(started + timeout_s - time.monotonic(), 0)

        self._fetch(timeout_s)
        try:
            return _result_of(self._operation, self)
        except OperationFailed as error:
            again = self._repeat(self, error, left_s()) if self._repeat and error.retryable else None
            if again is None:
                raise
        return again.result(left_s())

    def _fetch(self, timeout_s: float | None) -> None:
        with self._lock:  # one thread polls: by the second answer the service may have forgotten the result
            if not self._is_fetched:
                self._operation = self._wait(self, self._operation, timeout_s)
                self._is_fetched = True


@dataclass
class _Order:
    """The client's half of a run's order."""

    process: int = field(default_factory=os.getpid)  # one that it forks does not see which seq_ids are taken later
    lock: threading.RLock = field(default_factory=threading.RLock)
    next_seq_id: int | None = None  # None: the service was not asked yet
    # The newest operations. Weak: a result that nobody can ask for any more need not be fetched, nor kept.
    recent: deque[weakref.ref[PendingOperation]] = field(default_factory=deque)
    newest: int | None = None  # seq_id of the newest operation that is not a sampler's
    broken: str | None = None  # why no operation may follow
    lost: list[str] = field(default_factory=list)  # kinds of what was sent as next_seq_id and may have been taken

    def fetch_expiring_results(self, seq_id: int, timeout_s: float | None) -> None:
        """Fetch the results that the service may drop when it accepts ``seq_id``."""
        while self.recent:
            oldest = self.recent[0]()
            if oldest is not None:
                if oldest.seq_id > seq_id - wire.RESULTS_KEPT:
                    return
                with contextlib.suppress(WhitneyError):  # whoever calls its result() gets the error
                    oldest._fetch(timeout_s)
            self.recent.popleft()


class Operations:
    """The operations of all runs of one client.

    ``accepted`` counts those that the service took, by kind; ``undone`` those of them that are known to have failed,
    or to have been cancelled, without effect.
    """

    def __init__(self, transport: Transport, *, submit_timeout_s: float, operation_timeout_s: float) -> None:
        self._transport = transport
        self._submit_timeout_s = submit_timeout_s
        self._operation_timeout_s = operation_timeout_s
        self.accepted: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()
        self._orders: dict[str, _Order] = {}
        self._lock = threading.Lock()  # guards the counters and _orders

    def submit(
        self,
        run_id: str,
        path: str,
        kind: str,
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        *,
        repeat_after_s: Sequence[float] = (),
        hang_up: HangUp | None = None,
    ) -> PendingOperation:
        """Serialise the payload, then take the next seq_id, then send, under the run's lock.

        ``repeat_after_s``: the pauses after which ``result()`` submits it again if it failed and may be repeated.
        """
        serialised = as_json(payload, kind)
        with self._lock:
            order = self._orders.setdefault(run_id, _Order())
        if order.process != os.getpid():
            raise RunBroken(
                f"{kind} is not sent: this process was forked from the one that operates {run_id}, and only that one "
                "keeps its order. Open a run of its own here, or return the data to that process",
                outcome="not_sent",
            )
        with order.lock:
            if order.broken:
                raise RunBroken(
                    f"{kind} is not sent: {order.broken}. Until then only finish, cancel and close can follow",
                    outcome="not_sent",
                )
            if order.next_seq_id is None:
                order.next_seq_id = self._next_seq_id(run_id)
                if order.next_seq_id != 1:
                    log(logging.WARNING, f"{run_id} was operated by another client before: a run has one client")
            order.fetch_expiring_results(order.next_seq_id, timeout_s)
            if path == wire.path(wire.OPERATIONS, run_id=run_id):
                order.newest = order.next_seq_id
            pending = PendingOperation(run_id, kind, order.next_seq_id, path, {}, self._wait, _hang_up=hang_up)
            try:
                self._send(pending, serialised, timeout_s)
                self._accept(order, [kind])
            except BaseException as error:  # a Ctrl-C too leaves the outcome unknown
                self._note_loss(order, pending, error)
                raise
            order.recent.append(weakref.ref(pending))
            if repeat_after_s:
                pending._repeat = functools.partial(self._repeat, order, payload, repeat_after_s)
        return pending

    def _send(self, pending: PendingOperation, payload: bytes, timeout_s: float | None) -> None:
        kind, seq_id = pending.kind, pending.seq_id
        head = as_json({wire.KIND: kind, wire.SEQ_ID: seq_id}, kind)[:-1] + f',"{wire.PAYLOAD}":'.encode()
        body = [head, payload, b"}"]  # in parts: a payload may have 100 MB, and is not copied
        budget_s = self._submit_timeout_s if timeout_s is None else timeout_s
        answer = self._transport.exchange("POST", pending.path, body, budget_s=budget_s, seq_id=seq_id)
        _require_operation(answer, pending)
        pending._operation = answer

    def _note_loss(self, order: _Order, pending: PendingOperation, error: BaseException) -> None:
        """Break the order, unless it is certain that the service did not take the operation."""
        order.broken = _why_broken(error, pending.kind, pending.seq_id)
        if order.broken and not _is_out_of_step(error):
            order.lost.append(pending.kind)
        if isinstance(error, RequestRejected) and error.outcome == "unknown":
            # A resend was refused. Did the service take what was sent before? If it does not say, it may have.
            with contextlib.suppress(WhitneyError):
                if self._next_seq_id(pending.run_id) == order.next_seq_id:
                    error.outcome, order.broken = "rejected", None

    def _repeat(
        self,
        order: _Order,
        payload: Mapping[str, Any],
        pauses_s: Sequence[float],
        failed: PendingOperation,
        error: OperationFailed,
        left_s: float | None,
    ) -> PendingOperation | None:
        """Submit an operation that failed without effect again. None if there is no time, or it would be out of order.

        A sampler's weights are frozen, so its operations have no order.
        """
        pause_s, *later_s = pauses_s
        if left_s is not None and left_s <= pause_s:
            return None
        log(logging.WARNING, f"{error.message} (seq_id {failed.seq_id}); submitted again in {pause_s:g} s")
        time.sleep(pause_s)
        if failed._hang_up and failed._hang_up.done:
            return None
        timeout_s = None if left_s is None else left_s - pause_s
        with order.lock:
            if failed.path == wire.path(wire.OPERATIONS, run_id=failed.run_id) and order.newest != failed.seq_id:
                return None
            return self.submit(
                failed.run_id,
                failed.path,
                failed.kind,
                payload,
                timeout_s,
                repeat_after_s=later_s,
                hang_up=failed._hang_up,
            )

    def _accept(self, order: _Order, kinds: list[str]) -> None:
        """Count an operation, and only then its seq_id: an interrupt in between must not hide it."""
        assert order.next_seq_id is not None
        with self._lock:
            self.accepted.update(kinds)
        order.next_seq_id, order.lost = order.next_seq_id + 1, []

    def settle(self, timeout_s: float) -> None:
        """Find out what became of the operations whose outcome is unknown, so that others can follow them.

        The service counts what it took. If it has not taken such a request, its seq_id is free for the next operation;
        should it arrive after that, the service refuses it, since the seq_id is taken.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            orders = list(self._orders.items())
        for run_id, order in orders:
            with order.lock:
                if not order.lost:
                    continue
                next_seq_id = self._next_seq_id(run_id, max(deadline - time.monotonic(), 0))
                if next_seq_id == (order.next_seq_id or 0) + 1:
                    self._accept(order, order.lost)
                if next_seq_id == order.next_seq_id:
                    order.broken = None

    def _next_seq_id(self, run_id: str, timeout_s: float | None = None) -> int:
        path = wire.path(wire.RUN, run_id=run_id)
        budget_s = self._submit_timeout_s if timeout_s is None else timeout_s
        answer = self._transport.exchange("GET", path, budget_s=budget_s)
        require_same(answer, wire.RUN_ID, run_id, f"run {run_id}")
        seq_id = answer.get(wire.NEXT_SEQ_ID)
        if type(seq_id) is not int or seq_id < 1:
            raise UnexpectedResponse(
                f"run {run_id}: next_seq_id is {shortened(seq_id)}, not an integer ≥ 1", outcome="not_sent"
            )
        return seq_id

    def poll(self, path: str, left_s: float, **options: Any) -> dict[str, Any]:
        """Ask for a state that ``wait_until`` waits for. Trouble is ridden out for as long as that would wait."""
        budget_s = left_s or min(_LAST_POLL_S, self._submit_timeout_s)
        return self._transport.exchange("GET", path, budget_s=budget_s, **options)

    def _wait(self, pending: PendingOperation, operation: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """Return the operation once it has ended."""
        operation_id = operation[wire.OPERATION_ID]
        path = wire.path(wire.OPERATION, run_id=pending.run_id, operation_id=operation_id)
        hold = True  # whether the next poll is a long one
        strays = 0

        def poll(left_s: float) -> dict[str, Any] | None:
            nonlocal hold, strays
            wait_s = int(min(left_s, LONG_POLL_S)) if hold else 0
            try:
                answer = self.poll(
                    path + wire.WAIT.format(seconds=wait_s),
                    left_s,
                    seq_id=pending.seq_id,
                    not_yet=_NOT_YET_HELD if hold else _NOT_YET,
                    hang_up=pending._hang_up,
                )
                _require_operation(answer, pending, operation_id)
            except NotYet:
                hold = not hold
                return None
            except WhitneyError as error:
                strays += 1
                if _may_be_stray(error) and strays <= _STRAY_ANSWERS:
                    return None
                error.outcome = "unknown"  # the operation was accepted: only its result is refused here
                raise
            hold, strays = True, 0
            return answer

        name = f"{pending.kind} (seq_id {pending.seq_id})"
        facts = _facts(pending)
        timeout_s = self._operation_timeout_s if timeout_s is None else timeout_s
        says = pending._hang_up is None  # of those that are awaited together, whoever waits for them all says it
        ended = wait_until(wire.ENDED_OPERATION, poll, operation, name, timeout_s=timeout_s, says=says, **facts)
        if ended[wire.STATUS] != wire.SUCCEEDED:
            with self._lock:
                self.undone[pending.kind] += 1
        return ended


def as_json(value: object, name: str) -> bytes:
    """Return the JSON text. Raise ValueError if there is none."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: the payload is no JSON: {error}. check_payload says which entry it is") from None


def require_same(answer: dict[str, Any], field_name: str, expected: object, name: str, **facts: Any) -> None:
    """Raise UnexpectedResponse if an answer names another run, session or operation. It need not name any."""
    found = answer.get(field_name, expected)
    if type(found) is not type(expected) or found != expected:
        raise UnexpectedResponse(
            f"{name}: {field_name} is {shortened(found)} in the answer, expected {expected!r}",
            outcome="unknown",
            **facts,
        )


def _require_operation(answer: dict[str, Any], pending: PendingOperation, operation_id: str | None = None) -> None:
    """Raise UnexpectedResponse if the answer is not an operation, or not the one that was asked about."""
    facts = _facts(pending)
    found_id, status = answer.get(wire.OPERATION_ID), answer.get(wire.STATUS)
    if not wire.is_id(found_id):
        message = f"{pending.kind}: {wire.OPERATION_ID} is {shortened(found_id)} in the answer, not an id"
        raise UnexpectedResponse(message, outcome="unknown", **facts)
    if not isinstance(status, str):
        message = f"{pending.kind}: {wire.STATUS} is {shortened(status)} in the answer, not a string"
        raise UnexpectedResponse(message, outcome="unknown", **facts)
    require_same(answer, wire.RUN_ID, pending.run_id, pending.kind, **facts)
    require_same(answer, wire.SEQ_ID, pending.seq_id, pending.kind, **facts)
    require_same(answer, wire.KIND, pending.kind, pending.kind, **facts)
    require_same(answer, wire.OPERATION_ID, operation_id or found_id, pending.kind, **facts)


def _result_of(operation: dict[str, Any], pending: PendingOperation) -> dict[str, Any]:
    kind, status, result = pending.kind, operation[wire.STATUS], operation.get(wire.RESULT)
    if status != wire.SUCCEEDED:
        raise failure(kind, operation, **_facts(pending))
    if not isinstance(result, dict):
        message = f"{kind}: {wire.RESULT} is {shortened(result)}, expected an object"
        raise UnexpectedResponse(message, outcome="unknown", **_facts(pending))
    return result


def failure(name: str, answer: dict[str, Any], **facts: Any) -> OperationFailed:
    """Return the error that says why an operation, or a run, has not succeeded."""
    error = answer.get(wire.ERROR)
    error = error if isinstance(error, dict) else {}
    code, message = error.get(wire.ERROR_CODE), error.get(wire.ERROR_MESSAGE)
    return OperationFailed(
        f"{name} {answer[wire.STATUS]}: {message or 'the service gives no reason'}",
        outcome="failed",
        code=code if isinstance(code, str) else None,
        retryable=error.get(wire.ERROR_RETRYABLE) is True,
        **facts,
    )


def _facts(pending: PendingOperation) -> dict[str, Any]:
    """Return what an error about this operation carries."""
    return {"method": "POST", "path": pending.path, "seq_id": pending.seq_id}


def _is_out_of_step(error: BaseException) -> TypeGuard[WhitneyError]:
    """Return whether the service refused the seq_id: it was taken, or it is not the next one."""
    return isinstance(error, WhitneyError) and error.code in wire.ORDER_LOST


def _may_be_stray(error: WhitneyError) -> bool:
    """Return whether the answer to a poll may be that of a gateway, or of a server that was just replaced."""
    is_no_api = error.status is not None and error.code is None
    return error.status == 404 or is_no_api


def _why_broken(error: BaseException, kind: str, seq_id: int) -> str | None:
    """Return why no operation may follow; None if it is certain that the service did not take the seq_id."""
    if _is_out_of_step(error):
        return f"the service lost step with this client at {kind} (seq_id {seq_id}): {error.code}. A run has one client"
    if isinstance(error, WhitneyError) and error.outcome in ("not_sent", "rejected"):
        return None
    return f"the outcome of {kind} (seq_id {seq_id}) is unknown (client.settle() asks for it)"
