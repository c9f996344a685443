"""The loops without a build_loss: supervised fine-tuning, and on-policy distillation."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from whitney_loop import WhitneyClient, forward_backward_payload, sft_datum
from whitney_loop.local import serve

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(script, *arguments, folder, **variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith("WHITNEY_")} | variables
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("storage")) as running:
        yield running


def statuses(service, done):
    session = WhitneyClient(service.base_url, service.api_key).session(json.loads(done.stdout)["session_id"])
    return session["status"], [run["status"] for run in session["runs"]]


def test_sft_halves_the_loss_on_data_that_it_does_not_train_on(tmp_path):
    done = run("sft_loop.py", "--learning-rate", "0.1", "--epochs", "3", "--seed", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["eval_loss_after"] <= summary["eval_loss_before"] / 2
    assert summary["operations"]["forward"] == 4 and summary["operations"]["optim_step"] == summary["steps"] == 15
    assert "sample" not in summary["operations"] and summary["state_id"] and summary["artifact"]


def test_sft_takes_token_ids_anywhere_and_needs_no_evaluation(tmp_path, service):
    lines = [{"prompt": [1, 2], "completion": [3]}, {"prompt": [300], "completion": [4, 5]}]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    arguments = ["--data", "ids.jsonl", "--base-url", service.base_url, "--model", "byte-lm", "--batch-size", "1"]
    done = run("sft_loop.py", *arguments, folder=tmp_path, WHITNEY_API_KEY=service.api_key)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["tokens_trained"], summary["eval_loss_after"]) == (2, 3, None)
    assert statuses(service, done) == ("closed", ["finished"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "bad.jsonl:2: Expecting value"),
        ("[1]", 'bad.jsonl:2: expected {"prompt": …, "completion": …}'),
        ('{"prompt": "a"}', "bad.jsonl:2: expected"),
        ('{"prompt": "", "completion": "b"}', "bad.jsonl:2: prompt_tokens is empty"),
        ('{"prompt": [1], "completion": [2.5]}', r"bad.jsonl:2: completion_tokens[0] is 2.5"),
        ('{"prompt": 1, "completion": [2]}', "bad.jsonl:2: prompt is a int"),
        ('{"prompt": [1, 2], "completion": []}', "bad.jsonl:2: completion is empty"),
        ('{"prompt": [1, 2], "completion": [9223372036854775808]}', "bad.jsonl:2: completion_tokens[0] is"),
        (b'{"prompt": "\xff", "completion": "b"}', "bad.jsonl:2: 'utf-8' codec"),
        ("[" * 100_000, "bad.jsonl:2: "),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_before_anything_is_created(tmp_path, line, message):
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "a", "completion": "b"}\n' + raw + b"\n")
    for script, option in (("sft_loop.py", "--data"), ("distillation_loop.py", "--teacher-data")):
        done = run(script, option, "bad.jsonl", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and done.stderr.count("\n") == 1
        assert not (tmp_path / ".whitney_local").exists()


def test_a_text_may_hold_line_ends_that_are_not_jsons(tmp_path):
    line = json.dumps({"prompt": "a\u2028b\x85", "completion": "c"}, ensure_ascii=False)
    (tmp_path / "text.jsonl").write_text(line + "\n", encoding="utf-8")
    done = run("sft_loop.py", "--data", "text.jsonl", "--provider", "tinker", folder=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["tokens_trained"] == 2


def test_each_epoch_has_all_data_in_its_own_order():
    sys.path.insert(0, str(EXAMPLES))
    from sft_loop import batches

    data = [sft_datum([1], [token]) for token in range(10)]
    steps = list(batches(data, 2, 4, seed=1))
    assert [epoch for epoch, _ in steps] == [0, 0, 0, 1, 1, 1]
    orders = [[datum for epoch, payload in steps if epoch == wanted for datum in payload["data"]] for wanted in (0, 1)]
    assert orders[0] != orders[1] and all(sorted(order, key=str) == sorted(data, key=str) for order in orders)
    assert steps == list(batches(data, 2, 4, seed=1)) != list(batches(data, 2, 4, seed=2))


@pytest.mark.parametrize("outputs", [None, [], [None], [{}], [{"logprobs": [-1.0]}], [{"logprobs": [-1.0, None]}]])
def test_a_loss_per_token_is_told_only_where_the_outputs_tell_it(outputs):
    sys.path.insert(0, str(EXAMPLES))
    from sft_loop import mean_loss

    payload = forward_backward_payload([sft_datum([1, 2], [3])], "cross_entropy")
    assert mean_loss([{"outputs": outputs}], [payload]) is None
    assert mean_loss([{"outputs": [{"logprobs": [None, -2.0]}]}], [payload]) == 2.0


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("sft_loop.py", ["--data", "long.jsonl", "--batch-size", "1"]),
        ("distillation_loop.py", ["--teacher-data", "long.jsonl", "--cycles", "9999"]),
    ],
)
def test_ctrl_c_in_mid_loop_cancels_every_run_and_closes(tmp_path, service, script, arguments):
    (tmp_path / "long.jsonl").write_text('{"prompt": [1], "completion": [2]}\n' * 2000)
    arguments = [*arguments, "--base-url", service.base_url, "--model", "m", "--lora-rank", "2"]
    if script == "distillation_loop.py":
        arguments += ["--sample-json", str(EXAMPLES / "sample.json"), "--teacher-epochs", "1"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("WHITNEY_")}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=tmp_path, env=env | {"WHITNEY_API_KEY": service.api_key}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        next(line for line in process.stderr if line.startswith(("step 2 ", "cycle 1 ")))
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    session = WhitneyClient(service.base_url, service.api_key).session(json.loads(stdout)["session_id"])
    assert session["status"] == "closed" and {run["status"] for run in session["runs"]} == {"cancelled"}


def test_text_is_refused_away_from_the_embedded_service(tmp_path, service):
    (tmp_path / "text.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    arguments = ["--data", "text.jsonl", "--base-url", service.base_url, "--model", "m"]
    done = run("sft_loop.py", *arguments, folder=tmp_path, WHITNEY_API_KEY=service.api_key)
    assert done.returncode == 2 and "text.jsonl:1: prompt is text" in done.stderr


@pytest.mark.learns
def test_distillation_brings_the_student_to_the_teacher(tmp_path):
    data = str(EXAMPLES / "sft_train.jsonl")
    arguments = ["--teacher-data", data, "--cycles", "60", "--learning-rate", "0.1", "--seed", "1"]
    done = run("distillation_loop.py", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    kl = [float(text) for text in re.findall(r"kl/k1 (\S+)", done.stderr)]
    assert len(kl) == 60
    assert kl[0] > 0.5 and sum(kl[:3]) >= 5 * abs(sum(kl[-3:]))
    summary = json.loads(done.stdout)
    assert summary["kl_first"] == pytest.approx(kl[0], rel=1e-3) and summary["kl_last"] == pytest.approx(
        kl[-1], rel=1e-3
    )


def test_a_token_is_judged_by_how_much_likelier_the_teacher_finds_it(capsys):
    sys.path.insert(0, str(EXAMPLES))
    from distillation_loop import train_one_cycle

    asked = []

    class Client:
        def run_operation(self, run_id, kind, payload):
            asked.append((run_id, kind, payload))
            return {"save_weights_for_sampler": {"sampler_id": "smp-student", "version": 3}}.get(kind, {})

        def run_operations(self, run_id, kind, payloads):
            return [self.run_operation(run_id, kind, payload) for payload in payloads]

        def sampler_operation(self, run_id, sampler_id, kind, payload):
            assert (run_id, sampler_id, kind) == ("run-student", "smp-student", "sample")
            sequences = [([5, 6], [-1.0, -2.0]), ([], []), ([7], [-0.5])]
            return {"sequences": [{"tokens": tokens, "logprobs": logprobs} for tokens, logprobs in sequences]}

        def sampler_operations(self, run_id, sampler_id, kind, payloads):
            assert (run_id, sampler_id, kind) == ("run-teacher", "smp-teacher", "logprobs")
            answers = {(1, 2, 5, 6): [None, -9.0, -0.25, -2.5], (1, 2, 7): [None, -9.0, -1.5]}
            return [{"logprobs": answers[tuple(payload["input"]["token_ids"])]} for payload in payloads]

    ctx = SimpleNamespace(client=Client(), run_id="run-student", provider="modal")
    request = {"prompt": {"token_ids": [1, 2]}, "num_samples": 3, "sampling_params": {"max_tokens": 2}}
    summary = {"tokens_sampled": 0}
    kl = train_one_cycle(0, ctx, ("run-teacher", "smp-teacher"), request, {"type": "adamw"}, summary)
    assert kl == pytest.approx(-(0.75 - 0.5 - 1.0) / 3) and summary["tokens_sampled"] == 3
    assert [(run_id, kind) for run_id, kind, _ in asked[1:]] == [
        ("run-student", "forward_backward"), ("run-student", "optim_step"),
    ]  # fmt: skip
    payload = asked[1][2]
    tensors = [datum["loss_inputs"] for datum in payload["data"]]
    assert payload["loss_function"] == "importance_sampling"
    assert [datum["advantages"]["values"] for datum in tensors] == [[0.0, 0.75, -0.5], [0.0, -1.0]]
    assert [datum["logprobs"]["values"] for datum in tensors] == [[0.0, -1.0, -2.0], [0.0, -0.5]]


def test_a_seed_that_was_drawn_is_said_and_repeats_the_order_too(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(f'{{"prompt": "{c}", "completion": "x{c}"}}\n' for c in "abcdefgh"))
    arguments = ["--data", "d.jsonl", "--batch-size", "2", "--lora-rank", "2", "--learning-rate", "0.1"]
    first = run("sft_loop.py", *arguments, folder=tmp_path)
    [seed] = re.findall(r"seed (\d+) was drawn", first.stderr)
    assert json.loads(first.stdout)["seed"] == int(seed)
    again = run("sft_loop.py", *arguments, "--seed", seed, folder=tmp_path)
    losses = [re.findall(r"loss/token (\S+)", done.stderr) for done in (first, again)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_distillation_warns_of_what_biases_its_ratio(tmp_path, service):
    request = {
        "prompt": {"token_ids": [97]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 2, "temperature": 0.5},
    }
    (tmp_path / "r.json").write_text(json.dumps(request))
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1], "completion": [2]}\n')
    arguments = ["--teacher-data", "ids.jsonl", "--sample-json", "r.json", "--base-url", service.base_url]
    arguments += ["--model", "m", "--lora-rank", "2", "--cycles", "1", "--learning-rate", "0.1"]
    done = run("distillation_loop.py", *arguments, folder=tmp_path, WHITNEY_API_KEY=service.api_key)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["warnings"] == ["learning_rate", "sampling"]


def test_a_teacher_may_be_resumed_from_a_saved_state_and_both_runs_are_ended(tmp_path, service):
    arguments = ["--base-url", service.base_url, "--model", "byte-lm", "--lora-rank", "4", "--learning-rate", "0.1"]
    lines = [{"prompt": list(b"the "), "completion": list(b"end")}] * 4
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, lines)))
    key = {"WHITNEY_API_KEY": service.api_key}
    taught = run("sft_loop.py", "--data", "ids.jsonl", *arguments, folder=tmp_path, **key)
    state_id = json.loads(taught.stdout)["state_id"]
    samples = [{"prompt": {"token_ids": [97]}, "num_samples": n, "sampling_params": {"max_tokens": 1}} for n in (2, 3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, samples)))
    request = ["--sample-json", "prompts.jsonl", "--cycles", "3"]
    done = run("distillation_loop.py", "--teacher-state", state_id, *request, *arguments, folder=tmp_path, **key)
    assert done.returncode == 0, done.stderr
    assert re.search(r"teacher run-\w+ is frozen at version 1\n", done.stderr)
    assert re.findall(r"tokens (\d)", done.stderr) == ["2", "3", "2"]  # the next prompt each cycle, in their order
    assert statuses(service, done) == ("closed", ["finished", "finished"])

    lost = run("distillation_loop.py", "--teacher-state", "state-none", *request, *arguments, folder=tmp_path, **key)
    assert lost.returncode == 1 and "state-none" in lost.stderr and "Traceback" not in lost.stderr
    assert statuses(service, lost) == ("closed", ["cancelled"])
