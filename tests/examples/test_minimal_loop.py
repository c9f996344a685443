"""The loop that users copy: run as they run it, in a clone and as a copy beside an installed package."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from loop_runs import EXAMPLES, ROOT

SCRIPT = EXAMPLES / "minimal_loop.py"


def run(script, folder, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder, env=inherited | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return re.findall(r"^cycle (\d+)  (\S+) (.+)  mean reward (\S+)$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.long
def test_the_reward_rises_and_the_texts_become_the_answers(tmp_path):
    printed, output = run(SCRIPT, tmp_path)
    answers = {"in:": "out", "dry:": "wet", "hot:": "ice"}
    first, last = printed[: len(answers)], printed[-len(answers) :]
    assert [question for _, question, _, _ in first] == list(answers)
    assert sum(float(mean) for *_, mean in first) / 3 < 0.2
    assert sum(float(mean) for *_, mean in last) / 3 > 0.6

    def right_letters(lines):
        texts = [(ast.literal_eval(text), answers[question]) for _, question, text, _ in lines]
        return sum(a == b for text, answer in texts for a, b in zip(text, answer, strict=False))

    assert right_letters(last) > right_letters(first) + 3
    assert "adapter-" in output.splitlines()[-1]


def test_a_copy_runs_beside_an_installed_package(tmp_path):
    source = SCRIPT.read_text()
    assert source.count("CYCLES, SAMPLES_PER_PROMPT, MAX_TOKENS = 60, 32, 3") == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "copied.py").write_text(source.replace("= 60, 32, 3", "= 2, 4, 3"))
    shutil.copytree(ROOT / "whitney_loop", tmp_path / "site" / "whitney_loop")
    printed, _ = run(tmp_path / "mine" / "copied.py", tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert len(printed) == 2 * 3
