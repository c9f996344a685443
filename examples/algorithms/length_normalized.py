"""GRPO with its paper's length normalisation: every completion has the same weight, however long it is.

−Σ_i 1/|y_i| Σ_t min(r·A_i, clip(r)·A_i) with r = exp(logprob − sampled logprob), A = (reward − group mean) / population
deviation of the group, and |y_i| tokens in completion i. The service sums over tokens, so 1/|y_i| is a factor of the
advantage.
GRPO, arXiv 2402.03300. Modal and Tinker. Updates: several (``--updates 4``).
Divisor: the length of each completion. Left out: the paper's division by a constant, the number of completions, and
its KL (``grpo_kl``). Constants: the clip range is that of PPO's paper (0.2 on both sides).
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    group_mean_advantages,
    length_normalize,
    policy_payload,
)

LOSS_FUNCTION = "ppo"
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    sequences = sample["sequences"]
    rewards = [ctx.reward(sequence, request) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    lengths = [max(len(sequence["tokens"]), 1) for sequence in sequences]  # an empty completion is left out anyway
    scaled = [length_normalize(advantage, length) for advantage, length in zip(advantages, lengths, strict=True)]
    return policy_payload(
        sample, request, scaled, LOSS_FUNCTION, provider=ctx.provider, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
