"""Dr. GRPO: GRPO without the two divisions that bias it.

−Σ min(r·A, clip(r)·A) with r = exp(logprob − sampled logprob), A = reward − group mean. A is not divided by the
group's deviation, which favours prompts that are nearly solved or hopeless, nor by the length of the completion, which
favours long wrong answers.
Dr. GRPO, arXiv 2503.20783. Modal and Tinker. Updates: several (``--updates 4``).
Divisor: none, a sum over tokens. Left out: the paper's division by a constant, the number of completions.
Constants: the clip range is that of PPO's paper (0.2 on both sides).
"""

from typing import Any

from whitney_loop import LoopContext, NoGradientSignal, all_zero, group_mean_advantages, policy_payload

LOSS_FUNCTION = "ppo"
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(
        sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
