r"""Several turns: the policy walks to a goal, and a small game answers each of its steps.

A letter before "n" is a step to the left, one from "n" on a step to the right. The game answers "<:" or ">:", the side
where the goal is, as the prompt does, until the goal is reached or TURNS are over. GRPO compares whole walks;
``trajectory_datum`` trains on the policy's tokens in them and not on the game's answers. Each turn samples all walks
together, by operations that are ordered and billed like the loop's own.

    python examples/rl_loop.py --build-loss multi_turn:build_loss --cycles 20 \
        --sample-json examples/multi_turn.jsonl --batch-size 2
"""

from dataclasses import dataclass
from typing import Any

from whitney_loop import (
    LoopContext,
    NoGradientSignal,
    all_zero,
    forward_backward_payload,
    group_mean_advantages,
    result_sequences,
    sample_request,
    trajectory_datum,
)

LOSS_FUNCTION = "importance_sampling"
TURNS = 4
SEEDS = 2**31  # seeds stay below it, so that they fit into an int32


@dataclass
class Walk:
    """One walk. ``spans``: the text so far as (tokens, logprobs), without logprobs for those of the game."""

    goal: int
    spans: list[tuple[list[int], list[float] | None]]
    position: int = 0

    def step(self, sequence: dict[str, Any]) -> None:
        self.spans.append((sequence["tokens"], sequence["logprobs"]))
        letter = bytes(token for token in sequence["tokens"] if token < 256)[:1]
        self.position += (b"n" <= letter <= b"z") - (b"a" <= letter < b"n")

    def answer(self) -> None:
        self.spans.append((list(b"<:" if self.goal < self.position else b">:"), None))


def build_loss(sample: dict[str, Any], cycle: int, request: dict[str, Any], ctx: LoopContext) -> dict[str, Any]:
    prompt, goal, seed = request["prompt"]["token_ids"], request["metadata"]["goal"], request["sampling_params"]["seed"]
    sequences = sample["sequences"]  # the first turn, which the loop has sampled
    walks = [Walk(goal, [(prompt, None)]) for _ in sequences]
    walking = walks
    for turn in range(TURNS):
        if turn > 0:
            asked = []
            for index, walk in enumerate(walking):
                walk.answer()
                own_seed = (seed + turn * len(walks) + index) % SEEDS  # without one, a resumed run would sample others
                text = [token for tokens, _ in walk.spans for token in tokens]
                asked.append(sample_request(text, num_samples=1, max_tokens=1, seed=own_seed))
            results = ctx.client.sampler_operations(ctx.run_id, ctx.sampler_id, "sample", asked)
            sequences = [result_sequences(result)[0] for result in results]
        for walk, sequence in zip(walking, sequences, strict=True):
            walk.step(sequence)
        walking = [walk for walk in walking if walk.position != goal]
    rewards = [1 - abs(walk.position - goal) / abs(goal) for walk in walks]
    ctx.metrics |= {"reward": rewards, "solved": (len(walks) - len(walking)) / len(walks)}
    advantages = group_mean_advantages(rewards, normalize_std=True)
    if all_zero(advantages):
        raise NoGradientSignal(f"every walk has reward {rewards[0]:g}")
    data = [trajectory_datum(walk.spans, advantage) for walk, advantage in zip(walks, advantages, strict=True)]
    return forward_backward_payload(data, LOSS_FUNCTION)
