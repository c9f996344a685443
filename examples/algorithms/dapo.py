"""DAPO: more room to rise than to fall, and no group without signal.

−Σ min(r·A, clip(r)·A), a sum over the tokens of all completions, A = (reward − group mean) / group deviation, with
the high clip further away than the low one. A uniform group teaches nothing and is replaced: the paper draws other
prompts; sampling the same prompt again with another seed, as here, is a variant of it. Each such sample is billed.
DAPO, arXiv 2503.14476. Modal and Tinker. Updates: several (``--updates 4``). Knobs: the clip range, the resamples.
"""

from typing import Any

from grpo_build_loss import reward  # or a function of your own
from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    group_mean_advantages,
    policy_payload,
    result_sequences,
)

LOSS_FUNCTION = "ppo"
CLIP_LOW, CLIP_HIGH = 0.8, 1.28  # probability ratios
MOST_RESAMPLES = 2
SEED_STRIDE = 1_000_003  # far from the seeds that people count up, so that no resample repeats a sample
SEEDS = 2**31  # what a service keeps as int32 holds them


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    for resample in range(MOST_RESAMPLES + 1):
        if resample:
            params = request["sampling_params"]
            seed = (params.get("seed", cycle) + resample * SEED_STRIDE) % SEEDS
            again = request | {"sampling_params": params | {"seed": seed}}
            sample = ctx.client.sampler_operation(ctx.run_id, ctx.sampler_id, "sample", again)
        sequences = result_sequences(sample)
        rewards = [reward(sequence["tokens"]) for sequence in sequences]
        advantages = group_mean_advantages(rewards, normalize_std=True)
        if not all_zero(advantages):
            break
    ctx.metrics |= {"reward": rewards, "resamples": resample}
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    return policy_payload(
        sample, request, advantages, LOSS_FUNCTION, provider=ctx.provider, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
