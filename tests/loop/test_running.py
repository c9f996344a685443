"""Every exit cleans up, saves a state if it can, gives its exit code, and says what happened and how to go on."""

import json
import signal
import threading
from pathlib import Path

import pytest

from fault_proxy import FaultProxy
from loop_in_process import left_open
from loop_runs import adapter_of
from processes import read_until, start_impatient_loop, start_service
from whitney_loop.errors import UnexpectedResponse
from whitney_loop.local.engine import EngineError
from whitney_loop.local.run import Run
from whitney_loop.loop import training, user_loss

CYCLES = 1
SECOND_RUN = "never_saturates:opens_a_second_run"


class Unforeseen(Exception):
    """An error that nobody foresaw."""


def raises(error):
    def act():
        raise error

    return act


def sends(number):
    return lambda: signal.raise_signal(number)


ENDS = {
    "exception": (raises(Unforeseen("nobody foresaw")), 1),
    "Ctrl-C": (sends(signal.SIGINT), 130),
    "SIGTERM": (sends(signal.SIGTERM), 143),
    "SIGHUP": (sends(signal.SIGHUP), 129),
}


def check_the_end(code, summary, err, expected, sessions):
    assert code == expected, err
    assert left_open(sessions) == []
    if code == 0:
        assert summary["status"] == "succeeded"
    if code == 1:
        assert "nobody foresaw" in err.splitlines()[-1]
        assert summary is None or summary["status"] == "failed"
    if code > 128:
        name = {129: "SIGHUP", 130: "Ctrl-C", 143: "SIGTERM"}[code]
        assert err.splitlines()[-1].startswith(f"ended by {name}") and "Traceback" not in err
        assert summary is None or summary["status"] == f"ended by {name}"


def count_points(loop, interrupt_at, service):
    seen = interrupt_at({})
    code, _, err = loop(service, CYCLES, build_loss=SECOND_RUN)
    assert code == 0, err
    return len(seen)


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        ("exception", 5),
        ("Ctrl-C", 5),
        ("SIGTERM", 10),
        ("SIGHUP", 10),
        pytest.param("exception", 1, marks=pytest.mark.long),
        pytest.param("Ctrl-C", 1, marks=pytest.mark.long),
    ],
)
def test_an_end_before_or_after_any_exchange_leaves_nothing_open(
    loop, interrupt_at, service, all_sessions, name, stride
):
    how, code = ENDS[name]
    for n in range(1, count_points(loop, interrupt_at, service) + 1, stride):
        interrupt_at({n: how})
        check_the_end(*loop(service, CYCLES, build_loss=SECOND_RUN), code, all_sessions())


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("first", ["exception", "Ctrl-C", "SIGTERM"])
def test_the_first_of_two_ends_is_seen_and_nothing_is_left_open(
    loop, interrupt_at, service, all_sessions, first, stride
):
    (how, code), (again, _) = ENDS[first], ENDS["SIGTERM" if first == "Ctrl-C" else "Ctrl-C"]
    for n in range(1, count_points(loop, interrupt_at, service) + 1, stride):
        interrupt_at({n: how, n + 1 + n % 7: again})
        check_the_end(*loop(service, CYCLES, build_loss=SECOND_RUN), code, all_sessions())


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.long)])
def test_a_service_that_dies_at_any_exchange_is_reported_with_ids_and_command(
    loop, service, all_sessions, monkeypatch, stride
):
    monkeypatch.setattr(training, "LAST_SAVE_S", 0.05)
    named = 0
    for alive in range(0, 40, stride):
        passed = []

        def dead(method, path, passed=passed, alive=alive):
            passed.append(path)
            return len(passed) > alive

        with FaultProxy(service, rate=1, kinds=["drop request"], only=dead) as proxy:
            # An accepted operation is waited for up to --timeout, any other answer up to submit_timeout_s.
            code, summary, err = loop(proxy, CYCLES, "--timeout", "1", submit_timeout_s=0.05)
        if code == 0:
            break
        assert code == 1 and "Traceback" not in err
        assert err.splitlines()[-1].startswith("error: no usable answer")
        # A session whose id never arrived cannot be named. Every other open session is, and so are its runs.
        for name in ("session_id", "run_id"):
            if summary and summary[name] in left_open(all_sessions()):
                named += 1
                assert f"may still be open: {name[:-3]} {summary[name]}" in err
                assert f"python -m whitney_loop close {summary['session_id']} --base-url {proxy.base_url}" in err
    assert alive >= 12 and named > 12 / stride


