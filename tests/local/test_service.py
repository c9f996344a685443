"""Sessions and the runs in them, without HTTP: what is unknown, closed, too many, or forgotten."""

from __future__ import annotations

import threading

import pytest

from local.bench import WAIT_S, in_thread, refusal
from whitney_loop.local import service as service_module
from whitney_loop.local.byte_lm import ByteLM


@pytest.mark.parametrize(
    ("ask", "arguments"),
    [
        ("session", ["ses-unknown"]),
        ("close_session", ["ses-unknown"]),
        ("create_run", ["ses-unknown", {}, None]),
        ("run", ["run-unknown"]),
        ("finish_run", ["run-unknown"]),
        ("cancel_run", ["run-unknown"]),
        ("submit", ["run-unknown", {}]),
        ("operation", ["run-unknown", "op-1", 0.0]),
    ],
)
def test_an_unknown_session_or_run_is_not_found(bench, ask, arguments):
    with refusal(404, "not_found"):
        getattr(bench().service, ask)(*arguments)


def test_closing_a_session_cancels_its_runs_and_does_not_wait(busy):
    closed = busy.service.close_session(busy.session_id)
    assert (closed["status"], closed["runs"][0]["status"]) == ("closed", "cancelling")


def test_a_closed_session_takes_no_more_runs(bench):
    closed = bench()
    closed.service.close_session(closed.session_id)
    with refusal(409, "session_not_open"):
        closed.create()


def test_a_session_holds_a_limited_number_of_runs(bench, monkeypatch):
    monkeypatch.setattr(service_module, "_RUNS_PER_SESSION", 1)
    with refusal(409, "too_many_runs"):
        bench().create()


def test_two_requests_at_once_with_one_key_make_one_run(bench):
    made = bench()
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def slow_engine(*arguments):
        entered.release()
        assert gate.acquire(timeout=WAIT_S)
        return ByteLM(*arguments)

    made.backend.engine_class = slow_engine
    body = {"model": "byte-lm", "lora": {"rank": 1}}
    one, other = (in_thread(made.service.create_run, made.session_id, body, "key") for _ in range(2))
    assert entered.acquire(timeout=WAIT_S)
    assert not entered.acquire(timeout=0.05)  # the other one waits for it; a second engine would begin at once
    gate.release(2)
    assert one.result(WAIT_S)["run_id"] == other.result(WAIT_S)["run_id"]


def test_a_stopped_service_makes_no_session(bench):
    made = bench()
    made.service.stop(WAIT_S)
    with refusal(503, "shutting_down"):
        made.service.create_session({"provider": "modal"}, None)


# Forgotten sessions


def test_the_oldest_closed_session_is_forgotten_beyond_the_limit(bench, monkeypatch):
    monkeypatch.setattr(service_module, "_SESSIONS_KEPT", 2)
    made = bench()
    second = made.service.create_session({"provider": "modal"}, "key")["session_id"]
    with refusal(429, "too_many_sessions"):
        made.service.create_session({"provider": "modal"}, None)
    made.service.close_session(second)
    third = made.service.create_session({"provider": "modal"}, "key")["session_id"]
    assert third == second  # the key still belongs to it
    fourth = made.service.create_session({"provider": "modal"}, None)["session_id"]
    with refusal(404, "not_found"):
        made.service.session(second)
    assert made.service.session(fourth)["status"] == "open"
    assert made.run()["status"] == "active"


def test_a_session_is_not_forgotten_while_an_operation_of_it_runs(busy, monkeypatch):
    monkeypatch.setattr(service_module, "_SESSIONS_KEPT", 1)
    busy.service.close_session(busy.session_id)
    with refusal(429, "too_many_sessions"):
        busy.service.create_session({"provider": "modal"}, None)
    assert busy.run()["status"] == "cancelling"


def test_a_forgotten_session_takes_its_runs_along(bench, monkeypatch):
    monkeypatch.setattr(service_module, "_SESSIONS_KEPT", 1)
    made = bench()
    made.service.close_session(made.session_id)
    made.service.create_session({"provider": "modal"}, None)
    with refusal(404, "not_found"):
        made.run()


# The body of a run


def test_a_run_says_for_which_model_byte_lm_stands_in(bench):
    body = bench(model="Qwen/Qwen3.5-0.8B").run()
    assert body["model"] == "Qwen/Qwen3.5-0.8B"
    assert body["served_by"] == "byte-lm"
    assert body["note"].startswith("byte-lm stands in for Qwen/Qwen3.5-0.8B")


def test_a_run_of_byte_lm_itself_has_no_note(bench):
    body = bench().run()
    assert (body["model"], body["served_by"]) == ("byte-lm", "byte-lm")
    assert "note" not in body


def test_a_seed_that_is_not_given_is_drawn_and_said(bench):
    seeds = [bench(seed=None).run()["seed"] for _ in range(2)]
    assert all(isinstance(seed, int) for seed in seeds)
    assert seeds[0] != seeds[1]


def test_rank_and_seed_reach_the_engine(bench):
    given = []
    made = bench(lambda *arguments: given.append(arguments) or ByteLM(*arguments), seed=9)
    assert [each[:2] for each in given] == [(2, 9)]
    assert made.run()["lora"] == {"rank": 2}
