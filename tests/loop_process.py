"""A loop in a process of its own, as its users start it: for the tests that send it signals."""

import contextlib
import os
import subprocess
import sys
import threading

from loop_runs import EXAMPLES

GIVES_UP_S = 60.0  # a test that goes wrong ends; one that goes right never waits for it


def environment(**variables):
    return {name: value for name, value in os.environ.items() if not name.startswith("WHITNEY_")} | variables


@contextlib.contextmanager
def start_loop(folder, script, *arguments, **variables):
    """A loop of examples/ as a process that runs while the block goes on; it is killed if that takes too long."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(**variables), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    killer = threading.Timer(GIVES_UP_S, process.kill)
    killer.start()
    try:
        with process:
            yield process
    finally:
        killer.cancel()