@pytest.mark.long
def test_a_service_process_that_is_killed_leaves_ids_and_command(user_module, tmp_path):
    with start_service(tmp_path / "storage") as service:
        with start_impatient_loop(tmp_path, service, "--timeout", "2") as process:
            said = read_until(process.stderr, "cycle 1")
            service.process.kill()
            out, err = process.communicate(timeout=60)
    summary = json.loads(out)
    assert process.returncode == 1 and summary["status"] == "failed", said + err
    assert f"may still be open: run {summary['run_id']}" in err
    assert f"may still be open: session {summary['session_id']}" in err
    assert f"python -m whitney_loop close {summary['session_id']} --base-url {service.base_url}" in err
    assert "error: no usable answer" in err.splitlines()[-1] and "Traceback" not in err


def test_an_end_while_the_session_is_being_opened_closes_it_and_gives_a_summary(loop, service, all_sessions):
    signals = []

    def ended(method, path):
        if path.endswith("/sessions") and not signals:
            signals.append(signal.SIGTERM)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        return False

    with FaultProxy(service, rate=1, only=ended) as proxy:
        code, summary, _ = loop(proxy, 1)
    assert len(all_sessions()) == 1 and left_open(all_sessions()) == []
    assert (code, summary["status"], summary["where"]) == (143, "ended by SIGTERM", "the service of the base URL")


# The state that is saved before an early end

ENDS_IN_CYCLE_2 = """
import os, signal

def is_ended(sample, cycle, request, ctx):
    if cycle == 2:
        {end}
    return build_loss(sample, cycle, request, ctx)
"""
FAILS = "raise LookupError('as it was told')"
CTRL_C = "signal.raise_signal(signal.SIGINT)"
STEPS = """
        payload = build_loss(sample, cycle, request, ctx)
        from whitney_loop import adamw_optimizer
        ctx.client.run_operation(ctx.run_id, "forward_backward", payload)
        ctx.client.run_operation(ctx.run_id, "optim_step", {"optimizer": adamw_optimizer(0.1)})
"""
IS_ENDED = "never_saturates:is_ended"


@pytest.mark.parametrize(("end", "code"), [(FAILS, 1), (CTRL_C, 130)])
def test_a_state_is_saved_before_an_early_end_and_resuming_it_gives_the_same_adapter(
    loop, service, user_module, end, code
):
    expected = adapter_of(loop(service, 4)[1])
    user_module(ENDS_IN_CYCLE_2.format(end=end))
    ended, summary, err = loop(service, 4, "--metrics", "m.jsonl", build_loss=IS_ENDED)
    assert (ended, summary["next_cycle"]) == (code, 2)
    state_id = summary["state_id"]
    assert f"saved {state_id}: the next cycle is 2" in err
    assert f"to resume at cycle 2, the same command with: --resume-from {state_id} --cycles 2" in err
    more = ("--metrics", "m.jsonl", "--resume-from", "last")
    code, summary, err = loop(service, 2, *more)
    assert code == 0 and adapter_of(summary) == expected, err


def test_a_bad_answer_to_a_sample_saves_the_state_of_the_cycles_before(loop, service, monkeypatch):
    def bad(sample):
        if len(asked) == 2:
            raise UnexpectedResponse("sample: result.sequences is missing")
        asked.append(sample)
        return sample["sequences"]

    asked = []
    monkeypatch.setattr(user_loss, "result_sequences", bad)
    code, summary, err = loop(service, 4)
    assert (code, summary["next_cycle"]) == (1, 2), err
    assert err.splitlines()[-1].startswith("error: sample.json: sample: result.sequences is missing")


def test_no_state_is_saved_once_a_step_of_the_next_cycle_was_made(loop, service, user_module):
    user_module(ENDS_IN_CYCLE_2.replace("{end}", STEPS + "        " + FAILS))
    code, summary, err = loop(service, 4, build_loss=IS_ENDED)
    assert (code, summary["state_id"]) == (1, None)
    assert "no state is saved: cycle 2 has made an optimizer step, and a state is of whole cycles" in err


