"""The example of several turns: it learns, and it resumes exactly, although it samples beside the loop."""

import importlib
import re
from types import SimpleNamespace

import pytest

from loop_runs import EXAMPLES, check_exact_resumption

COMMAND = ("--build-loss", "multi_turn:build_loss", "--sample-json", EXAMPLES / "multi_turn.jsonl", "--batch-size", "2")


@pytest.mark.learns
@pytest.mark.parametrize("seed", [1, 2])
def test_it_learns_to_use_the_answers_of_the_game(run_loop, seed):
    done = run_loop("rl_loop", *COMMAND, "--cycles", "20", "--seed", seed)
    assert done.returncode == 0, done.stderr
    solved = [float(found) for found in re.findall(r"solved (\S+)", done.stderr)]
    assert solved[0] < 0.5 and sum(solved[-3:]) / 3 > 0.9


@pytest.mark.long
def test_it_resumes_exactly(run_loop):
    check_exact_resumption(run_loop, "rl_loop", *COMMAND, "--lora-rank", "1", cycles=(1, 1))


def test_only_the_tokens_of_the_policy_are_trained(monkeypatch):
    """With the goal on the right, the first walk goes there in two turns, and the second to the left in all turns."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    build_loss = importlib.import_module("multi_turn").build_loss

    def sampler_operations(run_id, sampler_id, kind, payloads):
        letters = [max(bytes(payload["prompt"]["token_ids"]).strip(b"<:>")) for payload in payloads]
        return [{"sequences": [{"tokens": [letter], "logprobs": [-2.0]}]} for letter in letters]

    client = SimpleNamespace(sampler_operations=sampler_operations)
    ctx = SimpleNamespace(client=client, run_id="run-1", sampler_id="smp-1", metrics={})
    params = {"max_tokens": 1, "seed": 5}
    request = {"prompt": {"token_ids": list(b">:")}, "metadata": {"goal": 2}, "sampling_params": params}
    first_turns = [{"tokens": [letter], "logprobs": [-1.0]} for letter in b"zb"]
    payload = build_loss({"sequences": first_turns}, 0, request, ctx)
    assert ctx.metrics == {"reward": [1.0, -2.0], "solved": 0.5}
    texts = [bytes(datum["loss_inputs"]["target_tokens"]["values"]) for datum in payload["data"]]
    assert texts == [b":z>:z", b":b>:b>:b>:b"]
    for datum, text in zip(payload["data"], texts, strict=True):
        assert datum["loss_inputs"]["weights"]["values"] == [float(letter in b"zb") for letter in text]
