"""--dry-run: everything that needs no session is checked, and nothing is created."""

import json
import re
from pathlib import Path

import pytest

from loop_runs import GRPO, training_on, write_requests
from scripted_server import OFFER, ScriptedServer, refusal
from whitney_loop import sample_request
from whitney_loop.loop import place

RL = ("rl_loop", "--dry-run", "--build-loss", GRPO, "--model", "byte-lm", "--sample-json", "one.jsonl")
VOWELS = "grpo_build_loss:reward"
LAST_LINE = "dry run: everything that needs no session was checked; none was created\n"


@pytest.fixture(autouse=True)
def one_request(tmp_path):
    write_requests(tmp_path / "one.jsonl", ["the "])


def test_a_dry_run_asks_for_capabilities_and_nothing_else(run_loop):
    with ScriptedServer(OFFER) as server:
        done = run_loop(*RL, **training_on(server))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith(LAST_LINE)
    assert "the service takes the key and offers save_weights_for_sampler, sample" in done.stderr
    assert [(request.method, request.path) for request in server.requests] == [("GET", "/v1/training/capabilities")]


@pytest.mark.parametrize("script", ["rl_loop", "sft_loop", "distillation_loop"])
def test_every_loop_has_a_dry_run_that_creates_nothing(run_loop, tmp_path, remote, script):
    (tmp_path / "data.jsonl").write_text('{"prompt": [1], "completion": [2]}\n')
    data = {
        "rl_loop": ("--build-loss", GRPO, "--sample-json", "one.jsonl"),
        "sft_loop": ("--data", "data.jsonl"),
        "distillation_loop": ("--teacher-data", "data.jsonl", "--sample-json", "one.jsonl"),
    }[script]
    files = ("--metrics", "m.jsonl", "--journal", "journal.json")
    done = run_loop(script, "--dry-run", "--model", "m", *data, *files, **training_on(remote))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.endswith(LAST_LINE) and remote.api_key not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["data.jsonl", "one.jsonl"]


def costs_at_most(done):
    """Return {operation or kind of tokens: number} of the line about the cost."""
    [line] = re.findall(r"(?m)^the loop's own operations are at most: (.*)\. Not counted: ", done.stderr)
    return {name: int(number) for number, name in (part.split(" ", 1) for part in line.split(", "))}


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("rl_loop", ("--build-loss", GRPO, "--cycles", "4", "--save-every", "2")),
        ("rl_loop", ("--build-loss", GRPO, "--updates", "2", "--minibatches", "3", "--max-datums", "1")),
        ("rl_loop", ("--build-loss", GRPO, "--eval-json", "many.jsonl", "--eval-every", "1", "--reward", VOWELS)),
        ("sft_loop", ("--epochs", "2", "--batch-size", "5", "--save-every", "1")),
        ("distillation_loop", ("--cycles", "3", "--save-every", "2")),
    ],
)
def test_a_dry_run_tells_what_the_run_costs_at_most(run_loop, script, arguments):
    write_requests(Path("many.jsonl"), ["the "], num_samples=16)
    sampled = () if script == "sft_loop" else ("--sample-json", "many.jsonl")
    arguments = (*arguments, *sampled, "--lora-rank", "1", "--seed", "1")
    most = costs_at_most(run_loop(script, *arguments, "--dry-run"))
    summary = run_loop(script, *arguments).summary
    tokens = {"sampled tokens": summary["tokens_sampled"], "trained tokens": summary["tokens_trained"]}
    costs = {name: number for name, number in (summary["operations"] | tokens).items() if number}
    assert costs.keys() == most.keys()
    exact = costs.keys() - tokens.keys() - {"logprobs"}  # every group here has a signal; some completions are empty
    assert {name: costs[name] for name in exact} == {name: most[name] for name in exact}
    assert all(number <= most[name] for name, number in costs.items())


def test_the_cost_of_a_resumed_run_is_that_of_its_own_cycles(run_loop):
    first = run_loop(*RL[:1], *RL[2:], "--seed", "1", "--metrics", "m.jsonl", "--cycles", "3", "--local")
    assert first.returncode == 0, first.stderr
    again = ("--metrics", "m.jsonl", "--resume-from", "last", "--cycles", "4", "--save-every", "2", "--local")
    most = costs_at_most(run_loop(*RL, *again))
    assert (most["optim_step"], most["save_state"]) == (4, 3)  # after cycles 3, 5 and at the end


def test_a_dry_run_warns_of_everything_that_is_known_beforehand(run_loop, tmp_path, remote):
    request = sample_request(b"the ", num_samples=4, max_tokens=6, temperature=0.7)
    (tmp_path / "one.jsonl").write_text(json.dumps(request))
    done = run_loop(*RL, "--learning-rate", "0.1", **training_on(remote))
    assert done.returncode == 0 and done.stderr.count("warning: ") == 2
    assert "a request samples with temperature 0.7" in done.stderr and "--learning-rate 0.1 is outside" in done.stderr


def test_a_dry_run_notes_prompts_that_are_sampled_once(run_loop, tmp_path, remote):
    write_requests(tmp_path / "one.jsonl", ["the ", "she "], num_samples=1)
    done = run_loop(*RL, **training_on(remote))
    assert done.returncode == 0
    assert "one.jsonl:1: num_samples is 1: a loss that compares" in done.stderr and "(2 of 2 requests)" in done.stderr


def test_a_dry_run_asks_for_save_state_if_states_are_to_be_saved_on_the_way(run_loop):
    with ScriptedServer(OFFER) as server:
        done = run_loop(*RL, "--save-every", "2", **training_on(server))
    assert done.returncode == 1 and "does not offer save_state for modal" in done.stderr


def test_a_dry_run_that_finds_a_mistake_names_the_first(run_loop):
    with ScriptedServer(refusal(401, "unauthorized")) as server:
        done = run_loop(*RL, **training_on(server))
    assert done.returncode == 1 and "status 401" in done.stderr and "Traceback" not in done.stderr
    done = run_loop(*RL, "--sample-json", "nowhere.json")
    assert (done.returncode, done.stdout) == (2, "") and "nowhere.json" in done.stderr


def test_a_text_that_the_terminal_cannot_encode_is_shown(run_loop, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"prompt": {"token_ids": [1]}, "\\ud800": 1}\n')
    done = run_loop(*RL, "--sample-json", "odd.jsonl")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "odd.jsonl:1: " in done.stderr


def test_a_dry_run_looks_at_the_journal_and_leaves_it(run_loop, tmp_path):
    (tmp_path / "journal.json").touch()
    done = run_loop(*RL, "--journal", "journal.json")
    assert done.returncode == 2 and "journal.json was left by a loop that was killed" in done.stderr
    done = run_loop(*RL, "--journal", "journal.json", "--recover")
    assert done.returncode == 0 and "that is cleaned up first" in done.stderr
    assert (tmp_path / "journal.json").exists()
    done = run_loop(*RL, "--journal", "other.json")
    assert done.returncode == 0 and not (tmp_path / "other.json").exists()
    done = run_loop(*RL, "--journal", "nowhere/journal.json")
    assert done.returncode == 2 and "cannot be written" in done.stderr


def test_a_dry_run_does_not_wait_long_for_a_service_that_cannot_serve_now(run_loop, monkeypatch):
    monkeypatch.setattr(place, "_DRY_RUN_S", 0.1)
    with ScriptedServer(*[refusal(503, "busy")] * 100) as server:
        done = run_loop(*RL, **training_on(server))
    assert done.returncode == 1 and "this is busy" in done.stderr
