"""--log: the user's function gets each record, and cannot end a training."""

import json
import re
import sys
import types

import pytest

from loop_runs import EXAMPLES, GRPO, check_refused

ARGUMENTS = ("--build-loss", GRPO, "--lora-rank", "1", "--seed", "1", "--cycles", "2", "--save-every", "1")
MINE = """
import json, sys

def keeps(record):
    with open("kept.jsonl", "a") as file:
        print(json.dumps(record), file=file)

def raises(record):
    raise ConnectionError("no network")

def exits(record):
    sys.exit(3)
"""


@pytest.fixture
def train(run_loop, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return lambda *arguments: run_loop("rl_loop", *ARGUMENTS, *arguments)


def test_a_logger_gets_every_line_of_the_metrics_file(train, tmp_path):
    done = train("--metrics", "m.jsonl", "--log", "mine:keeps")
    assert done.returncode == 0, done.stderr
    kept = (tmp_path / "kept.jsonl").read_text()
    assert kept == (tmp_path / "m.jsonl").read_text()
    kinds = [next(iter(json.loads(line))) for line in kept.splitlines()]
    assert kinds == ["config", "cycle", "state_id", "cycle", "state_id"]


def test_a_logger_needs_no_metrics_file(train, tmp_path):
    train("--log", "mine:keeps")
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("name", "said"), [("raises", "raised ConnectionError: no network"), ("exits", "raised SystemExit: 3")]
)
def test_an_error_of_a_logger_is_printed_once_and_the_training_goes_on(train, name, said):
    done = train("--log", f"mine:{name}")
    assert done.returncode == 0 and done.summary["cycles_done"] == 2
    assert done.stderr.count(f"warning: --log mine:{name} {said}. The training goes on\n") == 1
    assert "log" in done.summary["warnings"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [("mine", "--log is 'mine', expected MODULE:CALLABLE"), ("mine:kept", "has no 'kept'; did you mean 'keeps'?")],
)
def test_a_logger_that_is_not_there_is_refused_before_anything_is_created(train, spec, message):
    done = train("--log", spec)
    check_refused(done, message)


class Double(types.ModuleType):
    """Stands for a library: records the calls of its functions, and of the objects that they return."""

    def __init__(self, name, calls):
        super().__init__(name)
        self.calls = calls

    def __getattr__(self, name):
        def called(*arguments, **named):
            self.calls.append((name, arguments, named))
            return Double(name, self.calls)

        return called


BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", (EXAMPLES / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("library", "each"), [("wandb", "log"), ("torch.utils.tensorboard", "add_scalar"), ("mlflow", "log_metrics")]
)
def test_the_documented_loggers_call_their_libraries(train, tmp_path, monkeypatch, library, each):
    [documented] = [block for block in BLOCKS if re.search(rf"^(import|from) {library}\b", block, re.MULTILINE)]
    calls = []
    for end in [match.start() for match in re.finditer(r"\.|$", library)]:
        monkeypatch.setitem(sys.modules, library[:end], Double(library[:end], calls))
    (tmp_path / "mylog.py").write_text(documented)
    done = train("--log", "mylog:log")
    assert done.returncode == 0 and "log" not in done.summary["warnings"], done.stderr
    logged = [call for call in calls if call[0] == each]
    if each == "add_scalar":
        rewards = [(value, cycle) for _, (name, value, cycle), _ in logged if name == "reward/mean"]
    else:
        rewards = [(metrics["reward/mean"], named["step"]) for _, (metrics,), named in logged]
    assert [cycle for _, cycle in rewards] == [0, 1] and all(type(reward) is float for reward, _ in rewards)
