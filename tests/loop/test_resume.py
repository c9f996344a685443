"""Runs that are resumed continue as if they had never stopped: the same weights, bit by bit, and the same metrics."""

import importlib
import json
import re
import signal

import pytest

from loop_runs import EXAMPLES, GRPO, check_exact_resumption, entries_of, metrics_of, write_requests
from processes import read_until, start_loop

PROMPTS = ["the ", "she ", "they ", "one ", "a ", "and ", "that "]
COMMON = ("--lora-rank", "1", "--learning-rate", "0.1")
RL = ("--build-loss", GRPO, "--sample-json", "prompts.jsonl", "--batch-size", "3", *COMMON)
MINE = """
import os, sys, threading
from grpo_build_loss import build_loss as grpo

def waits(sample, cycle, request, ctx):
    if cycle == 5 and not os.path.exists("go on"):
        print("waiting in cycle 5", file=sys.stderr, flush=True)
        threading.Event().wait()
    return grpo(sample, cycle, request, ctx)

def fails(sample, cycle, request, ctx):
    if cycle == 5 and not os.path.exists("go on"):
        raise LookupError("as it was told")
    return grpo(sample, cycle, request, ctx)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    write_requests(tmp_path / "prompts.jsonl", PROMPTS)
    examples = [{"prompt": text, "completion": text[::-1]} for text in PROMPTS]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    return tmp_path


@pytest.fixture
def train(run_loop, folder):
    def run(script, *arguments):
        done = run_loop(script, *arguments)
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_four_cycles_are_two_and_two_more(train, folder):
    whole = train("rl_loop", *RL, "--seed", "1", "--cycles", "4", "--metrics", "whole.jsonl")
    first = train("rl_loop", *RL, "--seed", "1", "--cycles", "2", "--metrics", "parts.jsonl")
    state_id = first.summary["state_id"]
    second = train("rl_loop", *RL, "--cycles", "2", "--metrics", "parts.jsonl", "--resume-from", state_id)
    assert f"resuming from {state_id} at cycle 2" in second.stderr
    assert second.adapter == whole.adapter != first.adapter
    assert [entry["cycle"] for entry in metrics_of(folder / "parts.jsonl")] == [0, 1, 2, 3]
    assert metrics_of(folder / "parts.jsonl") == metrics_of(folder / "whole.jsonl")


def test_without_a_metrics_file_the_first_cycle_is_given(train):
    whole = train("rl_loop", *RL, "--seed", "1", "--cycles", "4")
    first = train("rl_loop", *RL, "--seed", "1", "--cycles", "2")
    assert first.summary["next_cycle"] == 2
    again = ("--seed", "1", "--cycles", "2", "--resume-from", first.summary["state_id"], "--first-cycle", "2")
    assert train("rl_loop", *RL, *again).adapter == whole.adapter


def test_sft_resumes_exactly_in_the_middle_of_an_epoch(train, folder):
    """Seven examples in batches of two are four steps an epoch; the state is that of step 6 of 8."""
    sft = ("--data", "examples.jsonl", "--batch-size", "2", *COMMON)
    whole = train("sft_loop", *sft, "--seed", "1", "--epochs", "2", "--metrics", "whole.jsonl", "--save-every", "6")
    (folder / "parts.jsonl").write_bytes((folder / "whole.jsonl").read_bytes())
    state_id, next_cycle = re.findall(r"^saved (state-\w+): the next cycle is (\d)$", whole.stderr, re.MULTILINE)[0]
    again = ("--epochs", "2", "--metrics", "parts.jsonl", "--resume-from", state_id)
    resumed = train("sft_loop", *sft, *again)
    assert next_cycle == "6" and resumed.summary["cycles_done"] == 2
    assert resumed.adapter == whole.adapter
    assert metrics_of(folder / "parts.jsonl") == metrics_of(folder / "whole.jsonl")


def test_sft_goes_on_to_further_epochs(train):
    sft = ("--data", "examples.jsonl", "--batch-size", "2", *COMMON)
    whole = train("sft_loop", *sft, "--seed", "1", "--epochs", "2")
    first = train("sft_loop", *sft, "--seed", "1", "--epochs", "1", "--metrics", "m.jsonl")
    second = train("sft_loop", *sft, "--epochs", "2", "--metrics", "m.jsonl", "--resume-from", "last")
    assert second.adapter == whole.adapter != first.adapter


def test_sft_that_is_done_has_nothing_to_resume(train, run_loop):
    train("sft_loop", "--data", "examples.jsonl", *COMMON, "--metrics", "m.jsonl")
    done = run_loop("sft_loop", "--data", "examples.jsonl", *COMMON, "--metrics", "m.jsonl", "--resume-from", "last")
    assert done.returncode == 2 and "the state to resume is at step 1 of 1: raise --epochs to train on" in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "next_cycle"),
    [(signal.SIGINT, 130, 5), pytest.param(signal.SIGKILL, -9, 4, marks=pytest.mark.long)],
    ids=["Ctrl-C", "kill"],
)
def test_an_ended_run_continues_at_the_cycle_after_its_last_state(train, run_loop, folder, number, code, next_cycle):
    """Ended in cycle 5, saved after cycle 3. Ctrl-C saves the whole cycle 4 first; after a kill it is trained again."""
    whole = train("rl_loop", *RL, "--seed", "1", "--cycles", "7", "--metrics", "whole.jsonl")
    waiting = (*RL, "--build-loss", "mine:waits", "--metrics", "m.jsonl")
    with start_loop(folder, "rl_loop.py", *waiting, "--seed", "1", "--cycles", "7", "--save-every", "2") as process:
        read_until(process.stderr, "waiting in cycle 5")
        assert [entry["cycle"] for entry in metrics_of(folder / "m.jsonl")] == [0, 1, 2, 3, 4]  # flushed
        other = run_loop("rl_loop", *waiting, "--resume-from", "last")
        assert other.returncode == 2 and "m.jsonl: another loop is writing it" in other.stderr
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    left = str(7 - next_cycle)
    if number == signal.SIGINT:
        assert re.search(
            rf"to resume at cycle 5, the same command with: --resume-from state-\w+ --cycles {left}", stderr
        )
    with (folder / "m.jsonl").open("a") as file:
        file.write('{"cycle": 5, "cut o')
    (folder / "go on").touch()
    resumed = train("rl_loop", *waiting, "--cycles", left, "--resume-from", "last")
    assert resumed.adapter == whole.adapter
    assert metrics_of(folder / "m.jsonl") == metrics_of(folder / "whole.jsonl")
    superseded = (folder / "m.jsonl.superseded").read_text()
    assert superseded.count('"cycle": ') == (1 if number == signal.SIGINT else 2)


@pytest.mark.long
def test_the_printed_options_are_enough_without_a_metrics_file_or_a_seed(train, run_loop, folder):
    failing = (*RL, "--build-loss", "mine:fails")
    stopped = run_loop("rl_loop", *failing, "--cycles", "7", "--save-every", "2")
    assert stopped.returncode == 1
    (folder / "go on").touch()
    [seed] = re.findall(r"seed (\d+) was drawn", stopped.stderr)
    [options] = re.findall(r"the same command with: (.*)\n", stopped.stderr)
    resumed = train("rl_loop", *failing, *options.split())
    assert resumed.adapter == train("rl_loop", *RL, "--seed", seed, "--cycles", "7").adapter


# Second runs


def second_runs_of(path):
    return [line["second_runs"] for line in entries_of(path) if "second_runs" in line]


@pytest.mark.parametrize(
    "name",
    [
        "reinforce_pp_baseline",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ppo_critic", "grpo_kl", "reinforce_pp")),
    ],
)
def test_a_training_with_a_second_run_is_resumed_exactly(train, folder, monkeypatch, name):
    if name == "reinforce_pp_baseline":
        monkeypatch.syspath_prepend(str(EXAMPLES))
        algorithm = importlib.import_module("algorithms.reinforce_pp_baseline")
        monkeypatch.setattr(algorithm, "RENEW_EVERY", 2)  # also before the resumption
    rl = ("--build-loss", f"algorithms.{name}:build_loss", *RL[2:])
    _, _, second = check_exact_resumption(train, "rl_loop", *rl, cycles=(3, 2))
    [states, _] = second_runs_of(folder / "parts.jsonl")
    expected = {"ppo_critic": {"critic": str}, "reinforce_pp_baseline": {"reference": str}}
    assert {run: type(state) for run, state in states.items()} == expected.get(name, {"reference": type(None)})
    assert "ctx.state" not in second.stderr


def test_distillation_is_resumed_with_its_teacher_which_is_not_trained_again(train):
    distil = ("--teacher-data", "examples.jsonl", "--teacher-epochs", "1", "--sample-json", "prompts.jsonl", *COMMON)
    whole, _, resumed = check_exact_resumption(train, "distillation_loop", *distil)
    assert resumed.summary["teacher_tokens_trained"] == 0 < whole.summary["teacher_tokens_trained"]


def test_a_second_run_is_not_resumed_without_the_metrics_file_that_names_its_state(train, run_loop):
    rl = ("--build-loss", "algorithms.grpo_kl:build_loss", *RL[2:], "--seed", "1")
    first = train("rl_loop", *rl, "--cycles", "2")
    again = run_loop("rl_loop", *rl, "--resume-from", first.summary["state_id"], "--first-cycle", "2")
    assert again.returncode == 1
    assert "the second run 'reference' cannot be resumed: its state is in the metrics file" in again.stderr


def test_a_run_with_every_option_on_resumes_exactly(train, run_loop, folder):
    """The run fails in cycle 5 and is resumed there; the schedule and the goal go on as if it had not failed."""
    steps = ("--updates", "2", "--minibatches", "2", "--max-datums", "3", "--optimizer", "weight_decay=0.1")
    schedule = ("--schedule", "cosine", "--warmup", "2", "--optimizer", "grad_clip_norm=1")
    ends = ("--stop-at", "optim/grad_norm:1e9", "--token-budget", "999999", "--max-minutes", "999")
    held_out = ("--eval-json", "held_out.jsonl", "--eval-every", "2", "--save-best", "--reward-threads", "2")
    write_requests(folder / "held_out.jsonl", ["his "])
    every = (*RL, *steps, *schedule, *ends, *held_out, "--reward", "grpo_build_loss:reward", "--save-every", "3")
    files = ("--metrics", "whole.jsonl", "--samples", "whole_samples.jsonl")
    whole = train("rl_loop", *every, "--seed", "1", "--cycles", "7", *files)
    every = (*every, "--build-loss", "mine:fails", "--metrics", "m.jsonl", "--samples", "samples.jsonl")
    assert run_loop("rl_loop", *every, "--seed", "1", "--cycles", "7").returncode == 1
    (folder / "go on").touch()
    resumed = train("rl_loop", *every, "--cycles", "2", "--resume-from", "last")
    assert "with other options" not in resumed.stderr
    assert resumed.adapter == whole.adapter
    assert metrics_of(folder / "m.jsonl") == metrics_of(folder / "whole.jsonl")
    assert (folder / "samples.jsonl").read_text() == (folder / "whole_samples.jsonl").read_text()


SECOND = """
from grpo_build_loss import build_loss as grpo

def build_loss(sample, cycle, request, ctx):
    {calls}
    return grpo(sample, cycle, request, ctx)
"""


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ('ctx.second_run("critic", rank=2); ctx.second_run("critic", rank=1)', "opened with rank 2 and frozen False"),
        ('ctx.second_run("critic"); ctx.second_run("critic", frozen=True)', "not with rank None and frozen True"),
        ('ctx.second_run("critic", rank=0)', "rank is 0, expected an integer of at least 1"),
        ('ctx.second_run("critic", rank="8")', "rank is '8', expected an integer"),
        ('ctx.second_run("")', "name is '', expected a text"),
        ("ctx.second_run(3)", "name is 3, expected a text"),
        ('ctx.second_run("ref", state_id="gone")', "second_run('ref') with state_id 'gone' and rank 1: "),
    ],
)
def test_a_second_run_that_is_asked_for_wrongly_is_named(run_loop, folder, calls, message):
    (folder / "second.py").write_text(SECOND.format(calls=calls))
    done = run_loop("rl_loop", "--build-loss", "second:build_loss", *RL[2:], "--seed", "1", "--cycles", "1")
    assert done.returncode == 1 and message in done.stderr
