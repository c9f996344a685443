"""DRO: a regression of the log-ratio on a soft advantage, instead of a clip.

−Σ (logprob·A − ½·beta·(logprob − sampled logprob)²) with A = reward − beta·log(mean over the group of
exp(reward / beta)). A group mean instead would be another algorithm. beta pulls the policy to the sampler; it is the
same in the advantage and in the loss.
DRO, arXiv 2405.19107. Tinker. Updates: several (``--updates 4``).
Divisor: none, a sum over tokens. Left out: the paper's learned value, which the soft mean of the group replaces, and
the square of the whole completion's log-ratio: the loss squares that of each token, which pulls less.
Constants: beta is our choice for rewards between 0 and 1.
"""

from typing import Any

from whitney_loop import LoopContext, NoGradientSignal, all_zero, policy_payload, soft_advantages

LOSS_FUNCTION = "dro"
BETA = 0.5


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards
    advantages = soft_advantages(rewards, beta=BETA)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider, loss_config={"beta": BETA})
