"""What a loop's ``train`` gets: the cycles of an open run, and the places that keep their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whitney_loop import wire
from whitney_loop.build_loss import LoopContext
from whitney_loop.errors import RequestRejected
from whitney_loop.loop.finite import is_not_finite, not_finite, reported_loss
from whitney_loop.loop.history import History
from whitney_loop.loop.metrics import Payload
from whitney_loop.loop.options import LoopOptions
from whitney_loop.loop.progress import progress_line
from whitney_loop.loop.report import Summary, say
from whitney_loop.loop.schedule import full_optimizer, scheduled_optimizer
from whitney_loop.loop.second_runs import SecondRuns
from whitney_loop.loop.signals import raise_if_signalled
from whitney_loop.loop.stops import Stops
from whitney_loop.loop.warnings import Warnings

# For the state that is saved before an early end. A supervisor such as "docker stop" kills after 10 s, and cancelling
# and closing come after it.
LAST_SAVE_S = 5.0


class Training:
    """What a loop's ``train`` gets: the client and the run to call, and the places to report to."""

    def __init__(
        self,
        options: LoopOptions,
        ctx: LoopContext,
        cycles: range,
        history: History,
        summary: Summary,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.client = ctx.client
        self.run_id = ctx.run_id
        self.ctx = ctx
        self.seed = options.seed or 0
        self.optimizer = full_optimizer(options)  # of a second run; each cycle has its own
        self.summary = summary
        self.warnings = Warnings(summary.warnings)
        self.samples = history.samples  # the file of --samples
        self.decode = decode  # of the engine
        self.earlier_cycles = history.cycles  # the records of the run that is resumed
        self._second_runs = SecondRuns(options, ctx, history)
        ctx.second_run = self._second_runs.open
        self._options = options
        self._cycles = cycles
        self._history = history
        self._started = self._cycle_started = time.monotonic()
        self._shown: Any = None  # the first metric of the last line of progress
        self._tokens = 0  # sampled and trained until then
        self._stops = Stops(options, history.cycles)
        summary.ended_by = self._stops.reached(0)  # a resumed run may have reached its goal
        self.next_cycle = cycles.start  # after the last whole cycle
        self._whole_steps = 0  # optimizer steps by the end of that cycle

    def cycles(self) -> Iterator[int]:
        """Yield the numbers of the cycles to train, until all are done or an option ends the training."""
        for cycle in self._cycles:
            if self.summary.ended_by:
                say(f"{self.summary.ended_by} is reached: the training ends before cycle {cycle}")
                return
            raise_if_signalled()
            self._cycle_started = time.monotonic()
            self.optimizer = scheduled_optimizer(self._options, cycle, self._cycles.stop)
            yield cycle

    def record(self, entry: Mapping[str, Any], shown: Mapping[str, Any], note: str = "") -> None:
        """Keep the metrics of a cycle, and print its line of progress: the metrics in ``shown``, and a note behind it.

        ``entry["cycle"]`` is its number; with ``entry["skipped"]`` it counts as one without an optimizer step.
        """
        self.summary.cycles_skipped += "skipped" in entry
        self.summary.cycles_done += "skipped" not in entry
        self.next_cycle, self._whole_steps = entry["cycle"] + 1, self._steps()
        self._history.write(entry)
        self._stops.take(entry)
        tokens = self.summary.tokens_sampled + self.summary.tokens_trained
        self.summary.ended_by = self._stops.reached(tokens)
        say(f"{self._line(entry['cycle'], shown, tokens)}  {note}".rstrip())
        if entry["cycle"] == self._cycles.start:
            self.warnings.unknown_metrics(self._stops.unknown(), entry)
            if self._history.state_id:
                self.warnings.lost_state(sorted(map(str, self.ctx.state)))

    def _line(self, cycle: int, shown: Mapping[str, Any], tokens: int) -> str:
        now = time.monotonic()
        before, self._shown = self._shown, next(iter(shown.values()))
        tokens_before, self._tokens = self._tokens, tokens
        seconds_left = (
            (now - self._started) / (self.next_cycle - self._cycles.start) * (self._cycles.stop - self.next_cycle)
        )
        if self._options.max_minutes is not None:
            seconds_left = min(seconds_left, max(0, 60 * self._options.max_minutes - (now - self._started)))
        tokens_per_s = (tokens - tokens_before) / max(now - self._cycle_started, 1e-9)
        return progress_line(cycle, shown, before, tokens_per_s=tokens_per_s, tokens=tokens, seconds_left=seconds_left)

    def record_evaluation(self, entry: Mapping[str, Any], line: str) -> None:
        """Keep the metrics of an evaluation before the cycle ``entry["cycle"]``, and print a line."""
        self._history.write(entry)
        self._stops.take(entry)
        say(line)

    def stop_if_nan(self, cycle: int, payloads: Sequence[Payload], results: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if a result of ``forward_backward`` holds a number that is NaN or infinite.

        Call it before ``optim_step``, which would put that number into the weights.
        """
        self._note_unreported("loss", reported_loss(results[0]))
        self._note_unreported("outputs", results[0].get("outputs"))
        if found := not_finite(payloads, results):
            raise ValueError(
                f"forward_backward of cycle {cycle}: {found}, so no optim_step was made. {self._last_good_state()}"
            )

    def stop_if_nan_gradient(self, cycle: int, step: Mapping[str, Any]) -> None:
        """Raise ValueError if the gradient's norm, in the result of ``optim_step``, is NaN or infinite."""
        norm = step.get("grad_norm")
        self._note_unreported("grad_norm", norm)
        if is_not_finite(norm):
            raise ValueError(
                f"optim_step of cycle {cycle}: grad_norm is {norm}: its weights are useless. {self._last_good_state()}"
            )

    def _note_unreported(self, name: str, value: object) -> None:
        if value is None:
            self.warnings.once(f"no_{name}", f"the service reports no {name}, so it is neither checked nor kept")

    def _last_good_state(self) -> str:
        state_id = self.summary.state_id or self._history.state_id
        return f"The last good state is {state_id}" if state_id else "No state was saved before it"

    def record_step(self, metrics: Mapping[str, Any], shown: str, step: Mapping[str, Any], tokens: int) -> None:
        """Record a cycle of one ``optim_step``, whose result is ``step``, on so many tokens.

        ``metrics`` are its number and what it was judged by; the line of progress shows the one that ``shown`` names.
        """
        self.stop_if_nan_gradient(metrics["cycle"], step)
        norm = step.get("grad_norm")
        optim = {"optim/grad_norm": norm, "optim/learning_rate": self.optimizer["learning_rate"]}
        seconds = time.monotonic() - self._cycle_started
        self.summary.tokens_trained += tokens
        entry = {**metrics, **optim, "tokens": tokens, "time/total": seconds}
        self.record(entry, {shown: metrics[shown], "grad_norm": norm})

    def is_first_or_last(self, cycle: int) -> bool:
        return cycle in (self._cycles.start, self._cycles.stop - 1) or bool(self.summary.ended_by)

    def saves_after(self, cycle: int) -> bool:
        """Return whether ``--save-every`` wants a state after this cycle. After the last cycle one is saved anyway."""
        every = self._options.save_every
        is_last = cycle + 1 == self._cycles.stop or self.summary.ended_by
        return every is not None and (cycle + 1) % every == 0 and not is_last

    def saved(self, result: Mapping[str, Any], *, next_cycle: int, timeout_s: float | None = None) -> None:
        """Keep the state that ``save_state`` gave, from which ``next_cycle`` can be trained; save second runs too."""
        state_id = result.get("state_id")
        if state_id is None:
            say("warning: save_state gave no state_id: this run cannot be resumed")
            return
        second_runs = self._second_runs.save(timeout_s)
        self.summary.state_id, self.summary.next_cycle = state_id, next_cycle
        state = {"state_id": state_id, "next_cycle": next_cycle}
        self._history.write(state | ({"second_runs": second_runs} if second_runs else {}))
        if next_cycle < self._cycles.stop:
            say(f"saved {state_id}: the next cycle is {next_cycle}")

    def _steps(self) -> int:
        """Return the number of optimizer steps that were, or may have been, made in all runs."""
        return self.client.accepted["optim_step"] - self.client.undone["optim_step"]

    def save_before_end(self) -> None:
        """Save the weights of the last whole cycle, if the run still has them and no state does.

        Raise only the KeyboardInterrupt of a signal.
        """
        cycle = self.next_cycle
        if cycle in (self._cycles.start, self.summary.next_cycle):
            return
        deadline = time.monotonic() + LAST_SAVE_S
        try:
            for attempt in (1, 2):
                self.client.settle(timeout_s=max(deadline - time.monotonic(), 0))
                if self._steps() != self._whole_steps:
                    say(f"no state is saved: cycle {cycle} has made an optimizer step, and a state is of whole cycles")
                    return
                left_s = max(deadline - time.monotonic(), 0)
                try:
                    result = self.client.run_operation(self.run_id, "save_state", {}, timeout_s=left_s)
                    break
                except RequestRejected as error:
                    # The interrupted operation may arrive only now and take the seq_id: then settle it again.
                    if error.code not in wire.ORDER_LOST or attempt == 2:
                        raise
            self.saved(result, next_cycle=cycle, timeout_s=max(deadline - time.monotonic(), 0))
        except ValueError as error:  # of the metrics file
            say(f"warning: {error}. To resume, give another --metrics, and --first-cycle {cycle} --seed {self.seed}")
        except BaseException as error:
            say(f"no state is saved: {error}")
            if not isinstance(error, Exception):
                raise

    def exported(self, result: Mapping[str, Any]) -> None:
        """Keep where ``export_lora`` put the adapter."""
        self.summary.artifact = dict(result)
