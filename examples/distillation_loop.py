"""On-policy distillation: the student samples, and a frozen teacher run in the same session says how likely that is.

    python examples/distillation_loop.py --teacher-data examples/sft_train.jsonl --cycles 60 --learning-rate 0.1

The teacher is resumed from ``--teacher-state`` (a ``state_id`` of ``save_state``), or trained first by SFT on
``--teacher-data``. Each cycle the advantage of a token is the teacher's logprob − the student's, under
``importance_sampling``: its expectation is −KL(student ‖ teacher), which the progress shows as ``kl/k1``, the mean over
the sampled tokens. Where it trains, how it ends and the exit codes are those of ``rl_loop.py``.
Source: Whitney's page "Distillation"; arXiv 2306.13649.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from loop_data import requests_of
from loop_support import (
    Payload,
    Place,
    Summary,
    UsageError,
    add_common_options,
    checked_optimizer,
    formatted,
    is_embedded,
    open_run,
    run_loop,
    say,
    train_on,
)
from loop_warnings import Warnings
from sft_loop import batches, read_data
from whitney_loop import (
    Datum,
    LoopContext,
    check_payload,
    completion_logprobs,
    forward_backward_payload,
    logprobs_request,
    lora_run,
    result_sampler_id,
    result_sequences,
    rl_datum,
)

NEEDED_OPERATIONS = ("forward_backward", "optim_step", "save_weights_for_sampler", "sample", "logprobs")
LOSS_FUNCTION = "importance_sampling"
TEACHER_BATCH = 8  # examples per optimizer step


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        optimizer = checked_optimizer(options, "cycles", "teacher_epochs")
        requests = requests_of(options)
        data = read_data(options.teacher_data, text=is_embedded(options)) if options.teacher_data else []
    except UsageError as error:
        say(f"error: {error}")
        return 2
    return run_loop(options, lambda place, summary: train(options, place, summary, requests, data, optimizer))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a student on what a frozen teacher thinks of its samples.")
    teacher = parser.add_mutually_exclusive_group(required=True)
    teacher.add_argument("--teacher-state", metavar="STATE_ID", help="a saved state of the same model and --lora-rank")
    teacher.add_argument("--teacher-data", type=Path, metavar="FILE.jsonl", help="to train the teacher first")
    parser.add_argument("--teacher-epochs", type=int, default=3, help="passes over --teacher-data (default 3)")
    parser.add_argument(
        "--sample-json",
        type=Path,
        metavar="FILE",
        help="payloads of sample: one, an array, or a JSONL; a cycle takes the next (embedded: sample.json here)",
    )
    parser.add_argument("--cycles", type=int, default=2, help="how many samples (default 2)")
    add_common_options(parser)
    return parser.parse_args(arguments)


def train(
    options: argparse.Namespace,
    place: Place,
    summary: Summary,
    requests: list[Payload],
    teacher_data: list[Datum],
    optimizer: Payload,
) -> int:
    summary |= {"cycles_done": 0, "tokens_sampled": 0, "tokens_trained": 0, "kl_first": None, "kl_last": None}
    warnings = Warnings(summary)
    warnings.learning_rate(options.learning_rate, embedded=place.embedded)
    warnings.sampling(requests, LOSS_FUNCTION)
    with open_run(options, place, summary, NEEDED_OPERATIONS) as ctx:
        teacher = open_teacher(ctx, options, teacher_data, optimizer, summary)
        for cycle in range(options.cycles):
            kl = train_one_cycle(cycle, ctx, teacher, requests[cycle % len(requests)], optimizer, summary)
            summary["kl_first"] = kl if cycle == 0 else summary["kl_first"]
            summary["kl_last"] = kl
            summary["cycles_done"] += 1
    return 0


def open_teacher(
    ctx: LoopContext, options: argparse.Namespace, data: list[Datum], optimizer: Payload, summary: Summary
) -> tuple[str, str]:
    """The teacher's run, cleaned up with the student's, and the sampler of its frozen weights."""
    run = lora_run(
        ctx.client,
        ctx.session_id,
        model=options.model,
        rank=options.lora_rank,
        seed=options.seed,
        resume_from=options.teacher_state,
    )
    teacher = LoopContext(ctx.client, ctx.resources.enter_context(run), "", ctx.provider, ctx.session_id, ctx.model)
    summary["teacher_run_id"] = teacher.run_id
    taught: Summary = {}
    for _, payload in batches(data, options.teacher_epochs, TEACHER_BATCH, options.seed):
        check_payload(payload, teacher.provider)
        train_on(teacher, payload, optimizer, taught)
    summary["teacher_tokens_trained"] = taught.get("tokens_trained", 0)
    saved = ctx.client.run_operation(teacher.run_id, "save_weights_for_sampler", {})
    say(f"teacher {teacher.run_id} is frozen at version {saved.get('version')}")
    return teacher.run_id, result_sampler_id(saved)


def train_one_cycle(
    cycle: int, ctx: LoopContext, teacher: tuple[str, str], request: Payload, optimizer: Payload, summary: Summary
) -> float:
    """One sample, judged token by token, and one update; the estimate of the KL that it was sampled with."""
    started = time.monotonic()
    saved = ctx.client.run_operation(ctx.run_id, "save_weights_for_sampler", {})
    sample = ctx.client.sampler_operation(ctx.run_id, result_sampler_id(saved), "sample", request)
    prompt = request["prompt"]["token_ids"]
    sequences = [sequence for sequence in result_sequences(sample) if sequence["tokens"]]  # an empty one chose nothing
    if not sequences:
        raise ValueError(f"every completion of cycle {cycle} is empty: give another prompt in --sample-json")
    asked = [logprobs_request(prompt + sequence["tokens"]) for sequence in sequences]
    answers = ctx.client.sampler_operations(*teacher, "logprobs", asked)
    data: list[Datum] = []
    advantages: list[float] = []
    for sequence, answer in zip(sequences, answers, strict=True):
        thought = completion_logprobs(answer, prompt)
        per_token = [theirs - mine for theirs, mine in zip(thought, sequence["logprobs"], strict=True)]
        advantages += per_token
        data.append(rl_datum(prompt, sequence["tokens"], sequence["logprobs"], per_token))
    payload = forward_backward_payload(data, LOSS_FUNCTION)
    check_payload(payload, ctx.provider)
    backward = train_on(ctx, payload, optimizer, summary)
    summary["tokens_sampled"] += len(advantages)
    kl: float = -sum(advantages) / len(advantages)
    line: dict[str, Any] = {"cycle": cycle, "version": saved.get("version"), "kl/k1": kl, "loss": backward.get("loss")}
    say(f"{formatted(line)}  tokens {len(advantages)}  {time.monotonic() - started:.2f} s")
    return kl


if __name__ == "__main__":
    sys.exit(main())
