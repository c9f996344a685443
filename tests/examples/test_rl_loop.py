"""The reference loop: it learns, it ends cleanly, it repeats itself, and a copy of the one file runs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loop_runs import EXAMPLES, GRPO, ROOT, left_behind, training_on
from processes import read_until, start_loop, start_service

MINE = """
import sys, threading

from grpo_build_loss import build_loss as grpo

def waits(sample, cycle, request, ctx):
    print("waiting in build_loss", file=sys.stderr, flush=True)
    threading.Event().wait()

def waits_in_cycle_1(sample, cycle, request, ctx):
    return waits(sample, cycle, request, ctx) if cycle == 1 else grpo(sample, cycle, request, ctx)
"""
REMOTE = ("--model", "byte-lm", "--sample-json", EXAMPLES / "sample.json", "--lora-rank", "1")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.learns
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_command_of_the_readme_learns(run_loop, seed):
    command = ("--build-loss", GRPO, "--cycles", "40", "--learning-rate", "0.1")
    done = run_loop("rl_loop", *command, "--seed", seed)
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"reward/mean (\S+)", done.stderr)]
    assert len(rewards) == 40
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 >= 0.9


def test_the_plain_command_trains_on_the_embedded_service_and_says_so(folder):
    with start_loop(folder, "rl_loop.py", "--build-loss", GRPO) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    where, seed, rate, first, *texts, second, _, _, _ = stderr.splitlines()
    assert where.startswith("training on the embedded service at http://127.0.0.1:")
    assert re.fullmatch(r"seed (\d+) was drawn: --seed \1 repeats this run", seed)
    assert rate == "learning rate 0.1, which byte-lm suggests; --learning-rate changes it"
    metrics = r"reward/mean \S+ +\S+ +kl \S+ +grad_norm \S+ +\d+ tokens/s +\d+ tokens +\d:\d\d:\d\d left"
    assert all(re.fullmatch(rf"cycle {number} +{metrics}", line) for number, line in enumerate([first, second]))
    assert [line.split()[0] for line in texts] == ["best", "median", "worst"]
    summary = json.loads(stdout)
    assert summary["where"] == "the embedded service" and summary["base_url"].startswith("http://127.0.0.1:")
    assert (summary["status"], summary["provider"], summary["model"]) == ("succeeded", "modal", "byte-lm")
    assert (summary["cycles_done"], summary["cycles_skipped"]) == (2, 0)
    assert summary["operations"] == {
        "save_weights_for_sampler": 2, "sample": 2, "forward_backward": 2, "optim_step": 2,
        "save_state": 1, "export_lora": 1,
    }  # fmt: skip
    assert 0 < summary["tokens_sampled"] == summary["tokens_trained"]
    adapter = Path(summary["artifact"]["uri"].removeprefix("file://"))
    assert (adapter / "adapter_model.safetensors").is_file()
    assert adapter.parent.parent == folder / ".whitney_local"
    assert list((folder / ".whitney_local" / "states").glob(f"{summary['state_id']}*"))


def test_the_same_seed_gives_the_same_adapter(run_loop):
    def adapter(seed, storage):
        options = ("--lora-rank", "1", "--learning-rate", "0.1", "--seed", seed, "--storage", storage)
        return run_loop("rl_loop", "--build-loss", GRPO, *options).adapter

    assert adapter("7", "one") == adapter("7", "two") != adapter("8", "three")


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_closes_and_gives_its_exit_code(folder, remote, number, code):
    arguments = ("--build-loss", "mine:waits", *REMOTE)
    with start_loop(folder, "rl_loop.py", *arguments, **training_on(remote)) as process:
        read_until(process.stderr, "waiting in build_loss")
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    summary = json.loads(stdout)
    assert summary["status"].startswith("ended by")
    assert left_behind(remote, summary) == ("closed", ["cancelled"])


@pytest.mark.long
@pytest.mark.parametrize("waits", ["waits", "waits_in_cycle_1"])
def test_a_second_signal_stops_the_waiting_and_prints_the_command_that_closes(folder, tmp_path, waits):
    """The service is stopped while build_loss waits, so that the clean-up, or in cycle 1 the saving, hangs."""
    with start_service(tmp_path / "storage") as service:
        arguments = ("--build-loss", f"mine:{waits}", *REMOTE)
        with start_loop(folder, "rl_loop.py", *arguments, **training_on(service)) as process:
            printed = read_until(process.stderr, "waiting in build_loss")
            service.process.send_signal(signal.SIGSTOP)
            process.send_signal(signal.SIGINT)
            printed += read_until(process.stderr, "closing what is open")
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
    printed += stderr
    session_id = json.loads(stdout)["session_id"]
    assert process.returncode == 130, printed
    assert "Traceback" not in printed and service.api_key not in printed
    assert "may still be open: run run-" in printed
    assert f"python -m whitney_loop close {session_id} --base-url {service.base_url}" in printed


# A copy of the one file


@pytest.mark.parametrize("safe_path", ["", "1"])  # "1": Python itself does not search the folder of the file
def test_a_copy_of_the_file_alone_runs_with_the_users_module(tmp_path, safe_path):
    """``argparse.py`` above it would be imported if the folder above a copy were searched for modules."""
    folder = tmp_path / "new project"
    folder.mkdir()
    (tmp_path / "argparse.py").write_text("raise RuntimeError('not the one of the standard library')\n")
    shutil.copy(EXAMPLES / "rl_loop.py", folder)
    shutil.copy(EXAMPLES / "grpo_build_loss.py", folder / "mymod.py")
    done = subprocess.run(
        [sys.executable, "rl_loop.py", "--build-loss", "mymod:build_loss", "--lora-rank", "1", "--cycles", "1"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": safe_path},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cycles_done"] == 1
