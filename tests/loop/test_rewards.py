"""``--reward``: how the user's reward is found, called, computed beside the sampling, and asked for by algorithms."""

import importlib
import signal
import threading

import pytest

from between import Between
from loop_runs import GRPO, check_refused, metrics_of, training_on
from processes import read_until, start_loop
from whitney_loop.loop import Request, write_prompts
from whitney_loop.loop.report import CallableError
from whitney_loop.loop.rewards import Rewards

ANSWERS = {"in:": "out", "dry:": "wet"}
BY_TOKENS = """
import math

def reward(tokens, request):
    answer = request["metadata"]["answer"].encode()
    return sum(a == b for a, b in zip(tokens, answer)) + tokens[0] / 256

def none(tokens, request): ...
def text(tokens, request): return "0.5"
def nan(tokens, request): return math.nan
def numbers(tokens, request): return [1.0]
def raises(tokens, request): raise LookupError("no such answer")
def one(tokens): ...

def own(sample, cycle, request, ctx):
    from whitney_loop import NoGradientSignal
    raise NoGradientSignal("it has a reward of its own")
"""
BY_TEXT = """
import by_tokens

def decode(tokens):
    return bytes(token % 256 for token in tokens).decode("latin-1")

def reward(text, request):
    assert isinstance(text, str)
    return by_tokens.reward(text.encode("latin-1"), request)

def no_text(text, request):
    return None
"""
DECODES_BADLY = """
def decode(tokens):
    {body}

def reward(text, request):
    return 1.0
"""
HANGS = """
import sys, threading

def reward(tokens, request):
    print("the reward hangs", file=sys.stderr, flush=True)
    threading.Event().wait()
"""
TELLS = """
import threading

scored = threading.Event()

def reward(tokens, request):
    scored.set()
    return tokens[0]
"""


@pytest.fixture
def train(run_loop, tmp_path):
    (tmp_path / "by_tokens.py").write_text(BY_TOKENS)
    (tmp_path / "by_text.py").write_text(BY_TEXT)
    pairs = [(list(prompt.encode()), {"answer": answer}) for prompt, answer in ANSWERS.items()]
    write_prompts(tmp_path / "answers.jsonl", pairs, num_samples=4, max_tokens=3)

    def run(reward, *arguments, build_loss=GRPO):
        data = ("--sample-json", "answers.jsonl", "--batch-size", "2", "--lora-rank", "1", "--seed", "1")
        return run_loop("rl_loop", "--build-loss", build_loss, *data, "--reward", reward, *arguments)

    return run


def test_a_reward_gets_the_text_if_its_module_decodes_else_the_tokens(train, tmp_path):
    for name in ("by_tokens", "by_text"):
        done = train(f"{name}:reward", "--metrics", f"{name}.jsonl")
        assert done.returncode == 0, done.stderr
    first, *_ = cycles = metrics_of(tmp_path / "by_tokens.jsonl")
    assert first["reward/mean"] > 0.1 and cycles == metrics_of(tmp_path / "by_text.jsonl")


def test_threads_change_no_reward(train, tmp_path):
    for threads in (1, 3):
        done = train("by_text:reward", "--metrics", f"{threads}.jsonl", "--reward-threads", threads)
        assert done.returncode == 0, done.stderr
    assert metrics_of(tmp_path / "1.jsonl") == metrics_of(tmp_path / "3.jsonl")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_tokens:none", "returned None in cycle 0 for answers.jsonl:{} (is its return missing?): expected a finite"),
        ("by_text:no_text", "returned None in cycle 0 for answers.jsonl:"),
        ("by_tokens:text", "returned '0.5' in cycle 0 for"),
        ("by_tokens:nan", "returned nan in cycle 0 for"),
        ("by_tokens:numbers", "returned [1.0] in cycle 0 for"),
        ("by_tokens:raises", "raised LookupError in cycle 0 for"),
    ],
)
def test_a_bad_reward_is_named_by_cycle_request_and_completion(train, name, message, threads):
    done = train(name, "--reward-threads", threads)
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and error.startswith(f"error: reward {message.partition('{}')[0]}")
    assert "answers.jsonl:" in error and ", sequences[0]" in error and message.partition("{}")[2] in error
    assert ("Traceback" in done.stderr) == (name == "by_tokens:raises")
    assert "rewards.py" not in done.stderr and "user_loss.py" not in done.stderr


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("by_tokens:rewrad", "--reward: module 'by_tokens'"),
        ("nowhere:reward", "--reward: no module 'nowhere'"),
        ("by_tokens:one", "--reward: one(tokens) cannot be called with two arguments: (tokens, request)"),
    ],
)
def test_an_unusable_reward_is_refused_before_anything_is_created(train, reward, message):
    done = train(reward)
    check_refused(done, message)


