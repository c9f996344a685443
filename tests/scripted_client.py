"""Shared by the tests of the client: a client of a scripted server, an operation, and its pauses."""

import time

import pytest

from whitney_loop import WhitneyClient, transport

KEY = "key-that-no-one-may-see"


def client_of(server, **seconds):
    return WhitneyClient(server.base_url, KEY, **seconds)


def step(client):
    return client.run_operation("run-1", "optim_step", {"optimizer": {}})


@pytest.fixture
def pauses(monkeypatch):
    """The pauses of this process in seconds; they take no time."""
    taken = []
    monkeypatch.setattr(time, "sleep", taken.append)
    return taken


@pytest.fixture
def gives_up_at_once(monkeypatch):
    """No retry: the pause before the first one is longer than any time limit."""
    monkeypatch.setattr(transport, "_backoff_s", lambda _: float("inf"))
