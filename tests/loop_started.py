"""A loop as a process of its own, for the tests that send it signals, kill it, or take its terminal away."""

import os
import subprocess
import sys

from loop_in_process import EXAMPLES

# The loop as it is, but giving up a request after a second, so that a service that is gone does not cost minutes.
IMPATIENT = f"""
import functools, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import rl_loop
from whitney_loop.loop import place, training
place.WhitneyClient = functools.partial(place.WhitneyClient, submit_timeout_s=1.0)
training.LAST_SAVE_S = 1.0
sys.exit(rl_loop.main(sys.argv[1:]))
"""


def start_loop(
    folder, base_url, key, *arguments, build_loss="build_loss", cycles=100_000, shell=(), variables=None, **options
):
    """Start the loop in ``folder``, where ``user_module`` and ``sample.json`` are.

    ``shell`` is a command that runs the one after it, ``variables`` are of the environment, ``options`` those of Popen.
    """
    command = [*shell, sys.executable, "-c", IMPATIENT]
    command += ["--build-loss", f"never_saturates:{build_loss}", "--model", "byte-lm"]
    command += ["--sample-json", "sample.json", "--lora-rank", "1", "--seed", "1", "--learning-rate", "0.1"]
    command += ["--base-url", base_url, "--cycles", str(cycles), "--timeout", "5", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    environment = os.environ | {"WHITNEY_API_KEY": key} | (variables or {})
    return subprocess.Popen(command, cwd=folder, env=environment, **options)


def read_until(stream, text):
    """The lines of a process up to the one that holds ``text``, joined."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"no line with {text!r}: {''.join(lines)}")