def test_a_reward_that_no_one_asks_for_is_warned_of(train):
    done = train("by_tokens:reward", build_loss="by_tokens:own")
    assert "warning: --reward has no effect on the training: build_loss never asks ctx.reward" in done.stderr
    assert done.summary["warnings"] == ["reward"]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_reward_that_hangs_does_not_hold_up_the_end(tmp_path, threads):
    (tmp_path / "hangs.py").write_text(HANGS)
    arguments = ("--build-loss", GRPO, "--reward", "hangs:reward", "--lora-rank", "1", "--reward-threads", threads)
    with start_loop(tmp_path, "rl_loop.py", *arguments) as process:
        read_until(process.stderr, "the reward hangs")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr


REQUEST = Request({"prompt": {"token_ids": [7]}, "num_samples": 2, "metadata": {"answer": 5}}, "answers.jsonl:1")


def test_rewards_of_a_sample_are_computed_once_and_side_by_side():
    """Each of the two calls waits for the other, so they must run at the same time."""
    meeting, calls = threading.Barrier(2, timeout=30), []

    def reward(tokens, request):
        calls.append(tokens)
        meeting.wait()
        return tokens[0] == request["metadata"]["answer"]

    rewards = Rewards(reward, None, threads=2)
    sequences = [{"tokens": [5]}, {"tokens": [6]}]
    rewards.start(sequences, REQUEST)
    for _ in range(2):
        assert [rewards.of(sequence, dict(REQUEST)) for sequence in sequences] == [1.0, 0.0]
    assert sorted(calls) == [[5], [6]]


def test_another_completion_or_request_is_scored_at_once():
    def reward(tokens, request):
        return tokens.pop() == request["metadata"]["answer"]

    rewards = Rewards(reward, None)
    sequences = [{"tokens": [5]}]
    rewards.start(sequences, REQUEST)
    assert sequences == [{"tokens": [5]}]  # the function gets a copy
    assert rewards.of({"tokens": [6]}, REQUEST) == 0.0
    assert rewards.of(sequences[0], REQUEST | {"metadata": {"answer": 6}}) == 0.0
    assert rewards.of(sequences[0], REQUEST) == 1.0
    with pytest.raises(CallableError, match="raised KeyError in cycle 0 for a changed request"):
        rewards.of(sequences[0], {"metadata": {}})


class SecondWaits(Between):
    """A service whose second sample ends only after the event ``scored``."""

    def __init__(self, service, scored):
        super().__init__(service)
        self.scored, self.samples, self.in_time = scored, [], True

    def after(self, path, body, answer):
        if "/samplers/" in path and body:
            self.samples.append(answer["operation_id"])
            return answer | {"status": "queued", "result": None}
        return answer

    def before(self, path):
        if len(self.samples) == 2 and self.samples[1] in path:
            self.in_time = self.scored.wait(timeout=20)


def test_a_sample_is_scored_while_later_ones_are_still_on_their_way(run_loop, tmp_path, remote, monkeypatch):
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_prompts(tmp_path / "two.jsonl", [([97], {}), ([98], {})], num_samples=2, max_tokens=1)
    data = ("--sample-json", "two.jsonl", "--batch-size", "2", "--model", "byte-lm", "--lora-rank", "1")
    with SecondWaits(remote, importlib.import_module("tells").scored) as service:
        run_loop(
            "rl_loop", "--build-loss", GRPO, "--reward", "tells:reward", "--cycles", "1", *data, **training_on(service)
        )
    assert len(service.samples) == 2 and service.in_time


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise LookupError('no such id')", "decode raised LookupError in cycle 0 for"),
        ("return None", "decode raised TypeError in cycle 0 for"),
    ],
)
def test_a_decode_that_gives_no_text_is_named_and_not_the_reward(train, tmp_path, body, message):
    (tmp_path / "decodes.py").write_text(DECODES_BADLY.format(body=body))
    done = train("decodes:reward")
    assert done.returncode == 1 and message in done.stderr


def test_tokens_that_were_sampled_before_a_reward_failed_are_counted(train):
    done = train("by_tokens:none")
    assert done.returncode == 1 and done.summary["tokens_sampled"] > 0
