"""WhitneyClient: sessions, runs, and operations that are ordered and run exactly once.

Whitney's documentation fixes the names of the operations, of the helpers and of one path. The rest of the wire is this
project's reading. It stands in ``wire.py``; if your deployment differs, edit it there.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from whitney_loop import wire
from whitney_loop.errors import ConfigurationError, RequestRejected, UnexpectedResponse, WhitneyError, log, shortened
from whitney_loop.fetching import run_all
from whitney_loop.operations import Operations, PendingOperation, as_json, failure, require_same
from whitney_loop.transport import Transport
from whitney_loop.waiting import wait_until

_LONGEST_LISTING = 400  # characters; the names of the contract take half of it
_LONGEST_TIMEOUT_S = 1e9  # 30 years; a socket takes at most 290 years


class WhitneyClient:
    """A client of one Whitney service. Thread-safe; the operations of one run are sent in the order of the calls.

    Use one client for a run: it numbers the run's operations, and a second client would use the same numbers. If both
    send the same operation with the same number, it runs once and both get its result.

    ::

        client = WhitneyClient("https://whitney.example", "my key")
        with training_session(client, provider="modal") as session_id:
            with lora_run(client, session_id, model="my-model", rank=8) as run_id:
                saved = client.run_operation(run_id, "save_weights_for_sampler", {})

    ``base_url`` and ``api_key`` default to WHITNEY_BASE_URL and WHITNEY_API_KEY; no host is guessed. Three limits are
    in seconds, each more than 0: ``operation_timeout_s`` from an operation's submission to its result,
    ``submit_timeout_s`` for any other request, retries included, and ``exchange_timeout_s`` for one attempt. TLS is
    always verified; the authorities in ``ca_file`` (PEM) are trusted instead of the system's. Raise ConfigurationError
    if one of these cannot be used.

    ``accepted`` counts the operations that the service took, by kind. ``undone`` counts those of them that are known to
    have ended without effect. ``closed_sessions`` holds the ids of the sessions that this client has closed.
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
        self.operation_timeout_s = _checked_seconds("operation_timeout_s", operation_timeout_s)
        self.submit_timeout_s = _checked_seconds("submit_timeout_s", submit_timeout_s)
        exchange_timeout_s = _checked_seconds("exchange_timeout_s", exchange_timeout_s)
        base_url = base_url or os.environ.get("WHITNEY_BASE_URL")
        if not base_url:
            raise ConfigurationError("no base URL: pass base_url or set WHITNEY_BASE_URL")
        key = api_key if api_key is not None else os.environ.get("WHITNEY_API_KEY")
        self._transport = Transport(
            base_url, key, timeout_s=self.submit_timeout_s, exchange_timeout_s=exchange_timeout_s, ca_file=ca_file
        )
        self.base_url = self._transport.base_url
        self.ca_file = None if ca_file is None else os.fspath(ca_file)
        self._operations = Operations(self._transport, timeout_s=self.operation_timeout_s)
        self.accepted: Counter[str] = self._operations.accepted
        self.undone: Counter[str] = self._operations.undone
        self.closed_sessions: set[str] = set()

    def __repr__(self) -> str:
        return f"WhitneyClient({self.base_url!r})"

    def close(self) -> None:
        """Close the connections that are kept for the next request. Optional: a later request opens a new one."""
        self._transport.close()

    def __enter__(self) -> WhitneyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the service offers

    def capabilities(self) -> dict[str, Any]:
        """Return what the service offers: ``{"providers": {name: {"operations": [...], "models": [...]}}}``."""
        return self._transport.exchange("GET", wire.CAPABILITIES)

    def require_operations(self, provider: str, names: Collection[str]) -> None:
        """Raise ConfigurationError unless the service offers each of these operations for ``provider``."""
        answer = self.capabilities()
        offered = answer.get(wire.OFFERED)
        if offered is None:
            providers = answer.get(wire.PROVIDERS)
            if not isinstance(providers, dict):
                raise UnexpectedResponse("capabilities: providers is not an object in the answer", outcome="rejected")
            if provider not in providers:
                message = f"{self.base_url} does not offer provider {provider!r}; it has {_listed(providers)}"
                raise ConfigurationError(message)
            entry = providers[provider]
            offered = entry.get(wire.OFFERED) if isinstance(entry, dict) else None
        if not isinstance(offered, list):
            raise UnexpectedResponse(f"capabilities: {provider}.operations is not a list", outcome="rejected")
        missing = [name for name in names if name not in offered]
        if missing:
            message = f"{self.base_url} does not offer {', '.join(missing)} for {provider}; it has {_listed(offered)}"
            raise ConfigurationError(message)

    # Sessions and runs

    def create_session(
        self, provider: str, *, idempotency_key: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Open a session and return its id. A second call with the same ``idempotency_key`` returns the same session.

        Without a key, each call opens a new session.
        """
        body = {wire.PROVIDER: provider}
        session = self._create(wire.SESSIONS, body, idempotency_key, wire.SESSION_ID, timeout_s)
        return str(session[wire.SESSION_ID])

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
        wait: bool = True,
    ) -> str:
        """Start a LoRA run of ``model`` in a session and return its id.

        ``rank`` ≥ 1. ``resume_from`` takes the ``state_id`` of a ``save_state``, and restores weights and optimizer.
        With ``wait``, return when the service has allocated the run. Raise OperationFailed if it cannot be allocated,
        OperationTimeout if that takes longer than ``operation_timeout_s``.
        """
        body: dict[str, Any] = {wire.MODEL: model, wire.LORA: {wire.RANK: rank}}
        body |= {} if seed is None else {wire.SEED: seed}
        body |= {} if resume_from is None else {wire.RESUME_FROM: resume_from}
        path = wire.path(wire.RUNS, session_id=session_id)
        run = self._create(path, body, idempotency_key, wire.RUN_ID, timeout_s)
        return self._allocated(run) if wait else str(run[wire.RUN_ID])

    def _allocated(self, run: dict[str, Any]) -> str:
        """Wait until the service has allocated a run, because it may accept no operation before; return its id."""
        run_id = str(run[wire.RUN_ID])
        if run.get(wire.STATUS) == wire.ALLOCATING:
            log(logging.WARNING, f"run {run_id} is being allocated: waiting for it")
            try:
                run = self._wait_for_run(run_id, "allocated", lambda status: status != wire.ALLOCATING, run)
            except WhitneyError as error:
                error.outcome = "unknown"  # the run was created
                raise
        if run.get(wire.STATUS) == wire.FAILED:
            raise failure(f"run {run_id}", run)
        return run_id

    def session(self, session_id: str) -> dict[str, Any]:
        """Return the session's present state: id, provider, status and its runs."""
        path = wire.path(wire.SESSION, session_id=session_id)
        return _about_session(session_id, self._transport.exchange("GET", path))

    def run(self, run_id: str) -> dict[str, Any]:
        """Return the run's present state: id, session, status and next_seq_id."""
        return _about_run(run_id, self._transport.exchange("GET", wire.path(wire.RUN, run_id=run_id)))

    def finish(self, run_id: str) -> dict[str, Any]:
        """End a run whose work is done, and return its state. Raise RequestRejected if it was cancelled or failed."""
        return _about_run(run_id, self._post(wire.path(wire.FINISH_RUN, run_id=run_id)))

    def cancel(self, run_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """End a run at once, and return its state. Queued operations will not run. May be called again."""
        return _about_run(run_id, self._post(wire.path(wire.CANCEL_RUN, run_id=run_id), timeout_s))

    def close_session(self, session_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Close a session, poll until it is closed or gone, and return its state. Open runs are cancelled.

        May be called again. Raise OperationTimeout if it is not closed after ``timeout_s``, polls included.
        """
        timeout_s = self.submit_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        session = self._post(wire.path(wire.CLOSE_SESSION, session_id=session_id), timeout_s)
        path = wire.path(wire.SESSION, session_id=session_id)
        try:
            session = wait_until(
                "closed",
                lambda status: status in wire.ENDED_SESSION,
                lambda left_s: _about_session(session_id, self._transport.poll(path, left_s)),
                _about_session(session_id, session),
                f"session {session_id}",
                timeout_s=deadline - time.monotonic(),
            )
        except RequestRejected as error:
            if error.status not in wire.GONE:
                raise
        self.closed_sessions.add(session_id)
        return session

    def wait_until_terminal(self, run_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Poll until the run has ended (finished, cancelled or failed), and return its state.

        Raise OperationTimeout after ``timeout_s``; default: the client's ``operation_timeout_s``.
        """
        return self._wait_for_run(run_id, "ended", lambda status: status in wire.ENDED_RUN, {}, timeout_s)

    def _wait_for_run(
        self,
        run_id: str,
        expected: str,
        is_reached: Callable[[str], bool],
        state: dict[str, Any],
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        path = wire.path(wire.RUN, run_id=run_id)
        return wait_until(
            expected,
            is_reached,
            lambda left_s: _about_run(run_id, self._transport.poll(path, left_s)),
            state,
            f"run {run_id}",
            timeout_s=self.operation_timeout_s if timeout_s is None else timeout_s,
        )

    # Operations

    def run_operation(
        self, run_id: str, kind: str, payload: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Do one operation of a run, such as ``forward_backward``: submit it, wait for its end and return its result.

        ``timeout_s`` limits all of it, in place of the client's ``submit_timeout_s`` and ``operation_timeout_s``.
        Raise RequestRejected if the service refuses it, OperationFailed if it fails, OperationTimeout if it does not
        end in time, RunBroken if the outcome of an earlier one is unknown, ValueError if the payload cannot be written
        as JSON. Payloads are not checked here: call ``check_payload`` first.

        If it fails and the service says that it may be repeated, it is submitted again, up to three times, unless a
        later operation of the run was submitted meanwhile. A sampler's operations do not count as later ones.
        """
        return self._operations.run(run_id, None, kind, payload, timeout_s)

    def sampler_operation(self, run_id: str, sampler_id: str, kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Do a sampler's operation, ``sample`` or ``logprobs``. It takes the run's next ``seq_id``, like any other.

        Everything else is as in ``run_operation``.
        """
        return self._operations.run(run_id, sampler_id, kind, payload)

    def run_operations(self, run_id: str, kind: str, payloads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Do an operation for each payload, in order, and return their results.

        No submission waits for a result: up to 8 threads fetch the results meanwhile. Raise what ``run_operation``
        raises for the first operation that fails; those that were submitted after it still run.
        """
        return run_all(self._operations, run_id, None, kind, payloads)

    def sampler_operations(
        self,
        run_id: str,
        sampler_id: str,
        kind: str,
        payloads: Iterable[Mapping[str, Any]],
        *,
        on_result: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Do a sampler's operation for each payload: like ``run_operations``, but the service may overlap them.

        An operation that fails and may be repeated is submitted again, as by ``run_operation``. ``on_result`` is called
        in this thread with the index of a payload and its result, in the order of arrival. Later payloads are submitted
        when it returns.
        """
        return run_all(self._operations, run_id, sampler_id, kind, payloads, on_result)

    def submit_operation(self, run_id: str, kind: str, payload: Mapping[str, Any]) -> PendingOperation:
        """Submit an operation in its order, and do not wait for its end. The pending operation's ``result()`` waits.

        Any number may be submitted before the first ``result()``. A service keeps only the newest 256 results, so an
        older result is fetched before it would be dropped. Raise what ``run_operation`` raises when it submits.
        """
        return self._operations.submit(run_id, None, kind, payload)

    def submit_sampler_operation(
        self, run_id: str, sampler_id: str, kind: str, payload: Mapping[str, Any]
    ) -> PendingOperation:
        """Submit a sampler's operation: like ``submit_operation``, but the service may overlap them.

        If the payload has ``metadata``, as in a prompt file, that is not sent.
        """
        return self._operations.submit(run_id, sampler_id, kind, payload)

    def settle(self, *, timeout_s: float | None = None) -> None:
        """Ask the service which operations of unknown outcome it took. After that, others can follow them.

        Call it after an interrupt, ServiceUnavailable or RunBroken. ``accepted`` then counts those that were taken;
        their results are lost. Those that were not taken are not sent again: submit them anew if you want them.
        Raise what ``run`` raises.
        """
        self._operations.settle(self.submit_timeout_s if timeout_s is None else timeout_s)

    # Requests

    def _create(
        self, path: str, body: dict[str, Any], idempotency_key: str | None, id_field: str, timeout_s: float | None
    ) -> dict[str, Any]:
        """Return the answer, which holds the id of what was created."""
        headers = {wire.IDEMPOTENCY_KEY: idempotency_key or os.urandom(16).hex()}
        answer = self._transport.exchange("POST", path, [as_json(body, path)], timeout_s=timeout_s, headers=headers)
        if not wire.is_id(answer.get(id_field)):
            message = f"{id_field} is {shortened(answer.get(id_field))}, expected an id"
            raise UnexpectedResponse(message, method="POST", path=path)
        return answer

    def _post(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        return self._transport.exchange("POST", path, [b"{}"], timeout_s=timeout_s)


def _about_run(run_id: str, answer: dict[str, Any]) -> dict[str, Any]:
    require_same(answer, wire.RUN_ID, run_id, f"run {run_id}")
    return answer


def _about_session(session_id: str, answer: dict[str, Any]) -> dict[str, Any]:
    require_same(answer, wire.SESSION_ID, session_id, f"session {session_id}")
    return answer


def _listed(names: Collection[object]) -> str:
    """Return the names that a service offers, on one line. The service may send anything as a name."""
    shown = [name if wire.is_id(name) else shortened(name) for name in names]
    return ", ".join(sorted(shown))[:_LONGEST_LISTING]


def _checked_seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LONGEST_TIMEOUT_S:
        message = f"{name} is {shortened(value)}, expected seconds: a number above 0, at most {_LONGEST_TIMEOUT_S:g}"
        raise ConfigurationError(message)
    return value
