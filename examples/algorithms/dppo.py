"""DPPO: a token is masked by how far its probability has moved, not by its ratio.

−Σ m·r·A with A = (reward − group mean) / group deviation; m = 0 where A > 0 and the probability rose by more than
DELTA_HIGH, or A < 0 and it fell by more than DELTA_LOW (binary total variation). Rare tokens keep room to move.
DPPO, arXiv 2602.04879. Modal. Updates: several (``--updates 4``). Knobs: the two differences.
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

LOSS_FUNCTION = "dppo"
DELTA_LOW, DELTA_HIGH = 0.2, 0.2  # differences of probabilities, 0…1
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
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage)
        for sequence, advantage in zip(sequences, advantages, strict=True)
        if sequence["tokens"]  # an empty completion has no term
    ]
    return forward_backward_payload(data, LOSS_FUNCTION, {"delta_low": DELTA_LOW, "delta_high": DELTA_HIGH})
