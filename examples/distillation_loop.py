"""On-policy distillation: the student samples, and a frozen teacher run in the same session scores each token.

    python examples/distillation_loop.py --cycles 60 --learning-rate 0.1

The teacher is resumed from ``--teacher-state`` (a ``state_id`` of ``save_state``), or first trained by supervised
fine-tuning on ``--teacher-data``. The advantage of a token is the teacher's logprob − the student's, and the loss is
``importance_sampling``. The progress shows ``kl/k1``, the mean over the sampled tokens of the student's logprob − the
teacher's: an estimate of KL(student ‖ teacher), which falls as the student learns. The whole cycle is in ``train`` of
distillation_loop.py. Source: Whitney's page "Distillation"; arXiv 2306.13649.

Exit codes: 0 trained; 1 failed; 2 usage; 130 Ctrl-C; 143 SIGTERM; 129 SIGHUP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if (Path(__file__).resolve().parent.parent / "whitney_loop" / "__init__.py").is_file():  # a clone runs uninstalled
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from whitney_loop import (
    Datum,
    SecondRun,
    check_payload,
    completion_logprobs,
    forward_backward_payload,
    logprobs_request,
    result_sampler_id,
    result_sequences,
    rl_datum,
)
from whitney_loop.callables import examples_folder
from whitney_loop.loop import (
    LoopOptions,
    Request,
    Training,
    UsageError,
    Work,
    distillation_cost,
    fingerprint,
    option,
    parse_options,
    read_examples,
    read_requests,
    requests_of_cycle,
    run_training,
    train_on_examples,
    trained_tokens,
)

LOSS_FUNCTION = "importance_sampling"
TEACHER_BATCH = 8  # examples per optimizer step
COMMAND = "python examples/distillation_loop.py"


@dataclass(frozen=True, kw_only=True)
class Options(LoopOptions):
    """The options of this loop, beside those of every loop (whitney_loop/loop/options.py)."""

    teacher_state: str | None = option(None, "its saved state, of the same rank", group="teacher", metavar="STATE_ID")
    teacher_data: Path | None = option(None, "examples to train it on first", group="teacher", metavar="FILE.jsonl")
    teacher_epochs: int = option(3, "passes over --teacher-data", group="teacher", at_least=1)
    sample_json: Path | None = option(None, "prompt file; each cycle takes one prompt", group="data", metavar="FILE")
    cycles: int = option(2, "cycles to train, from the first or the resumed one", group="data", at_least=1)


def main(arguments: Sequence[str] | None = None, prog: str = COMMAND) -> int:
    description = (__doc__ or "").replace(COMMAND, prog)
    return run_training(parse_options(Options, arguments, description, prog), prepare)


def prepare(options: Options, first_cycle: int) -> Work:
    """Read and check the data, before anything is created."""
    path = options.teacher_data
    if path is None and options.teacher_state is None and options.local:
        path = examples_folder() / "sft_train.jsonl"
    if (path is None) == (options.teacher_state is None):
        raise UsageError("give one of --teacher-state and --teacher-data")
    requests = read_requests(options.sample_json, embedded=options.local)
    teacher_data = read_examples(path, "--teacher-data", text=options.local) if path else []
    return Work(
        cycles=range(first_cycle, first_cycle + options.cycles),
        operations=["save_weights_for_sampler", "sample", "logprobs", "forward_backward", "optim_step"],
        data={"requests": len(requests), "data_sha256": fingerprint([*requests, *teacher_data])},
        train=lambda training: train(training, options, requests, teacher_data),
        cost=distillation_cost(requests, options.cycles, teacher_data, options.teacher_epochs, TEACHER_BATCH),
        saved_runs=2,
        requests=requests,
        loss_function=LOSS_FUNCTION,
    )


def train(training: Training, options: Options, requests: Sequence[Request], teacher_data: list[Datum]) -> None:
    """Each cycle: the student samples, the teacher scores, the student steps; then a saved state and an adapter."""
    client, run, summary = training.client, training.run_id, training.summary
    teacher = open_teacher(training, options, teacher_data)
    for cycle in training.cycles():
        [request] = requests_of_cycle(requests, 1, training.seed, cycle)
        prompt = request["prompt"]["token_ids"]
        saved = client.run_operation(run, "save_weights_for_sampler", {})
        [sample] = client.sampler_operations(run, result_sampler_id(saved), "sample", [request])
        sequences = [sequence for sequence in result_sequences(sample) if sequence["tokens"]]
        if not sequences:
            raise ValueError(f"{request.where}: every completion of cycle {cycle} is empty: give another prompt")

        asked = [logprobs_request(prompt + sequence["tokens"]) for sequence in sequences]
        answers = client.sampler_operations(teacher.run_id, teacher.sampler_id, "logprobs", asked)
        data, gaps = [], []
        for sequence, answer in zip(sequences, answers, strict=True):
            expert, student = completion_logprobs(answer, prompt), sequence["logprobs"]
            advantages = [theirs - own for theirs, own in zip(expert, student, strict=True)]
            data.append(rl_datum(prompt, sequence["tokens"], student, advantages))
            gaps += advantages
        payload = forward_backward_payload(data, LOSS_FUNCTION)
        check_payload(payload, options.provider)

        backward = client.run_operation(run, "forward_backward", payload)
        training.stop_if_nan(cycle, [payload], [backward])
        step = client.run_operation(run, "optim_step", {"optimizer": training.optimizer})

        kl = -sum(gaps) / len(gaps)
        summary.results = {"kl_first": kl} | summary.results | {"kl_last": kl}
        summary.tokens_sampled += len(gaps)
        metrics = {"cycle": cycle, "version": saved.get("version"), "kl/k1": kl, "loss": backward.get("loss")}
        training.record_step(metrics, "kl/k1", step, trained_tokens(payload))
        if training.saves_after(cycle):
            training.saved(client.run_operation(run, "save_state", {}), next_cycle=cycle + 1)
    training.saved(client.run_operation(run, "save_state", {}), next_cycle=training.next_cycle)
    training.exported(client.run_operation(run, "export_lora", {}))


def open_teacher(training: Training, options: Options, data: list[Datum]) -> SecondRun:
    """The teacher's run: from its state, or trained on ``data`` first. A resumed training has its state already."""
    teacher = training.ctx.second_run("teacher", state_id=options.teacher_state)
    epochs = 0 if teacher.state_id else options.teacher_epochs
    tokens = train_on_examples(training, teacher.run_id, data, epochs, TEACHER_BATCH)
    training.summary.results = {"teacher_run_id": teacher.run_id, "teacher_tokens_trained": tokens}
    return teacher


if __name__ == "__main__":
    sys.exit(main())
