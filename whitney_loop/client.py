"""WhitneyClient: the contract's paths and fields, and operations that are ordered and run exactly once.

Whitney's documentation fixes the names of the operations, of the helpers and of one path. Everything else of the
wire is this project's reading, and it stands in ``Wire``: where your deployment differs, edit it there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import reprlib
import threading
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from whitney_loop.errors import (
    ConfigurationError,
    OperationFailed,
    OperationTimeout,
    RequestRejected,
    RunBroken,
    UnexpectedResponse,
    WhitneyError,
    redacted,
)
from whitney_loop.transport import TIMEOUT, Transport

logger = logging.getLogger("whitney_loop")


class Wire:
    """The wire, in one place. [doc]: Whitney's documentation says so. [ours]: this project's reading."""

    # Paths; {names} are filled in, percent-encoded.
    CAPABILITIES = "/v1/training/capabilities"  # [doc]
    SESSIONS = "/v1/training/sessions"  # [ours], and so is every path below
    SESSION = "/v1/training/sessions/{session_id}"
    CLOSE_SESSION = "/v1/training/sessions/{session_id}/close"  # the word "close": [doc]
    RUNS = "/v1/training/sessions/{session_id}/runs"
    RUN = "/v1/training/runs/{run_id}"
    FINISH_RUN = "/v1/training/runs/{run_id}/finish"  # the words "finish" and "cancel": [doc]
    CANCEL_RUN = "/v1/training/runs/{run_id}/cancel"
    OPERATIONS = "/v1/training/runs/{run_id}/operations"
    SAMPLER_OPERATIONS = "/v1/training/runs/{run_id}/samplers/{sampler_id}/operations"
    OPERATION = "/v1/training/runs/{run_id}/operations/{operation_id}"
    WAIT = "?wait_s={seconds}"  # on OPERATION: answer when it ends, or after so many seconds

    # Fields [ours]
    PROVIDERS = "providers"
    PROVIDER = "provider"
    OFFERED = "operations"
    SESSION_ID = "session_id"
    RUN_ID = "run_id"
    RUN_LIST = "runs"
    OPERATION_ID = "operation_id"
    SAMPLER_ID = "sampler_id"
    MODEL = "model"
    LORA = "lora"
    RANK = "rank"
    SEED = "seed"
    RESUME_FROM = "resume_from"
    KIND = "kind"
    SEQ_ID = "seq_id"
    NEXT_SEQ_ID = "next_seq_id"
    PAYLOAD = "payload"
    STATUS = "status"
    RESULT = "result"
    ERROR = "error"
    ERROR_CODE = "code"
    ERROR_MESSAGE = "message"
    ERROR_RETRYABLE = "retryable"
    REQUEST_ID = "request_id"
    IDEMPOTENCY_KEY = "Idempotency-Key"  # a header
    SEQUENCES = "sequences"  # [doc], and so are the two below
    TOKENS = "tokens"
    LOGPROBS = "logprobs"

    # Statuses and codes [ours]; a status that is not named here is not final.
    SUCCEEDED = "succeeded"
    ENDED_OPERATION = frozenset({"succeeded", "failed", "cancelled"})
    ENDED_RUN = frozenset({"finished", "cancelled", "failed"})
    ENDED_SESSION = frozenset({"closed"})
    CANCELLED_RUN = frozenset({"cancelling", "cancelled"})
    RUN_NOT_ACTIVE = "run_not_active"
    ORDER_LOST = frozenset({"seq_conflict", "seq_gap"})
    GONE = frozenset({404, 410})  # HTTP: what was closed, and is forgotten since


_LONG_POLL_S = 20  # below the idle limits of common proxies (60 s)
_FIRST_PAUSE_S = 0.02  # between polls of a server that does not hold them
_LONGEST_PAUSE_S = 5.0
_LONGEST_LISTING = 400  # characters; the names of the contract take half of it
_LONGEST_ID = 300  # characters
_RESULTS_KEPT = 256  # a service keeps those of so many newest operations
# Answers to a poll that only say that there is none yet. 504 and a read timeout come of holding it: one that was not
# held is then asked, and there they are trouble.
_NOTHING_YET = (408,)
_NOTHING_YET_HELD = (408, 504, TIMEOUT)
_PATIENCE_S = 30.0  # an operation that takes longer says so in the log, each time this passes


@dataclass
class _Order:
    """The client's half of a run's order."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    next_seq_id: int | None = None  # None: not asked yet
    pending: dict[int, PendingOperation] = field(default_factory=dict)  # by seq_id: those whose result was not fetched
    broken: str | None = None  # why no operation may follow


