"""A data set of prompts: how it is read, which of it a cycle takes, and what becomes of the groups."""

import json
import re
import sys

import pytest

import safetensors_file
from gate import Gate
from loop_process import GRPO, REMOTE, ROOT, adapter_of, elsewhere, environment, loop, summary_of
from scripted_server import ScriptedServer
from whitney_loop import sample_request
from whitney_loop.local import serve

sys.path.insert(0, str(ROOT / "examples"))

import loop_data
import loop_support

PROMPTS = ["the ", "she ", "they ", "one ", "a ", "and ", "that ", "with "]
REQUESTS = [sample_request(prompt.encode(), num_samples=4, max_tokens=6) for prompt in PROMPTS]

MINE = """
import json
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal

def tells(sample, cycle, request, ctx):
    with open("asked.jsonl", "a") as file:
        print(json.dumps([cycle, request]), file=file)
    return grpo(sample, cycle, request, ctx)

def skips_the(sample, cycle, request, ctx):
    if bytes(request["prompt"]["token_ids"]) == b"the ":
        raise NoGradientSignal("not this one")
    return grpo(sample, cycle, request, ctx)

def skips_cycle_0(sample, cycle, request, ctx):
    if cycle == 0:
        ctx.metrics["reward"] = [0.5, 0.5]
        raise NoGradientSignal("all alike")
    return grpo(sample, cycle, request, ctx)

def disagrees(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    if request == disagrees.first:
        return payload
    disagrees.first = disagrees.first or request
    return payload | ({"loss_function": "ppo"} if disagrees.first != request else {})
disagrees.first = None

def disagrees_on_config(sample, cycle, request, ctx):
    disagrees_on_config.calls += 1
    high = 1.0 + disagrees_on_config.calls
    return grpo(sample, cycle, request, ctx) | {
        "loss_function": "ppo", "loss_config": {"clip_low_threshold": 0.5, "clip_high_threshold": high}}
disagrees_on_config.calls = 0

def bad(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    return payload | ({"loss_function": "dro"} if bytes(request["prompt"]["token_ids"]) == b"the " else {})
"""

