"""What the README says is true: its Python runs, its commands run, its tables are the code's."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import whitney_loop
from whitney_loop.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = [re.sub(r"(?m)^   ", "", block) if block.startswith("   ") else block
          for block in re.findall(r"(?ms)^ *```python\n(.*?)^ *```", README)]  # fmt: skip

# Stands in for the library of the reader's own tokenizer.
TRANSFORMERS = """
class AutoTokenizer:
    eos_token_id = 151645
    @classmethod
    def from_pretrained(cls, name):
        return cls()
    def encode(self, text):
        return list(text.encode())
"""


def run(command, folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WHITNEY_")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_every_python_block_runs(block, tmp_path):
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    (tmp_path / "block.py").write_text(block)
    done = run([sys.executable, "block.py"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_build_loss_block_trains_and_the_tokenizer_block_makes_its_request(tmp_path):
    [build_loss] = [block for block in PYTHON if "def build_loss" in block]
    [tokenizer] = [block for block in PYTHON if "AutoTokenizer" in block]
    (tmp_path / "mymod.py").write_text(build_loss)
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    (tmp_path / "make.py").write_text(tokenizer)
    assert run([sys.executable, "make.py"], tmp_path).returncode == 0
    [command] = re.findall(r"python (examples/rl_loop.py .*--local)$", README, re.MULTILINE)
    script, *arguments = shlex.split(command)
    done = run([sys.executable, str(ROOT / script), *arguments], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cycles_done"] == 2


@pytest.mark.long
def test_the_transcript_is_what_the_command_prints(tmp_path):
    command = re.findall(r"^    python (examples/rl_loop.py .*)$", README, re.MULTILINE)[0]
    script, *arguments = shlex.split(command)
    done = run([sys.executable, str(ROOT / script), *arguments, "--seed", "1"], tmp_path)
    [transcript] = re.findall(r"(?ms)^```console\n(.*?)^```", README)
    # Python's sum rounds differently from 3.12 on, so after the first cycle only the form is the same everywhere.
    shown = transcript.splitlines()
    printed = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert re.search(r"(?m)^warning: every completion of cycle \d+ was cut off", done.stderr)
    cycle = re.compile(r"cycle \d+ +reward/mean (\S+) .* \d:\d\d:\d\d left(  skipped: .*)?")
    assert shown[1].split()[:6] == printed[1].split()[:6]
    assert all(cycle.fullmatch(line) for line in [*shown[1:4], *printed[1:41]])
    summary = json.loads(transcript.splitlines()[-1])
    assert summary.keys() == json.loads(done.stdout).keys()


@pytest.mark.learns
def test_the_section_on_many_prompts_works_from_training_to_comparing(tmp_path):
    """Every command of it, in its order, in a folder that holds nothing but examples/; Ctrl-C after the first state."""
    [section] = re.findall(r"(?ms)^## Many prompts.*?(?=^## )", README)
    commands = [shlex.split(line) for line in re.findall(r"^    python (.*)$", section, re.MULTILINE)]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    [train, plot, resume, other, compare] = [[sys.executable, *command] for command in commands]

    checked = run([*train, "--dry-run"], tmp_path)
    assert checked.returncode == 0 and "dry run: everything" in checked.stderr

    environment = {name: value for name, value in os.environ.items() if not name.startswith("WHITNEY_")}
    with subprocess.Popen(
        train, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        for line in process.stderr:
            if line.startswith("saved state-"):
                process.send_signal(signal.SIGINT)
                break
        summary, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "to resume at cycle 5" in said
    assert json.loads(summary)["next_cycle"] == 5

    for command in (plot, resume, other, compare):
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "grpo.jsonl").read_text().splitlines()]
    cycles = [line for line in lines if "cycle" in line]
    assert [line["cycle"] for line in cycles] == list(range(15))
    assert cycles[-1]["reward/mean"] > cycles[0]["reward/mean"]
    assert (tmp_path / "metrics.html").exists()
    assert "algorithms.reinforce_pp:build_loss" in (tmp_path / "compare.html").read_text()


def test_every_metric_that_a_cycle_has_is_in_the_readme(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "rl_loop.py"), "--build-loss", "grpo_build_loss:build_loss"]
    assert run([*command, "--metrics", "m.jsonl"], tmp_path).returncode == 0
    cycle = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[1])
    named = {key for key in cycle if key not in ("cycle", "version") and not key.startswith("provider/")}
    assert {key for key in named if f"`{key}`" not in README and f"`…/{key.partition('/')[2]}`" not in README} == set()


def test_the_loss_tables_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (✓?) *\| (✓?) *\| ?(.*?) *\|$", README, re.MULTILINE)
    assert {loss for loss, modal, _, _ in rows if modal} == whitney_loop.LOSS_SUPPORT["modal"]
    assert {loss for loss, _, tinker, _ in rows if tinker} == whitney_loop.LOSS_SUPPORT["tinker"]
    keys = {loss: set(re.findall(r"`(\w+)`", cell)) for loss, modal, _, cell in rows if modal}
    assert keys == whitney_loop.LOSS_CONFIG_KEYS


def test_the_table_of_algorithms_is_that_of_the_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    rows = re.findall(r"^\| .* \| (`.*`) \| (.*) \| (?:several|1) \| `(\w+)` \|$", README, re.MULTILINE)
    assert {file for _, _, file in rows} == {path.stem for path in (ROOT / "examples" / "algorithms").glob("*.py")}
    for losses, providers, file in rows:
        loss = importlib.import_module(f"algorithms.{file}").LOSS_FUNCTION
        assert f"`{loss}`" in losses
        having = [name for name in ("modal", "tinker") if loss in whitney_loop.LOSS_SUPPORT[name]]
        assert providers.lower() == ", ".join(having)


def test_every_public_name_is_in_the_readme():
    public = {name: getattr(whitney_loop, name) for name in whitney_loop.__all__}
    errors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Exception)}
    missing = {name for name in public if name not in README}
    assert missing <= errors


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="this is no clone of git")
def test_git_ignores_what_the_commands_write():
    options = r"--(?:metrics|output|journal|sample-json|build-loss) (\w+\.\w+)\b(?!:)"
    written = {*re.findall(options, README), "metrics.html", "mymod.py"}
    ignored = run(["git", "check-ignore", *written], ROOT).stdout.split()
    assert set(ignored) == written and len(written) > 5


def test_the_commands_of_the_package_are_those_of_the_table():
    rows = re.findall(r"^\| (`whitney-loop .*?) \|", README, re.MULTILINE)
    assert set(re.findall(r"`(?:whitney-loop )?([a-z]+)", " ".join(rows))) == set(COMMANDS)


def test_every_link_and_path_leads_somewhere():
    for target in re.findall(r"\]\((\S+?)\)", README):
        assert (ROOT / target).exists(), target


def test_the_version_is_that_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", whitney_loop.__version__)
