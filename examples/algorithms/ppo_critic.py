"""PPO with a critic: a second run in the same session learns the value of every prefix.

The critic's values give GAE advantages, and the returns that it should learn. The policy is trained with PPO's clipped
surrogate, A with mean 0 and population deviation 1 over all tokens of the batch. The critic is trained with
½·max((clip(v) − R)², (v − R)²): v is the value, R the return, and clip keeps v within VALUE_CLIP of its old value. The
reward comes with the last token. The value after it is 0, even if the completion was cut off: our choice.
The batch is all groups of a cycle (``--batch-size``), so the loop calls ``build_batch_loss``. The critic takes its own
updates on it, before the policy takes those of ``--updates``.
PPO, arXiv 1707.06347; GAE, arXiv 1506.02438. Modal, which alone has the critic's loss. Updates: several
(``--updates 4``). Divisor: none, a sum over tokens. Left out: the entropy bonus of PPO's paper.
Constants: the clip range and GAE_LAMBDA are those of PPO's paper; GAMMA is 1 since the reward comes at the end;
VALUE_CLIP, CRITIC_UPDATES, learning rate and rank are our choice for the embedded model.
"""

from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    adamw_optimizer,
    all_zero,
    batch_normalize,
    check_payload,
    completion_values,
    critic_datum,
    forward_backward_payload,
    generalized_advantages,
    rl_datum,
    sft_datum,
)

LOSS_FUNCTION = "ppo_critic"  # of the critic: the loop refuses a provider without it
OPERATIONS = ("forward",)  # besides the loop's own: a service without them is refused before a session exists
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # probability ratios: the surrogate is flat beyond them
VALUE_CLIP = 0.2  # acts from the second update on
CRITIC_UPDATES = 4
GAMMA, GAE_LAMBDA = 1.0, 0.95
CRITIC_OPTIMIZER = {"optimizer": adamw_optimizer(0.1)}  # for the embedded model; 1e-5 is a start for a real one
CRITIC_RANK = 8


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    """Train on a batch of one group."""
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
    if not completions:
        raise NoGradientSignal("every completion is empty")
    critic = ctx.second_run("critic", rank=CRITIC_RANK).run_id
    asked = forward_backward_payload([sft_datum(prompt, s["tokens"]) for prompt, s, _ in completions], "ppo_critic")
    check_payload(asked, ctx.provider, kind="forward")
    outputs = ctx.client.run_operation(critic, "forward", asked).get("outputs") or []
    if len(outputs) != len(completions):
        raise ValueError(f"forward of the critic gave {len(outputs)} outputs for {len(completions)} data; expected all")
    critic_data, advantages = [], []
    for (prompt, sequence, scored), output in zip(completions, outputs, strict=True):
        tokens, values = sequence["tokens"], completion_values(output, prompt)
        token_rewards = [0.0] * (len(tokens) - 1) + [scored]
        gained, returns = generalized_advantages(token_rewards, values, gamma=GAMMA, gae_lambda=GAE_LAMBDA)
        advantages.append(gained)
        critic_data.append(critic_datum(prompt, tokens, values, returns))
    critic_payload = forward_backward_payload(critic_data, "ppo_critic", {"value_clip": VALUE_CLIP})
    check_payload(critic_payload, ctx.provider)
    for update in range(CRITIC_UPDATES):
        learned = ctx.client.run_operation(critic, "forward_backward", critic_payload)
        ctx.client.run_operation(critic, "optim_step", CRITIC_OPTIMIZER)
        if update == 0:
            ctx.metrics["critic/loss"] = learned.get("loss")  # of the values that the advantages were made with
    ctx.metrics["critic/clip_frac"] = (learned.get("metrics") or {}).get("clip_frac")
    normalized = batch_normalize(advantages)
    if all(map(all_zero, normalized)):
        raise NoGradientSignal("every token has the same advantage")
    data = [
        rl_datum(prompt, sequence["tokens"], sequence["logprobs"], advantage)
        for (prompt, sequence, _), advantage in zip(completions, normalized, strict=True)
    ]
    config = {"clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}
    return forward_backward_payload(data, "ppo", config)