@dataclass
class PendingOperation:
    """An operation that the service has accepted, and whose result was not waited for yet."""

    run_id: str
    kind: str
    seq_id: int
    path: str
    _operation: dict[str, Any] = field(repr=False)
    _wait: Callable[[PendingOperation, dict[str, Any]], dict[str, Any]] = field(repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def result(self) -> dict[str, Any]:
        """Wait for the end and give the result; raises what ``run_operation`` raises. May be asked again."""
        try:
            with self._lock:  # a second poll could come when the first has the result, and the service not any more
                self._operation = self._wait(self, self._operation)
            return _result_of(self._operation, self.kind)
        except WhitneyError as error:
            error.method, error.path = error.method or "POST", error.path or self.path
            raise


class WhitneyClient:
    """A client of one Whitney service. Thread-safe; the operations of one run are sent in the order of the calls.

    ``base_url`` and ``api_key`` default to WHITNEY_BASE_URL and WHITNEY_API_KEY; no host is guessed. Seconds:
    ``operation_timeout_s`` from an operation's start to its result, ``submit_timeout_s`` for getting any request
    accepted, retries included, ``exchange_timeout_s`` for one attempt. TLS is always verified; ``ca_file`` (PEM) names
    whom to trust in place of the system's authorities. Raises ConfigurationError where the URL, the key or
    the file can not be used. ``accepted`` counts the operations that the service took, by kind; ``closed_sessions`` are
    the ids of those that it was asked to close, and that are closed.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        operation_timeout_s: float = 3600.0,
        submit_timeout_s: float = 300.0,
        exchange_timeout_s: float = 60.0,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        base_url = base_url or os.environ.get("WHITNEY_BASE_URL")
        if not base_url:
            raise ConfigurationError("no base URL: pass base_url or set WHITNEY_BASE_URL", outcome="not_sent")
        key = api_key if api_key is not None else os.environ.get("WHITNEY_API_KEY")
        self._transport = Transport(
            base_url, key, exchange_timeout_s=exchange_timeout_s, read_error=_read_error, ca_file=ca_file
        )
        self.ca_file = None if ca_file is None else os.fspath(ca_file)
        self.base_url = self._transport.base_url
        self.operation_timeout_s = operation_timeout_s
        self.submit_timeout_s = submit_timeout_s
        self.accepted: Counter[str] = Counter()
        self.closed_sessions: set[str] = set()
        self._orders: dict[str, _Order] = {}
        self._lock = threading.Lock()  # guards accepted and _orders

    def __repr__(self) -> str:
        return f"WhitneyClient({self.base_url!r})"

    # What the service offers

    def capabilities(self) -> dict[str, Any]:
        """The service's capabilities: ``{"providers": {name: {"operations": [...], "models": [...]}}}``."""
        return self._get(Wire.CAPABILITIES)

    def require_operations(self, provider: str, names: Collection[str]) -> None:
        """Raise ConfigurationError where the service does not offer each of these operations for ``provider``."""
        answer = self.capabilities()
        offered = answer.get(Wire.OFFERED)
        if offered is None:
            providers = answer.get(Wire.PROVIDERS)
            if not isinstance(providers, dict):
                raise UnexpectedResponse("capabilities: providers is not an object in the answer", outcome="rejected")
            if provider not in providers:
                raise ConfigurationError(
                    f"{self.base_url} does not offer provider {provider!r}; it has {_listed(providers)}",
                    outcome="not_sent",
                )
            entry = providers[provider]
            offered = entry.get(Wire.OFFERED) if isinstance(entry, dict) else None
        if not isinstance(offered, list):
            raise UnexpectedResponse(f"capabilities: {provider}.operations is not a list", outcome="rejected")
        missing = [name for name in names if name not in offered]
        if missing:
            raise ConfigurationError(
                f"{self.base_url} does not offer {', '.join(missing)} for {provider}; it has {_listed(offered)}",
                outcome="not_sent",
            )

    # Sessions and runs

    def create_session(
        self, provider: str, *, idempotency_key: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Open a session and return its id. The same ``idempotency_key`` (default: a new one) opens it once only."""
        return self._create(Wire.SESSIONS, {Wire.PROVIDER: provider}, idempotency_key, Wire.SESSION_ID, timeout_s)

    def create_lora_run(
        self,
        session_id: str,
        *,
        model: str,
        rank: int = 32,
        seed: int | None = None,
        resume_from: str | None = None,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Start a LoRA run of ``model`` in a session and return its id.

        ``rank`` ≥ 1. ``resume_from`` takes the ``state_id`` of a ``save_state``: its weights and its optimizer.
        """
        body: dict[str, Any] = {Wire.MODEL: model, Wire.LORA: {Wire.RANK: rank}}
        body |= {} if seed is None else {Wire.SEED: seed}
        body |= {} if resume_from is None else {Wire.RESUME_FROM: resume_from}
        return self._create(_path(Wire.RUNS, session_id=session_id), body, idempotency_key, Wire.RUN_ID, timeout_s)

    def session(self, session_id: str) -> dict[str, Any]:
        """The session as it is: id, provider, status and its runs."""
        return self._get(_path(Wire.SESSION, session_id=session_id))

    def run(self, run_id: str) -> dict[str, Any]:
        """The run as it is: id, session, status and next_seq_id."""
        return self._get(_path(Wire.RUN, run_id=run_id))

    def finish(self, run_id: str) -> dict[str, Any]:
        """End a run whose work is done; the run as it is then. RequestRejected where it was cancelled or failed."""
        return self._post(_path(Wire.FINISH_RUN, run_id=run_id))

    def cancel(self, run_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """End a run as it stands: what is queued will not run. May be asked again."""
        return self._post(_path(Wire.CANCEL_RUN, run_id=run_id), timeout_s)

    def close_session(self, session_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Close a session, and poll until it is closed or gone; what still runs in it is cancelled. May be asked again.

        OperationTimeout where it is not closed after ``timeout_s``, polls included.
        """
        timeout_s = self.submit_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        session = self._post(_path(Wire.CLOSE_SESSION, session_id=session_id), timeout_s)
        path = _path(Wire.SESSION, session_id=session_id)
        try:
            session = self._until(Wire.ENDED_SESSION, f"session {session_id}", path, session, deadline, timeout_s)
        except RequestRejected as error:
            if error.status not in Wire.GONE:
                raise
        self.closed_sessions.add(session_id)
        return session

    def wait_until_terminal(self, run_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Poll until the run has ended (finished, cancelled or failed); OperationTimeout after ``timeout_s``."""
        timeout_s = self.operation_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        path = _path(Wire.RUN, run_id=run_id)
        return self._until(Wire.ENDED_RUN, f"run {run_id}", path, self._get(path), deadline, timeout_s)

    def _until(
        self, statuses: Collection[str], what: str, path: str, state: dict[str, Any], deadline: float, timeout_s: float
    ) -> dict[str, Any]:
        """The state of a run or a session, which was ``state``, once its status is one of these."""
        pause = _FIRST_PAUSE_S
        while str(state.get(Wire.STATUS)) not in statuses:  # str: what is no status may not even be hashable
            if time.monotonic() + pause > deadline:
                found, expected = _shown(state.get(Wire.STATUS)), " or ".join(sorted(statuses))
                raise OperationTimeout(f"{what} is {found} after {timeout_s:.0f} s, not {expected}", outcome="unknown")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            left = deadline - time.monotonic()
            state = self._exchange("GET", path, None, timeout_s=min(left, self.submit_timeout_s))
        return state

    # Operations

    def run_operation(self, run_id: str, kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Do one operation of a run (``forward_backward``, ``optim_step`` …), wait for its end and return its result.

        Raises RequestRejected where the service refuses it, OperationFailed where it fails, OperationTimeout where it
        does not end in time, RunBroken where an earlier one's outcome is unknown, ValueError where the payload is no
        JSON. Payloads are not judged here: call ``check_payload`` first.
        """
        return self.submit_operation(run_id, kind, payload).result()

    def sampler_operation(self, run_id: str, sampler_id: str, kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a sampler's operation, ``sample`` or ``logprobs``; it takes the run's next ``seq_id`` too."""
        return self.submit_sampler_operation(run_id, sampler_id, kind, payload).result()

    def run_operations(self, run_id: str, kind: str, payloads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """An operation for each payload, in order, and their results. All are submitted before the first is awaited.

        Raises what ``run_operation`` raises for the first that fails; those that were submitted after it still run.
        """
        submitted = [self.submit_operation(run_id, kind, payload) for payload in payloads]
        return [operation.result() for operation in submitted]

    def sampler_operations(
        self, run_id: str, sampler_id: str, kind: str, payloads: Iterable[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The same for a sampler's operations, on several of which a service may work at a time."""
        submitted = [self.submit_sampler_operation(run_id, sampler_id, kind, payload) for payload in payloads]
        return [operation.result() for operation in submitted]

    def submit_operation(self, run_id: str, kind: str, payload: Mapping[str, Any]) -> PendingOperation:
        """Have an operation accepted, in its order, and do not wait for it: ``result()`` of what is returned does.

        Any number may be submitted before the first result is awaited: where a service would forget one (it keeps 256),
        that one is fetched first. Raises what ``run_operation`` raises until then.
        """
        return self._submit(run_id, _path(Wire.OPERATIONS, run_id=run_id), kind, payload)

    def submit_sampler_operation(
        self, run_id: str, sampler_id: str, kind: str, payload: Mapping[str, Any]
    ) -> PendingOperation:
        """The same for a sampler's operation. A service may work on several of them at a time."""
        path = _path(Wire.SAMPLER_OPERATIONS, run_id=run_id, sampler_id=sampler_id)
        return self._submit(run_id, path, kind, payload)

    def _submit(self, run_id: str, path: str, kind: str, payload: Mapping[str, Any]) -> PendingOperation:
        """Serialise, then take the seq_id, then send, under the run's lock."""
        serialised = _json(payload, kind)
        order = self._order(run_id)
        with order.lock:
            if order.broken:
                raise RunBroken(
                    f"{kind} is not sent: {order.broken}. Only finish, cancel and close can follow",
                    outcome="not_sent",
                )
            if order.next_seq_id is None:
                order.next_seq_id = self._next_seq_id(run_id)
            seq_id = order.next_seq_id
            self._fetch_what_would_be_forgotten(order, seq_id)
            head = json.dumps({Wire.KIND: kind, Wire.SEQ_ID: seq_id})
            body = f'{head[:-1]}, "{Wire.PAYLOAD}": {serialised}}}'.encode()
            try:
                answer = self._exchange("POST", path, body, seq_id=seq_id)
                _require_operation(answer, run_id, kind, seq_id)
                order.next_seq_id = seq_id + 1
            except BaseException as error:
                order.broken = _why_broken(error, kind, seq_id)
                if isinstance(error, WhitneyError):
                    error.method, error.path = error.method or "POST", error.path or redacted(path)
                raise
            pending = PendingOperation(run_id, kind, seq_id, redacted(path), answer, self._ended)
            with self._lock:
                self.accepted[kind] += 1
                order.pending[seq_id] = pending
        return pending

    def _fetch_what_would_be_forgotten(self, order: _Order, seq_id: int) -> None:
        """Fetch, whoever waits for it, each result that a service may forget once ``seq_id`` is taken."""
        with self._lock:
            oldest = [pending for number, pending in order.pending.items() if number <= seq_id - _RESULTS_KEPT]
        for pending in oldest:
            with contextlib.suppress(WhitneyError):  # its own result() says so
                pending.result()
            with self._lock:
                order.pending.pop(pending.seq_id, None)

    def _ended(self, pending: PendingOperation, operation: dict[str, Any]) -> dict[str, Any]:
        """The operation once it has ended, however long the service holds a poll."""
        kind, seq_id = pending.kind, pending.seq_id
        path = _path(Wire.OPERATION, run_id=pending.run_id, operation_id=operation[Wire.OPERATION_ID])
        deadline = time.monotonic() + self.operation_timeout_s
        started = said = time.monotonic()
        pause, hold = _FIRST_PAUSE_S, True
        while operation[Wire.STATUS] not in Wire.ENDED_OPERATION:
            asked = time.monotonic()
            left = deadline - asked
            if left <= 0:
                raise OperationTimeout(
                    f"{kind} was accepted and is {_shown(operation[Wire.STATUS])}, but did not end in "
                    f"{self.operation_timeout_s:g} s; it may still",
                    outcome="unknown", seq_id=seq_id,
                )  # fmt: skip
            if asked - said > _PATIENCE_S:
                said = asked
                status = _shown(operation[Wire.STATUS])
                logger.warning("%s (seq_id %s) is %s for %.0f s", kind, seq_id, status, asked - started)
            answer = self._poll(path, operation, pending, left, hold=hold)
            operation, hold = answer or operation, answer is not None or not hold
            held_s = time.monotonic() - asked
            if operation[Wire.STATUS] not in Wire.ENDED_OPERATION and held_s < min(left, _LONG_POLL_S) / 2:
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        with self._lock:
            self._orders[pending.run_id].pending.pop(seq_id, None)
        return operation

    def _poll(
        self, path: str, operation: dict[str, Any], pending: PendingOperation, left: float, *, hold: bool
    ) -> dict[str, Any] | None:
        """The operation as it is, with ``hold`` after at most ``_LONG_POLL_S``; None where the answer is none yet."""
        wait = Wire.WAIT.format(seconds=max(1, int(min(left, _LONG_POLL_S))) if hold else 0)
        try:
            answer = self._transport.exchange(
                "GET",
                path + wait,
                budget_s=min(left, self.submit_timeout_s),
                seq_id=pending.seq_id,
                nothing_yet=_NOTHING_YET_HELD if hold else _NOTHING_YET,
            )
            if answer is not None:
                _require_operation(answer, pending.run_id, pending.kind, pending.seq_id, operation[Wire.OPERATION_ID])
        except WhitneyError as error:
            error.outcome = "unknown"  # the operation was accepted: what is refused here is only its result
            raise
        return answer

    def _order(self, run_id: str) -> _Order:
        with self._lock:
            return self._orders.setdefault(run_id, _Order())

    def _next_seq_id(self, run_id: str) -> int:
        answer = self.run(run_id)
        seq_id = answer.get(Wire.NEXT_SEQ_ID)
        if type(seq_id) is not int or seq_id < 1:
            raise UnexpectedResponse(
                f"run {run_id}: next_seq_id is {_shown(seq_id)}, not an integer ≥ 1", outcome="not_sent"
            )
        return seq_id

    # Requests

    def _create(
        self, path: str, body: dict[str, Any], idempotency_key: str | None, id_field: str, timeout_s: float | None
    ) -> str:
        key = idempotency_key or str(uuid.uuid4())
        headers = {Wire.IDEMPOTENCY_KEY: key}
        answer = self._exchange("POST", path, _json(body, path).encode(), headers=headers, timeout_s=timeout_s)
        made = answer.get(id_field)
        if not is_id(made):
            raise UnexpectedResponse(
                f"{id_field} is {_shown(made)} in the answer, not an id",
                outcome="unknown",
                method="POST",
                path=path,
            )
        return made

    def _get(self, path: str) -> dict[str, Any]:
        return self._exchange("GET", path, None)

    def _post(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        return self._exchange("POST", path, b"{}", timeout_s=timeout_s)

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        seq_id: int | None = None,
    ) -> dict[str, Any]:
        budget_s = self.submit_timeout_s if timeout_s is None else timeout_s
        answer = self._transport.exchange(method, path, body, budget_s=budget_s, headers=headers, seq_id=seq_id)
        assert answer is not None  # only a poll ends without
        return answer


def result_sampler_id(result: Mapping[str, Any]) -> str:
    """The ``sampler_id`` that ``save_weights_for_sampler`` gave; UnexpectedResponse where there is none."""
    sampler_id = result.get(Wire.SAMPLER_ID) if isinstance(result, Mapping) else None
    if not is_id(sampler_id):
        raise UnexpectedResponse(
            f"save_weights_for_sampler: result.sampler_id is {_shown(sampler_id)}, expected an id",
            outcome="unknown",
        )
    return sampler_id


def result_sequences(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ``sequences`` in the result of ``sample``: each has ``tokens``, and as many finite ``logprobs``.

    Raises UnexpectedResponse that names the field otherwise: a completion without them can not be trained on.
    """
    sequences = result.get(Wire.SEQUENCES) if isinstance(result, Mapping) else None
    if not isinstance(sequences, list) or not sequences:
        raise _bad_sample("sequences", sequences, "a list of at least one sequence")
    for index, sequence in enumerate(sequences):
        where = f"sequences[{index}]"
        if not isinstance(sequence, dict):
            raise _bad_sample(where, sequence, "an object")
        tokens, logprobs = sequence.get(Wire.TOKENS), sequence.get(Wire.LOGPROBS)
        if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
            raise _bad_sample(f"{where}.tokens", tokens, "a list of token ids")
        if not isinstance(logprobs, list) or not all(_is_finite(logprob) for logprob in logprobs):
            raise _bad_sample(f"{where}.logprobs", logprobs, "a list of finite numbers, one per token")
        if len(logprobs) != len(tokens):
            raise _bad_sample(
                f"{where}.logprobs", logprobs, f"{len(tokens)} numbers, one per token, not {len(logprobs)}"
            )
    return sequences


def _bad_sample(where: str, found: object, expected: str) -> UnexpectedResponse:
    return UnexpectedResponse(f"sample: result.{where} is {_shown(found)}, expected {expected}", outcome="unknown")


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def is_id(value: object) -> TypeGuard[str]:
    """Whether it can stand in a path and in a message."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_ID and value.isprintable()


class _Short(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redacted(x), level)  # before it is cut: a part of the key is not recognised


_shown = _Short().repr  # what stands there, in few characters


def _listed(names: Collection[object]) -> str:
    """What a service offers, which may be anything."""
    shown = [redacted(name) if is_id(name) else _shown(name) for name in names]
    return ", ".join(sorted(shown))[:_LONGEST_LISTING]


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _path(template: str, **ids: str) -> str:
    return template.format(**{name: urllib.parse.quote(value, safe="") for name, value in ids.items()})


def _json(value: object, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: the payload is no JSON: {error}. check_payload says which entry it is") from None


def _read_error(body: dict[str, Any]) -> dict[str, Any]:
    error = body.get(Wire.ERROR)
    error = error if isinstance(error, dict) else {}
    return {
        "message": error.get(Wire.ERROR_MESSAGE),
        "code": error.get(Wire.ERROR_CODE),
        "request_id": body.get(Wire.REQUEST_ID),
    }


def _require_operation(
    answer: dict[str, Any], run_id: str, kind: str, seq_id: int, operation_id: str | None = None
) -> None:
    """Raise UnexpectedResponse where this is no operation, or not the one that was asked about."""
    for name, fits, what in ((Wire.OPERATION_ID, is_id, "an id"), (Wire.STATUS, _is_text, "a string")):
        if not fits(answer.get(name)):
            found = f"{name} is {_shown(answer.get(name))} in the answer, not {what}"
            raise UnexpectedResponse(f"{kind}: {found}", outcome="unknown", seq_id=seq_id)
    expected = {
        Wire.RUN_ID: run_id,
        Wire.SEQ_ID: seq_id,
        Wire.KIND: kind,
        Wire.OPERATION_ID: operation_id or answer[Wire.OPERATION_ID],
    }
    for name, value in expected.items():
        found = answer.setdefault(name, value)
        if type(found) is not type(value) or found != value:
            raise UnexpectedResponse(
                f"{kind}: {name} is {_shown(found)} in the answer, expected {value!r}", outcome="unknown", seq_id=seq_id
            )


def _why_broken(error: BaseException, kind: str, seq_id: int) -> str | None:
    """None where the order still holds: the service did not take the seq_id, and says so or never heard of it."""
    if isinstance(error, WhitneyError) and error.code in Wire.ORDER_LOST:
        return f"the service lost step with this client at {kind} (seq_id {seq_id}): {error.code}"
    if isinstance(error, WhitneyError) and error.outcome in ("not_sent", "rejected"):
        return None
    return f"the outcome of {kind} (seq_id {seq_id}) is unknown"


def _result_of(operation: dict[str, Any], kind: str) -> dict[str, Any]:
    seq_id, status, result = operation[Wire.SEQ_ID], operation[Wire.STATUS], operation.get(Wire.RESULT)
    if status != Wire.SUCCEEDED:
        error = operation.get(Wire.ERROR)
        error = error if isinstance(error, dict) else {}
        code, message = error.get(Wire.ERROR_CODE), error.get(Wire.ERROR_MESSAGE)
        raise OperationFailed(
            f"{kind} {status}: {message or 'the service gives no reason'}",
            outcome="failed",
            code=code if isinstance(code, str) else None,
            seq_id=seq_id,
            retryable=error.get(Wire.ERROR_RETRYABLE) is True,
        )
    if not isinstance(result, dict):
        raise UnexpectedResponse(
            f"{kind}: result is {_shown(result)}, expected an object", outcome="unknown", seq_id=seq_id
        )
    return result
