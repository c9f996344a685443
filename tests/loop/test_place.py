"""Where a loop trains: on a service by its URL, or on the embedded one."""

import json
from pathlib import Path

import pytest

from loop_runs import GRPO, check_refused, left_behind, training_on, write_requests

REMOTE = ["--model", "byte-lm", "--sample-json", "one.jsonl"]


@pytest.fixture
def train(run_loop, tmp_path):
    write_requests(tmp_path / "one.jsonl", ["the "])

    def run(*arguments, **variables):
        return run_loop("rl_loop", "--build-loss", GRPO, "--lora-rank", "1", "--cycles", "1", *arguments, **variables)

    return run


def test_a_base_url_in_the_environment_is_where_it_trains(train, remote):
    done = train(*REMOTE, "--seed", "1", **training_on(remote))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"training on {remote.base_url} (as modal): what runs there may be billed\n")
    assert done.summary["where"] == "the service of the base URL" and done.summary["base_url"] == remote.base_url
    assert left_behind(remote, done.summary) == ("closed", ["finished"])
    assert remote.api_key not in done.stdout + done.stderr


def test_local_rehearses_the_command_of_a_real_run(train, tmp_path):
    request = {
        "prompt": {"token_ids": [151644, 872, 198, 9906]},
        "num_samples": 4,
        "sampling_params": {"max_tokens": 6},
    }
    (tmp_path / "real.json").write_text(json.dumps(request))
    real = {"WHITNEY_BASE_URL": "https://whitney.invalid", "WHITNEY_API_KEY": "real"}
    done = train("--model", "Qwen/Qwen3.5-0.8B", "--sample-json", "real.json", "--local", "--seed", "1", **real)
    assert done.returncode == 0, done.stderr
    where, _, note = done.stderr.splitlines()[:3]
    assert "embedded service" in where and "byte-lm" in note and "Qwen/Qwen3.5-0.8B" in note
    assert done.summary["model"] == "Qwen/Qwen3.5-0.8B"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"WHITNEY_API_KEY": "k"}, "WHITNEY_API_KEY is set, but no base URL"),
        (["--local", "--base-url", "http://127.0.0.1:1"], {}, "--local and --base-url contradict"),
        (["--base-url", "http://127.0.0.1:1"], {}, "--model is required"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m"], {}, "--sample-json is required"),
        (["--base-url", "http://example.com", *REMOTE], {}, "https only"),
        (["--base-url", "https://example.com", *REMOTE], {}, "no API key"),
        (["--base-url", ""], {}, "--base-url is empty"),
        (["--ca-file", "nowhere.pem", "--local"], {"WHITNEY_BASE_URL": "https://example.com"}, "--ca-file is for a"),
        (["--ca-file", "nowhere.pem"], {}, "--ca-file is for a service at a URL, but the embedded one is used"),
        (["--storage", "one.jsonl"], {}, "the embedded service cannot start"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused(train, arguments, variables, message):
    done = train(*arguments, **variables)
    check_refused(done, message)


def test_a_refused_key_is_one_line(train, remote):
    done = train(*REMOTE, **training_on(remote) | {"WHITNEY_API_KEY": "wrong"})
    assert done.returncode == 1 and "status 401" in done.stderr and "Traceback" not in done.stderr


def test_a_drawn_seed_is_printed_and_repeats_the_run(train):
    first = train("--sample-json", "one.jsonl", "--learning-rate", "0.1")
    seed = first.summary["seed"]
    assert f"seed {seed} was drawn: --seed {seed} repeats this run\n" in first.stderr
    again = train("--sample-json", "one.jsonl", "--learning-rate", "0.1", "--seed", seed)
    assert first.adapter == again.adapter
    assert "was drawn" not in again.stderr


def test_a_second_run_draws_another_seed(train):
    seeds = {train("--sample-json", "one.jsonl").summary["seed"] for _ in range(2)}
    assert len(seeds) == 2


TINY_ENGINE = """
from whitney_loop.local.byte_lm import ByteLMBackend

class Tiny(ByteLMBackend):
    name, model, stands_in, largest_rank = "tiny", "tiny-lm", False, 8
    losses = frozenset({"cross_entropy", "importance_sampling"})
    suggested_learning_rate = 0.05
    clips_gradients = False

def make(size: int, broken: bool = False):
    if broken:
        raise OSError("no model in folder x")
    return Tiny()
"""
ON_TINY = ["--engine", "mine:make", "--engine-option", "size=1"]


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "mine.py").write_text(TINY_ENGINE)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("loop", ["rl_loop", "sft_loop", "distillation_loop"])
def test_every_loop_trains_on_the_engine_of_its_command(run_loop, loop):
    own = {"rl_loop": ["--build-loss", GRPO, "--cycles", "1"], "distillation_loop": ["--cycles", "1"]}.get(loop, [])
    done = run_loop(loop, *own, *ON_TINY, "--lora-rank", "1", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.summary["model"] == "tiny-lm"


@pytest.mark.usefixtures("tiny")
def test_an_engine_gives_its_model_and_its_learning_rate(train):
    done = train("--sample-json", "one.jsonl", *ON_TINY, "--seed", "1", "--metrics", "m.jsonl")
    where, rate = done.stderr.splitlines()[:2]
    assert where.endswith("(as modal): tiny-lm by tiny")
    assert rate == "learning rate 0.05, which tiny suggests; --learning-rate changes it"
    config = json.loads(Path("m.jsonl").read_text().splitlines()[0])["config"]
    assert (config["model"], config["optimizer"]["learning_rate"]) == ("tiny-lm", 0.05)


def test_a_service_by_url_gets_the_default_learning_rate(train, remote):
    done = train(*REMOTE, "--seed", "1", **training_on(remote))
    assert "learning rate 1e-06, the default; --learning-rate changes it" in done.stderr.splitlines()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--engine", "mine:make"], {}, "--engine mine:make needs --engine-option size=…"),
        (["--engine-option", "size=1"], {}, "--engine-option needs --engine"),
        ([*ON_TINY, "--engine-option", "colour=1"], {}, "mine:make has no 'colour'; it has size, broken"),
        ([*ON_TINY, "--engine-option", "broken=true"], {}, "cannot start: OSError: no model in folder x"),
        (["--engine", "theirs:make"], {}, "no module 'theirs'"),
        ([*ON_TINY], {"WHITNEY_BASE_URL": "http://127.0.0.1:1"}, "pass --local"),
        ([*ON_TINY, "--optimizer", "grad_clip_norm=1"], {}, "grad_clip_norm: tiny does not clip gradients; leave it"),
        ([*ON_TINY, "--lora-rank", "9"], {}, "lora.rank is 9; expected an integer from 1 to 8"),
        ([*ON_TINY, "--model", "other"], {}, 'model is "other"; tiny trains only "tiny-lm" here'),
        (
            [*ON_TINY, "--build-loss", "algorithms.ppo:build_loss"],
            {},
            "tiny has no loss ppo; it has cross_entropy, importance_sampling",
        ),
    ],
)
def test_an_engine_that_cannot_do_what_is_asked_is_refused_before_a_service_starts(
    train, arguments, variables, message
):
    done = train("--sample-json", "one.jsonl", "--dry-run", *arguments, **variables)
    check_refused(done, message)
