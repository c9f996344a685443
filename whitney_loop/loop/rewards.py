"""The user's reward: found by ``--reward``, computed as soon as a sample has arrived, asked for by ``ctx.reward``."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from whitney_loop.callables import callable_of, load_module, optional_callable, require_parameters
from whitney_loop.loop.options import UsageError
from whitney_loop.loop.prompts import Request
from whitney_loop.loop.report import CallableError
from whitney_loop.loop.signals import raise_if_signalled

DEFAULT = "grpo_build_loss:reward"  # the share of vowels, which the embedded model can learn
LONGEST_WAIT_S = 0.2  # at a stretch: a wait without end is not always interrupted by a Ctrl-C


class Rewards:
    """The user's reward function, and the rewards of the completions of a cycle.

    ``function(text, request)`` gets the text that ``decode(tokens)`` returns, or the tokens if there is no ``decode``.
    With one thread, rewards are computed in the loop's own; with several, side by side in daemon threads.
    """

    def __init__(self, function: Callable[..., Any], decode: Callable[..., Any] | None, threads: int = 1) -> None:
        self.is_asked = False  # by a build_loss, which may also have a reward of its own
        self._function = function
        self.decode = decode
        self._cycle = 0
        # By the id of the sequence: the sequence, kept so that its id is not used again, its request and its reward.
        self._started: dict[int, tuple[Mapping[str, Any], Mapping[str, Any], Future[float]]] = {}
        self._jobs = _start_threads(threads) if threads > 1 else None

    def begin(self, cycle: int) -> None:
        """Forget the completions of the cycle before."""
        self._cycle = cycle
        self._started.clear()

    def start(self, sequences: Sequence[Mapping[str, Any]], request: Request) -> None:
        """Start to compute the rewards of the completions of a request, which have just arrived."""
        own_copy = copy.deepcopy(request)  # the user's function may change it
        for index, sequence in enumerate(sequences):
            where = f"in cycle {self._cycle} for {request.where}, sequences[{index}]"
            compute = functools.partial(self._compute, sequence, own_copy, where)
            future: Future[float] = Future()
            if self._jobs is None:
                future.set_result(compute())
                raise_if_signalled()  # a bare ``except:`` of the user's may have caught the exception of a Ctrl-C
            else:
                self._jobs.put((future, compute))
            self._started[id(sequence)] = sequence, request, future

    def of(self, sequence: Mapping[str, Any], request: Mapping[str, Any]) -> float:
        """Return the reward of a completion: ``ctx.reward``. One that was not started is computed now."""
        self.is_asked = True
        if id(sequence) in self._started:
            _, started_for, future = self._started[id(sequence)]
            if started_for == request:
                while not future.done():
                    wait([future], LONGEST_WAIT_S)
                return future.result()
        where = f"in cycle {self._cycle} for {getattr(request, 'where', 'a changed request')}"
        return self._compute(sequence, request, where)

    def known(self, sequence: Mapping[str, Any]) -> float | None:
        """Return the reward of a completion, if it was started and is computed."""
        if id(sequence) not in self._started:
            return None
        _, _, future = self._started[id(sequence)]
        return future.result() if future.done() and future.exception() is None else None

    def _compute(self, sequence: Mapping[str, Any], request: Mapping[str, Any], where: str) -> float:
        """Call the user's function. Raise CallableError if it raises, or returns no finite number."""
        completion: Any = list(sequence["tokens"])
        called = "decode"
        try:
            if self.decode:
                completion = self.decode(completion)
                if not isinstance(completion, str):
                    raise TypeError(f"it returned {type(completion).__name__}, expected str")
            called = "reward"
            value = self._function(completion, request)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise CallableError(f"{called} raised {type(error).__name__} {where}: {error}") from error
        number = _as_number(value)
        if not math.isfinite(number):
            hint = " (is its return missing?)" if value is None else ""
            raise CallableError(f"reward returned {value!r:.80} {where}{hint}: expected a finite number")
        return number


def load_rewards(spec: str | None, threads: int) -> Rewards:
    """Load the function that ``MODULE:CALLABLE`` names, or the default. Raise UsageError if it cannot be used."""
    option = "--reward"
    try:
        module, name = load_module(spec or DEFAULT, option)
        function = callable_of(module, name, option)
        decode = optional_callable(module, "decode", ("tokens",), option)
        require_parameters(function, name, ("text" if decode else "tokens", "request"), option)
    except ValueError as error:
        raise UsageError(f"{error}") from None
    return Rewards(function, decode, threads)


def _as_number(value: Any) -> float:
    """Return the value, perhaps of numpy or torch, as a float; NaN if it is not a number."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        return math.nan


def _start_threads(count: int) -> SimpleQueue[tuple[Future[float], Callable[[], float]]]:
    """Return the queue of ``count`` new threads. At the end of the process they are left: a reward may hang.

    The threads of concurrent.futures.ThreadPoolExecutor would be waited for.
    """
    jobs: SimpleQueue[tuple[Future[float], Callable[[], float]]] = SimpleQueue()
    for _ in range(count):
        threading.Thread(target=_work, args=(jobs,), daemon=True).start()
    return jobs


def _work(jobs: SimpleQueue[tuple[Future[float], Callable[[], float]]]) -> None:
    while True:
        future, compute = jobs.get()
        try:
            future.set_result(compute())
        except BaseException as error:  # ctx.reward raises it
            future.set_exception(error)
