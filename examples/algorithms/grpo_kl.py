"""GRPO with a KL penalty against the model that training started from, per token in the advantage.

A_t = (reward − group mean) / population deviation of the group − KL_COEF·(sampled logprob − reference logprob), under
PPO's surrogate. The reference is a second run of the base model, which is never stepped; each completion costs a
``logprobs``. A group with equal rewards is skipped: its penalty has a gradient, but it would only pull back.
GRPO, arXiv 2402.03300. Modal and Tinker. Updates: several (``--updates 4``).
Divisor: none, a sum over tokens; the paper divides by the length of each completion and by their number. In the paper
the KL is a term of its own in the loss, with another estimate (k3); here it is a part of the advantage.
Constants: KL_COEF is the paper's; the clip range is that of PPO's paper (0.2 on both sides).
"""

from typing import Any

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
OPERATIONS = ("logprobs",)  # besides the loop's own: a service without them is refused before a session exists
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
KL_COEF = 0.04


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    sequences = sample["sequences"]
    rewards = [ctx.reward(sequence, request) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    prompt = request["prompt"]["token_ids"]
    asked = [logprobs_request(prompt + sequence["tokens"]) for sequence in sequences]
    reference = ctx.second_run("reference", frozen=True)
    answers = ctx.client.sampler_operations(reference.run_id, reference.sampler_id, "logprobs", asked)
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
