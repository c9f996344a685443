"""REINFORCE++ with baseline: the KL to the reference shapes the return, and the batch is the normaliser.

A_t = (reward − group mean) − KL_COEF·Σ_{u≥t} (sampled logprob − reference logprob), then mean 0 and deviation 1 over
all tokens of the batch, under PPO's surrogate. The batch is all groups of a cycle (``--batch-size``), so the loop calls
``build_batch_loss``. The reference is the sampler of cycle 0, which a service keeps as long as the run; each completion
costs a ``logprobs``. A group whose rewards are equal is left out, since where nothing else is there normalising would
blow the penalty up into the only signal.
REINFORCE++, arXiv 2501.03262. Modal and Tinker. Updates: several (``--updates 4``). Knobs: the clip range, KL_COEF.
"""

from typing import Any

from grpo_build_loss import reward  # or a function of your own
from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    batch_normalize,
    clip_arguments,
    completion_logprobs,
    forward_backward_payload,
    group_mean_advantages,
    kl_shaped_returns,
    logprobs_request,
    rl_datum,
)

LOSS_FUNCTION = "ppo"
OPERATIONS = ("logprobs",)  # beside the loop's own: a service without them is refused before a session exists
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
KL_COEF = 0.01


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    """A batch of one group."""
    return build_batch_loss([sample], cycle, [request], ctx)


def build_batch_loss(
    samples: list[dict[str, Any]], cycle: int, requests: list[dict[str, Any]], ctx: LoopContext
) -> dict[str, Any]:
    reference = ctx.state.setdefault("reference", ctx.sampler_id)
    ctx.metrics["reward"] = []
    completions, uniform = [], 0
    for sample, request in zip(samples, requests, strict=True):
        prompt = request["prompt"]["token_ids"]
        rewards = [reward(sequence["tokens"]) for sequence in sample["sequences"]]
        ctx.metrics["reward"] += rewards
        centered = group_mean_advantages(rewards)
        if all_zero(centered):
            uniform += 1
            continue
        for sequence, advantage in zip(sample["sequences"], centered, strict=True):
            if sequence["tokens"]:  # an empty completion has no term
                completions.append((prompt, sequence, advantage))
    ctx.metrics["groups/uniform_frac"] = uniform / len(samples)
    if not completions:
        raise NoGradientSignal("every group has one reward for all its completions")
    asked = [logprobs_request(prompt + sequence["tokens"]) for prompt, sequence, _ in completions]
    answers = ctx.client.sampler_operations(ctx.run_id, reference, "logprobs", asked)
    returns = [
        kl_shaped_returns(advantage, sequence["logprobs"], completion_logprobs(answer, prompt), kl_coef=KL_COEF)
        for (prompt, sequence, advantage), answer in zip(completions, answers, strict=True)
    ]
    clip, config = clip_arguments(ctx.provider, CLIP_LOW, CLIP_HIGH)
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage, **clip)
        for (prompt, sequence, _), advantage in zip(completions, batch_normalize(returns), strict=True)
    ]
    return forward_backward_payload(data, LOSS_FUNCTION, config)
