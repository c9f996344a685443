"""One cycle: its batch of samples, its training payload, and results that are merged."""

import json
import re

import pytest

import safetensors_file
from between import Between, changing_results
from gate import Gate
from loop_runs import GRPO, entries_of, metrics_of, training_on, write_requests
from scripted_server import OFFER, ScriptedServer, operation, reply, run
from whitney_loop.loop import merged_results
from whitney_loop.loop.cycle import split_payload

PROMPTS = ["the ", "she ", "they ", "one ", "a ", "and ", "that ", "with "]

MINE = """
import json
from grpo_build_loss import build_loss as grpo

def tells(sample, cycle, request, ctx):
    with open("asked.jsonl", "a") as file:
        print(json.dumps([cycle, request]), file=file)
    return grpo(sample, cycle, request, ctx)
"""


@pytest.fixture
def train(run_loop, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    write_requests(tmp_path / "prompts.jsonl", PROMPTS)

    def run(build_loss, *arguments, **variables):
        common = ("--sample-json", "prompts.jsonl", "--lora-rank", "1", "--seed", "1", "--learning-rate", "0.1")
        return run_loop("rl_loop", "--build-loss", build_loss, *common, *arguments, **variables)

    return run


def test_a_cycle_samples_a_batch_and_trains_on_all_of_it_at_once(train, tmp_path):
    done = train("mine:tells", "--batch-size", "4", "--cycles", "2")
    assert done.returncode == 0, done.stderr
    assert done.summary["operations"] == {
        "save_weights_for_sampler": 2, "sample": 8, "forward_backward": 2, "optim_step": 2,
        "save_state": 1, "export_lora": 1,
    }  # fmt: skip
    assert 0 < done.summary["tokens_sampled"] == done.summary["tokens_trained"]
    taken = [bytes(request["prompt"]["token_ids"]).decode() for _, request in entries_of(tmp_path / "asked.jsonl")]
    assert sorted(taken) == sorted(PROMPTS)


def test_all_prompts_of_a_cycle_are_in_flight_together(train, tmp_path, remote):
    """The service answers no sample before all eight were submitted."""
    with Gate(remote, together=8) as gate:
        arguments = ("--model", "byte-lm", "--batch-size", "8", "--cycles", "2")
        done = train("mine:tells", *arguments, **training_on(gate))
    assert done.returncode == 0, done.stderr
    assert gate.opened_in_time and gate.most_in_flight == 8
    assert gate.kinds[:10] == ["save_weights_for_sampler", *["sample"] * 8, "forward_backward"]
    assert gate.sampled == [request for _, request in entries_of(tmp_path / "asked.jsonl")]


def test_more_updates_train_more_often_on_the_same_sample(train):
    done = train(GRPO, "--cycles", "1", "--updates", "3", "--provider", "tinker")
    assert (done.summary["operations"]["sample"], done.summary["operations"]["optim_step"]) == (1, 3)
    assert done.summary["tokens_trained"] == 3 * done.summary["tokens_sampled"]


def test_reinforce_pp_normalises_over_the_whole_batch(train):
    done = train("algorithms.reinforce_pp:build_loss", "--batch-size", "8", "--updates", "2", "--cycles", "2")
    assert done.returncode == 0, done.stderr
    assert done.summary["operations"]["forward_backward"] == 4


def test_a_sample_that_cannot_be_trained_on_never_reaches_build_loss(train, tmp_path):
    (tmp_path / "never.py").write_text("def build_loss(sample, cycle, request, ctx):\n    raise AssertionError\n")
    saved = operation(kind="save_weights_for_sampler", result={"sampler_id": "smp-1", "version": 0})
    sampled = operation(kind="sample", seq_id=2, result={"sequences": [{"tokens": [1, 2], "logprobs": [-1.0]}]})
    script = [OFFER, reply({"session_id": "ses-1"}), run(), run(), run(), saved, sampled]
    script += [run("cancelling"), run("cancelled"), reply({"session_id": "ses-1", "status": "closed"})]
    with ScriptedServer(*script) as server:
        done = train("never:build_loss", "--model", "byte-lm", **training_on(server))
    assert done.returncode == 1 and "Traceback" not in done.stderr and "AssertionError" not in done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "sequences[0]" in error and "logprobs" in error


# Which request an error of the service is about


def test_a_refused_request_is_named_by_file_and_line(train, tmp_path, remote):
    write_requests(tmp_path / "huge.jsonl", ["all "], num_samples=10**6, max_tokens=10**6)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    lines[2] = (tmp_path / "huge.jsonl").read_text().strip()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    done = train(GRPO, "--model", "byte-lm", "--batch-size", "8", **training_on(remote))
    assert done.returncode == 1 and re.search(r"error: prompts.jsonl:3: .*num_samples 1000000 with", done.stderr)


class FailsOn(Between):
    """A service that accepts a sample of this prompt, and fails to do it."""

    prompt, failing = list(b"they "), None

    def after(self, path, body, answer):
        if body and json.loads(body).get("payload", {}).get("prompt") == {"token_ids": self.prompt}:
            self.failing = answer["operation_id"]
        if self.failing is None or answer.get("operation_id") != self.failing:
            return answer
        return answer | {"status": "failed", "result": None, "error": {"code": "context", "message": "too long"}}


def test_a_failed_request_is_named_by_file_and_line(train, remote):
    with FailsOn(remote) as service:
        done = train(GRPO, "--model", "byte-lm", "--batch-size", "8", **training_on(service))
    assert done.returncode == 1 and "error: prompts.jsonl:3: sample failed: too long" in done.stderr


def test_a_null_logprob_is_named_by_request_and_position(train, remote):
    def without_the_second(result):
        first, *others = result["sequences"]
        return result | {"sequences": [first | {"logprobs": [first["logprobs"][0], None]}, *others]}

    with changing_results(remote, "sample", without_the_second) as service:
        done = train(GRPO, "--model", "byte-lm", "--batch-size", "8", **training_on(service))
    assert done.returncode == 1
    found = r"error: prompts.jsonl:\d: sample: result.sequences\[0\].logprobs\[1\] is None, expected a finite number"
    assert re.search(found, done.stderr)


# A payload in parts: --max-datums


def test_a_payload_in_parts_has_the_gradient_of_the_whole(train, tmp_path):
    def trained(*arguments):
        file = f"{len(arguments)}.jsonl"
        done = train(GRPO, "--batch-size", "4", "--cycles", "1", "--metrics", file, *arguments)
        assert done.returncode == 0, done.stderr
        return done, metrics_of(tmp_path / file)[0]["loss/sum"]

    whole, loss = trained()
    parts, loss_of_parts = trained("--max-datums", "5")
    operations = [done.summary["operations"] for done in (whole, parts)]
    assert [counts["forward_backward"] for counts in operations] == [1, 4]
    assert operations[1]["optim_step"] == 1
    assert parts.summary["tokens_trained"] == whole.summary["tokens_trained"]
    assert loss_of_parts == pytest.approx(loss, abs=1e-9)
    assert weights_of(whole) == pytest.approx(weights_of(parts), abs=1e-4)


def weights_of(done):
    tensors, _ = safetensors_file.read(done.adapter)
    return [value for name in sorted(tensors) for value in tensors[name][1]]


def test_parts_keep_the_order_of_the_data():
    payload = {"data": [1, 2, 3, 4, 5], "loss_function": "ppo"}
    assert [part["data"] for part in split_payload(payload, 2)] == [[1, 2], [3, 4], [5]]
    assert split_payload(payload, None) == [payload]


def test_results_of_parts_are_merged():
    part = {"data": [{"loss_inputs": {"weights": {"values": [0.0, 1.0]}}}]}
    other = {"data": [{"loss_inputs": {"weights": {"values": [1.0, 1.0, 1.0]}}}]}
    results = [
        {"loss": 1.0, "metrics": {"loss:sum": 1.0, "clip_frac": 0.0, "r:max": 2, "note": "x"}, "outputs": ["a"]},
        {"loss": 2.0, "metrics": {"loss:sum": 2.0, "clip_frac": 1.0, "r:max": 4, "note": "y"}, "outputs": ["b"]},
    ]
    merged = merged_results([part, other], results)
    assert merged == {"loss": 3.0, "metrics": {"loss:sum": 3.0, "clip_frac": 0.75, "r:max": 4}, "outputs": ["a", "b"]}
    assert merged_results([part, other], [{}, {}]) == {"metrics": {}}
