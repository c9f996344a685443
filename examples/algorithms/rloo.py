"""RLOO: REINFORCE with the other completions of the group as the baseline.

−Σ r·A with r = exp(logprob − sampled logprob), A = reward − mean reward of the others. On the first update r = 1, and
this is REINFORCE's gradient.
RLOO, arXiv 2402.14740. Modal and Tinker. Updates: 1, as in the paper: nothing here clips.
Divisor: none, a sum over tokens. Left out: the paper's division by a constant, the number of completions, and the KL
penalty in its reward (``kl_adjust_advantages`` adds one, as in ``grpo_kl``). No constants.
"""

from typing import Any

from whitney_loop import LoopContext, NoGradientSignal, all_zero, leave_one_out_baseline, policy_payload

LOSS_FUNCTION = "importance_sampling"


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards
    advantages = leave_one_out_baseline(rewards)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider)