BATCH = """
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal

def build_loss(sample, cycle, request, ctx):
    raise AssertionError("build_batch_loss stands beside it")

def build_batch_loss(samples, cycle, requests, ctx):
    if cycle == 0:
        raise NoGradientSignal("cycle 0 is not for training")
    ctx.metrics["groups"] = len(samples)
    payloads = [grpo(sample, cycle, request, ctx) for sample, request in zip(samples, requests)]
    return payloads[0] | {"data": [datum for payload in payloads for datum in payload["data"]]}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "batch.py").write_text(BATCH)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))
    return tmp_path


PROMPT_FILE = ("--sample-json", "prompts.jsonl", "--lora-rank", "4", "--seed", "1")


def asked_in(folder):
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]


def prompts_by_cycle(folder):
    cycles = {}
    for cycle, request in asked_in(folder):
        cycles.setdefault(cycle, []).append(bytes(request["prompt"]["token_ids"]).decode())
    return cycles


@pytest.mark.parametrize("form", ["array", "jsonl", "jsonl by its content", "spread array"])
def test_a_data_set_is_an_array_or_a_jsonl_of_requests(form, tmp_path):
    path = tmp_path / ("data.jsonl" if form == "jsonl" else "data.json")
    lines = "\n\n".join(json.dumps(request, ensure_ascii=False) for request in REQUESTS)
    text = {"array": json.dumps(REQUESTS), "spread array": json.dumps(REQUESTS, indent=2)}.get(form, lines)
    path.write_text(text)
    assert loop_data.read_requests(path) == REQUESTS
    path.write_text(text, encoding="utf-8-sig")  # as some editors write it
    assert loop_data.read_requests(path) == REQUESTS


def test_a_single_object_may_be_spread_over_lines(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(REQUESTS[0], indent=2))
    assert loop_data.read_requests(path) == [REQUESTS[0]]


GOOD = json.dumps(REQUESTS[0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.jsonl", f"{GOOD}\n\n{{}}\n", "d.jsonl:3: request.prompt is missing"),
        ("d.jsonl", f"{GOOD}\n{GOOD[:-1]}\n", "d.jsonl:2: Expecting ',' delimiter at column"),
        ("d.json", f"{GOOD}\n{GOOD}\n[]\n", "d.json:3: request is []"),
        ("d.json", f"[{GOOD}, {{}}]", "d.json, entry 1 of the array (the first is 0): request.prompt is missing"),
        ("d.json", "[]", "d.json: holds no request"),
        ("d.jsonl", "\n", "d.jsonl: holds no request"),
        ("d.jsonl", GOOD.replace("116", '"t"'), "d.jsonl:1: prompt.token_ids[0] is 't'"),
        ("d.jsonl", f"{GOOD}\n" + "[" * 200_000, "d.jsonl:2: "),
        ("d.json", '["What is 7 * 6?"]', "d.json, entry 0 of the array (the first is 0): request is 'What is 7 * 6?'"),
        ("d.jsonl", f"{GOOD}\n".encode() + b'{"prompt": "\xff"}', "d.jsonl:2: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_is_bad_in_a_data_set_is_named_by_file_and_line_before_anything_is_created(name, text, message, folder):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with ScriptedServer() as server:
        env = environment(WHITNEY_BASE_URL=server.base_url, WHITNEY_API_KEY="k")
        done = loop(folder, "--build-loss", GRPO, "--model", "byte-lm", "--sample-json", name, env=env)
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
    assert f"error: --sample-json {message}" in done.stderr and done.stderr.count("\n") == 1


def test_each_epoch_has_every_request_once_in_an_order_of_its_own():
    batches = loop_data.Batches(REQUESTS, 3, seed=1)
    taken = [request["prompt"]["token_ids"] for cycle in range(16) for request in batches.of_cycle(cycle)]
    epochs = [taken[start : start + 8] for start in range(0, 48, 8)]
    everything = sorted(request["prompt"]["token_ids"] for request in REQUESTS)
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({json.dumps(epoch) for epoch in epochs}) == 6
    other = [request["prompt"]["token_ids"] for request in loop_data.Batches(REQUESTS, 8, seed=2).of_cycle(0)]
    assert epochs[0] != other


def test_what_a_cycle_takes_depends_on_seed_and_cycle_alone():
    batches = loop_data.Batches(REQUESTS, 3, seed=1)
    first = [batches.of_cycle(cycle) for cycle in range(10)]
    assert loop_data.Batches(REQUESTS, 3, seed=1).of_cycle(7) == first[7]
    seeds = [request["sampling_params"]["seed"] for cycle in first for request in cycle]
    assert len(set(seeds)) == 30 and all(0 <= seed < 2**31 for seed in seeds)
    assert all("seed" not in request["sampling_params"] for request in REQUESTS)


def test_a_request_with_a_seed_of_its_own_keeps_it():
    own = sample_request(b"the ", num_samples=4, max_tokens=6, seed=0)
    assert loop_data.Batches([own], 1, seed=1).of_cycle(5) == [own]


def test_a_cycle_samples_a_batch_and_trains_on_all_of_it_at_once(folder):
    done = loop(folder, "--build-loss", "mine:tells", *PROMPT_FILE, "--batch-size", "4", "--cycles", "2")
    assert done.returncode == 0, done.stderr
    summary = summary_of(done)
    assert summary["operations"] == {
        "save_weights_for_sampler": 2, "sample": 8, "forward_backward": 2, "optim_step": 2,
        "save_state": 1, "export_lora": 1,
    }  # fmt: skip
    assert 0 < summary["tokens_sampled"] == summary["tokens_trained"]
    taken = prompts_by_cycle(folder)
    assert sorted(taken[0] + taken[1]) == sorted(PROMPTS)


def test_all_prompts_of_a_cycle_are_in_flight_together(folder):
    """On a service that works on eight samples at a time, eight take no longer than one."""
    with serve(folder / "storage") as service, Gate(service, together=8) as gate:
        arguments = ("--model", "byte-lm", *PROMPT_FILE, "--batch-size", "8", "--cycles", "2")
        done = loop(folder, "--build-loss", "mine:tells", *arguments, env=elsewhere(gate))
    assert done.returncode == 0, done.stderr
    assert gate.opened_in_time and gate.most_in_flight == 8
    assert gate.kinds[:10] == ["save_weights_for_sampler", *["sample"] * 8, "forward_backward"]
    assert gate.sampled == [request for _, request in asked_in(folder)]


def test_a_group_without_signal_is_left_out(folder):
    done = loop(folder, "--build-loss", "mine:skips_the", *PROMPT_FILE, "--batch-size", "8", "--cycles", "1")
    summary = summary_of(done)
    assert (summary["cycles_done"], summary["cycles_skipped"]) == (1, 0)
    assert summary["tokens_trained"] < summary["tokens_sampled"]


def test_a_cycle_in_which_no_group_has_signal_is_skipped_and_counted(folder):
    done = loop(folder, "--build-loss", "mine:skips_cycle_0", *PROMPT_FILE, "--batch-size", "4")
    said = done.stderr.splitlines()[1]
    assert "reward/mean 0.5  skipped: none of 4 groups has a signal; the first: all alike  tokens" in said
    summary = summary_of(done)
    assert (summary["cycles_done"], summary["cycles_skipped"]) == (1, 1)
    assert summary["operations"]["forward_backward"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("disagrees", "loss_function 'importance_sampling' in cycle 0 for request 0 of 4, but 'ppo' in cycle 0 for "),
        ("disagrees_on_config", "loss_config {'clip_low_threshold': 0.5, 'clip_high_threshold': 2.0} in cycle 0 for "),
        ("bad", "of 4, what modal would refuse: loss_function 'dro' is not advertised by modal"),
    ],
)
def test_groups_that_can_not_be_trained_on_together_are_never_sent(folder, name, message):
    done = loop(folder, "--build-loss", f"mine:{name}", *PROMPT_FILE, "--batch-size", "4", "--cycles", "3")
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert summary_of(done)["operations"].get("forward_backward", 0) < 2


def test_a_build_batch_loss_is_called_once_for_all(folder):
    done = loop(folder, "--build-loss", "batch:build_loss", *PROMPT_FILE, "--batch-size", "4", "--cycles", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert "build_batch_loss of batch is called once a cycle" in done.stderr
    assert any("skipped: cycle 0 is not for training" in line for line in lines)
    assert any(re.match(r"cycle 1 .* groups 4", line) for line in lines)
    summary = summary_of(done)
    assert (summary["cycles_done"], summary["cycles_skipped"]) == (1, 1)


def test_reinforce_pp_normalises_over_the_whole_batch(folder):
    arguments = ("--build-loss", "algorithms.reinforce_pp:build_loss", *PROMPT_FILE, "--batch-size", "8")
    done = loop(folder, *arguments, "--updates", "2", "--cycles", "2", "--learning-rate", "0.1")
    assert done.returncode == 0, done.stderr
    assert summary_of(done)["operations"]["forward_backward"] == 4


def test_a_payload_in_parts_has_the_gradient_of_the_whole(folder):
    def trained(*arguments):
        common = ("--build-loss", GRPO, *PROMPT_FILE, "--batch-size", "4", "--cycles", "1", "--learning-rate", "0.1")
        done = loop(folder, *common, *arguments)
        assert done.returncode == 0, done.stderr
        return summary_of(done), float(re.findall(r"loss (\S+)", done.stderr)[0])

    whole, loss = trained()
    parts, loss_of_parts = trained("--max-datums", "5")
    assert (whole["operations"]["forward_backward"], parts["operations"]["forward_backward"]) == (1, 4)
    assert parts["operations"]["optim_step"] == 1 and parts["tokens_trained"] == whole["tokens_trained"]
    assert loss_of_parts == pytest.approx(loss, abs=1e-9)
    weights = [_floats(adapter_of(summary)) for summary in (whole, parts)]
    assert weights[0] == pytest.approx(weights[1], abs=1e-4)


def _floats(content):
    tensors, _ = safetensors_file.read(content)
    return [value for name in sorted(tensors) for value in tensors[name][1]]


def test_results_of_parts_are_put_together():
    part = {"data": [{"loss_inputs": {"weights": {"values": [0.0, 1.0]}}}]}
    other = {"data": [{"loss_inputs": {"weights": {"values": [1.0, 1.0, 1.0]}}}]}
    results = [
        {"loss": 1.0, "metrics": {"loss:sum": 1.0, "clip_frac": 0.0, "r:max": 2, "note": "x"}, "outputs": ["a"]},
        {"loss": 2.0, "metrics": {"loss:sum": 2.0, "clip_frac": 1.0, "r:max": 4, "note": "y"}, "outputs": ["b"]},
    ]
    merged = loop_support.merged_results(results, [part, other])
    assert merged == {"loss": 3.0, "metrics": {"loss:sum": 3.0, "clip_frac": 0.75, "r:max": 4}, "outputs": ["a", "b"]}
    assert loop_support.merged_results([{}, {}], [part, other]) == {"metrics": {}}


def test_a_build_batch_loss_that_is_no_function_is_refused(folder):
    (folder / "odd.py").write_text("def build_loss(*_): ...\nbuild_batch_loss = 3\n")
    done = loop(folder, "--build-loss", "odd:build_loss")
    assert done.returncode == 2 and "'build_batch_loss' of 'odd' is of type int" in done.stderr


def test_the_seed_that_was_drawn_repeats_the_run(folder):
    first = loop(folder, "--build-loss", GRPO, "--learning-rate", "0.1")
    seed = summary_of(first)["seed"]
    again = loop(folder, "--build-loss", GRPO, "--learning-rate", "0.1", "--seed", seed)
    assert adapter_of(summary_of(first)) == adapter_of(summary_of(again))
    assert "was drawn" not in again.stderr


def test_a_second_process_draws_other_seeds(folder):
    seeds = {summary_of(loop(folder, "--build-loss", GRPO, "--cycles", "1"))["seed"] for _ in range(2)}
    assert len(seeds) == 2


def test_the_example_request_is_still_all_that_is_needed(folder):
    assert REMOTE[3] == str(loop_data.EXAMPLE_REQUEST)
    assert len(loop_data.read_requests(loop_data.EXAMPLE_REQUEST)) == 1
