"""Nothing lost and nothing twice: the loop through a proxy with faults, held against the loop without."""

import signal
import threading
import time
from collections import Counter

import pytest

from fault_proxy import FAULTS, FaultProxy
from loop_in_process import adapter_of, left_open
from whitney_loop.local import serve


def check_that_faults_change_nothing(loop, executed, everything, tmp_path, *, cycles, **proxy_options):
    with serve(tmp_path / "plain") as service:
        code, summary, err = loop(service, service.base_url, cycles)
        assert code == 0, err
        expected = adapter_of(summary)
        operations = 4 * cycles + 2
        assert [seq_id for _, seq_id in executed] == list(range(1, operations + 1))
    executed.clear()
    with serve(tmp_path / "faulty") as service, FaultProxy(service.base_url, **proxy_options) as proxy:
        code, summary, err = loop(service, proxy.base_url, cycles)
        assert code == 0, err
        assert left_open(everything()) == []
    assert adapter_of(summary) == expected
    assert executed == [(summary["run_id"], seq_id) for seq_id in range(1, operations + 1)]
    assert summary["operations"]["optim_step"] == cycles == summary["cycles_done"]
    assert [len(session["runs"]) for session in everything()] == [1, 1]  # no session and no run was made twice
    return proxy


@pytest.mark.long
@pytest.mark.parametrize("kind", FAULTS)
def test_one_kind_of_fault_on_half_of_all_exchanges_changes_nothing(loop, executed, everything, tmp_path, kind):
    proxy = check_that_faults_change_nothing(
        loop, executed, everything, tmp_path, cycles=2, seed=3, rate=0.5, kinds=[kind]
    )
    assert proxy.faults


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, *[pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4)]])
def test_a_fault_on_a_fifth_of_all_exchanges_gives_the_same_adapter_and_runs_everything_once(
    loop, executed, everything, tmp_path, seed
):
    proxy = check_that_faults_change_nothing(loop, executed, everything, tmp_path, cycles=200, seed=seed)
    kinds = Counter(kind for kind, _, _ in proxy.faults)
    assert kinds.keys() == FAULTS.keys()
    assert 0.15 < len(proxy.faults) / proxy.exchanges < 0.25


def after(count, what):
    """A predicate that lets the first ``count`` of the requests that are ``what`` pass, and no other of them."""
    seen = []

    def only(method, path):
        if not what(method, path):
            return False
        seen.append(path)
        return len(seen) > count

    return only


def is_submit(method, path):
    return method == "POST" and path.endswith("/operations")


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("drop reply", "unknown"),
        ("drop request", "unknown"),
        ("503", "unknown"),
        ("429", "rejected"),
        ("stall", "unknown"),
    ],
)
def test_where_an_operation_never_gets_its_answer_the_loop_gives_up_says_what_is_known_and_closes(
    loop, executed, everything, tmp_path, kind, outcome
):
    only = after(6, is_submit)
    with serve(tmp_path) as service, FaultProxy(service.base_url, rate=1, kinds=[kind], only=only) as proxy:
        started = time.monotonic()
        code, summary, err = loop(service, proxy.base_url, 5, submit_timeout_s=1.0)
        assert time.monotonic() - started < 10
        assert left_open(everything()) == []
    assert code == 1 and summary["status"] == "failed"
    assert f"outcome {outcome}" in err.splitlines()[-1] and "seq_id 7" in err.splitlines()[-1]
    assert "no usable answer" in summary["error"]
    assert [run["status"] for session in everything() for run in session["runs"]] == ["cancelled"]
    assert all(count == 1 for count in Counter(executed).values())


def test_where_no_answer_comes_at_all_any_more_the_ids_and_the_command_are_printed(
    loop, executed, everything, tmp_path
):
    only = after(9, lambda method, path: True)
    with serve(tmp_path) as service, FaultProxy(service.base_url, rate=1, kinds=["drop request"], only=only) as proxy:
        code, summary, err = loop(service, proxy.base_url, 5, submit_timeout_s=0.3)
        assert code == 1
        session_id, run_id = summary["session_id"], summary["run_id"]
        assert f"may still be open: run {run_id}" in err and f"may still be open: session {session_id}" in err
        assert f"python -m whitney_loop close {session_id} --base-url {proxy.base_url}" in err
        assert err.splitlines()[-1].startswith("error: no usable answer")


def test_a_loop_that_is_ended_while_its_session_is_being_opened_closes_it_and_gives_its_summary(
    loop, everything, tmp_path
):
    def ended(method, path):
        if path.endswith("/sessions") and not signals:
            signals.append(signal.SIGTERM)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        return False

    signals = []
    with serve(tmp_path) as service, FaultProxy(service.base_url, rate=1, only=ended) as proxy:
        code, summary, _ = loop(service, proxy.base_url, 1)
        assert len(everything()) == 1 and left_open(everything()) == []
    assert (code, summary["status"], summary["where"]) == (143, "ended by SIGTERM", "the service of the base URL")


RAISES = """
import asyncio

def gives_up(*arguments):
    raise {error}

def gives_up_at_the_end(sample, cycle, request, ctx):
    ctx.resources.callback(gives_up)
    return build_loss(sample, cycle, request, ctx)
"""


@pytest.mark.parametrize("error", ["asyncio.CancelledError", "GeneratorExit", "SystemExit"])
@pytest.mark.parametrize("where", ["gives_up", "gives_up_at_the_end"])
def test_what_the_user_s_code_raises_is_reported_as_an_error_even_where_it_is_no_exception_to_python(
    loop, everything, tmp_path, error, where
):
    with (tmp_path / "never_saturates.py").open("a") as module:
        module.write(RAISES.format(error=error))
    with serve(tmp_path / "storage") as service:
        code, summary, err = loop(service, service.base_url, 1, build_loss=f"never_saturates:{where}")
        assert left_open(everything()) == []
    assert code == 1 and summary["status"] == "failed"
    name = error.rpartition(".")[2]
    assert err.splitlines()[-1] == f"error: {summary['error']}" and name in summary["error"]
    assert "in gives_up\n" in err and "in _call\n" not in err
