"""GSPO: one importance ratio for the whole completion, clipped very near 1.

−Σ_i 1/|y_i| Σ_t min(s_i·A_i, clip(s_i)·A_i), s_i = exp(mean over the completion of (logprob − sampled logprob)),
A = (reward − group mean) / population deviation of the group, |y_i| tokens in completion i. The service sums over
tokens, so 1/|y_i| is a factor of the advantage.
GSPO, arXiv 2507.18071. Modal. Updates: several (``--updates 4``).
Divisor: the length of each completion. Left out: the paper's division by a constant, the number of completions.
Constants: the clip range is the paper's.
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

LOSS_FUNCTION = "gspo"
CLIP_LOW, CLIP_HIGH = 1 - 3e-4, 1 + 4e-4  # of a completion's ratio, which moves far less than that of a token


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
