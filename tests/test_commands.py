"""The command line of the package: its commands and their help pages."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from loop_runs import EXAMPLES, ROOT, same_signal_handlers
from whitney_loop.__main__ import COMMANDS, main


@pytest.fixture(autouse=True)
def restored_signal_handlers():
    with same_signal_handlers():
        yield


def help_of(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_help_of_the_program_names_every_command_and_nothing_else(capsys):
    shown = help_of("--help", capsys)
    assert re.findall(r"(?m)^  ([a-z]+)  +\w", shown) == list(COMMANDS)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_page_has_a_command_that_parses_the_exit_codes_and_named_groups(command, capsys):
    shown = help_of(command, capsys)
    assert re.search(rf"(?m)^    whitney-loop {command} ", shown)
    assert re.search(r"Exit codes: 0 .*\b2 usage", shown)
    assert len(re.findall(r"(?m)^[a-z ,-]+:$", shown)) >= 2


@pytest.mark.parametrize("command", ["train", "sft", "distill"])
def test_each_option_of_a_loop_is_one_line_of_a_named_group(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = help_of(command, capsys)
    options = shown[shown.index("\noptions:\n") :].strip().splitlines()
    wrapped = [line for line in options if line and not re.match(r"  -|[a-z ,-]+:$", line)]
    assert not wrapped, wrapped
    assert "examples/" not in shown  # an installed package has no such folder


def test_the_help_of_train_lists_every_algorithm(capsys):
    shown = help_of("train", capsys)
    names = {path.stem for path in (EXAMPLES / "algorithms").glob("[a-z]*.py")}
    assert set(re.findall(r"(?m)^    (\w+)  +\w", shown)) == names and len(names) >= 12
    assert re.findall(r"(?m)^    (\w+)  [^.]+\.\s+Only\s+with --provider\s+tinker", shown) == ["dro"]
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("command", ["train", "sft", "distill"])
def test_the_command_that_a_loops_help_page_shows_passes_its_dry_run(command, tmp_path, monkeypatch, capsys):
    [shown] = re.findall(rf"(?m)^    (whitney-loop {command} .*)$", help_of(command, capsys))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the loop adds to it
    assert main([*shlex.split(shown)[1:], "--dry-run"]) == 0
    assert "dry run" in capsys.readouterr().err


def test_the_script_and_the_command_show_the_same_help_but_for_their_names(capsys):
    script = [sys.executable, str(EXAMPLES / "rl_loop.py"), "--help"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.replace("python examples/rl_loop.py", "whitney-loop train") == help_of("train", capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "--build-loss"),
        (["close", "ses-1"], "give --base-url URL, or set WHITNEY_BASE_URL"),
        (["close", "ses-1", "--base-u", "http://localhost"], "unrecognized arguments: --base-u"),
        (["plot", "m.jsonl", "--out", "x"], "unrecognized arguments: --out"),
        (["serve", "--po", "0"], "unrecognized arguments: --po"),
    ],
)
def test_a_usage_error_shows_the_usage_and_a_line_that_says_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and message in shown.splitlines()[-1] and shown.startswith("usage: ")


def test_a_base_url_that_cannot_be_used_is_a_usage_error(capsys):
    assert main(["close", "ses-1", "--base-url", "ftp://host"]) == 2
    assert "ftp" in capsys.readouterr().err


def test_a_terminal_without_unicode_gets_a_help_page_all_the_same():
    command = [sys.executable, "-m", "whitney_loop", "sft", "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0 and rb"\u2026" in done.stdout, done.stderr
