"""What the documents say is true: their Python runs, their commands run, their links lead somewhere, their tables are the code's."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import whitney_loop
from whitney_loop.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted(ROOT.glob("[a-z]*/**/*.md"))]
}
ALL = "\n".join(DOCUMENTS.values())
PYTHON = [
    pytest.param(block, id=f"{name}:{number}")
    for name, text in DOCUMENTS.items()
    for number, block in enumerate(re.findall(r"(?ms)^```python\n(.*?)^```", text))
]
# Commands that stand alone: a line that is indented by four spaces. Two dots or a word in capitals is the reader's to fill in.
COMMAND = re.compile(r"(?m)^    ((?:python (?:examples/|-m whitney_loop|-m pytest)|whitney-loop ).*)$")


def commands_of(name):
    return COMMAND.findall(DOCUMENTS[name])


def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WHITNEY_")}
    return kept | {"PYTHONPATH": str(ROOT)}
