"""DPPO: a token is masked by how far its probability has moved, not by its ratio, so rare tokens have room to move.

−Σ m·r·A with r = exp(logprob − sampled logprob) and A = (reward − group mean) / population deviation of the group.
m = 0 if A > 0 and the probability has risen by more than delta_high, or if A < 0 and it has fallen by more than
delta_low (binary total variation); else m = 1.
DPPO, arXiv 2602.04879. Modal. Updates: several (``--updates 4``).
Divisor: none, a sum over tokens. Left out: the paper's division by a constant, the number of completions.
Constants: delta_low and delta_high are those of the library SkyRL; the library verl has 0.15.
"""

from typing import Any

from whitney_loop import LoopContext, NoGradientSignal, all_zero, group_mean_advantages, policy_payload

LOSS_FUNCTION = "dppo"
LOSS_CONFIG = {"delta_low": 0.2, "delta_high": 0.2}  # differences of probabilities, 0…1


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider, loss_config=LOSS_CONFIG)
