"""The files of an installed package, and its commands, which run from any folder."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = ["whitney_loop", "examples", "tests", ".ci", ".gitignore", "pyproject.toml", "README.md", "LICENSE"]
UNTRACKED = [
    "examples/mine.py", "examples/algorithms/mine.py", "examples/.whitney_local/state", "examples/metrics.jsonl",
    "examples/__pycache__/rl_loop.cpython-311.pyc", "whitney_loop/scratch.py", "whitney_loop/.whitney_local/state",
    "whitney_loop/__pycache__/client.cpython-311.pyc", "notes.txt",
]  # fmt: skip


def run(command, folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A clone of the project that also holds files that git does not track."""
    for module in ("hatchling", "pip"):
        pytest.importorskip(module, reason=f"{module} is not installed, so no wheel can be built and installed here")
    if shutil.which("git") is None:
        pytest.skip("git is not installed, and only git knows what it tracks")
    folder = tmp_path_factory.mktemp("project")
    for name in PROJECT:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    run(["git", "init", "-q"], folder)
    run(["git", "add", "-A"], folder)
    for name in UNTRACKED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not for others")
    return folder


def built(project, target, folder):
    """Build a distribution, ``wheel``, ``wheel:editable`` or ``sdist``, and return its path."""
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder], project)
    [path] = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(project, tmp_path_factory):
    return built(project, "wheel", tmp_path_factory.mktemp("wheel"))


def tracked(project):
    return set(run(["git", "ls-files"], project).split())


def files_of(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_and_the_examples_as_git_tracks_them_and_nothing_else(project, wheel):
    package = {name for name in tracked(project) if name.startswith("whitney_loop/")}
    examples = {f"whitney_loop/{name}" for name in tracked(project) if name.startswith("examples/")}
    assert len(package) > 20 and len(examples) > 15
    assert files_of(wheel) == package | examples


def test_a_package_index_shows_the_readme_without_links_that_lead_nowhere_there(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        shown = archive.read(metadata).decode()
    assert "[`whitney_loop/CONTRACT.md`](" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "`whitney_loop/CONTRACT.md` marks which is which" in shown and "](" not in shown


def test_the_sdist_holds_all_that_git_tracks_and_gives_the_same_wheel(project, wheel, tmp_path):
    sdist = built(project, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert names == tracked(project) | {"PKG-INFO"}
    [unpacked] = tmp_path.glob("whitney_loop-*")
    assert files_of(built(unpacked, "wheel", tmp_path / "again")) == files_of(wheel)


@pytest.fixture(scope="module", params=["wheel", "wheel:editable"])
def environment(request, project, tmp_path_factory):
    """The folder of commands of an environment in which only the package is installed."""
    folder = tmp_path_factory.mktemp("environment")
    path = built(project, request.param, folder / "wheel")
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    install = ["install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check", path]
    run([sys.executable, "-m", "pip", "--python", scripts / "python", *install], folder)
    return scripts


SMALL = ["--lora-rank", "2", "--seed", "1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--build-loss", "algorithms.ppo:build_loss", "--cycles", "1"],
        ["sft", "--epochs", "1"],
        ["distill", "--teacher-epochs", "1", "--cycles", "1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_installed_command_trains_from_an_empty_folder_on_the_data_of_the_package(environment, arguments, tmp_path):
    summary = json.loads(run([environment / "whitney-loop", *arguments, *SMALL], tmp_path))
    assert summary["status"] == "succeeded"


def test_the_help_of_an_installed_train_lists_every_algorithm(environment, tmp_path):
    shown = run([environment / "whitney-loop", "train", "--help"], tmp_path)
    for path in (ROOT / "examples" / "algorithms").glob("[a-z]*.py"):
        assert f"\n    {path.stem} " in shown


def test_a_copy_of_rl_loop_alone_runs_beside_a_users_module(environment, tmp_path):
    shutil.copy(ROOT / "examples" / "rl_loop.py", tmp_path)
    (tmp_path / "mymod.py").write_text("from grpo_build_loss import build_loss\n")
    arguments = ["--build-loss", "mymod:build_loss", "--cycles", "1"]
    summary = json.loads(run([environment / "python", "rl_loop.py", *arguments, *SMALL], tmp_path))
    assert summary["cycles_done"] == 1
