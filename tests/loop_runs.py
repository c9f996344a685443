"""The loops as their users run them: a command line in, an exit code and two texts out.

``run_loop`` runs one in this process, which saves the half second that Python needs to start. ``processes.py`` starts
real processes, for the tests that need signals or an environment of their own.
"""

import contextlib
import importlib
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from whitney_loop import WhitneyClient, sample_request
from whitney_loop.local import serve
from whitney_loop.loop.signals import ENDING_SIGNALS

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
GRPO = "grpo_build_loss:build_loss"


@dataclass(repr=False)
class Done:
    """The outcome of a loop; the names are those of subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str

    def __repr__(self):
        """Return what a failing assertion shows, short enough that pytest does not cut it."""
        return f"<exit code {self.returncode}, stderr ends with {self.stderr[-150:]!r}>"

    @property
    def summary(self):
        [line] = self.stdout.splitlines()
        return json.loads(line)

    @property
    def adapter(self):
        return adapter_of(self.summary)


def adapter_of(summary):
    """Return the bytes of the adapter that a loop on the embedded service exported."""
    return (Path(summary["artifact"]["uri"].removeprefix("file://")) / "adapter_model.safetensors").read_bytes()


@contextlib.contextmanager
def same_signal_handlers():
    """Put back the signal handlers that a loop replaces."""
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def run_loop(tmp_path, monkeypatch, capsys):
    """``run_loop(script, *arguments, **variables)``: a loop of examples/ in the folder ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def run(script, *arguments, **variables):
        with monkeypatch.context() as patch, same_signal_handlers():
            patch.syspath_prepend(str(EXAMPLES))  # as Python does for a script
            for name, value in variables.items():
                patch.setenv(name, value)
            capsys.readouterr()
            try:
                code = importlib.import_module(script).main([str(argument) for argument in arguments])
            except SystemExit as error:  # of argparse
                code = error.code
            finally:
                _forget_modules_of(tmp_path)
        return Done(code, *capsys.readouterr())

    return run


def _forget_modules_of(folder):
    """Forget the user's modules, so that the next loop and the next test import them anew."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{folder}/"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def remote(tmp_path_factory):
    """A service that the loop did not start, in place of one that may send a bill."""
    with serve(tmp_path_factory.mktemp("remote")) as running:
        yield running


def training_on(service):
    """Return the environment variables that name this service."""
    return {"WHITNEY_BASE_URL": service.base_url, "WHITNEY_API_KEY": service.api_key}


def left_behind(service, summary):
    """Return the status of the loop's session and those of its runs, as the service knows them."""
    session = WhitneyClient(service.base_url, service.api_key).session(summary["session_id"])
    return session["status"], [run["status"] for run in session["runs"]]


def write_requests(path, texts, **params):
    """Write a JSONL of small sample requests, which train in milliseconds."""
    params = {"num_samples": 4, "max_tokens": 6} | params
    path.write_text("".join(json.dumps(sample_request(text.encode(), **params)) + "\n" for text in texts))


def entries_of(path):
    """Return the objects in a JSONL."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(path):
    """Return the cycles in a metrics file, without their times."""
    return [
        {name: value for name, value in entry.items() if not name.startswith("time/")}
        for entry in entries_of(path)
        if "cycle" in entry
    ]


def check_exact_resumption(train, *arguments, cycles=(2, 2)):
    """Train in one run and in two: adapters and metrics must be the same. Return the three outcomes."""
    whole = train(*arguments, "--seed", "1", "--cycles", sum(cycles), "--metrics", "whole.jsonl")
    first = train(*arguments, "--seed", "1", "--cycles", cycles[0], "--metrics", "parts.jsonl")
    second = train(*arguments, "--cycles", cycles[1], "--metrics", "parts.jsonl", "--resume-from", "last")
    assert second.returncode == 0, second.stderr
    assert second.adapter == whole.adapter != first.adapter
    assert metrics_of(Path("parts.jsonl")) == metrics_of(Path("whole.jsonl"))
    return whole, first, second


def check_refused(done, message):
    """Assert that the loop said in one line why it does not start, and created nothing in the current folder."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not Path(".whitney_local").exists()
