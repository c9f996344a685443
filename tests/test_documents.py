"""The documents are true: Python and commands run, links lead somewhere, and tables are the code's."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

import whitney_loop
from loop_runs import ROOT, entries_of
from whitney_loop.__main__ import COMMANDS

PAGES = ["README.md", "examples/README.md", "whitney_loop/README.md", "whitney_loop/local/README.md", "tests/README.md"]
PAGES += ["whitney_loop/CONTRACT.md"]
DOCUMENTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README, EXAMPLES = DOCUMENTS["README.md"], DOCUMENTS["examples/README.md"]
CLIENT = DOCUMENTS["whitney_loop/README.md"]
PYTHON = [
    pytest.param(block, id=f"{page}, block {number}")
    for page, text in DOCUMENTS.items()
    for number, block in enumerate(re.findall(r"(?ms)^```python\n(.*?)^```", text))
]
LOGGERS = ("wandb", "torch.utils.tensorboard", "mlflow")  # tests/loop/test_log.py runs these blocks
LOOP = re.compile(r"^ +(?:python examples/(\w+)\.py|whitney-loop (train)) ?(.*)$", re.MULTILINE)


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}


def run(command, folder):
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )


def python(text, folder):
    done = run([sys.executable, *shlex.split(text)], folder)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def folder(tmp_path):
    """A reader's folder with examples/ and the modules of the README in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make_prompts, mymod, *_ = re.findall(r"(?ms)^```python\n(.*?)^```", README)
    (tmp_path / "make_prompts.py").write_text(make_prompts)
    (tmp_path / "mymod.py").write_text(mymod)
    python("make_prompts.py", tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", PYTHON)
def test_every_python_block_runs(block, tmp_path):
    if any(f"import {name}" in block or f"from {name}" in block for name in LOGGERS):
        pytest.skip("its library is not the standard one")
    (tmp_path / "block.py").write_text(block)
    python("block.py", tmp_path)


LOOPS = [
    pytest.param(match, id=f"{page}: {match[0].strip()[:70]}")
    for page, text in DOCUMENTS.items()
    for match in LOOP.finditer(text)
]


@pytest.mark.parametrize("match", LOOPS)
def test_every_command_of_a_loop_passes_its_dry_run(match, folder):
    """Without the options that need something of the reader's: another engine, a service, a saved state."""
    script, _, arguments = match.groups()
    if "--engine " in arguments:
        pytest.skip("it needs PyTorch; tests/engines runs its task")
    if script == "minimal_loop":
        pytest.skip("tests/examples/test_minimal_loop.py runs it whole")
    arguments = re.sub(r"--resume-from last|--base-url \S+|--recover", "", arguments)
    if "sample.json" in arguments.split():
        shutil.copy(ROOT / "examples" / "sample.json", folder)
    if "mymod:build_loss" in arguments:
        (folder / "mymod.py").write_text((ROOT / "examples" / "grpo_build_loss.py").read_text())
    script = f"examples/{script}.py" if script else "-m whitney_loop train"
    done = python(f"{script} {arguments} --dry-run", folder)
    assert "dry run: everything" in done.stderr


@pytest.mark.long
def test_the_transcript_is_what_the_first_command_prints(folder):
    script, _, arguments = LOOP.search(README).groups()
    done = python(f"examples/{script}.py {arguments} --seed 1", folder)
    [transcript] = re.findall(r"(?ms)^```console\n(.*?)^```", README)
    # Python's sum rounds differently from 3.12 on, so after the first cycle only the form is the same everywhere.
    shown, printed = transcript.splitlines(), [line for line in done.stderr.splitlines() if "warning: " not in line]
    assert shown[2].split()[:7] == printed[2].split()[:7]
    cycle = re.compile(r"cycle \d+ +reward/mean \S+ +\S+ +kl \S+ +grad_norm \S+ +\d+ tokens/s +\d+ tokens +\S+ left.*")
    assert all(cycle.fullmatch(line) for line in shown + printed if line.startswith("cycle "))
    assert any(line.startswith("--stop-at reward/mean:0.95 is reached") for line in printed)
    assert json.loads(done.stdout)["ended_by"] == "--stop-at reward/mean:0.95"


@pytest.mark.learns
def test_the_prompts_with_answers_are_learned(folder):
    script, _, arguments = next(match for match in LOOP.finditer(README) if "answers.jsonl" in match[0]).groups()
    done = python(f"examples/{script}.py {arguments} --seed 1", folder)
    assert json.loads(done.stdout)["ended_by"] == "--stop-at reward/mean:0.95"


@pytest.mark.learns
def test_the_section_on_many_prompts_works_from_training_to_comparing(folder):
    """Every command of it, in its order; Ctrl-C after the first state."""
    [section] = re.findall(r"(?ms)^## Many prompts.*?(?=^## )", EXAMPLES)
    train, plot, resume, other, compare = re.findall(r"^    python (.*)$", section, re.MULTILINE)
    command = [sys.executable, *shlex.split(train)]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        for line in process.stderr:
            if line.startswith("saved state-"):
                process.send_signal(signal.SIGINT)
                break
        summary, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "to resume at cycle 5" in said
    assert json.loads(summary)["next_cycle"] == 5
    for text in (plot, resume, other, compare):
        python(text, folder)
    lines = entries_of(folder / "grpo.jsonl")
    cycles = [line for line in lines if "cycle" in line]
    assert [line["cycle"] for line in cycles] == list(range(15))
    assert cycles[-1]["reward/mean"] > cycles[0]["reward/mean"]
    assert (folder / "metrics.html").exists()
    assert "algorithms.reinforce_pp:build_loss" in (folder / "compare.html").read_text()


def test_every_metric_of_a_cycle_and_every_option_is_explained(folder):
    python("examples/rl_loop.py --build-loss grpo_build_loss:build_loss --lora-rank 1 --metrics m.jsonl", folder)
    config, cycle, *_ = entries_of(folder / "m.jsonl")
    metrics = {key for key in cycle if key not in ("cycle", "version") and not key.startswith("provider/")}
    assert {
        key for key in metrics if f"`{key}`" not in EXAMPLES and f"`…/{key.partition('/')[2]}`" not in EXAMPLES
    } == set()
    facts = {
        "config",
        "requests",
        "data_sha256",
        "whitney_loop",
        "where",
        "session_id",
        "run_id",
        "started",
        "eval_sha256",
    }
    options = {f"--{name.replace('_', '-')}" for name in config["config"].keys() - facts}
    everywhere = "\n".join(DOCUMENTS.values())
    assert {option for option in options if option not in everywhere} <= {
        "--storage",
        "--lora-rank",
        "--timeout",
        "--base-url",
    }


def test_the_loss_tables_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (✓?) *\| (✓?) *\| ?(.*?) *\|$", CLIENT, re.MULTILINE)
    assert {loss for loss, modal, _, _ in rows if modal} == whitney_loop.LOSS_SUPPORT["modal"]
    assert {loss for loss, _, tinker, _ in rows if tinker} == whitney_loop.LOSS_SUPPORT["tinker"]
    keys = {loss: set(re.findall(r"`(\w+)`", cell)) for loss, modal, _, cell in rows if modal}
    assert keys == whitney_loop.LOSS_CONFIG_KEYS


def test_the_table_of_algorithms_is_that_of_the_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    rows = re.findall(r"^\| .* \| (`.*`) \| (.*) \| (?:several|1) \| `(\w+)` \|$", EXAMPLES, re.MULTILINE)
    assert {file for _, _, file in rows} == {path.stem for path in (ROOT / "examples" / "algorithms").glob("*.py")}
    for losses, providers, file in rows:
        loss = importlib.import_module(f"algorithms.{file}").LOSS_FUNCTION
        assert f"`{loss}`" in losses
        having = [name for name in ("modal", "tinker") if loss in whitney_loop.LOSS_SUPPORT[name]]
        assert providers.lower() == ", ".join(having)


def test_every_public_name_is_explained():
    public = {name: getattr(whitney_loop, name) for name in whitney_loop.__all__}
    errors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Exception)}
    assert {name for name in public if name not in CLIENT} <= errors


