"""The embedded service without HTTP: sessions and their runs.

The rules for one run are in ``run.py``, those for the body of a request in ``requests.py``.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from whitney_loop.local.byte_lm import ByteLMBackend
from whitney_loop.local.engine import Backend, JSONObject
from whitney_loop.local.requests import (
    RUN_KINDS,
    SAMPLER_KINDS,
    ServiceError,
    operation_request,
    run_request,
    session_request,
)
from whitney_loop.local.run import Run
from whitney_loop.local.storage import Storage
from whitney_loop.losses import LOSS_SUPPORT

_SESSIONS_WITH_RESULTS = 16  # the newest; results can take megabytes, so older ended sessions lose theirs
_SESSIONS_KEPT = 1_000  # the service may run for weeks, so beyond this number the oldest ended session is forgotten
_RUNS_PER_SESSION = 256  # each active run needs a thread and a model


@dataclass
class Session:
    """A session with a provider, and its runs."""

    provider: str
    key: str | None  # the Idempotency-Key of the request that created it
    session_id: str = field(default_factory=lambda: f"ses-{secrets.token_hex(8)}")
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
    """Answers the requests of the HTTP front: takes and returns JSON bodies, or raises ServiceError.

    ``key`` is the Idempotency-Key: a second request with the same key returns the session or run of the first.
    ``backend`` trains; None: the embedded byte-lm. Raise OSError if ``storage`` cannot be written.
    """

    def __init__(self, storage: Path, backend: Backend | None = None) -> None:
        self._backend = backend or ByteLMBackend()
        self._storage = Storage(storage, self._backend.name)
        self._sessions: dict[str, Session] = {}
        self._runs: dict[str, Run] = {}
        self._stopping = False
        self._lock = threading.Lock()  # held while sessions and runs are created, closed and forgotten

    def capabilities(self) -> JSONObject:
        offer = {"operations": [*RUN_KINDS, *SAMPLER_KINDS], "models": [self._backend.model]}
        return {"providers": dict.fromkeys(LOSS_SUPPORT, offer)}

    def create_session(self, body: JSONObject, key: str | None) -> JSONObject:
        with self._lock:
            for existing in self._sessions.values():
                if key is not None and existing.key == key:
                    return existing.body()
            provider = session_request(body)
            if self._stopping:
                raise ServiceError(503, "shutting_down", "the service is ending; start it again")
            self._make_room()
            session = Session(provider, key)
            self._sessions[session.session_id] = session
            return session.body()

    def session(self, session_id: str) -> JSONObject:
        return self._session(session_id).body()

    def close_session(self, session_id: str) -> JSONObject:
        """Cancel every run in the session. Do not wait for their end."""
        with self._lock:
            session = self._session(session_id)
            session.status = "closed"
            for run in session.runs:
                run.cancel()
            return session.body()

    def create_run(self, session_id: str, body: JSONObject, key: str | None) -> JSONObject:
        with self._lock:
            session = self._session(session_id)
            run = session.runs_by_key.get(key) if key is not None else None
            if run is None:
                run = self._new_run(session, body)
                if key is not None:
                    session.runs_by_key[key] = run
        return run.allocated()  # without the lock, since this waits for the engine

    def _new_run(self, session: Session, body: JSONObject) -> Run:
        if session.status != "open":
            message = f"session {session.session_id} is closed; create another session"
            raise ServiceError(409, "session_not_open", message)
        settings = run_request(session.provider, body, self._backend)
        if len(session.runs) >= _RUNS_PER_SESSION:
            message = f"session {session.session_id} holds {_RUNS_PER_SESSION} runs; create another session"
            raise ServiceError(409, "too_many_runs", message)
        most, active = self._backend.most_runs, sum(not run.ended for run in self._runs.values())
        if most is not None and active >= most:
            message = f"{active} runs are active, and {self._backend.name} takes at most {most}; finish or cancel one"
            raise ServiceError(422, "too_many_runs", message)
        self._storage.check_state(settings)
        run = Run(session.session_id, settings, self._backend, self._storage)
        self._runs[run.run_id] = run
        session.runs.append(run)
        return run

    def run(self, run_id: str) -> JSONObject:
        return self._run(run_id).body()

    def finish_run(self, run_id: str) -> JSONObject:
        return self._run(run_id).finish()

    def cancel_run(self, run_id: str) -> JSONObject:
        return self._run(run_id).cancel()

    def submit(self, run_id: str, body: JSONObject, sampler_id: str | None = None) -> JSONObject:
        run = self._run(run_id)
        seq_id, kind, payload = operation_request(body)
        return run.submit(seq_id, kind, payload, sampler_id)

    def operation(self, run_id: str, operation_id: str, wait_s: float) -> JSONObject:
        return self._run(run_id).operation(operation_id, wait_s)

    def stop(self, timeout_s: float) -> None:
        """Close every session and wait for the workers, at most ``timeout_s`` seconds for all together."""
        with self._lock:
            self._stopping = True
            for session in self._sessions.values():
                session.status = "closed"
            workers = [run.stop() for run in self._runs.values()]
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _session(self, session_id: str) -> Session:
        if (session := self._sessions.get(session_id)) is None:
            raise ServiceError(404, "not_found", f"there is no session {session_id!r} here")
        return session

    def _run(self, run_id: str) -> Run:
        if (run := self._runs.get(run_id)) is None:
            raise ServiceError(404, "not_found", f"there is no run {run_id!r} here")
        return run

    def _make_room(self) -> None:
        """Forget old results, and the oldest ended session if the limit is reached.

        Raise ServiceError if it is reached and no session has ended.
        """
        for session in list(self._sessions.values())[:-_SESSIONS_WITH_RESULTS]:
            if session.has_ended:
                for run in session.runs:
                    run.forget_operations()
        if len(self._sessions) < _SESSIONS_KEPT:
            return
        oldest = next((session for session in self._sessions.values() if session.has_ended), None)
        if oldest is None:
            raise ServiceError(429, "too_many_sessions", f"{_SESSIONS_KEPT} sessions are open; close some of them")
        del self._sessions[oldest.session_id]
        for run in oldest.runs:
            del self._runs[run.run_id]