def test_the_cycles_before_a_step_that_failed_without_effect_are_saved(loop, service, monkeypatch):
    execute, steps = Run._execute, []

    def fails(of_run, operation, engine):
        if operation.kind == "optim_step":
            steps.append(operation)
            if len(steps) == 3:
                raise EngineError("out_of_memory", "as it was told")
        return execute(of_run, operation, engine)

    monkeypatch.setattr(Run, "_execute", fails)
    code, summary, err = loop(service, 4)
    assert (code, summary["next_cycle"]) == (1, 2) and summary["state_id"], err
    assert "optim_step failed: as it was told" in err.splitlines()[-1]


def test_no_state_is_saved_twice_for_the_same_cycle(loop, service, user_module):
    user_module(ENDS_IN_CYCLE_2.format(end=FAILS))
    code, summary, err = loop(service, 4, "--save-every", "2", build_loss=IS_ENDED)
    assert (code, summary["next_cycle"], summary["operations"]["save_state"]) == (1, 2, 1), err


def test_a_failing_metrics_file_saves_the_state_and_says_how_to_resume_without_it(
    service, user_module, all_sessions, tmp_path
):
    user_module("\nimport resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n")
    with start_impatient_loop(tmp_path, service, "--metrics", "m.jsonl") as process:
        out, err = process.communicate(timeout=60)
    summary = json.loads(out)
    assert process.returncode == 1 and summary["state_id"] and left_open(all_sessions()) == []
    problem = f"--metrics {tmp_path / 'm.jsonl'} cannot be written: File too large"
    again = f"--first-cycle {summary['next_cycle']} --seed 1"
    assert f"warning: {problem}. To resume, give another --metrics, and {again}" in err
    assert err.splitlines()[-1] == f"error: {problem}"


def test_a_service_that_takes_no_more_operations_delays_an_end_by_the_limit_of_the_last_save(
    loop, service, user_module, monkeypatch
):
    """Without that limit the loop would retry for ten minutes."""
    monkeypatch.setattr(training, "LAST_SAVE_S", 0.1)
    user_module(ENDS_IN_CYCLE_2.format(end="open('ended', 'x').close(); " + FAILS))

    def refused(method, path):
        return method == "POST" and path.endswith("/operations") and Path("ended").exists()

    with FaultProxy(service, rate=1, kinds=["503"], only=refused) as proxy:
        code, summary, err = loop(proxy, 4, build_loss=IS_ENDED, submit_timeout_s=600.0)
    assert (code, summary["state_id"]) == (1, None)
    assert "no state is saved: no usable answer" in err and "as it was told" in err.splitlines()[-1]


def test_a_save_that_does_not_end_in_time_delays_an_end_by_that_limit(loop, service, user_module, monkeypatch):
    monkeypatch.setattr(training, "LAST_SAVE_S", 0.1)
    user_module(ENDS_IN_CYCLE_2.format(end=FAILS))
    cancelled = threading.Event()
    execute = Run._execute

    def waits(of_run, operation, engine):
        if operation.kind == "save_state":
            cancelled.wait(60)
        return execute(of_run, operation, engine)

    def notes(method, path):
        if path.endswith("/cancel"):
            cancelled.set()
        return False

    monkeypatch.setattr(Run, "_execute", waits)
    with FaultProxy(service, rate=1, only=notes) as proxy:
        code, summary, err = loop(proxy, 4, build_loss=IS_ENDED)
    assert (code, summary["state_id"]) == (1, None)
    assert "no state is saved: save_state (seq_id 11) is " in err, err


def test_a_second_signal_during_the_last_save_skips_it_and_closes(loop, service, all_sessions, user_module):
    user_module(ENDS_IN_CYCLE_2.format(end="open('ended', 'x').close(); " + CTRL_C))

    def interrupts(method, path):
        if method == "POST" and path.endswith("/operations") and Path("ended").exists():
            Path("ended").unlink()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            return True
        return False

    with FaultProxy(service, rate=1, kinds=["stall"], only=interrupts) as proxy:
        code, summary, err = loop(proxy, 4, build_loss=IS_ENDED, exchange_timeout_s=60.0)
    assert (code, summary["state_id"]) == (130, None)
    assert "no state is saved: Ctrl-C" in err and left_open(all_sessions()) == []
