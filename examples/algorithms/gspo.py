"""GSPO: one importance ratio for the whole sequence, clipped very near 1.

−Σ_i 1/|y_i| Σ_t min(s_i·A_i, clip(s_i)·A_i), s_i = exp(mean over the sequence of (logprob − sampled logprob)),
A = (reward − group mean) / group deviation. The service sums over tokens, so the 1/|y| is put into the advantage.
GSPO, arXiv 2507.18071. Modal. Updates: several (``--updates 4``). Knobs: the clip range, the paper's.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    forward_backward_payload,
    group_mean_advantages,
    length_normalize,
    rl_datum,
)

LOSS_FUNCTION = "gspo"
CLIP_LOW, CLIP_HIGH = 1 - 3e-4, 1 + 4e-4  # ratios of sequences: means move far less than tokens
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
    config = {"clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}
    data = [
        rl_datum(prompt, tokens, sequence["logprobs"], length_normalize(advantage, len(tokens)))
        for sequence, advantage in zip(sequences, advantages, strict=True)
        if (tokens := sequence["tokens"])  # an empty completion has no term
    ]
    return forward_backward_payload(data, LOSS_FUNCTION, config)
