"""Warnings that save runs: each is printed once, with what to do about it, and named in the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whitney_loop.loop.metrics import is_number
from whitney_loop.loop.report import say

RATIO_LOSSES = frozenset({"importance_sampling", "ppo", "cispo", "gspo", "dro", "dppo"})
NEUTRAL = {"temperature": 1, "top_p": 1, "top_k": -1}
LEARNING_RATES = (1e-7, 1e-2)  # of LoRA on language models; the embedded model takes far larger ones
LARGEST_GAP = 0.05  # of a completion's logprobs; sampler and trainer in bfloat16 differ by about 0.01
PATIENCE = 3  # cycles in a row without a gradient signal


class Warnings:
    """Prints each warning once, and adds its name to ``printed``."""

    def __init__(self, printed: list[str]) -> None:
        self._printed = printed
        self._cycles_without_signal = 0

    def once(self, name: str, text: str) -> None:
        if name not in self._printed:
            self._printed.append(name)
            say(f"warning: {text}")

    def learning_rate(self, rate: float | None, *, rehearsal: bool) -> None:
        low, high = LEARNING_RATES
        if rate is not None and not rehearsal and not low <= rate <= high:
            self.once(
                "learning_rate",
                f"--learning-rate {rate:g} is outside {low:g}…{high:g}, the usual range for LoRA on language models: a "
                "larger one destroys the model, a smaller one does nothing. The embedded model takes larger ones",
            )

    def sampling(self, requests: Sequence[Mapping[str, Any]], loss_function: str | None) -> None:
        """Warn if the tokens are not drawn from the policy itself, as an importance ratio assumes."""
        for request in requests:
            params = request["sampling_params"]
            other = [name for name, neutral in NEUTRAL.items() if params.get(name, neutral) != neutral]
            if other and loss_function in RATIO_LOSSES:
                self.once(
                    "sampling",
                    f"a request samples with {' and '.join(f'{name} {params[name]}' for name in other)}, but "
                    f"{loss_function} takes the ratio to the policy without them: the gradient is biased. Set "
                    f"{' and '.join(f'{name} to {NEUTRAL[name]}' for name in other)} in --sample-json",
                )

    def completions(self, metrics: Mapping[str, Any], cycle: int) -> None:
        if metrics["completions/truncated_frac"] == 1:
            self.once(
                "truncated",
                f"every completion of cycle {cycle} was cut off at max_tokens: a reward that looks for an end or an "
                "answer sees none. Raise max_tokens in --sample-json, or reward ending",
            )

    def gap(self, gap: float | None, cycle: int) -> None:
        """``gap`` is between sampler and trainer on the same weights, so it should be 0."""
        if gap is not None and gap > LARGEST_GAP:
            self.once(
                "logprobs",
                f"in cycle {cycle} a completion's logprobs of sampler and trainer differ by {gap:.2g} per token (more "
                f"than {LARGEST_GAP}) on the same weights: ratios are wrong from the start. Check if the datum's "
                "arrays are shifted or its prompt is another one (build it with rl_datum); if not, the service samples "
                "with other weights or in another precision: ask it, or clip the ratio tightly",
            )

    def signal(self, skipped: bool, mean_reward: object) -> None:
        self._cycles_without_signal = self._cycles_without_signal + 1 if skipped else 0
        if self._cycles_without_signal == PATIENCE:
            reward = "put the rewards into ctx.metrics['reward'] to see which case it is"
            if isinstance(mean_reward, (int, float)):
                reward = f"mean reward: {mean_reward:.4g}"
            self.once(
                "no_signal",
                f"no gradient signal {PATIENCE} cycles in a row ({reward}). At the best possible reward the task is "
                "solved: stop, or give harder prompts. Below it the policy has collapsed, or never gets a reward: "
                "resume an earlier state with a smaller learning rate, or sample more completions per prompt",
            )

    def unused_reward(self) -> None:
        self.once(
            "reward",
            "--reward has no effect on the training: build_loss never asks ctx.reward(sequence, request)",
        )

    def lost_metrics(self, notes: Sequence[str]) -> None:
        """``notes`` name the entries of ``ctx.metrics`` that are not kept, with the reasons."""
        if notes:
            self.once(
                "metrics",
                f"not kept of ctx.metrics: {'; '.join(notes[:3])}. Put numbers, lists of numbers or short texts there",
            )

    def unknown_metrics(self, names: Sequence[str], record: Mapping[str, Any]) -> None:
        """``names`` are metrics of ``--stop-at`` that are not in the record of the first cycle."""
        if names:
            known = ", ".join(sorted(name for name, value in record.items() if is_number(value)))
            self.once("stop_at", f"--stop-at: cycle {record['cycle']} has no {', '.join(names)}; it has {known}")

    def lost_state(self, names: Sequence[str]) -> None:
        """``names`` are those that a build_loss keeps in ``ctx.state`` after a resumption."""
        if names:
            self.once(
                "state",
                f"build_loss keeps {', '.join(names)} in ctx.state, which a resumption does not bring back: a "
                "reference or a critic starts anew, from the state that was resumed",
            )
