"""--engine MODULE:CALLABLE and --engine-option NAME=VALUE: the engine that they make, or what is wrong in one line."""

from __future__ import annotations

import sys

import pytest

from whitney_loop.local.byte_lm import ByteLMBackend
from whitney_loop.local.engine import load_backend

MODULE = """
from __future__ import annotations
from whitney_loop.local.byte_lm import ByteLMBackend

class Mine(ByteLMBackend):
    name = "mine"

def make(model: str, budget: int = 1, scale: float = 1.0, slow: bool = False, note=None):
    made = Mine()
    made.model, made.given = model, (budget, scale, slow, note)
    return made

def plain():
    return Mine()

def broken():
    raise FileNotFoundError("no model in /models/none")

def incomplete():
    return object()
"""


@pytest.fixture(autouse=True)
def my_engine(tmp_path, monkeypatch):
    (tmp_path / "my_engine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_engine", None)


def test_options_are_read_as_their_parameters_are_annotated():
    backend = load_backend("my_engine:make", ["model=a=b", "budget=7", "scale=1e-3", "slow=true", "note=1"])
    assert (backend.model, backend.given) == ("a=b", (7, 1e-3, True, "1"))


def test_an_engine_without_options_is_made_and_keeps_the_defaults_of_a_backend():
    backend = load_backend("my_engine:plain")
    assert (backend.name, backend.vocabulary, backend.most_runs, backend.clips_gradients) == ("mine", None, None, True)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("my_engine:make", [], "--engine my_engine:make needs --engine-option model=…"),
        ("my_engine:make", ["model"], "--engine-option 'model': expected NAME=VALUE"),
        ("my_engine:make", ["rank=1"], "my_engine:make has no 'rank'; it has model, budget, scale, slow, note"),
        ("my_engine:plain", ["rank=1"], "my_engine:plain has no 'rank'; it has none"),
        ("my_engine:make", ["model=m", "budget=1.5"], "--engine-option budget=1.5: expected a value of type int"),
        ("my_engine:make", ["model=m", "slow=yes"], "--engine-option slow=yes: expected a value of type bool"),
        ("my_engine:broken", [], "cannot start: FileNotFoundError: no model in /models/none"),
        ("my_engine:incomplete", [], "made a object without name, model, "),
        ("my_engine:missing", [], "--engine"),
        ("no_such_module:make", [], "--engine"),
    ],
)
def test_an_engine_that_cannot_be_made_is_a_value_error(spec, options, message):
    with pytest.raises(ValueError) as failure:
        load_backend(spec, options)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_byte_lm_decodes_its_tokens_and_those_of_another_tokenizer():
    assert ByteLMBackend().decode([*"é!".encode(), 256, 256 * 9 + ord("a"), 0xFF]) == "é!a\N{REPLACEMENT CHARACTER}"
