"""RLOO: REINFORCE with the other completions of the group as the baseline.

−Σ r·A with A = reward − mean reward of the others; on the first update r = 1 and this is REINFORCE's gradient.
RLOO, arXiv 2402.14740. Modal and Tinker. Updates: 1, as in the paper, which stays on-policy: nothing here clips.
No knobs.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    forward_backward_payload,
    leave_one_out_baseline,
    rl_datum,
)

LOSS_FUNCTION = "importance_sampling"
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int]) -> float:
    """The share of lowercase vowels, 0…1."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    prompt = request["prompt"]["token_ids"]
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = leave_one_out_baseline(rewards)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage)
        for sequence, advantage in zip(sequences, advantages, strict=True)
        if sequence["tokens"]  # an empty completion has no term
    ]
    return forward_backward_payload(data, LOSS_FUNCTION)
