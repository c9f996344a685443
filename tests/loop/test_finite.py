"""Numbers that are NaN or infinite stop a loop; fields that are missing or odd do not."""

import json
import math

import pytest

from between import Between, changing_results
from loop_runs import GRPO, training_on, write_requests
from whitney_loop.loop.finite import is_not_finite, not_finite

COMMON = ("--model", "byte-lm", "--lora-rank", "1", "--seed", "1")


@pytest.fixture
def train(run_loop, tmp_path):
    """Train one of the loops on a service; rl_loop with two data per forward_backward."""
    write_requests(tmp_path / "one.jsonl", ["the "])
    (tmp_path / "data.jsonl").write_text('{"prompt": [1], "completion": [2, 3]}\n' * 3)
    data = {
        "rl_loop": ("--build-loss", GRPO, "--sample-json", "one.jsonl", "--cycles", "3", "--max-datums", "2"),
        "sft_loop": ("--data", "data.jsonl", "--batch-size", "1"),
        "distillation_loop": ("--teacher-data", "data.jsonl", "--sample-json", "one.jsonl"),
    }

    def run(script, service, *arguments):
        return run_loop(script, *data[script], *COMMON, *arguments, **training_on(service))

    return run


@pytest.mark.parametrize("script", ["rl_loop", "sft_loop", "distillation_loop"])
def test_a_loss_that_is_nan_stops_before_the_step(train, remote, script):
    with changing_results(remote, "forward_backward", lambda result: result | {"loss": math.nan}) as service:
        done = train(script, service)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: forward_backward of cycle 0: the loss is nan, so no optim_step was made. No state was saved" in (
        done.stderr
    )
    assert done.summary["cycles_done"] == 0


def spoilt_output(result):
    """The last token of the second datum: it has a weight."""
    second = result["outputs"][-1]["logprobs"]
    return result | {"outputs": [result["outputs"][0], {"logprobs": [*second[:-1], -math.inf]}]}


def test_an_output_that_is_infinite_stops_and_names_its_place(train, remote):
    with changing_results(remote, "forward_backward", spoilt_output) as service:
        done = train("rl_loop", service)
    assert done.returncode == 1
    assert "forward_backward of cycle 0: outputs[1].logprobs[" in done.stderr and "] is -inf" in done.stderr


def test_a_norm_that_is_infinite_names_the_last_good_state(train, remote):
    steps = []

    def spoils_the_third(result):
        steps.append(result)
        return result | ({"grad_norm": 1e999} if result["step"] == 3 else {})

    with changing_results(remote, "optim_step", spoils_the_third) as service:
        done = train("sft_loop", service, "--save-every", "1")
    assert done.returncode == 1
    state_id = done.summary["state_id"]
    assert f"optim_step of cycle 2: grad_norm is inf: its weights are useless. The last good state is {state_id}" in (
        done.stderr
    )
    assert f"to resume at cycle 2, the same command with: --resume-from {state_id}" in done.stderr


@pytest.mark.parametrize("script", ["rl_loop", "sft_loop", "distillation_loop"])
@pytest.mark.parametrize("odd", [None, "nan", [], {"loss": 1}, True])
def test_fields_that_are_missing_or_odd_stop_nothing(train, remote, script, odd):
    def changed(answer):
        answer = answer | {"note": odd}
        if answer.get("kind") in ("forward_backward", "optim_step") and answer.get("result"):
            odd_fields = dict.fromkeys(("loss", "metrics", "outputs", "grad_norm", "step"), odd)
            return answer | {"result": odd_fields if odd is not None else {}}
        return answer

    with Between(remote, changed) as service:
        done = train(script, service)
    assert done.returncode == 0, done.stderr
    missing = {name for name in done.summary["warnings"] if name.startswith("no_")}
    assert missing == ({"no_loss", "no_outputs", "no_grad_norm"} if odd is None else set())
    assert done.stderr.count("the service reports no loss") == (odd is None)


WEIGHTS = {"weights": {"values": [0.0, 1.0]}}
PAYLOADS = [{"data": [{"loss_inputs": WEIGHTS}] * 2}, {"data": [{"loss_inputs": WEIGHTS}]}]


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ([{}, {}], ""),
        ([{"loss": 1.0}, {"loss": 1e308}], ""),
        ([{"loss": 1.0}, {"loss": math.nan}], "the loss is nan"),
        ([{"metrics": {"loss:sum": math.inf}}, {}], "the loss is inf"),
        ([{"outputs": [{"logprobs": [math.nan, -1.0]}]}, {}], ""),  # the first token has no weight
        ([{}, {"outputs": [{"logprobs": [-1.0, math.nan]}]}], "outputs[2].logprobs[1] is nan"),
        ([{}, {"outputs": [{"values": [0.0, math.inf]}]}], "outputs[2].values[1] is inf"),
        ([{"outputs": [{"values": [1e308, 1e308]}, {"values": [None, -1]}]}, {}], ""),  # only their sum is infinite
    ],
)
def test_the_first_number_that_is_not_finite_is_named(results, found):
    assert not_finite(PAYLOADS, results) == found


def test_an_integer_beyond_floats_is_not_finite():
    assert is_not_finite(10**400) and not is_not_finite(10**300) and not is_not_finite("nan")
    assert is_not_finite(json.loads("1e999"))
