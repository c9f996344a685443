"""On-policy distillation."""

import itertools
import json
import re
import signal

import pytest

from between import changing_results
from loop_runs import EXAMPLES, left_behind, training_on, write_requests
from processes import read_until, start_loop
from whitney_loop.operations import Operations

TEACHER = [{"prompt": list(b"the "), "completion": list(b"end")}] * 4
SMALL = ("--model", "byte-lm", "--lora-rank", "1", "--learning-rate", "0.1")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, TEACHER)))
    write_requests(tmp_path / "one.jsonl", ["the "])
    return tmp_path


@pytest.fixture
def submitted(monkeypatch):
    """(run_id, payload, operation) of each operation that a client submits, in order."""
    record = []

    submit = Operations.submit

    def recorded(operations, run_id, sampler_id, kind, payload, *arguments, **options):
        operation = submit(operations, run_id, sampler_id, kind, payload, *arguments, **options)
        record.append((run_id, payload, operation))
        return operation

    monkeypatch.setattr(Operations, "submit", recorded)
    return record


@pytest.mark.learns
def test_the_command_of_its_help_brings_the_student_to_the_teacher(run_loop):
    data = ("--teacher-data", EXAMPLES / "sft_train.jsonl")
    done = run_loop("distillation_loop", *data, "--cycles", "60", "--learning-rate", "0.1", "--seed", "1")
    assert done.returncode == 0, done.stderr
    kl = [float(text) for text in re.findall(r"kl/k1 (\S+)", done.stderr)]
    assert len(kl) == 60
    assert kl[0] > 0.5 and sum(kl[:3]) >= 5 * abs(sum(kl[-3:]))
    assert done.summary["kl_first"] == pytest.approx(kl[0], rel=1e-3)
    assert done.summary["kl_last"] == pytest.approx(kl[-1], rel=1e-3)


def test_the_advantage_of_a_token_is_the_teachers_logprob_minus_the_students(run_loop, folder, submitted):
    """A small share of the completions of byte-lm is empty; those are left out."""
    data = ("--teacher-data", "ids.jsonl", "--sample-json", "one.jsonl", "--cycles", "1", "--seed", "1")
    done = run_loop("distillation_loop", *data, *SMALL)
    assert done.returncode == 0, done.stderr
    student, teacher = done.summary["run_id"], done.summary["teacher_run_id"]
    of_student = {operation.kind: (payload, operation.result()) for run, payload, operation in submitted
                  if run == student}  # fmt: skip
    assert list(of_student) == [
        "save_weights_for_sampler", "sample", "forward_backward", "optim_step", "save_state", "export_lora"
    ]  # fmt: skip
    scored = [(payload, operation.result()) for run, payload, operation in submitted
              if run == teacher and operation.kind == "logprobs"]  # fmt: skip
    prompt = list(b"the ")
    sequences = [sequence for sequence in of_student["sample"][1]["sequences"] if sequence["tokens"]]
    assert [asked["input"]["token_ids"] for asked, _ in scored] == [prompt + s["tokens"] for s in sequences]
    expected = [
        [theirs - own for theirs, own in zip(answer["logprobs"][4:], sequence["logprobs"], strict=True)]
        for sequence, (_, answer) in zip(sequences, scored, strict=True)
    ]
    payload = of_student["forward_backward"][0]
    assert payload["loss_function"] == "importance_sampling"
    tensors = [datum["loss_inputs"] for datum in payload["data"]]
    assert [datum["advantages"]["values"][3:] for datum in tensors] == expected
    assert [datum["logprobs"]["values"][3:] for datum in tensors] == [s["logprobs"] for s in sequences]
    gaps = [gap for gaps in expected for gap in gaps]
    assert done.summary["kl_first"] == pytest.approx(-sum(gaps) / len(gaps))
    assert done.summary["tokens_sampled"] == len(gaps)


def test_a_teacher_may_be_a_saved_state_and_both_runs_are_ended(run_loop, folder, remote):
    env = training_on(remote)
    state_id = run_loop("sft_loop", "--data", "ids.jsonl", *SMALL, **env).summary["state_id"]
    lines = [{"prompt": {"token_ids": [97]}, "num_samples": n, "sampling_params": {"max_tokens": 1}} for n in (2, 3)]
    (folder / "two.jsonl").write_text("\n".join(map(json.dumps, lines)))
    cycles = ("--sample-json", "two.jsonl", "--cycles", "4", *SMALL)
    done = run_loop("distillation_loop", "--teacher-state", state_id, *cycles, **env)
    assert done.returncode == 0, done.stderr
    so_far = [0, *map(int, re.findall(r"(\d+) tokens ", done.stderr))]  # sampled and trained
    tokens = [after - before for before, after in itertools.pairwise(so_far)]
    assert sorted(tokens[:2]) == sorted(tokens[2:]) == [4, 6]  # each prompt once an epoch
    assert left_behind(remote, done.summary) == ("closed", ["finished", "finished"])

    lost = run_loop("distillation_loop", "--teacher-state", "state-none", *cycles, **env)
    assert lost.returncode == 1 and "state-none" in lost.stderr and "Traceback" not in lost.stderr
    assert left_behind(remote, lost.summary) == ("closed", ["cancelled"])


def test_sampling_that_biases_its_ratio_is_warned_of(run_loop, folder, remote):
    write_requests(folder / "warm.jsonl", ["a"], temperature=0.5)
    data = ("--teacher-data", "ids.jsonl", "--sample-json", "warm.jsonl", "--cycles", "1")
    done = run_loop("distillation_loop", *data, *SMALL, **training_on(remote))
    assert done.returncode == 0, done.stderr
    assert done.summary["warnings"] == ["learning_rate", "sampling"]


def test_a_null_logprob_of_the_teacher_is_named_by_its_position(run_loop, folder, remote):
    def without_the_last(result):
        return {"logprobs": [*result["logprobs"][:-1], None]}

    with changing_results(remote, "logprobs", without_the_last) as service:
        data = ("--teacher-data", "ids.jsonl", "--sample-json", "one.jsonl")
        done = run_loop("distillation_loop", *data, *SMALL, **training_on(service))
    assert done.returncode == 1
    assert re.search(r"error: result.logprobs\[\d+\] is None, expected a finite number", done.stderr)


def test_ctrl_c_cancels_both_runs_and_closes(folder, remote):
    data = ("--teacher-data", "ids.jsonl", "--sample-json", "one.jsonl", "--cycles", "9999")
    with start_loop(folder, "distillation_loop.py", *data, *SMALL, **training_on(remote)) as process:
        read_until(process.stderr, "cycle 1 ")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert left_behind(remote, json.loads(stdout)) == ("closed", ["cancelled", "cancelled"])
