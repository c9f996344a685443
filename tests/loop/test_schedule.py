"""The optimizer steps of a cycle: how many, on which data, and with which optimizer."""

import json

import pytest

from between import Recorder
from loop_runs import GRPO, check_refused, metrics_of, training_on, write_requests
from whitney_loop.loop import LoopOptions
from whitney_loop.loop.cycle import minibatches_of
from whitney_loop.loop.schedule import scheduled_optimizer

COMMON = ("--build-loss", GRPO, "--lora-rank", "1", "--seed", "1", "--sample-json", "one.jsonl", "--model", "byte-lm")


@pytest.fixture
def train(run_loop, tmp_path):
    write_requests(tmp_path / "one.jsonl", ["the "])
    return lambda *arguments, **variables: run_loop("rl_loop", *COMMON, *arguments, **variables)


def rates(schedule, warmup, end):
    options = LoopOptions(learning_rate=8.0, schedule=schedule, warmup=warmup)
    return [scheduled_optimizer(options, cycle, end)["learning_rate"] for cycle in range(end)]


def test_schedules_rise_in_the_warmup_and_fall_until_the_end():
    assert rates("constant", 0, 3) == [8, 8, 8]
    assert rates("constant", 1, 3) == [4, 8, 8]
    assert rates("linear", 0, 4) == [8, 6, 4, 2]
    assert rates("linear", 3, 7) == [2, 4, 6, 8, 6, 4, 2]
    assert rates("cosine", 1, 5) == pytest.approx([4, 8, 4 + 8**0.5, 4, 4 - 8**0.5])


def test_the_learning_rate_of_each_cycle_is_kept(train, tmp_path):
    schedule = ("--learning-rate", "0.4", "--schedule", "linear", "--warmup", "1", "--cycles", "3")
    done = train(*schedule, "--metrics", "m.jsonl")
    assert done.returncode == 0, done.stderr
    assert [entry["optim/learning_rate"] for entry in metrics_of(tmp_path / "m.jsonl")] == [0.2, 0.4, 0.2]


def test_fields_of_the_optimizer_are_sent_and_kept(train, tmp_path, remote):
    fields = ("--optimizer", "weight_decay=0.01", "--optimizer", "grad_clip_norm=2", "--optimizer", "beta2=0.9")
    with Recorder(remote) as service:
        train("--cycles", "1", "--metrics", "m.jsonl", "--learning-rate", "0.5", *fields, **training_on(service))
    expected = {"type": "adamw", "learning_rate": 0.5, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}
    expected |= {"weight_decay": 0.01, "grad_clip_norm": 2.0}
    assert service.of_kind("optim_step") == [{"optimizer": expected}]
    assert json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])["config"]["optimizer"] == expected


def test_a_changed_optimizer_or_schedule_is_printed_at_a_resumption(train):
    train("--cycles", "1", "--metrics", "m.jsonl", "--learning-rate", "0.1", "--optimizer", "beta1=0.8")
    changed = ("--optimizer", "weight_decay=1", "--schedule", "linear", "--minibatches", "2", "--learning-rate", "0.1")
    done = train("--cycles", "2", "--metrics", "m.jsonl", "--resume-from", "last", *changed)
    told = "--schedule constant → linear to cycle 3, --minibatches 1 → 2, --optimizer beta1=0.8 → 0.9, "
    assert f"with other options than before: {told}--optimizer weight_decay=0.0 → 1.0\n" in done.stderr


def test_a_pass_is_as_many_steps_as_there_are_minibatches(train, tmp_path, remote):
    """A cycle of four samples, in two passes of two steps each: every pass trains on each sample once."""
    with Recorder(remote) as service:
        arguments = ("--cycles", "1", "--updates", "2", "--minibatches", "2", "--metrics", "m.jsonl")
        done = train(*arguments, "--learning-rate", "0.1", **training_on(service))
    assert done.returncode == 0, done.stderr
    steps = [[json.dumps(datum) for datum in payload["data"]] for payload in service.of_kind("forward_backward")]
    assert [len(data) for data in steps] == [2, 2, 2, 2] and done.summary["operations"]["optim_step"] == 4
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3])
    assert steps[:2] != steps[2:]  # shuffled anew
    [cycle] = metrics_of(tmp_path / "m.jsonl")
    assert done.summary["tokens_trained"] == 2 * cycle["completions/tokens"]
    assert cycle["kl/k3"] > 0


def test_metrics_are_of_every_sample_of_the_last_pass(train, tmp_path):
    """At a learning rate of 0 a step changes nothing, so that minibatches give the metrics of the whole."""
    for name, count in (("whole", "1"), ("parts", "3")):
        train("--cycles", "1", "--learning-rate", "0", "--minibatches", count, "--metrics", f"{name}.jsonl")
    [whole], [parts] = (metrics_of(tmp_path / f"{name}.jsonl") for name in ("whole", "parts"))
    assert parts.keys() == whole.keys()
    assert parts["loss/sum"] == pytest.approx(whole["loss/sum"]) and parts["ess"] == pytest.approx(whole["ess"])


def test_there_are_no_more_minibatches_than_data():
    payload = {"data": [1, 2, 3], "loss_function": "ppo"}
    assert minibatches_of(payload, 1, "") == [payload]
    several = minibatches_of(payload, 9, "1:0:0")
    assert sorted(batch["data"] for batch in several) == [[1], [2], [3]]
    assert several == minibatches_of(payload, 9, "1:0:0")
    assert sorted(len(batch["data"]) for batch in minibatches_of(payload, 2, "")) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--optimizer", "momentum=1"),
            "--optimizer momentum=1: expected NAME=VALUE, NAME one of grad_clip_norm, weig",
        ),
        (("--optimizer", "beta1"), "--optimizer beta1: '' is not a number"),
        (("--optimizer", "beta1=x"), "--optimizer beta1=x: 'x' is not a number"),
        (("--optimizer", "beta1=1"), "--optimizer: optimizer.beta1 is 1.0, expected"),
        (("--learning-rate", "-1"), "--learning-rate: optimizer.learning_rate is -1.0"),
        (("--warmup", "9", "--cycles", "9"), "--warmup is 9, but the last cycle is 8: expected at most 8"),
        (("--warmup", "-1"), "--warmup is -1, expected at least 0"),
        (("--minibatches", "0"), "--minibatches is 0, expected at least 1"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_before_anything_is_created(train, arguments, message):
    done = train(*arguments)
    check_refused(done, message)
