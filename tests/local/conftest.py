"""Benches whose service and threads end with the test."""

from __future__ import annotations

import threading

import pytest

from local.bench import WAIT_S, Bench, GatedEngine
from whitney_loop.local.byte_lm import ByteLM


@pytest.fixture
def bench(tmp_path):
    made = []

    def create(engine_class=ByteLM, limits=None, **fields):
        made.append(Bench(tmp_path, engine_class, limits, **fields))
        return made[-1]

    yield create
    for each in made:
        for engine in each.engines:
            if isinstance(engine, GatedEngine):
                engine.gate.release(1000)
        each.service.stop(WAIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("worker of"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def busy(bench):
    """A bench whose first operation runs and whose second one waits for it."""
    made = bench(GatedEngine)
    made.engine = made.engines[0]
    made.first, made.second = made.post(), made.post()
    assert made.engine.begun.acquire(timeout=WAIT_S)
    return made
