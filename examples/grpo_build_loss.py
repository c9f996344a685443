"""GRPO. The reward is that of ``--reward``; without it, the share of lowercase vowels in the completion.

A = (reward − group mean) / population deviation of the group, with Whitney's loss ``importance_sampling``, which both
providers have. Divisor: none, a sum over tokens. Source: Whitney's page "GRPO"; arXiv 2402.03300. Run it:

    python examples/rl_loop.py --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1
"""

from typing import Any

from whitney_loop import LoopContext, NoGradientSignal, all_zero, group_mean_advantages, policy_payload

LOSS_FUNCTION = "importance_sampling"
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int], request: dict[str, Any]) -> float:
    """0…1. Ids 0–255 are bytes and 256 is the end; ``request["metadata"]`` is that of the prompt file."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards  # the loop prints their mean and keeps their deviation
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider)
