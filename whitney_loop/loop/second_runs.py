"""Runs beside the policy's, by name: a critic, a frozen reference, a teacher."""

from __future__ import annotations

from contextlib import ExitStack

from whitney_loop.build_loss import LoopContext, SecondRun
from whitney_loop.errors import RequestRejected
from whitney_loop.lifecycle import lora_run
from whitney_loop.loop.history import History
from whitney_loop.loop.options import LoopOptions


class SecondRuns:
    """The second runs of a training; ``open`` is ``ctx.second_run``."""

    def __init__(self, options: LoopOptions, ctx: LoopContext, history: History) -> None:
        self._options = options
        self._ctx = ctx
        self._history = history
        self._open: dict[str, tuple[SecondRun, ExitStack]] = {}

    def open(
        self, name: str, *, rank: int | None = None, state_id: str | None = None, frozen: bool = False
    ) -> SecondRun:
        """Return the run of this name; see LoopContext.second_run."""
        if name in self._open:
            run, resources = self._open[name]
            if rank not in (None, run.rank) or frozen != run.frozen:
                raise ValueError(
                    f"second_run({name!r}) was opened with rank {run.rank} and frozen {run.frozen}, not with rank "
                    f"{rank} and frozen {frozen}: give another run another name"
                )
            if state_id in (None, run.state_id):
                return run
            resources.close()
        if not isinstance(name, str) or not name:
            raise ValueError(f"second_run: name is {name!r}, expected a text, such as 'critic'")
        rank = self._options.lora_rank if rank is None else rank
        if type(rank) is not int or rank < 1:
            raise ValueError(f"second_run({name!r}): rank is {rank!r}, expected an integer of at least 1")
        if state_id is None:
            state_id = self._resumed_state(name)
        ctx, resources = self._ctx, self._ctx.resources.enter_context(ExitStack())
        new_run = lora_run(
            ctx.client,
            ctx.session_id,
            model=ctx.model,
            rank=rank,
            seed=self._options.seed,
            resume_from=state_id,
        )
        try:
            run_id = resources.enter_context(new_run)
        except RequestRejected as error:
            error.message = f"second_run({name!r}) with state_id {state_id!r} and rank {rank}: {error.message}"
            raise
        run = SecondRun(ctx.client, run_id, state_id, rank, frozen)
        self._open[name] = run, resources
        return run

    def save(self, timeout_s: float | None = None) -> dict[str, str | None]:
        """Save each run that is not frozen; return the state of each by name, None for the base model."""
        states = dict(self._history.second_runs)  # one that was not asked for since the resumption keeps its state
        for name, (run, _) in self._open.items():
            if not run.frozen:
                saved = self._ctx.client.run_operation(run.run_id, "save_state", {}, timeout_s=timeout_s)
                run.state_id = saved["state_id"]
            states[name] = run.state_id
        return states

    def _resumed_state(self, name: str) -> str | None:
        """Return the run's state in the resumed training, if there is one. Raise ValueError if no file holds it."""
        history = self._history
        if history.first_cycle and not history.configs:
            raise ValueError(
                f"the second run {name!r} cannot be resumed: its state is in the metrics file of the run; give it by "
                "--metrics instead of --first-cycle"
            )
        return history.second_runs.get(name)
