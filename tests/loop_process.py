"""A loop as its users run it: a process, and what it printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "examples" / "rl_loop.py"
GRPO = "grpo_build_loss:build_loss"


def environment(**variables):
    return {name: value for name, value in os.environ.items() if not name.startswith("WHITNEY_")} | variables


def elsewhere(service):
    """The environment of someone who trains away from the embedded service of the loop."""
    return environment(WHITNEY_BASE_URL=service.base_url, WHITNEY_API_KEY=service.api_key)


REMOTE = ["--model", "byte-lm", "--sample-json", str(ROOT / "examples" / "sample.json"), "--lora-rank", "4"]


def loop(folder, *arguments, env=None):
    command = [sys.executable, str(LOOP), *map(str, arguments)]
    env = environment() if env is None else env
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def summary_of(done):
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout + done.stderr
    return json.loads(lines[0])


def adapter_of(summary):
    """The bytes of the adapter that a loop on the embedded service left behind."""
    return (Path(summary["artifact"]["uri"].removeprefix("file://")) / "adapter_model.safetensors").read_bytes()
