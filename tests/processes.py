"""A loop, or the embedded service, as a process: for tests that send it signals, kill it, or take its terminal away."""

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

from loop_runs import EXAMPLES, ROOT

GIVES_UP_S = 60.0  # a test that goes wrong ends; one that goes right never waits for it

# rl_loop, but it gives up a request after a second, so that a service that is gone does not cost minutes.
IMPATIENT = f"""
import functools, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import rl_loop
from whitney_loop.loop import place, training
place.WhitneyClient = functools.partial(place.WhitneyClient, submit_timeout_s=1.0)
training.LAST_SAVE_S = 1.0
sys.exit(rl_loop.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def start_loop(folder, script, *arguments, **variables):
    """Run a loop of examples/ while the block goes on; it is killed if that takes too long."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    killer = threading.Timer(GIVES_UP_S, process.kill)
    killer.start()
    try:
        with process:
            yield process
    finally:
        killer.cancel()


def start_impatient_loop(
    folder, service, *arguments, build_loss="build_loss", cycles=100_000, shell=(), variables=None, **options
):
    """Start rl_loop in ``folder``, where ``user_module`` and ``sample.json`` are.

    ``shell`` is a command that runs the one after it, ``variables`` are of the environment, ``options`` those of Popen.
    """
    command = [*shell, sys.executable, "-c", IMPATIENT]
    command += ["--build-loss", f"never_saturates:{build_loss}", "--model", "byte-lm"]
    command += ["--sample-json", "sample.json", "--lora-rank", "1", "--seed", "1", "--learning-rate", "0.1"]
    command += ["--base-url", service.base_url, "--cycles", str(cycles), "--timeout", "5", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    environment = os.environ | {"WHITNEY_API_KEY": service.api_key} | (variables or {})
    return subprocess.Popen(command, cwd=folder, env=environment, **options)


@dataclass
class ServiceProcess:
    process: subprocess.Popen
    base_url: str
    api_key: str


@contextlib.contextmanager
def start_service(storage, api_key="key-of-the-test"):
    """Run the embedded service while the block goes on."""
    command = [sys.executable, "-u", "-m", "whitney_loop.local", "--port", "0", "--storage", str(storage)]
    environment = os.environ | {"WHITNEY_API_KEY": api_key}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as process:
        try:
            base_url = read_until(process.stdout, "WHITNEY_BASE_URL=").splitlines()[-1].partition("=")[2]
            yield ServiceProcess(process, base_url, api_key)
        finally:
            process.kill()


def contract_command(base_url, key, *options):
    """Return the command that asks a service every sentence of the contract."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/contract"]
    return [*command, "--contract-url", base_url, "--contract-key", key, *options]


def read_until(stream, text):
    """Return the lines of a process up to the one that holds ``text``, joined."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"no line with {text!r}: {''.join(lines)}")
