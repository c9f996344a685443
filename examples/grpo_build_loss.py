"""GRPO on one prompt: the reward is the share of lowercase vowels in the completion.

Group-mean advantages divided by the group's deviation, and Whitney's ``importance_sampling`` loss, on either provider.
Source: Whitney's page "GRPO"; arXiv 2402.03300. Run it:

    python examples/rl_loop.py --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    forward_backward_payload,
    group_mean_advantages,
    rl_datum,
)

LOSS_FUNCTION = "importance_sampling"
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int]) -> float:
    """0…1. Ids 0–255 are bytes and 256 is the end; with your own model, decode with its tokenizer here."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    prompt_tokens = request["prompt"]["token_ids"]
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward/mean"] = sum(rewards) / len(rewards)
    ctx.metrics["reward"] = rewards  # of these the loop tells the deviation too, over all groups of a cycle
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    data = [
        rl_datum(prompt_tokens, sequence["tokens"], sequence["logprobs"], advantage)
        for sequence, advantage in zip(sequences, advantages, strict=True)
        if sequence["tokens"]  # an empty completion has no term
    ]
    return forward_backward_payload(data, LOSS_FUNCTION)
