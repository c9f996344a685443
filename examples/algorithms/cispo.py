"""CISPO: the importance weight is clipped, not the token's gradient, so no token is dropped.

−Σ sg(min(r, high))·logprob·A with A = (reward − group mean) / group deviation; sg stops the gradient.
CISPO (MiniMax-M1), arXiv 2506.13585. Modal and Tinker. Updates: several (``--updates 4``). Knobs: the clip range;
the paper leaves the low side open.
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

LOSS_FUNCTION = "cispo"
CLIP_LOW, CLIP_HIGH = 0.0, 1.2  # probability ratios; 0 is open
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int]) -> float:
    """The share of lowercase vowels, 0…1."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    prompt = request["prompt"]["token_ids"]
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
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
