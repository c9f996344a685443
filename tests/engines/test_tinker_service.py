"""The engine for Tinker, through the real SDK, against a double that computes with byte-lm."""

from __future__ import annotations

import gc
import re
import subprocess
import sys

import pytest

pytest.importorskip("tinker", reason="the Tinker SDK is not installed (pip install 'tinker>=0.38')")

from tinker.lib.internal_client_holder import _SessionlessHolderCache
from tinker.lib.public_interfaces import rest_client_common

from engines.tinker_double import KEY, MODEL, running
from local.bench import FORWARD, SAMPLE, WAIT_S
from local.byte_payloads import ADAMW, tensor
from loop_runs import ROOT, metrics_of
from processes import contract_command
from whitney_loop.local import serve
from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.engine import EngineError, load_backend
from whitney_loop.local.objectives import OBJECTIVES

# The SDK leaves connections behind that it does not close; Python warns of each when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

CACHES = []  # of connections; kept, so that none is collected outside these tests
MAKE = "engines.tinker_service:make"


@pytest.fixture
def points_to(monkeypatch):
    """``points_to(url)``: set the SDK's environment variables, and give it no connection of another test."""

    def point(base_url):
        monkeypatch.setenv("TINKER_BASE_URL", base_url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        monkeypatch.setenv("TINKER_TELEMETRY", "0")
        CACHES.append(_SessionlessHolderCache())
        monkeypatch.setattr(rest_client_common, "sessionless_holder_cache", CACHES[-1])

    yield point
    gc.collect()


@pytest.fixture
def double(tmp_path, points_to):
    (tmp_path / "double").mkdir()
    with running(tmp_path / "double") as started:
        points_to(started.base_url)
        yield started


def backend_of(*options):
    return load_backend(MAKE, [f"model={MODEL}", *options])


@pytest.fixture
def new_run(double):
    """``new_run(*options, proceed=…)``: an engine, which is closed at the end."""
    runs = []

    def make(*options, rank=2, proceed=lambda: None):
        runs.append(backend_of(*options).new_run(rank=rank, seed=1, proceed=proceed))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


# How it carries out an operation


def data_for(loss_function):
    (datum,) = FORWARD["data"]
    length = len(datum["input"]["token_ids"])
    values = {"weights": 0.5, "logprobs": -3.0, "advantages": 1.5}
    names = ["weights"] if loss_function == "cross_entropy" else list(values)
    inputs = {name: tensor([values[name]] * length) for name in names}
    return [{**datum, "loss_inputs": {**inputs, "target_tokens": datum["loss_inputs"]["target_tokens"]}}]


@pytest.mark.parametrize(
    ("loss_function", "logprob"),
    [(loss, -3.0) for loss in sorted(OBJECTIVES.keys() - {"ppo_critic"})] + [("importance_sampling", -25.0)],
)
def test_a_step_on_each_loss_leads_where_it_leads_without_the_server(new_run, loss_function, logprob):
    """For losses that the server has, losses sent as importance sampling, and a ratio beyond the contract's limit."""
    payload = {"data": data_for(loss_function), "loss_function": loss_function, "loss_config": {}}
    if loss_function != "cross_entropy":
        payload["data"][0]["loss_inputs"]["logprobs"]["values"][0] = logprob
    here, there = ByteLM(2, 1), new_run()
    for _ in range(2):
        expected, found = (engine.forward_backward(payload) for engine in (here, there))
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
        expected, found = (engine.optim_step(ADAMW) for engine in (here, there))
        assert found == pytest.approx(expected, rel=1e-3)
    expected, found = (engine.forward(FORWARD)["outputs"][0]["logprobs"] for engine in (here, there))
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_loss_that_the_server_has_costs_one_pass_and_another_one_two(new_run, double):
    run = new_run()
    passes = {}
    for loss_function in ("cross_entropy", "importance_sampling", "ppo"):
        double.requests.clear()
        run.forward_backward({"data": data_for(loss_function), "loss_function": loss_function, "loss_config": {}})
        passes[loss_function] = double.requests.count("forward_backward")
    assert passes == {"cross_entropy": 1, "importance_sampling": 1, "ppo": 2}


def test_a_loss_that_is_not_finite_adds_nothing(new_run):
    payload = {"data": data_for("ppo"), "loss_function": "ppo", "loss_config": {}}
    payload["data"][0]["loss_inputs"]["advantages"]["values"][0] = 3e38
    payload["data"][0]["loss_inputs"]["weights"]["values"][0] = 3e38
    run = new_run()
    with pytest.raises(EngineError, match="beyond float32; nothing was accumulated") as raised:
        run.forward_backward(payload)
    assert raised.value.code == "non_finite_loss"
    with pytest.raises(EngineError, match="needs a forward_backward"):
        run.optim_step(ADAMW)


def test_logprobs_of_a_tempered_sample_are_those_of_the_policy(new_run):
    sampler = new_run().sampler()
    for params in ({"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.5}, {}):
        request = {"prompt": {"token_ids": [97, 98]}, "num_samples": 2, "sampling_params": {"max_tokens": 3, **params}}
        for sequence in sampler.sample(request, "seed"):
            scored = sampler.logprobs([97, 98, *sequence["tokens"]])[2:]
            assert sequence["logprobs"] == pytest.approx(scored, abs=1e-6)


def test_many_samples_are_those_of_each_request_alone(new_run):
    sampler = new_run().sampler()
    requests = [(SAMPLE, f"seed {i}") for i in range(3)]
    assert sampler.sample_many(requests) == [sampler.sample(*request) for request in requests]


# What it refuses


def test_a_server_that_averages_is_refused_unless_one_says_so(new_run, double):
    double.averages = True
    with pytest.raises(EngineError, match="tells no loss:sum.*averages=true"):
        new_run()
    assert double.finished.wait(WAIT_S)
    assert list(double.sessions.values()) == ["errored"]
    payload = {"data": data_for("ppo"), "loss_function": "ppo", "loss_config": {}}
    here, there = ByteLM(2, 1), new_run("averages=true")
    for engine in (here, there):
        engine.forward_backward(payload)
    expected, found = (engine.optim_step(ADAMW) for engine in (here, there))
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("fields", [{"eps": 1e-320}, {"learning_rate": 1e30, "weight_decay": 1e30}], ids=str)
def test_an_optimizer_that_float32_does_not_hold_is_refused(new_run, fields):
    run = new_run()
    run.forward_backward(FORWARD)
    with pytest.raises(EngineError, match="in float32") as raised:
        run.optim_step(ADAMW | fields)
    assert raised.value.code == "non_finite_update"
    assert run.optim_step(ADAMW)["step"] == 1


def test_a_gradient_clip_is_refused_unless_the_server_is_said_to_clip(double):
    assert (backend_of().clips_gradients, backend_of("clips_gradients=true").clips_gradients) == (False, True)


def test_a_model_that_the_server_does_not_train_is_refused_with_those_that_it_trains(double):
    with pytest.raises(ValueError, match=f"does not train 'another'; it trains {MODEL}"):
        load_backend(MAKE, ["model=another"])


def test_without_a_server_the_engine_does_not_start(points_to):
    points_to("http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(ValueError, match="has not answered in 0.2 s; see TINKER_BASE_URL"):
        backend_of("silence_s=0.2")


# Failures


def test_a_request_that_the_server_refuses_changes_nothing(new_run, double):
    run = new_run()
    double.refuses = "forward_backward"
    with pytest.raises(EngineError, match="as the test told it"):
        run.forward_backward(FORWARD)
    with pytest.raises(EngineError, match="needs a forward_backward"):
        run.optim_step(ADAMW)


def test_weights_that_are_no_longer_finite_are_noticed(new_run, double):
    run = new_run()
    double.damaged = True
    with pytest.raises(EngineError, match="not finite"):
        run.forward(FORWARD)
    with pytest.raises(RuntimeError, match="its gradient was added"):  # so the service ends the run
        run.forward_backward(FORWARD)


class Cancelled(Exception):
    """What a service raises through ``proceed``."""


@pytest.mark.parametrize("held", ["forward_backward", "asample"])
def test_cancelling_reaches_a_request_that_waits_there(new_run, double, held):
    def proceed():
        if double.begun.is_set():
            raise Cancelled

    run = new_run(proceed=proceed)
    sampler = run.sampler()
    double.holds = held
    with pytest.raises(Cancelled):
        sampler.sample(SAMPLE, "seed") if held == "asample" else run.forward_backward(FORWARD)


def test_a_session_is_finished_when_its_run_ends_and_another_one_resumes(double, tmp_path):
    run = backend_of().new_run(rank=2, seed=1, proceed=lambda: None)
    run.forward_backward(FORWARD)
    run.optim_step(ADAMW)
    assert run.save_state(tmp_path) == 1
    loss = run.forward(FORWARD)["loss"]
    run.close()
    resumed = backend_of().new_run(rank=2, seed=5, proceed=lambda: None)
    resumed.load_state(tmp_path)
    assert resumed.forward(FORWARD)["loss"] == pytest.approx(loss)
    resumed.close()
    assert list(double.sessions.values()) == ["success"] * 3
    assert double.models == {}


@pytest.mark.parametrize("text", ["[]", "{}", '{"path": 1, "step": 1}', "no JSON"])
def test_a_state_that_names_no_checkpoint_is_damaged(new_run, tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError):
        new_run().load_state(tmp_path)


# The loops and the contract


def loop_arguments(*more):
    arguments = ["--build-loss", "grpo_build_loss:build_loss", "--engine", MAKE, "--engine-option", f"model={MODEL}"]
    return [*arguments, "--model", MODEL, "--lora-rank", "2", "--learning-rate", "0.1", "--seed", "1", *more]


def test_the_reward_rises_through_it(run_loop, double, tmp_path):
    done = run_loop("rl_loop", *loop_arguments("--cycles", "30", "--metrics", "metrics.jsonl"))
    assert done.returncode == 0, done.stderr
    assert f"{MODEL} by tinker-service" in done.stderr
    rewards = [cycle["reward/mean"] for cycle in metrics_of(tmp_path / "metrics.jsonl")]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert done.adapter  # exported there and downloaded
    assert list(double.sessions.values()) == ["success"]


def test_killing_the_server_in_mid_run_fails_the_run_in_the_engines_name(run_loop, points_to, tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    command = [sys.executable, ROOT / "tests/engines/tinker_double.py", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            points_to(re.search(r"TINKER_BASE_URL=(\S+)", process.stdout.readline())[1])
            arguments = loop_arguments("--cycles", "3", "--engine-option", "silence_s=5", "--timeout", "60")
            arguments[1] = "killer:build_loss"
            done = run_loop("rl_loop", *arguments, PID_TO_KILL=str(process.pid))
        finally:
            process.kill()
    assert done.returncode == 1
    assert "tinker-service broke (ConnectionError)" in done.stderr
    assert done.summary["status"] == "failed"
    assert "STILL OPEN" not in done.stderr


KILLER = """
import os, signal
from grpo_build_loss import build_loss as grpo

def build_loss(sample, cycle, request, ctx):
    if cycle == 1:
        os.kill(int(os.environ["PID_TO_KILL"]), signal.SIGKILL)
    return grpo(sample, cycle, request, ctx)
"""


@pytest.mark.long
@pytest.mark.parametrize("provider", ["modal", "tinker"])
def test_the_contract_holds_on_it_but_for_the_critic(double, tmp_path, provider):
    """A server has no value head, so these four sentences cannot hold."""
    with serve(tmp_path / "storage", backend_of("clips_gradients=true")) as service:
        options = ("--contract-model", MODEL, "--contract-provider", provider)
        command = contract_command(service.base_url, service.api_key, *options)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    broken = set(re.findall(r"^\[(?:doc|ours)\].*", done.stdout, re.MULTILINE))
    assert [line for line in broken if "critic" not in line] == []
    assert len(broken) == (4 if provider == "modal" else 0), done.stdout
