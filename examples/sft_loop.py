"""Supervised fine-tuning: passes over a data set of prompts and completions, without sampling.

    python examples/sft_loop.py --learning-rate 0.1 --epochs 3

A line of ``--data`` is ``{"prompt": …, "completion": …}``. Each is a list of token ids. On the embedded service it may
also be a text: its bytes are the tokens, and a completion then ends with the end token, 256. The loss is
``cross_entropy`` on the completions. A cycle is one optimizer step. The whole loop is in ``train`` of sft_loop.py.

Exit codes: 0 trained; 1 failed; 2 usage; 130 Ctrl-C; 143 SIGTERM; 129 SIGHUP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if (Path(__file__).resolve().parent.parent / "whitney_loop" / "__init__.py").is_file():  # a clone runs uninstalled
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from whitney_loop import Datum
from whitney_loop.callables import examples_folder
from whitney_loop.loop import (
    LoopOptions,
    Training,
    UsageError,
    Work,
    batch_of_step,
    evaluation_payloads,
    fingerprint,
    formatted,
    mean_loss,
    option,
    parse_options,
    read_examples,
    run_training,
    say,
    sft_cost,
    steps_in,
    trained_tokens,
)

COMMAND = "python examples/sft_loop.py"


@dataclass(frozen=True, kw_only=True)
class Options(LoopOptions):
    """The options of this loop, beside those of every loop (whitney_loop/loop/options.py)."""

    data: Path | None = option(
        None, "examples to train on; the embedded service has its own", group="data", metavar="FILE.jsonl"
    )
    eval_data: Path | None = option(
        None, "examples whose loss is printed before and after the training", group="data", metavar="FILE.jsonl"
    )
    batch_size: int = option(8, "examples per optimizer step", group="data", at_least=1)
    epochs: int = option(1, "passes over the data, including those before resuming", group="data", at_least=1)


def main(arguments: Sequence[str] | None = None, prog: str = COMMAND) -> int:
    description = (__doc__ or "").replace(COMMAND, prog)
    return run_training(parse_options(Options, arguments, description, prog), prepare)


def prepare(options: Options, first_cycle: int) -> Work:
    """Read and check the data, before anything is created."""
    path, eval_path = options.data, options.eval_data
    if path is None and not options.local:
        raise UsageError("--data is required unless the embedded service is used (--local rehearses)")
    if path is None:
        path, eval_path = examples_folder() / "sft_train.jsonl", eval_path or examples_folder() / "sft_eval.jsonl"
    data = read_examples(path, "--data", text=options.local)
    eval_data = read_examples(eval_path, "--eval-data", text=options.local) if eval_path else []
    end = steps_in(data, options.epochs, options.batch_size)
    if first_cycle >= end:
        raise UsageError(f"the state to resume is at step {first_cycle} of {end}: raise --epochs to train on")
    return Work(
        cycles=range(first_cycle, end),
        operations=["forward_backward", "optim_step", *(["forward"] if eval_data else [])],
        data={"examples": len(data), "data_sha256": fingerprint(data)},
        train=lambda training: train(training, options, data, eval_data),
        cost=sft_cost(data, cycles=end - first_cycle, batch_size=options.batch_size, eval_data=eval_data),
    )


def train(training: Training, options: Options, data: Sequence[Datum], eval_data: Sequence[Datum]) -> None:
    """Every batch of every epoch: the gradient of the loss, then the optimizer; then a saved state and an adapter."""
    client, run = training.client, training.run_id
    evaluate(training, options, eval_data, "before")
    for cycle in training.cycles():
        epoch, payload = batch_of_step(data, options.batch_size, training.seed, cycle, options.provider)
        backward = client.run_operation(run, "forward_backward", payload)
        training.stop_if_nan(cycle, [payload], [backward])
        step = client.run_operation(run, "optim_step", {"optimizer": training.optimizer})

        metrics = {"cycle": cycle, "epoch": epoch, "loss/token": mean_loss([payload], [backward])}
        training.record_step(metrics, "loss/token", step, trained_tokens(payload))
        if training.saves_after(cycle):
            training.saved(client.run_operation(run, "save_state", {}), next_cycle=cycle + 1)
    evaluate(training, options, eval_data, "after")
    training.saved(client.run_operation(run, "save_state", {}), next_cycle=training.next_cycle)
    training.exported(client.run_operation(run, "export_lora", {}))


def evaluate(training: Training, options: Options, data: Sequence[Datum], when: str) -> None:
    """Print, and keep in the summary, the loss per token on data that is not trained on, if there are any."""
    if not data:
        return
    payloads = list(evaluation_payloads(data, options.batch_size, options.provider))
    results = [training.client.run_operation(training.run_id, "forward", payload) for payload in payloads]
    loss = training.summary.results[f"eval_loss_{when}"] = mean_loss(payloads, results)
    say(f"evaluation {when} training: {formatted({'loss/token': loss})}")


if __name__ == "__main__":
    sys.exit(main())
