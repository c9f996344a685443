"""CISPO: the importance weight is clipped, not the token's gradient, so no token is dropped.

−Σ sg(min(r, high))·logprob·A with A = (reward − group mean) / group deviation; sg stops the gradient.
CISPO (MiniMax-M1), arXiv 2506.13585. Modal and Tinker. Updates: several (``--updates 4``). Knobs: the clip range;
the paper leaves the low side open.
"""

from typing import Any

from grpo_build_loss import reward  # or a function of your own
from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    group_mean_advantages,
    policy_payload,
)

LOSS_FUNCTION = "cispo"
CLIP_LOW, CLIP_HIGH = 0.0, 1.2  # probability ratios; 0 is open


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [reward(sequence["tokens"]) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(
        sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
