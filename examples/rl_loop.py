"""The reference RL loop: you write the prompts, the reward and the loss; a Whitney service samples and trains.

    python examples/rl_loop.py --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1

Without a base URL it trains on the embedded service, and says so. The whole cycle is in ``train`` of rl_loop.py.

Exit codes: 0 trained; 1 failed, or every cycle was skipped; 2 usage; 130 Ctrl-C; 143 SIGTERM; 129 SIGHUP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if (Path(__file__).resolve().parent.parent / "whitney_loop" / "__init__.py").is_file():  # a clone runs uninstalled
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from whitney_loop.callables import algorithms
from whitney_loop.loop import (
    REQUIRED,
    Cycle,
    Evaluation,
    LoopOptions,
    Request,
    Texts,
    Training,
    UsageError,
    UserLoss,
    Work,
    evaluation_cost,
    fingerprint,
    load_user_loss,
    notes_on_groups,
    option,
    parse_options,
    read_held_out,
    read_requests,
    requests_of_cycle,
    rl_cost,
    run_training,
)

COMMAND = "python examples/rl_loop.py"
EVAL_EVERY = 10  # cycles


@dataclass(frozen=True, kw_only=True)
class Options(LoopOptions):
    """The options of this loop, beside those of every loop (whitney_loop/loop/options.py)."""

    build_loss: str = option(
        REQUIRED,
        "your function, in the current folder, or an example",
        group="loss and data",
        metavar="MODULE:CALLABLE",
    )
    reward: str | None = option(
        None, "your reward(text or tokens, request); default: vowels", group="loss and data", metavar="MODULE:CALLABLE"
    )
    reward_threads: int = option(1, "rewards to compute side by side", group="loss and data", at_least=1)
    sample_json: Path | None = option(
        None, "prompt file; default on the embedded service: an example", group="loss and data", metavar="FILE"
    )
    batch_size: int = option(1, "prompts per cycle", group="loss and data", at_least=1)
    cycles: int = option(2, "cycles to train, from the first or the resumed one", group="loss and data", at_least=1)
    eval_json: Path | None = option(
        None, "held-out prompts, sampled without training", group="evaluation", metavar="FILE"
    )
    eval_every: int | None = option(
        None, f"evaluate before every Nth cycle and at the end; default: {EVAL_EVERY}", group="evaluation", at_least=1
    )
    save_best: bool = option(False, "save a state whenever an evaluation is the best so far", group="evaluation")
    updates: int = option(1, "passes over the samples of each cycle", group="optimizer", at_least=1)
    minibatches: int = option(1, "optimizer steps of a pass, on shuffled samples", group="optimizer", at_least=1)
    max_datums: int | None = option(
        None, "most completions in one forward_backward; default: no limit", group="optimizer", at_least=1
    )

    show_every: int | None = option(
        None, "show texts of every Nth cycle too, not only of first and last", group="texts", metavar="N", at_least=1
    )
    samples: Path | None = option(
        None, "write a line per completion, with its text and reward (see plot)", group="texts", metavar="FILE.jsonl"
    )
    samples_per_group: int | None = option(
        None, "write only N of each group, the best and the worst first", group="texts", metavar="N", at_least=1
    )


def main(arguments: Sequence[str] | None = None, prog: str = COMMAND) -> int:
    description = f"{__doc__}\nAlgorithms, as algorithms.NAME:build_loss:\n{algorithms()}".replace(COMMAND, prog)
    return run_training(parse_options(Options, arguments, description, prog), prepare)


def prepare(options: Options, first_cycle: int) -> Work:
    """Load and check what the user gave, before anything is created."""
    loss = load_user_loss(
        options.build_loss,
        options.provider,
        reward=options.reward,
        reward_threads=options.reward_threads,
        evaluates=options.eval_json is not None,
    )
    requests = read_requests(options.sample_json, embedded=options.local)
    if options.batch_size > len(requests):
        raise UsageError(
            f"--batch-size is {options.batch_size}, but the number of requests is {len(requests)} "
            "(num_samples of a request is how often its prompt is sampled)"
        )
    if options.samples_per_group and not options.samples:
        raise UsageError("--samples-per-group needs --samples FILE.jsonl")
    if options.eval_every and not options.eval_json:
        raise UsageError("--eval-every needs --eval-json FILE")
    held_out, notes = read_held_out(options.eval_json, loss, requests, save_best=options.save_best)
    operations = ["save_weights_for_sampler", "sample", "forward_backward", "optim_step"]
    operations += ["save_state"] if options.save_best else []
    if loss.build_batch_loss:
        notes += [f"--build-loss {options.build_loss}: build_batch_loss of its module is called once a cycle instead"]
    else:
        notes += notes_on_groups(requests)
    cycles = range(first_cycle, first_cycle + options.cycles)
    cost = rl_cost(
        requests,
        cycles=options.cycles,
        batch_size=options.batch_size,
        updates=options.updates,
        minibatches=options.minibatches,
        max_datums=options.max_datums,
    )
    return Work(
        cycles=cycles,
        operations=[*operations, *loss.operations],
        data={"requests": len(requests), "data_sha256": fingerprint(requests)},
        train=lambda training: train(training, options, loss, requests, held_out),
        cost=cost + evaluation_cost(held_out, cycles, options.eval_every or EVAL_EVERY, save_best=options.save_best),
        requests=requests,
        loss_function=loss.loss_function,
        notes=notes,
    )


def train(
    training: Training, options: Options, loss: UserLoss, requests: Sequence[Request], held_out: Sequence[Request]
) -> None:
    """The documented cycle, as often as asked; then a saved state and an exported adapter."""
    client, run = training.client, training.run_id
    training.ctx.reward = loss.rewards.of  # your build_loss may ask for it
    texts = Texts(training, loss.decode, show_every=options.show_every, per_group=options.samples_per_group)
    evaluation = Evaluation(training, loss, held_out, options.eval_every or EVAL_EVERY, save_best=options.save_best)
    for number in training.cycles():
        batch = requests_of_cycle(requests, options.batch_size, training.seed, number)
        cycle = Cycle(training, number, loss, batch, texts)

        # Sample: a sampler keeps the weights as they are now, and completes every prompt with them.
        saved = client.run_operation(run, "save_weights_for_sampler", {})
        sampler_id = cycle.use_sampler(saved)
        evaluation.before(number, sampler_id)  # if it is due
        samples = client.sampler_operations(run, sampler_id, "sample", batch, on_result=cycle.start_rewards)

        # Score: your function turns the samples into what to train on, or None if they teach nothing.
        payload = cycle.build_loss(samples)

        # Step: the gradient of the loss, then the optimizer. One step a cycle, without --updates and --minibatches.
        for parts in cycle.batches(payload, options.updates, options.minibatches, options.max_datums):
            backward = client.run_operations(run, "forward_backward", parts)
            training.stop_if_nan(number, parts, backward)  # before it gets into the weights
            step = client.run_operation(run, "optim_step", {"optimizer": training.optimizer})
            cycle.stepped(parts, backward, step)

        cycle.record()
        if training.saves_after(number):
            training.saved(client.run_operation(run, "save_state", {}), next_cycle=number + 1)
    evaluation.after_last()
    training.saved(client.run_operation(run, "save_state", {}), next_cycle=training.next_cycle)
    training.exported(client.run_operation(run, "export_lora", {}))


if __name__ == "__main__":
    sys.exit(main())
