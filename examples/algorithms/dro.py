"""DRO: regression of the log-ratio on a soft advantage, instead of a clip.

−Σ (logprob·A − ½·beta·(logprob − sampled logprob)²) with A = reward − beta·log(mean over the group of
exp(reward / beta)). Group means here would be another algorithm. The paper squares the log-ratio of the sequence, the
loss that is offered that of each token: its pull to the sampler is weaker.
DRO, arXiv 2405.19107. Tinker. Updates: several (``--updates 4``). Knobs: beta, the pull to the sampler, the same
in the advantage and in the loss.
"""

from typing import Any

from grpo_build_loss import reward  # or a function of your own
from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    policy_payload,
    soft_advantages,
)

LOSS_FUNCTION = "dro"
BETA = 0.5


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [reward(sequence["tokens"]) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards
    advantages = soft_advantages(rewards, beta=BETA)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider, loss_config={"beta": BETA})
