"""One cycle of policy training: samples in, a checked payload out, and the metrics of both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from whitney_loop.client import result_sampler_id, result_sequences
from whitney_loop.loop.metrics import (
    Metrics,
    Payload,
    largest_gap,
    loss_metrics,
    merged_results,
    sample_metrics,
    trained_tokens,
    user_metrics,
)
from whitney_loop.loop.prompts import Request, named_in_errors
from whitney_loop.loop.report import formatted
from whitney_loop.loop.samples import Completion, Texts, add_advantages, add_rewards, completions_of
from whitney_loop.loop.training import Training
from whitney_loop.loop.user_loss import Built, UserLoss, build

OWN_NAMES = frozenset({"skipped", "state_id", "next_cycle", "config"})  # of the metrics file, beside a cycle's metrics


class Cycle:
    """The cycle with this number; the steps of the loop's body report to it in their order."""

    def __init__(
        self, training: Training, number: int, loss: UserLoss, requests: Sequence[Request], texts: Texts
    ) -> None:
        self.requests = list(requests)
        self._training = training
        self._number = number
        self._loss = loss
        self._texts = texts
        self._completions: list[Completion] = []
        self._version: Any = None
        self._sampled: Metrics = {}
        self._built = Built(None)
        self._trained: Metrics = {}
        self._times = [time.monotonic()]  # the start, then the end of: sampling, build_loss, training

    def snapshot(self, saved: Payload) -> str:
        """The sampler that ``save_weights_for_sampler`` gave."""
        self._version = saved.get("version")
        self._training.ctx.sampler_id = result_sampler_id(saved)
        return self._training.ctx.sampler_id

    def build_loss(self, samples: list[Payload]) -> Payload | None:
        """Call the user's function. Return what to train on, or None if no group has a gradient signal."""
        for request, sample in zip(self.requests, samples, strict=True):
            with named_in_errors([request]):
                result_sequences(sample)  # raises if it cannot be trained on
        self._sampled = sample_metrics(samples)  # before build_loss, which may change what it is given
        self._completions = completions_of(self._number, self.requests, samples)
        self._times.append(time.monotonic())
        self._built = build(self._loss, samples, self._number, self.requests, self._training.ctx)
        self._times.append(time.monotonic())
        return self._built.payload

    def updated(self, parts: list[Payload], backward: list[Payload], step: Payload) -> None:
        """One update: the payload in parts, their ``forward_backward`` results, and the ``optim_step``'s.

        Of several updates the metrics of the last are kept: there the trainer is farthest from the sampler.
        """
        assert self._built.payload is not None
        self._training.require_finite_step(self._number, step)
        result = merged_results(parts, backward) | {"grad_norm": step.get("grad_norm")}
        if not self._trained:
            self._training.warnings.gap(largest_gap(self._built.payload, result), self._number)
        self._trained = loss_metrics(self._built.payload, result)
        self._training.summary.tokens_trained += trained_tokens(self._built.payload)

    def record(self) -> None:
        """Warn, count, keep samples and metrics, and print the line of progress."""
        self._times.append(time.monotonic())
        training, built = self._training, self._built
        skipped = {"skipped": built.skip_reason} if built.payload is None else {}
        head = {"cycle": self._number, "version": self._version}
        own = self._trained | self._group_metrics() | self._sampled | self._seconds() | skipped
        taken = head.keys() | own.keys() | OWN_NAMES
        of_user, lost = user_metrics(built.metrics)
        users = {f"user/{name}" if name in taken else name: value for name, value in of_user.items()}

        if built.payload is not None:
            training.warnings.sampling(self.requests, built.payload["loss_function"])
        training.warnings.lost_metrics(lost)
        training.warnings.completions(self._sampled, self._number)
        training.warnings.signal(bool(skipped), users.get("reward/mean", users.get("reward")))
        training.summary.tokens_sampled += self._sampled["completions/tokens"]
        add_rewards(self._completions, built.metrics)
        add_advantages(self._completions, built.payload)
        self._texts.keep(self._completions)
        training.record(head | users | own, self._line(head, users))
        self._texts.show(self._completions)

    def _group_metrics(self) -> Metrics:
        uniform = self._built.uniform_groups
        return {} if uniform is None else {"groups/uniform_frac": uniform / len(self.requests)}

    def _seconds(self) -> Metrics:
        start, sampled, built, trained = self._times
        return {
            "time/sample": sampled - start,
            "time/build_loss": built - sampled,
            "time/train": trained - built,
            "time/total": trained - start,
        }

    def _line(self, head: Metrics, users: Metrics) -> str:
        shown = {name: value for name, value in users.items() if not name.endswith("/std")}
        loss = {"loss": self._trained.get("loss/sum"), "clip_frac": self._trained.get("clip_frac")}
        skipped = f"skipped: {' '.join(self._built.skip_reason.split())}"
        result = formatted(loss) if self._built.payload is not None else skipped
        tokens, seconds = self._sampled["completions/tokens"], self._times[-1] - self._times[0]
        return "  ".join(
            filter(None, [formatted(head), formatted(shown), result, f"tokens {tokens}", f"{seconds:.2f} s"])
        )


def split_payload(payload: Payload | None, max_datums: int | None) -> list[Payload]:
    """The payload in parts of at most ``max_datums`` data, in their order; with None all in one."""
    if payload is None:
        return []
    data = payload["data"]
    size = max_datums or len(data)
    return [payload | {"data": data[start : start + size]} for start in range(0, len(data), size)]
