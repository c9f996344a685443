"""GRPO with a KL penalty against the model that training started from, per token in the advantage.

A_t = (reward − group mean) / group deviation − KL_COEF·(sampled logprob − reference logprob), under PPO's surrogate.
The reference is the sampler of cycle 0, which a service keeps as long as the run; each completion costs a ``logprobs``.
A group whose rewards are equal is skipped, although its penalty alone has a gradient: it would only pull back.
GRPO, arXiv 2402.03300 (there the penalty stands in the loss, with another estimate of the same KL). Modal and Tinker.
Updates: several (``--updates 4``). Knobs: the clip range, KL_COEF.
"""

from typing import Any

from grpo_build_loss import reward  # or a function of your own
from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    completion_logprobs,
    group_mean_advantages,
    kl_adjust_advantages,
    logprobs_request,
    policy_payload,
)

LOSS_FUNCTION = "ppo"
OPERATIONS = ("logprobs",)  # beside the loop's own: a service without them is refused before a session exists
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
KL_COEF = 0.05


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    reference = ctx.state.setdefault("reference", ctx.sampler_id)
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    prompt = request["prompt"]["token_ids"]
    asked = [logprobs_request(prompt + sequence["tokens"]) for sequence in sequences]
    answers = ctx.client.sampler_operations(ctx.run_id, reference, "logprobs", asked)
    penalised = [
        kl_adjust_advantages(
            [advantage] * len(sequence["tokens"]),
            sequence["logprobs"],
            completion_logprobs(answer, prompt),
            kl_coef=KL_COEF,
        )
        for sequence, advantage, answer in zip(sequences, advantages, answers, strict=True)
    ]
    return policy_payload(
        sample, request, penalised, LOSS_FUNCTION, provider=ctx.provider, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
