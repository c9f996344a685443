"""GRPO with a KL penalty against the model that training started from, per token in the advantage.

A_t = (reward − group mean) / group deviation − KL_COEF·(sampled logprob − reference logprob), under PPO's surrogate.
The reference is the sampler of cycle 0, which a service keeps as long as the run; each completion costs a ``logprobs``.
A group whose rewards are equal is skipped, although its penalty alone has a gradient: it would only pull back.
GRPO, arXiv 2402.03300 (there the penalty stands in the loss, with another estimate of the same KL). Modal and Tinker.
Updates: several (``--updates 4``). Knobs: the clip range, KL_COEF.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    completion_logprobs,
    forward_backward_payload,
    group_mean_advantages,
    kl_adjust_advantages,
    logprobs_request,
    rl_datum,
)

LOSS_FUNCTION = "ppo"
OPERATIONS = ("logprobs",)  # beside the loop's own: a service without them is refused before a session exists
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
KL_COEF = 0.05
VOWELS = frozenset(b"aeiou")


def reward(tokens: list[int]) -> float:
    """The share of lowercase vowels, 0…1."""
    return sum(token in VOWELS for token in tokens) / max(len(tokens), 1)


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    reference = ctx.state.setdefault("reference", ctx.sampler_id)
    prompt = request["prompt"]["token_ids"]
    sequences = sample["sequences"]
    rewards = [reward(sequence["tokens"]) for sequence in sequences]
    ctx.metrics["reward"] = rewards
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every completion has reward {rewards[0]:g}")
    on_tinker = ctx.provider == "tinker"  # which takes the clip range per token; Modal takes it in loss_config
    clip = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH} if on_tinker else {}
    config = {} if on_tinker else {"clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}
    kept = [pair for pair in zip(sequences, advantages, strict=True) if pair[0]["tokens"]]  # an empty one has no term
    asked = [logprobs_request(prompt + sequence["tokens"]) for sequence, _ in kept]
    answers = ctx.client.sampler_operations(ctx.run_id, reference, "logprobs", asked)
    data = []
    for (sequence, advantage), answer in zip(kept, answers, strict=True):
        tokens, logprobs = sequence["tokens"], sequence["logprobs"]
        penalised = kl_adjust_advantages(
            [advantage] * len(tokens), logprobs, completion_logprobs(answer, prompt), kl_coef=KL_COEF
        )
        data.append(rl_datum(prompt, tokens, logprobs, penalised, **clip))
    return forward_backward_payload(data, LOSS_FUNCTION, config)
