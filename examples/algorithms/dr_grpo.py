"""Dr. GRPO: GRPO done right, with neither of the divisions that bias it.

A = reward − group mean: not divided by the deviation, which favours prompts that are nearly solved or hopeless, and
no term divided by its sequence's length, which favours long wrong answers. The surrogate is PPO's, a sum over tokens.
Dr. GRPO, arXiv 2503.20783. Modal and Tinker. Updates: several (``--updates 4``). Knobs: the clip range.
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

LOSS_FUNCTION = "ppo"
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int]) -> float:
    """The share of lowercase vowels, 0…1."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    prompt = request["prompt"]["token_ids"]
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    on_tinker = ctx.provider == "tinker"  # which takes the clip range per token; Modal takes it in loss_config
    clip = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH} if on_tinker else {}
    config = {} if on_tinker else {"clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage, **clip)
        for sequence, advantage in zip(sequences, advantages, strict=True)
        if sequence["tokens"]  # an empty completion has no term
    ]
    return forward_backward_payload(data, LOSS_FUNCTION, config)
