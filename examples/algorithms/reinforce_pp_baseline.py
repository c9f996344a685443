"""REINFORCE++ with baseline: rewards are compared within a group, normalised over the batch, and pulled to a reference.

A_t = a − KL_COEF·(sampled logprob − reference logprob), under PPO's surrogate; a = reward − group mean, then mean 0
and population deviation 1 over all tokens of the batch. The KL has the gradient of the paper's separate term
½·KL_COEF·(logprob − reference logprob)² on the first update; later the ratio and the clip act on it too.
The batch is all groups of a cycle (``--batch-size``): the loop calls ``build_batch_loss``. A group with equal rewards
is left out and does not count in mean and deviation: its zeros would make all other advantages larger, and the mean
would give it an advantage for no reason. The reference is a second run that is never stepped: first the base model, and
after every RENEW_EVERY cycles a copy of the policy. Each completion costs a ``logprobs``.
REINFORCE++, arXiv 2501.03262. Modal and Tinker. Updates: several (``--updates 4``).
Divisor: none, a sum over tokens.
Constants: the clip range is that of PPO's paper (0.2 on both sides); KL_COEF and RENEW_EVERY are our choice
(the paper keeps one reference; later work renews it).
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
    group_mean_advantages,
    kl_adjust_advantages,
    logprobs_request,
    rl_datum,
)

LOSS_FUNCTION = "ppo"
# Besides the loop's own: a service without them is refused before a session exists.
OPERATIONS = ("logprobs", "save_state")
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
KL_COEF = 0.01
RENEW_EVERY = 20  # cycles; a far reference holds the policy back


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    """Train on a batch of one group."""
    return build_batch_loss([sample], cycle, [request], ctx)


def build_batch_loss(
    samples: list[dict[str, Any]], cycle: int, requests: list[dict[str, Any]], ctx: LoopContext
) -> dict[str, Any]:
    ctx.metrics["reward"], completions, rows, uniform = [], [], [], 0
    for sample, request in zip(samples, requests, strict=True):
        rewards = [ctx.reward(sequence, request) for sequence in sample["sequences"]]
        ctx.metrics["reward"] += rewards
        centered = group_mean_advantages(rewards)
        if all_zero(centered):
            uniform += 1
            continue
        for sequence, advantage in zip(sample["sequences"], centered, strict=True):
            if sequence["tokens"]:  # an empty completion has no term
                completions.append((request["prompt"]["token_ids"], sequence))
                rows.append([advantage] * len(sequence["tokens"]))
    ctx.metrics["groups/uniform_frac"] = uniform / len(samples)
    if not completions:
        raise NoGradientSignal("every group has one reward for all its completions")
    asked = [logprobs_request(prompt + sequence["tokens"]) for prompt, sequence in completions]
    state_id = None
    if cycle and cycle % RENEW_EVERY == 0:
        state_id = ctx.client.run_operation(ctx.run_id, "save_state", {})["state_id"]
    reference = ctx.second_run("reference", frozen=True, state_id=state_id)
    answers = ctx.client.sampler_operations(reference.run_id, reference.sampler_id, "logprobs", asked)
    clip, config = clip_arguments(ctx.provider, CLIP_LOW, CLIP_HIGH)
    data = []
    for (prompt, sequence), row, answer in zip(completions, batch_normalize(rows), answers, strict=True):
        logprobs = sequence["logprobs"]
        advantages = kl_adjust_advantages(row, logprobs, completion_logprobs(answer, prompt), kl_coef=KL_COEF)
        data.append(rl_datum(prompt, sequence["tokens"], logprobs, advantages, **clip))
    return forward_backward_payload(data, LOSS_FUNCTION, config)
