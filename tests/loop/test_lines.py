"""Files that a loop writes line by line, such as the metrics file: their lines, their only writer, and broken lines."""

import os
from pathlib import Path

import pytest

from loop_runs import GRPO, check_refused, entries_of, training_on
from whitney_loop.loop.files import lock
from whitney_loop.loop.history import History
from whitney_loop.loop.lines import LinesFile, read_lines


def test_the_file_has_the_configuration_then_a_line_per_cycle_then_the_state(tmp_path, run_loop, prompts):
    arguments = ("--build-loss", GRPO, *prompts, "--cycles", "3", "--learning-rate", "0.1", "--updates", "2")
    done = run_loop("rl_loop", *arguments, "--metrics", "m.jsonl")
    assert done.returncode == 0, done.stderr
    first, *cycles, state = entries_of(tmp_path / "m.jsonl")
    assert list(first) == ["config"] and first["config"]["seed"] == 1 and first["config"]["batch_size"] == 4
    assert first["config"]["run_id"] == done.summary["run_id"]
    assert [entry["cycle"] for entry in cycles] == [0, 1, 2] and [entry["version"] for entry in cycles] == [0, 2, 4]
    assert state == {"state_id": done.summary["state_id"], "next_cycle": 3}
    expected = {
        "reward/mean", "reward/std", "loss/sum", "kl/k1", "kl/k3", "ratio/max", "ess", "groups/uniform_frac",
        "completions/truncated_frac", "completions/empty_frac", "completions/tokens", "optim/grad_norm",
        "time/sample", "time/build_loss", "time/train", "time/total", "provider/loss:sum",
    }  # fmt: skip
    assert expected <= cycles[0].keys()
    assert sum(entry["completions/tokens"] for entry in cycles) == done.summary["tokens_sampled"]
    assert cycles[0]["ratio/max"] > 1 and 0 < cycles[0]["ess"] < 1  # of the second update


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the platform has no file that is always full")
def test_a_full_disk_ends_the_run_with_the_name_of_the_file():
    with pytest.raises(ValueError, match="--metrics /dev/full cannot be written: No space left"):
        with History(metrics=LinesFile("--metrics", FULL)) as history:
            history.claim()
            history.write({"cycle": 0})


def test_the_key_is_nowhere_in_the_file(tmp_path, run_loop, prompts, remote):
    (tmp_path / "mine.py").write_text(
        "import os\nfrom grpo_build_loss import build_loss as grpo\n"
        "def build_loss(sample, cycle, request, ctx):\n"
        "    payload = grpo(sample, cycle, request, ctx)\n"
        "    ctx.metrics['note'] = os.environ['WHITNEY_API_KEY']\n"
        "    return payload\n"
    )
    arguments = ("--build-loss", "mine:build_loss", "--model", "byte-lm", *prompts, "--metrics", "m.jsonl")
    done = run_loop("rl_loop", *arguments, **training_on(remote))
    assert done.returncode == 0, done.stderr
    assert [entry["note"] for entry in entries_of(tmp_path / "m.jsonl") if "cycle" in entry] == ["[key]", "[key]"]
    assert remote.api_key not in (tmp_path / "m.jsonl").read_text() + done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metrics", "old.jsonl"), "old.jsonl exists: give another name, or remove it: no state was saved in it"),
        (("--metrics", "saved.jsonl"), "saved.jsonl exists: give another name, or --resume-from last"),
        (("--metrics", "pipe"), "pipe: it is not a regular file"),
        (("--metrics", "same", "--journal", "same"), "same: give them different names"),
        (("--metrics", "nowhere/m.jsonl"), "nowhere/m.jsonl: there is no folder"),
        (("--metrics", "."), ": it is not a regular file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_created(tmp_path, run_loop, arguments, message):
    (tmp_path / "old.jsonl").write_text('{"cycle": 0}\n')
    (tmp_path / "saved.jsonl").write_text('{"state_id": "state-1", "next_cycle": 1}\n')
    os.mkfifo(tmp_path / "pipe")
    done = run_loop("rl_loop", "--build-loss", GRPO, *arguments)
    check_refused(done, message)


def test_a_file_that_another_loop_is_writing_is_said_to_be_in_use(tmp_path, run_loop):
    path = tmp_path / "m.jsonl"
    path.write_text('{"cycle": 0}\n')
    with path.open("a") as other:
        assert lock(other)
        done = run_loop("rl_loop", "--build-loss", GRPO, "--metrics", path)
    assert done.returncode == 2 and "another loop is writing it" in done.stderr and "remove" not in done.stderr


def test_a_file_is_read_while_its_last_line_is_still_being_written(tmp_path):
    path, whole = tmp_path / "m.jsonl", '{"cycle": 0}\n\n{"cycle": 1, "text": "ü"}\n'.encode()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        cycles = [line.entry["cycle"] for line in read_lines(path)]
        assert cycles == [0, 1][: whole[:length].count(b"}")]


def test_a_line_that_is_no_object_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"cycle": 0}\n[]\n{"cycle": 1}\n')
    with pytest.raises(ValueError, match="m.jsonl:2 is not one of the lines that a loop writes"):
        read_lines(path)


def test_a_resumed_file_goes_on_after_a_last_line_without_its_newline(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"config": {}}\n{"state_id": "s-1", "next_cycle": 1}')
    [_, state] = read_lines(path)
    assert state.end == path.stat().st_size
    metrics = LinesFile("--metrics", path, kept_bytes=state.end, file=path.open("r+b"))
    with History(1, "s-1", metrics=metrics) as history:
        history.begin({"seed": 1})
    assert [line.entry for line in read_lines(path)] == [
        {"config": {}}, {"state_id": "s-1", "next_cycle": 1}, {"config": {"seed": 1}},
    ]  # fmt: skip
