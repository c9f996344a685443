"""An engine whose packages are not installed says in one line what to install. These tests need no such package."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[sys.argv[1]] = None  # importing it raises ModuleNotFoundError
from whitney_loop.local.__main__ import main
sys.exit(main(["--port", "0", "--engine", sys.argv[2], "--engine-option", "model=any"]))
"""


@pytest.mark.parametrize(
    ("package", "engine", "install"),
    [
        ("peft", "engines.torch_lora:make", "pip install torch transformers peft"),
        ("tinker", "engines.tinker_service:make", 'pip install "tinker>=0.38"'),
    ],
)
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(package, engine, install):
    command = [sys.executable, "-c", PROGRAM, package, engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert package in line
    assert line.endswith(install)
