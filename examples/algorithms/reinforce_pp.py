"""REINFORCE++ with baseline: the KL to the reference shapes the return, and the batch is the normaliser.

A_t = (reward − group mean) − KL_COEF·Σ_{u≥t} (sampled logprob − reference logprob), then mean 0 and deviation 1 over
all tokens of the batch, under PPO's surrogate. The reference is the sampler of cycle 0, which a service keeps as long
as the run; each completion costs a ``logprobs``. A batch here is one group: where its rewards are equal the cycle is
skipped, since normalising would blow the penalty up into the only signal.
REINFORCE++, arXiv 2501.03262. Modal and Tinker. Updates: several (``--updates 4``). Knobs: the clip range, KL_COEF.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    batch_normalize,
    completion_logprobs,
    forward_backward_payload,
    group_mean_advantages,
    kl_shaped_returns,
    logprobs_request,
    rl_datum,
)

LOSS_FUNCTION = "ppo"
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
KL_COEF = 0.01
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int]) -> float:
    """The share of lowercase vowels, 0…1."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    prompt = request["prompt"]["token_ids"]
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward/mean"] = sum(rewards) / len(rewards)
    centered = group_mean_advantages(rewards)
    if all_zero(centered):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    reference = ctx.state.setdefault("reference", ctx.sampler_id)
    returns = []
    for sequence, advantage in zip(sequences, centered, strict=True):
        asked = logprobs_request(prompt + sequence["tokens"])
        answer = ctx.client.sampler_operation(ctx.run_id, reference, "logprobs", asked)
        reference_logprobs = completion_logprobs(answer, prompt)
        returns.append(kl_shaped_returns(advantage, sequence["logprobs"], reference_logprobs, kl_coef=KL_COEF))
    advantages = batch_normalize(returns)
    on_tinker = ctx.provider == "tinker"  # which takes the clip range per token; Modal takes it in loss_config
    clip = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH} if on_tinker else {}
    config = {} if on_tinker else {"clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage, **clip)
        for sequence, advantage in zip(sequences, advantages, strict=True)
    ]
    return forward_backward_payload(data, LOSS_FUNCTION, config)
