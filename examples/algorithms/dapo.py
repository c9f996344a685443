"""DAPO: more room to rise than to fall, no group without signal, and every token of a group weighs the same.

−Σ min(r·A, clip(r)·A) / tokens of the group, with r = exp(logprob − sampled logprob) and A = (reward − group mean) /
population deviation of the group. The high clip is further from 1 than the low one. A group with equal rewards teaches
nothing and is replaced: the paper draws other prompts; this variant samples the same prompt again with another seed.
Each such sample is billed.
DAPO, arXiv 2503.14476. Modal and Tinker. Updates: several (``--updates 4``).
Divisor: the number of tokens of the group, as in the paper's formula (common code takes those of the batch).
Constants: the clip range is the paper's; MOST_RESAMPLES is our choice. OVERLONG_TOKENS is 4,096 of 20,480 tokens in the
paper; it is off here, since nearly all completions of the embedded model reach ``max_tokens``.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    group_mean_advantages,
    length_normalize,
    policy_payload,
    result_sequences,
)

LOSS_FUNCTION = "ppo"
CLIP_LOW, CLIP_HIGH = 0.8, 1.28  # probability ratios
OVERLONG_TOKENS = 0  # over so many tokens before max_tokens the reward falls by up to 1; 0: off
MOST_RESAMPLES = 2
SEED_STRIDE = 1_000_003  # far from the seeds that people count up, so that no resample repeats a sample
SEEDS = 2**31  # seeds stay below it, so that they fit into an int32


def overlong_penalty(tokens: list[int], max_tokens: int) -> float:
    """Return 0 for a completion that ends before the last OVERLONG_TOKENS, then linearly to −1 at ``max_tokens``."""
    if OVERLONG_TOKENS == 0:
        return 0.0
    excess = max(len(tokens) - (max_tokens - OVERLONG_TOKENS), 0)
    return -min(excess / OVERLONG_TOKENS, 1.0)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    params = request["sampling_params"]
    for resample in range(MOST_RESAMPLES + 1):
        if resample:
            seed = (params.get("seed", cycle) + resample * SEED_STRIDE) % SEEDS
            again = request | {"sampling_params": params | {"seed": seed}}
            sample = ctx.client.sampler_operation(ctx.run_id, ctx.sampler_id, "sample", again)
        sequences = result_sequences(sample)
        rewards = [
            ctx.reward(sequence, request) + overlong_penalty(sequence["tokens"], params["max_tokens"])
            for sequence in sequences
        ]
        advantages = group_mean_advantages(rewards, normalize_std=True)
        if not all_zero(advantages):
            break
    ctx.metrics |= {"reward": rewards, "resamples": resample}
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    tokens_of_group = max(sum(len(sequence["tokens"]) for sequence in sequences), 1)
    scaled = [length_normalize(advantage, tokens_of_group) for advantage in advantages]
    return policy_payload(
        sample, request, scaled, LOSS_FUNCTION, provider=ctx.provider, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
