"""DRO: regression of the log-ratio on a soft advantage, instead of a clip.

−Σ (logprob·A − ½·beta·(logprob − sampled logprob)²) with A = reward − beta·log(mean over the group of
exp(reward / beta)). Group means here would be another algorithm. The paper squares the log-ratio of the sequence, the
loss that is offered that of each token: its pull to the sampler is weaker.
DRO, arXiv 2405.19107. Tinker. Updates: several (``--updates 4``). Knobs: beta, the pull to the sampler, the same
in the advantage and in the loss.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    forward_backward_payload,
    rl_datum,
    soft_advantages,
)

LOSS_FUNCTION = "dro"
BETA = 0.5
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int]) -> float:
    """The share of lowercase vowels, 0…1."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    prompt = request["prompt"]["token_ids"]
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = soft_advantages(rewards, beta=BETA)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage)
        for sequence, advantage in zip(sequences, advantages, strict=True)
        if sequence["tokens"]  # an empty completion has no term
    ]
    return forward_backward_payload(data, LOSS_FUNCTION, {"beta": BETA})
