"""Evaluation on held-out prompts (``--eval-json``): every N cycles, with the weights from before that cycle's training.

Each evaluation is a line of its own in the metrics file, ``{"cycle": …, "eval/…": …}``.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whitney_loop.loop.metrics import Metrics, Payload, is_number, sample_metrics, user_metrics
from whitney_loop.loop.options import UsageError
from whitney_loop.loop.prompts import Request, evaluation_requests, read_requests
from whitney_loop.loop.report import CallableError, formatted
from whitney_loop.loop.signals import raise_if_signalled
from whitney_loop.loop.training import Training
from whitney_loop.loop.user_loss import UserLoss, take_sample
from whitney_loop.results import result_sampler_id


class Evaluation:
    """The evaluations of a training: none without requests.

    ``requests`` are sampled every ``every`` cycles, from cycle 0 on, and after the last one, each time with the same
    seeds. A resumed run does not repeat those in its metrics file.
    """

    def __init__(
        self, training: Training, loss: UserLoss, requests: Sequence[Request], every: int, *, save_best: bool
    ) -> None:
        self._training = training
        self._loss = loss
        self._requests = evaluation_requests(requests, training.seed)
        self._every = every
        self._save_best = save_best
        earlier = [entry for entry in training.earlier_cycles if any(name.startswith("eval/") for name in entry)]
        self._done = {entry["cycle"] for entry in earlier}
        self._best = max((value for value in map(compared_value, earlier) if value is not None), default=-math.inf)

    def before(self, cycle: int, sampler_id: str) -> None:
        """Evaluate the weights of this sampler before the training of a cycle, if that is due."""
        if cycle % self._every == 0 and self._is_missing(cycle):
            self._evaluate(cycle, sampler_id)

    def after_last(self) -> None:
        """Evaluate the trained weights."""
        cycle, ctx = self._training.next_cycle, self._training.ctx
        if self._is_missing(cycle):
            saved = ctx.client.run_operation(ctx.run_id, "save_weights_for_sampler", {})
            ctx.sampler_id = result_sampler_id(saved)
            self._evaluate(cycle, ctx.sampler_id)

    def _is_missing(self, cycle: int) -> bool:
        return bool(self._requests) and cycle not in self._done

    def _evaluate(self, cycle: int, sampler_id: str) -> None:
        training, client, started = self._training, self._training.client, time.monotonic()
        self._loss.rewards.begin(cycle)
        take = functools.partial(take_sample, training.summary, self._loss, self._requests)
        samples = client.sampler_operations(training.run_id, sampler_id, "sample", self._requests, on_result=take)
        found, lost = user_metrics([self._scored(samples, cycle)])
        tokens = sample_metrics(samples)["completions/tokens"]
        metrics = {f"eval/{name}": value for name, value in (found | {"completions/tokens": tokens}).items()}
        training.warnings.lost_metrics(lost)
        self._done.add(cycle)
        entry = {"cycle": cycle, **metrics, "time/eval": time.monotonic() - started}
        training.record_evaluation(entry, f"evaluation before cycle {cycle}  {formatted(metrics)}")
        if self._save_best:
            self._save_if_best(cycle, metrics)

    def _scored(self, samples: list[Payload], cycle: int) -> Metrics:
        """Return the metrics of the user's ``evaluate``; without it, the rewards of all completions."""
        if self._loss.evaluate is None:
            pairs = zip(samples, self._requests, strict=True)
            reward = self._loss.rewards.of
            return {"reward": [reward(sequence, asked) for sample, asked in pairs for sequence in sample["sequences"]]}
        try:
            found = self._loss.evaluate(samples, cycle, copy.deepcopy(self._requests), self._training.ctx)
        except (KeyboardInterrupt, CallableError):  # CallableError: of ctx.reward
            raise
        except BaseException as error:
            raise CallableError(f"evaluate raised {type(error).__name__} in cycle {cycle}: {error}") from error
        raise_if_signalled()  # a bare ``except:`` of the user's may have caught the exception of a Ctrl-C
        if not isinstance(found, dict):
            hint = " (is its return missing?)" if found is None else ""
            raise CallableError(f"evaluate returned {found!r:.80} in cycle {cycle}{hint}: expected a dict of metrics")
        return found

    def _save_if_best(self, cycle: int, metrics: Metrics) -> None:
        """Save a state if no evaluation before was better; its next cycle is this one."""
        value, training = compared_value(metrics), self._training
        if value is None:
            raise ValueError(
                f"--save-best: evaluate returned no number or list of numbers named reward, by which it compares; it "
                f"returned {', '.join(sorted(metrics))}"
            )
        if value > self._best:
            self._best = value
            training.saved(training.client.run_operation(training.run_id, "save_state", {}), next_cycle=cycle)
            training.summary.results |= {"best_state_id": training.summary.state_id, "best_reward": value}


def compared_value(metrics: Mapping[str, Any]) -> float | None:
    """Return the number that ``--save-best`` compares: ``eval/reward/mean``, or without it ``eval/reward``."""
    value = metrics.get("eval/reward/mean", metrics.get("eval/reward"))
    return float(value) if is_number(value) else None


def read_held_out(
    path: Path | None, loss: UserLoss, requests: Sequence[Request], *, save_best: bool
) -> tuple[list[Request], list[str]]:
    """Return the requests of ``--eval-json``, none without it, and notes to print.

    Raise UsageError if the file is wrong, or there is nothing to evaluate by.
    """
    if path is None:
        if save_best:
            raise UsageError("--save-best needs --eval-json FILE")
        return [], []
    if not (loss.has_reward or loss.evaluate):
        raise UsageError(
            "--eval-json needs --reward MODULE:CALLABLE, or evaluate(samples, cycle, requests, ctx) in the module of "
            "--build-loss"
        )
    held_out = read_requests(path, embedded=False, option="--eval-json")
    prompts = {tuple(request["prompt"]["token_ids"]) for request in requests}
    trained_on = [request.where for request in held_out if tuple(request["prompt"]["token_ids"]) in prompts]
    if not trained_on:
        return held_out, []
    note = (
        f"--eval-json: {len(trained_on)} of its {len(held_out)} prompts are in --sample-json too, the first at "
        f"{trained_on[0]}: their rewards do not show what is learned beyond them"
    )
    return held_out, [note]
