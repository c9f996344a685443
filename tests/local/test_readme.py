"""The README of the embedded service names every part of an engine, and its error codes exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from whitney_loop.local import engine

README = (Path(engine.__file__).parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("protocol", [engine.Backend, engine.Engine, engine.Sampler, engine.BatchSampler])
def test_every_part_of_an_engine_is_named(protocol):
    functions = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]
    attributes = [name for name in protocol.__annotations__ if name not in ("name", "model", "version")]
    assert [name for name in (*functions, *attributes) if not re.search(rf"\b{name}\b", README)] == []


def test_the_error_codes_that_are_named_are_those_of_the_embedded_engine():
    source = Path(engine.__file__).parent.joinpath("byte_lm.py").read_text(encoding="utf-8")
    codes = set(re.findall(r'\("(\w+)", …\)', README)) - {"out_of_memory"}  # which it never is
    assert codes >= {"no_gradients", "non_finite_update", "non_finite_loss"}
    assert [code for code in sorted(codes) if f'EngineError("{code}"' not in source] == []
