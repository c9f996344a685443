"""Many operations of a run: submitted one after the other, while threads fetch the results of earlier ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from whitney_loop.connections import HangUp
from whitney_loop.errors import OperationFailed, OperationTimeout, WhitneyError, log
from whitney_loop.operations import REPEAT_PAUSES_S, Operations, PendingOperation
from whitney_loop.waiting import PATIENCE_S

THREAD_NAME = "whitney_loop.fetching"
_MOST_THREADS = 8  # each holds a connection while it waits


def run_all(
    operations: Operations,
    run_id: str,
    sampler_id: str | None,
    kind: str,
    payloads: Iterable[Mapping[str, Any]],
    on_result: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Submit an operation for each payload, in order, and return the results in that order.

    ``on_result`` is called in this thread, with the index of the payload and its result, as each result arrives. An
    error is raised when all results before it have arrived, with the ``index`` and the ``payload`` of its operation. If
    a sampler's operation fails and may be repeated, it is. An operation of the run is not, because others follow it.
    """
    fetchers = _Fetchers(operations, on_result)
    try:
        for payload in payloads:
            fetchers.submit(run_id, sampler_id, kind, payload)
        return fetchers.results()
    finally:
        fetchers.end()


class _Fetchers:
    """Threads that fetch results. They are daemons, so that a wait does not delay the end of the process."""

    def __init__(self, operations: Operations, on_result: Callable[[int, dict[str, Any]], None] | None) -> None:
        self._operations = operations
        self._on_result = on_result
        self._hang_up = HangUp()
        self._submitted = 0
        self._accepted: SimpleQueue[tuple[int, PendingOperation, Mapping[str, Any]] | None] = SimpleQueue()
        self._ended = 0  # number of operations whose result or error is known
        self._arrived: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._outcomes: dict[int, Any] = {}  # results and errors, by index

    def submit(self, run_id: str, sampler_id: str | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Submit one operation, then pass on the results that have arrived."""
        try:
            operation = self._operations.submit(run_id, sampler_id, kind, payload, hang_up=self._hang_up)
        except WhitneyError as error:
            error.index, error.payload = self._submitted, payload
            raise
        self._accepted.put((self._submitted, operation, payload))
        self._submitted += 1
        if self._submitted <= _MOST_THREADS:
            threading.Thread(target=self._fetch, name=THREAD_NAME, daemon=True).start()
        while not self._arrived.empty():
            self._receive()

    def results(self) -> list[dict[str, Any]]:
        """Wait for all results and return them. Raise the first error in the order of the payloads."""
        for index in range(self._submitted):
            while index not in self._outcomes:
                self._receive()
            if isinstance(self._outcomes[index], BaseException):
                raise self._outcomes[index]
        return [self._outcomes[index] for index in range(self._submitted)]

    def end(self) -> None:
        """End the threads. Nobody needs the results that they still wait for."""
        self._hang_up()
        for _ in range(_MOST_THREADS):
            self._accepted.put(None)

    def _receive(self) -> None:
        """Wait for one result or error. Keep it, and pass a result on to ``on_result``."""
        while True:
            try:
                index, outcome = self._arrived.get(timeout=PATIENCE_S)
                break
            except Empty:
                ended = f"{self._ended} of {self._submitted} operations have ended"
                log(logging.WARNING, f"{ended}, none in the last {PATIENCE_S:.0f} s")
        self._outcomes[index] = outcome
        if self._on_result is not None and isinstance(outcome, dict):
            self._on_result(index, outcome)

    def _fetch(self) -> None:
        while accepted := self._accepted.get():
            index, operation, payload = accepted
            try:
                outcome: Any = self._result(operation, payload)
            except BaseException as error:
                if isinstance(error, WhitneyError):
                    error.index, error.payload = index, payload
                outcome = error
            self._ended += 1
            self._arrived.put((index, outcome))

    def _result(self, operation: PendingOperation, payload: Mapping[str, Any]) -> dict[str, Any]:
        pauses_s = [] if operation.sampler_id is None else list(REPEAT_PAUSES_S)
        while True:
            ended = self._ended
            try:
                return operation.result()
            except OperationTimeout:
                if self._ended == ended:
                    raise
                # Earlier operations have ended meanwhile, so its turn may have come only now: wait again.
            except OperationFailed as error:
                if not pauses_s:
                    raise
                operation = self._operations.repeat(operation, payload, error, pauses_s.pop(0))
