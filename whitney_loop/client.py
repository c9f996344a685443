"""WhitneyClient: sessions, runs, and operations that are ordered and run exactly once.

Whitney's documentation fixes the names of the operations, of the helpers and of one path. The rest of the wire is this
project's reading. It stands in ``wire.py``: if your deployment differs, edit it there.
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
from whitney_loop.wire import is_id as is_id

_LONGEST_LISTING = 400  # characters; the names of the contract take half of it
_LONGEST_TIMEOUT_S = 1e9  # 30 years; a socket takes no more than 290


class WhitneyClient:
    """A client of one Whitney service. Thread-safe; the operations of one run are sent in the order of the calls.

    A run has one client: it counts the run's operations, and a second one's would take the same numbers. Two clients
    that send the same operation at the same number both get the result of the one that ran.

    ::

        client = WhitneyClient("https://whitney.example", "my key")
        with training_session(client, provider="modal") as session_id:
            with lora_run(client, session_id, model="my-model", rank=8) as run_id:
                saved = client.run_operation(run_id, "save_weights_for_sampler", {})

    ``base_url`` and ``api_key`` default to WHITNEY_BASE_URL and WHITNEY_API_KEY; no host is guessed. In seconds, each
    more than 0: ``operation_timeout_s`` from an operation's submission to its result, ``submit_timeout_s`` until any
    other request is answered, retries included, ``exchange_timeout_s`` for one attempt. TLS is always verified; the
    authorities in ``ca_file`` (PEM) are trusted instead of the system's. Raise ConfigurationError if one of these
    cannot be used.

    ``accepted`` counts the operations that the service took, by kind; ``undone`` those of them that are known to have
    ended without effect. ``closed_sessions`` holds the ids of the sessions that this client has closed.
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
            raise ConfigurationError("no base URL: pass base_url or set WHITNEY_BASE_URL", outcome="not_sent")
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
        """Close the connections that are kept for the next request. Optional; a request that follows opens one."""
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
                raise ConfigurationError(
                    f"{self.base_url} does not offer provider {provider!r}; it has {_listed(providers)}",
                    outcome="not_sent",
                )
            entry = providers[provider]
            offered = entry.get(wire.OFFERED) if isinstance(entry, dict) else None
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
        """Open a session and return its id. A second call with the same ``idempotency_key`` returns the same session.

        Default of the key: a new one.
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

        ``rank`` ≥ 1. ``resume_from`` takes the ``state_id`` of a ``save_state``: its weights and its optimizer. With
        ``wait``, a run that the service is still allocating is awaited, as long as an operation would be. Raise
        OperationFailed if that fails, OperationTimeout if it takes longer.
        """
        body: dict[str, Any] = {wire.MODEL: model, wire.LORA: {wire.RANK: rank}}
        body |= {} if seed is None else {wire.SEED: seed}
        body |= {} if resume_from is None else {wire.RESUME_FROM: resume_from}
        path = wire.path(wire.RUNS, session_id=session_id)
        run = self._create(path, body, idempotency_key, wire.RUN_ID, timeout_s)
        return self._allocated(run) if wait else str(run[wire.RUN_ID])

    def _allocated(self, run: dict[str, Any]) -> str:
        """Wait while the service allocates a run, which may accept no operation until then; return its id."""
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
        """End a run at once, and return its state: queued operations will not run. May be called again."""
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
        """Do one operation of a run (``forward_backward``, ``optim_step`` …), wait for its end and return its result.

        ``timeout_s`` limits all of it, in place of the client's ``submit_timeout_s`` and ``operation_timeout_s``.
        Raise RequestRejected if the service refuses it, OperationFailed if it fails, OperationTimeout if it does not
        end in time, RunBroken if the outcome of an earlier one is unknown, ValueError if the payload is no JSON.
        Payloads are not judged here: call ``check_payload`` first.

        An operation that fails with the service's word that it may be repeated is submitted again, up to three times,
        if no other operation of the run, sampler operations excepted, was submitted since.
        """
        return self._operations.run(run_id, None, kind, payload, timeout_s)

    def sampler_operation(self, run_id: str, sampler_id: str, kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Do a sampler's operation, ``sample`` or ``logprobs``; it takes the run's next ``seq_id`` too.

        Otherwise like ``run_operation``.
        """
        return self._operations.run(run_id, sampler_id, kind, payload)

    def run_operations(self, run_id: str, kind: str, payloads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Do an operation for each payload, in order, and return their results.

        No submission waits for a result; results are fetched by up to 8 threads meanwhile. Raise what
        ``run_operation`` raises for the first that fails; those that were submitted after it still run.
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

        One that fails and may be repeated is submitted again, as by ``run_operation``. ``on_result`` is called with the
        index of a payload and its result as soon as that has arrived, in the order of arrival and in this thread; later
        payloads are submitted when it returns.
        """
        return run_all(self._operations, run_id, sampler_id, kind, payloads, on_result)

    def submit_operation(self, run_id: str, kind: str, payload: Mapping[str, Any]) -> PendingOperation:
        """Submit an operation in its order and do not wait for its end: the ``result()`` of what it returns does.

        Any number may be submitted before the first result is awaited: a service keeps the newest 256 results, so an
        older one is fetched before it would be dropped. Raise what ``run_operation`` raises until then.
        """
        return self._operations.submit(run_id, None, kind, payload)

    def submit_sampler_operation(
        self, run_id: str, sampler_id: str, kind: str, payload: Mapping[str, Any]
    ) -> PendingOperation:
        """Submit a sampler's operation: like ``submit_operation``, but the service may overlap them.

        ``metadata`` beside the payload's fields, as a prompt file may have it, is not sent.
        """
        return self._operations.submit(run_id, sampler_id, kind, payload)

    def settle(self, *, timeout_s: float | None = None) -> None:
        """Ask the service what became of the operations whose outcome is unknown: after it, others can follow them.

        Call it after an interrupt, ServiceUnavailable or RunBroken. ``accepted`` then counts those that were taken;
        their results are lost. Those that were not taken must not be sent later: submit them again if they are wanted.
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
        made = answer.get(id_field)
        if not wire.is_id(made):
            raise UnexpectedResponse(
                f"{id_field} is {shortened(made)} in the answer, not an id",
                outcome="unknown",
                method="POST",
                path=path,
            )
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
    """Return the names that a service offers, on one line; they may be anything."""
    shown = [name if wire.is_id(name) else shortened(name) for name in names]
    return ", ".join(sorted(shown))[:_LONGEST_LISTING]


def _checked_seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LONGEST_TIMEOUT_S:
        raise ConfigurationError(
            f"{name} is {shortened(value)}, expected seconds: a number above 0, at most {_LONGEST_TIMEOUT_S:g}",
            outcome="not_sent",
        )
    return value
