"""Fixtures: the loop in this process, with pauses that take no time, and the service's records of it."""

import functools
import gc
import json
import sys
import time

import pytest

from loop_runs import EXAMPLES, same_signal_handlers
from whitney_loop import WhitneyClient
from whitney_loop.local import serve
from whitney_loop.local.run import Run
from whitney_loop.local.service import Service
from whitney_loop.loop import place
from whitney_loop.transport import Transport

# The reward depends on every token, on the cycle and on the place: no group is uniform, so every cycle makes a step.
NEVER_SATURATES = """
import shutil, zlib
from whitney_loop import forward_backward_payload, group_mean_advantages, lora_run, rl_datum

def opens_a_second_run(sample, cycle, request, ctx):
    if cycle == 0:
        ctx.resources.enter_context(lora_run(ctx.client, ctx.session_id, model=ctx.model, rank=1))
    return build_loss(sample, cycle, request, ctx)

def fails(sample, cycle, request, ctx):
    raise LookupError("as it was told")

def copies_the_journal(sample, cycle, request, ctx):
    shutil.copy("journal.json", "copy.json")
    return build_loss(sample, cycle, request, ctx)

def build_loss(sample, cycle, request, ctx):
    sequences = sample["sequences"]
    rewards = [
        2 * (zlib.crc32(bytes(token % 256 for token in s["tokens"]) + bytes([cycle % 256])) % 97) + place
        for place, s in enumerate(sequences)
    ]
    data = [
        rl_datum(request["prompt"]["token_ids"], s["tokens"], s["logprobs"], advantage)
        for s, advantage in zip(sequences, group_mean_advantages(rewards, normalize_std=True))
    ]
    return forward_backward_payload(data, "importance_sampling")
"""
SAMPLE = {"prompt": {"token_ids": [97]}, "num_samples": 2, "sampling_params": {"max_tokens": 4}}


@pytest.fixture
def user_module(tmp_path):
    """``user_module(text)``: add functions to the module ``never_saturates`` of the current folder."""
    path = tmp_path / "never_saturates.py"
    path.write_text(NEVER_SATURATES)
    (tmp_path / "sample.json").write_text(json.dumps(SAMPLE))

    def add(text):
        with path.open("a") as module:
            module.write(text)

    yield add
    sys.modules.pop("never_saturates", None)


@pytest.fixture
def loop(user_module, tmp_path, monkeypatch, capsys):
    """``loop(service, cycles, *options)``: (exit code, summary or None, stderr) of a loop in this process.

    ``service`` may also be a proxy in front of one: only its ``base_url`` and ``api_key`` are used.
    """
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    import rl_loop

    at_once = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: at_once(min(seconds, 0.001)))

    def run(service, cycles, *more, build_loss="never_saturates:build_loss", **seconds):
        # A stall costs 0.2 s. Every real answer is faster; a slower one counts as one more fault.
        seconds = {"exchange_timeout_s": 0.2, "submit_timeout_s": 30.0} | seconds
        monkeypatch.setattr(place, "WhitneyClient", functools.partial(WhitneyClient, **seconds))
        monkeypatch.setenv("WHITNEY_API_KEY", service.api_key)
        arguments = ["--build-loss", build_loss, "--model", "byte-lm", "--base-url", service.base_url]
        arguments += ["--sample-json", "sample.json", "--lora-rank", "1", "--learning-rate", "0.1", "--seed", "5"]
        sys.modules.pop("never_saturates", None)  # the test may have added functions since the last loop
        with same_signal_handlers():
            code = rl_loop.main([*arguments, "--cycles", str(cycles), *more])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


@pytest.fixture
def service(all_sessions, tmp_path):
    """The embedded service, which a loop uses by its URL, like any deployment."""
    with serve(tmp_path / "storage") as running:
        yield running


@pytest.fixture
def executed_operations(monkeypatch):
    """(run, seq_id) of every operation that the engines of services executed, in order."""
    record = []
    execute = Run._execute

    def recorded(run, operation, engine):
        record.append((operation.run_id, operation.seq_id))
        return execute(run, operation, engine)

    monkeypatch.setattr(Run, "_execute", recorded)
    return record


@pytest.fixture
def all_sessions(monkeypatch):
    """``all_sessions()``: the current state of every session that any embedded service made."""
    services = []
    begin = Service.__init__

    def noted(service, *arguments, **options):
        services.append(service)
        begin(service, *arguments, **options)

    monkeypatch.setattr(Service, "__init__", noted)

    return lambda: [session.body() for service in services for session in list(service._sessions.values())]


@pytest.fixture
def interrupt_at(monkeypatch):
    """``interrupt_at({n: act})``: call ``act`` at the n-th point; each exchange has one before and one after it.

    Returns a list that grows by one with every point.
    """
    acts, seen = {}, []
    exchange = Transport.exchange

    def point():
        seen.append(None)
        if len(seen) in acts:
            acts[len(seen)]()

    def exchanged(transport, *arguments, **options):
        point()
        try:
            return exchange(transport, *arguments, **options)
        finally:
            point()

    monkeypatch.setattr(Transport, "exchange", exchanged)

    def arrange(new_acts):
        acts.clear()
        seen.clear()
        acts.update(new_acts)
        return seen

    yield arrange
    gc.collect()  # what an interrupt left unclosed is warned of here, where it is ignored


def left_open(sessions):
    """Return the ids of the sessions and runs that are open."""
    return [s["session_id"] for s in sessions if s["status"] != "closed"] + [
        run["run_id"] for s in sessions for run in s["runs"] if run["status"] not in ("finished", "cancelled", "failed")
    ]
