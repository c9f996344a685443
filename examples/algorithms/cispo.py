"""CISPO: the importance weight is clipped, not the token's gradient, so no token is dropped.

−Σ sg(min(r, CLIP_HIGH))·logprob·A / tokens of the group, with r = exp(logprob − sampled logprob) and
A = (reward − group mean) / population deviation of the group. sg stops the gradient.
CISPO (MiniMax-M1), arXiv 2506.13585. Modal and Tinker. Updates: several (``--updates 4``).
Divisor: the number of tokens of the group, as in the paper's formula (common code takes those of the batch).
Constants: CLIP_LOW is 0, since the paper has no low limit; the paper gives no number for CLIP_HIGH, 1.2 is our choice.
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

LOSS_FUNCTION = "cispo"
CLIP_LOW, CLIP_HIGH = 0.0, 1.2  # probability ratios; 0: no limit


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    tokens_of_group = max(sum(len(sequence["tokens"]) for sequence in sample["sequences"]), 1)
    scaled = [length_normalize(advantage, tokens_of_group) for advantage in advantages]
    return policy_payload(
        sample, request, scaled, LOSS_FUNCTION, provider=ctx.provider, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
