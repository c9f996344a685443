"""Many operations of a run: submitted one after the other, while threads fetch the results of those before."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from whitney_loop.connections import HangUp
from whitney_loop.errors import OperationTimeout, WhitneyError, log
from whitney_loop.operations import PendingOperation
from whitney_loop.waiting import PATIENCE_S

THREAD_NAME = "whitney_loop.fetching"
_MOST_THREADS = 8  # each holds a connection while it waits


def do_all(
    submit: Callable[[Mapping[str, Any], HangUp], PendingOperation],
    payloads: Iterable[Mapping[str, Any]],
    on_result: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Submit every payload, in order, and return the results in that order.

    ``on_result`` is called in this thread, with the index of the payload and its result, as each result arrives. An
    error is raised when all results before it have come, with its ``index`` and its ``payload``.
    """
    fetchers = _Fetchers()
    outcomes: dict[int, Any] = {}  # results and errors, by index
    results: list[dict[str, Any]] = []

    def receive() -> None:
        index, outcome = fetchers.next()
        outcomes[index] = outcome
        if on_result is not None and isinstance(outcome, dict):
            on_result(index, outcome)

    try:
        for payload in payloads:
            fetchers.submit(submit, payload)
            while fetchers.has_next():
                receive()
        while len(results) < fetchers.submitted:
            while len(results) not in outcomes:
                receive()
            outcome = outcomes.pop(len(results))
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
    finally:
        fetchers.end()
    return results


class _Fetchers:
    """Daemon threads that fetch results, so that one that still waits does not delay the end of the process."""

    def __init__(self) -> None:
        self.submitted = 0
        self._hang_up = HangUp()
        self._accepted: SimpleQueue[tuple[int, Any, PendingOperation] | None] = SimpleQueue()
        self._arrived: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._ended = 0  # operations

    def submit(self, submit: Callable[..., PendingOperation], payload: Mapping[str, Any]) -> None:
        try:
            operation = submit(payload, self._hang_up)
        except WhitneyError as error:
            error.index, error.payload = self.submitted, payload
            raise
        self._accepted.put((self.submitted, payload, operation))
        self.submitted += 1
        if self.submitted <= _MOST_THREADS:
            threading.Thread(target=self._fetch, name=THREAD_NAME, daemon=True).start()

    def has_next(self) -> bool:
        return not self._arrived.empty()

    def next(self) -> tuple[int, Any]:
        """Wait for an index and the result, or the error, of its operation."""
        while True:
            try:
                return self._arrived.get(timeout=PATIENCE_S)
            except Empty:
                log(
                    logging.WARNING,
                    f"{self._ended} of {self.submitted} operations have ended, none in the last {PATIENCE_S:.0f} s",
                )

    def end(self) -> None:
        """End the threads. Nobody needs what they still wait for."""
        self._hang_up()
        for _ in range(_MOST_THREADS):
            self._accepted.put(None)

    def _fetch(self) -> None:
        while accepted := self._accepted.get():
            index, payload, operation = accepted
            try:
                outcome = self._result(operation)
            except BaseException as error:
                if isinstance(error, WhitneyError):
                    error.index, error.payload = index, payload
                outcome = error
            self._ended += 1
            self._arrived.put((index, outcome))

    def _result(self, operation: PendingOperation) -> Any:
        while True:
            ended = self._ended
            try:
                return operation.result()
            except OperationTimeout:
                if self._ended == ended:
                    raise
                # Those before it have ended meanwhile, and its turn may have come only now.
