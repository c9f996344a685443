"""One cycle of policy training: samples in, a checked payload out, and the metrics of both."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from whitney_loop.loop.metrics import (
    Metrics,
    Payload,
    largest_gap,
    logprob_gaps,
    loss_metrics,
    merged_results,
    sample_metrics,
    trained_tokens,
    user_metrics,
)
from whitney_loop.loop.prompts import Request
from whitney_loop.loop.report import formatted
from whitney_loop.loop.samples import Completion, Texts, add_advantages, add_rewards, completions_of
from whitney_loop.loop.training import Training
from whitney_loop.loop.user_loss import Built, UserLoss, build, take_sample
from whitney_loop.results import result_sampler_id

OWN_NAMES = frozenset({"skipped", "state_id", "next_cycle", "config"})  # of the metrics file, beside a cycle's metrics


class Cycle:
    """One cycle. The loop calls its methods in their order here."""

    def __init__(
        self, training: Training, number: int, loss: UserLoss, requests: Sequence[Request], texts: Texts
    ) -> None:
        self._requests = list(requests)
        self._training = training
        self._number = number
        self._loss = loss
        loss.rewards.begin(number)
        self._texts = texts
        self._completions: list[Completion] = []
        self._version: Any = None
        self._sampled: Metrics = {}
        self._built = Built(None)
        self._parts: list[Payload] = []  # of the last pass over the data, with their results
        self._results: list[Payload] = []
        self._gaps: list[list[list[float]]] = []  # between trainer and sampler: per part, per datum, per token
        self._steps = 0
        self._grad_norm: Any = None  # of the last step
        self._times = [time.monotonic()]  # the start, then the end of: sampling, build_loss, training

    def use_sampler(self, saved: Payload) -> str:
        """Return the id of the sampler that ``save_weights_for_sampler`` gave, and keep it as ``ctx.sampler_id``."""
        self._version = saved.get("version")
        self._training.ctx.sampler_id = result_sampler_id(saved)
        return self._training.ctx.sampler_id

    def start_rewards(self, index: int, sample: Payload) -> None:
        """Check the sample of a request as soon as it is there, and start to compute its rewards."""
        take_sample(self._training.summary, self._loss, self._requests, index, sample)

    def build_loss(self, samples: list[Payload]) -> Payload | None:
        """Call the user's function. Return what to train on, or None if no group has a gradient signal."""
        self._sampled = sample_metrics(samples)  # before build_loss, which may change the samples
        self._completions = completions_of(self._number, self._requests, samples)
        sequences = [sequence for sample in samples for sequence in sample["sequences"]]
        self._times.append(time.monotonic())
        self._loss.rewards.is_asked = False
        self._built = build(self._loss, samples, self._number, self._requests, self._training.ctx)
        self._times.append(time.monotonic())
        add_rewards(self._completions, self._built.metrics, map(self._loss.rewards.known, sequences))
        add_advantages(self._completions, self._built.payload)
        if self._loss.has_reward and not self._loss.rewards.is_asked:
            self._training.warnings.unused_reward()
        return self._built.payload

    def batches(
        self, payload: Payload | None, updates: int, minibatches: int, max_datums: int | None
    ) -> Iterator[list[Payload]]:
        """Yield the parts of each optimizer step: ``updates`` passes over the data, in ``minibatches`` steps each.

        Without a payload there is no step. The metrics are those of the last pass, in which the trainer is farthest
        from the sampler.
        """
        if payload is None:
            return
        for update in range(updates):
            self._parts, self._results, self._gaps = [], [], []
            for batch in minibatches_of(payload, minibatches, f"{self._training.seed}:{self._number}:{update}"):
                yield split_payload(batch, max_datums)

    def stepped(self, parts: list[Payload], backward: list[Payload], step: Payload) -> None:
        """Take an optimizer step: its parts, the results of their ``forward_backward``, and that of ``optim_step``."""
        self._training.stop_if_nan_gradient(self._number, step)
        gaps = [logprob_gaps(part, result) for part, result in zip(parts, backward, strict=True)]
        if self._steps == 0:  # its weights are the sampler's
            self._training.warnings.gap(largest_gap(itertools.chain(*gaps)), self._number)
        self._parts += parts
        self._results += backward
        self._gaps += gaps
        self._steps += 1
        self._grad_norm = step.get("grad_norm")
        self._training.summary.tokens_trained += sum(map(trained_tokens, parts))

    def record(self) -> None:
        """Warn, count, keep samples and metrics, and print the line of progress."""
        self._times.append(time.monotonic())
        training, built = self._training, self._built
        skipped = {"skipped": built.skip_reason} if built.payload is None else {}
        head = {"cycle": self._number, "version": self._version}
        uniform = built.uniform_groups
        groups = {} if uniform is None else {"groups/uniform_frac": uniform / len(self._requests)}
        own = self._metrics_of_last_pass() | groups | self._sampled | self._seconds() | skipped
        taken = head.keys() | own.keys() | OWN_NAMES
        of_user, lost = user_metrics(built.metrics)
        users = {f"user/{name}" if name in taken else name: value for name, value in of_user.items()}

        if built.payload is not None:
            training.warnings.sampling(self._requests, built.payload["loss_function"])
        training.warnings.lost_metrics(lost)
        training.warnings.completions(self._sampled, self._number)
        training.warnings.signal(bool(skipped), users.get("reward/mean", users.get("reward")))
        reward = "reward/mean" if "reward/mean" in users else "reward"
        shown = {reward: users.get(reward), "kl": own.get("kl/k3"), "grad_norm": own.get("optim/grad_norm")}
        others = {name: value for name, value in users.items() if name != reward and not name.endswith("/std")}
        notes = [formatted(others), f"skipped: {' '.join(built.skip_reason.split())}" if skipped else ""]
        self._texts.keep(self._completions)
        training.record(head | users | own, shown, "  ".join(filter(None, notes)))
        self._texts.show(self._completions)

    def _metrics_of_last_pass(self) -> Metrics:
        if not self._parts:
            return {}
        result = merged_results(self._parts, self._results) | {"grad_norm": self._grad_norm}
        rate = {"optim/learning_rate": self._training.optimizer["learning_rate"]}
        # If the outputs of one part do not fit it, there is nothing to say of all tokens.
        gaps = [gap for part in self._gaps for datum in part for gap in datum] if all(self._gaps) else []
        return loss_metrics(result, gaps) | rate

    def _seconds(self) -> Metrics:
        start, sampled, built, trained = self._times
        return {
            "time/sample": sampled - start,
            "time/build_loss": built - sampled,
            "time/train": trained - built,
            "time/total": trained - start,
        }


def minibatches_of(payload: Payload, count: int, origin: str) -> list[Payload]:
    """Return the data, shuffled by ``origin``, in ``count`` payloads of about the same size, but none without a datum.

    With ``count`` 1 nothing is shuffled. Nothing is scaled: if build_loss divides the advantages by a number of tokens,
    that number remains the one of the whole cycle.
    """
    data = payload["data"]
    if count == 1:
        return [payload]
    shuffled = random.Random(origin).sample(data, len(data))
    return [payload | {"data": shuffled[first::count]} for first in range(min(count, len(data)))]


def split_payload(payload: Payload, max_datums: int | None) -> list[Payload]:
    """Return the payload in parts of at most ``max_datums`` data, in their order; with None all in one."""
    data = payload["data"]
    size = max_datums or len(data)
    return [payload | {"data": data[start : start + size]} for start in range(0, len(data), size)]
