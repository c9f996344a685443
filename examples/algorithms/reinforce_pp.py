"""REINFORCE++: no groups; the KL to the reference is part of the return, and the batch is the baseline.

A_t = reward − KL_COEF·Σ_{u≥t} (sampled logprob − reference logprob), then mean 0 and population deviation 1 over all
tokens of the batch, under PPO's surrogate. The batch is all prompts of a cycle (``--batch-size``), so the loop calls
``build_batch_loss``. The reference is a second run of the base model, which is never stepped; each completion costs a
``logprobs``. If all rewards are equal, the cycle is skipped: otherwise the normalised KL would be the signal.
REINFORCE++, arXiv 2501.03262. Modal and Tinker. Updates: several (``--updates 4``).
Divisor: none, a sum over tokens.
Constants: the clip range is that of PPO's paper (0.2 on both sides); KL_COEF is our choice.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    batch_normalize,
    clip_arguments,
    completion_logprobs,
    forward_backward_payload,
    kl_shaped_returns,
    logprobs_request,
    rl_datum,
)

LOSS_FUNCTION = "ppo"
OPERATIONS = ("logprobs",)  # besides the loop's own: a service without them is refused before a session exists
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
KL_COEF = 0.01


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    """Train on a batch of one prompt."""
    return build_batch_loss([sample], cycle, [request], ctx)


def build_batch_loss(
    samples: list[dict[str, Any]], cycle: int, requests: list[dict[str, Any]], ctx: LoopContext
) -> dict[str, Any]:
    ctx.metrics["reward"], completions = [], []
    for sample, request in zip(samples, requests, strict=True):
        for sequence in sample["sequences"]:
            scored = ctx.reward(sequence, request)
            ctx.metrics["reward"].append(scored)
            if sequence["tokens"]:  # an empty completion has no term
                completions.append((request["prompt"]["token_ids"], sequence, scored))
    [centered] = batch_normalize([[scored for _, _, scored in completions]])  # zeros if all rewards are equal
    if all_zero(centered):
        raise NoGradientSignal("every completion of the batch has the same reward")
    asked = [logprobs_request(prompt + sequence["tokens"]) for prompt, sequence, _ in completions]
    reference = ctx.second_run("reference", frozen=True)
    answers = ctx.client.sampler_operations(reference.run_id, reference.sampler_id, "logprobs", asked)
    returns = [
        kl_shaped_returns(scored, sequence["logprobs"], completion_logprobs(answer, prompt), kl_coef=KL_COEF)
        for (prompt, sequence, scored), answer in zip(completions, answers, strict=True)
    ]
    clip, config = clip_arguments(ctx.provider, CLIP_LOW, CLIP_HIGH)
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantages, **clip)
        for (prompt, sequence, _), advantages in zip(completions, batch_normalize(returns), strict=True)
    ]
    return forward_backward_payload(data, LOSS_FUNCTION, config)
