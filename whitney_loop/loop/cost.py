"""The highest possible cost of a run, in operations and tokens: ``--dry-run`` prints it before anything is billed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from whitney_loop.datums import Datum
from whitney_loop.loop.metrics import trained_tokens
from whitney_loop.loop.supervised import steps_in

SAMPLED, TRAINED = "sampled tokens", "trained tokens"  # the keys of a cost beside the names of operations
Cost = Counter[str]


def rl_cost(
    requests: Sequence[Mapping[str, Any]],
    *,
    cycles: int,
    batch_size: int,
    updates: int,
    minibatches: int,
    max_datums: int | None,
) -> Cost:
    """Return the cost of the cycles if every completion has ``max_tokens`` and every group a gradient signal."""
    data = batch_size * max(request["num_samples"] for request in requests)
    tokens = batch_size * max(map(_most_tokens, requests))
    steps = min(minibatches, data)
    parts = sum(_divided_up(len(range(first, data, steps)), max_datums or data) for first in range(steps))
    each = Cost({"save_weights_for_sampler": 1, "sample": batch_size, "forward_backward": updates * parts})
    each += Cost({"optim_step": updates * steps, SAMPLED: tokens, TRAINED: updates * tokens})
    return _times(cycles, each)


def evaluation_cost(held_out: Sequence[Mapping[str, Any]], cycles: range, every: int, *, save_best: bool) -> Cost:
    """Return the cost of all evaluations, if each one is the best so far."""
    if not held_out:
        return Cost()
    each = Cost({"sample": len(held_out), SAMPLED: sum(map(_most_tokens, held_out)), "save_state": int(save_best)})
    return Cost({"save_weights_for_sampler": 1}) + _times(1 + sum(cycle % every == 0 for cycle in cycles), each)


def sft_cost(data: Sequence[Datum], *, cycles: int, batch_size: int, eval_data: Sequence[Datum] = ()) -> Cost:
    """Return the cost of ``cycles`` optimizer steps, and of an evaluation before and after them."""
    epochs = _divided_up(cycles, steps_in(data, 1, batch_size))
    cost = Cost({"forward_backward": cycles, "optim_step": cycles, TRAINED: epochs * trained_tokens({"data": data})})
    return cost + Cost({"forward": 2 * _divided_up(len(eval_data), batch_size)})


def distillation_cost(
    requests: Sequence[Mapping[str, Any]],
    cycles: int,
    teacher_data: Sequence[Datum],
    teacher_epochs: int,
    teacher_batch: int,
) -> Cost:
    """Return the cost of the cycles, and of the training of the teacher, if it has data."""
    teacher_steps = steps_in(teacher_data, teacher_epochs, teacher_batch)
    teacher = sft_cost(teacher_data, cycles=teacher_steps, batch_size=teacher_batch) if teacher_data else Cost()
    tokens, scored = max(map(_most_tokens, requests)), max(request["num_samples"] for request in requests)
    each = Cost({"save_weights_for_sampler": 1, "sample": 1, "logprobs": scored, "forward_backward": 1})
    each += Cost({"optim_step": 1, SAMPLED: tokens, TRAINED: tokens})
    return teacher + Cost({"save_weights_for_sampler": 1}) + _times(cycles, each)


def saving_cost(cycles: range, save_every: int | None, runs: int) -> Cost:
    """Return the cost of the saved states, each of ``runs`` runs, and of the exported adapter."""
    on_the_way = (cycles.stop - 1) // save_every - cycles.start // save_every if save_every else 0
    return Cost({"save_state": runs * (on_the_way + 1), "export_lora": 1})


def cost_line(cost: Cost) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in cost.items())
    return f"the loop's own operations are at most: {counts}. Not counted: prompts, and what your own function asks for"


def _most_tokens(request: Mapping[str, Any]) -> int:
    tokens: int = request["num_samples"] * request["sampling_params"]["max_tokens"]
    return tokens


def _times(count: int, cost: Cost) -> Cost:
    return Cost({name: count * each for name, each in cost.items()})


def _divided_up(count: int, size: int) -> int:
    """Return the number of parts of at most ``size``."""
    return -(-count // size)