def test_the_commands_of_the_package_are_those_of_the_table():
    rows = re.findall(r"^\| (`whitney-loop .*?) \|", README, re.MULTILINE)
    assert set(re.findall(r"`(?:whitney-loop )?([a-z]+)", " ".join(rows))) == set(COMMANDS)


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="this is no clone of git")
def test_git_ignores_what_the_commands_write():
    options = r"--(?:metrics|samples|output|journal|sample-json|build-loss) (\w+\.\w+)\b(?!:)"
    written = {name for text in DOCUMENTS.values() for name in re.findall(options, text)}
    written |= {"metrics.html", "mymod.py", "make_prompts.py", "capitals_tokenizer/"}
    ignored = run(["git", "check-ignore", *written], ROOT).stdout.split()
    assert set(ignored) == written and len(written) > 8


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", DOCUMENTS[page]):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, anchor


def test_every_numbered_rule_of_the_order_has_a_test():
    [section] = re.findall(r"(?ms)^## 3\. .*?(?=^## )", DOCUMENTS["whitney_loop/CONTRACT.md"])
    rules = set(re.findall(r"(?m)^(\d)\. ", section))
    tests = (ROOT / "tests" / "contract" / "test_order.py").read_text(encoding="utf-8")
    assert set(re.findall(r"def test_(\d)_", tests)) == rules


def test_the_readme_is_short():
    assert README.count("\n") <= 150


def test_the_version_is_that_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", whitney_loop.__version__)
