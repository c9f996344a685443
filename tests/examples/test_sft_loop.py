"""Supervised fine-tuning."""

import json
import re
import signal

from loop_runs import left_behind, training_on
from processes import read_until, start_loop


def test_the_command_of_its_help_halves_the_loss_on_other_data(run_loop):
    done = run_loop("sft_loop", "--learning-rate", "0.1", "--epochs", "3", "--seed", "1", "--lora-rank", "8")
    assert done.returncode == 0, done.stderr
    summary = done.summary
    assert summary["eval_loss_after"] <= summary["eval_loss_before"] / 2
    assert summary["operations"]["forward"] == 4 and summary["operations"]["optim_step"] == summary["cycles_done"] == 15
    assert "sample" not in summary["operations"] and summary["state_id"] and summary["artifact"]
    line = r"^cycle 14 +loss/token \S+ +[+-]\S+ +grad_norm \S+ +\d+ tokens/s +\d+ tokens +0:00:00 left$"
    assert re.search(line, done.stderr, re.MULTILINE)


def test_token_ids_train_anywhere_and_need_no_evaluation(run_loop, tmp_path, remote):
    lines = [{"prompt": [1, 2], "completion": [3]}, {"prompt": [300], "completion": [4, 5]}]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    arguments = ("--data", "ids.jsonl", "--model", "byte-lm", "--batch-size", "1", "--lora-rank", "1")
    done = run_loop("sft_loop", *arguments, "--provider", "tinker", **training_on(remote))
    assert done.returncode == 0, done.stderr
    assert (done.summary["cycles_done"], done.summary["tokens_trained"]) == (2, 3)
    assert "eval_loss_after" not in done.summary
    assert left_behind(remote, done.summary) == ("closed", ["finished"])


def test_data_are_required_away_from_the_embedded_service(run_loop, remote):
    done = run_loop("sft_loop", "--model", "m", **training_on(remote))
    assert done.returncode == 2 and "--data is required unless the embedded service is used" in done.stderr


def test_a_drawn_seed_repeats_the_order_too(run_loop, tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(f'{{"prompt": "{c}", "completion": "x{c}"}}\n' for c in "abcdefgh"))
    arguments = ("--data", "d.jsonl", "--batch-size", "2", "--lora-rank", "1", "--learning-rate", "0.1")
    first = run_loop("sft_loop", *arguments)
    [seed] = re.findall(r"seed (\d+) was drawn", first.stderr)
    assert first.summary["seed"] == int(seed)
    again = run_loop("sft_loop", *arguments, "--seed", seed)
    losses = [re.findall(r"loss/token (\S+)", done.stderr) for done in (first, again)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_ctrl_c_cancels_the_run_and_closes(tmp_path, remote):
    (tmp_path / "long.jsonl").write_text('{"prompt": [1], "completion": [2]}\n' * 2000)
    arguments = ("--data", "long.jsonl", "--batch-size", "1", "--model", "m", "--lora-rank", "1")
    with start_loop(tmp_path, "sft_loop.py", *arguments, **training_on(remote)) as process:
        read_until(process.stderr, "cycle 2 ")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert left_behind(remote, json.loads(stdout)) == ("closed", ["cancelled"])
