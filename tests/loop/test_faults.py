"""Nothing lost and nothing twice: the loop through a proxy with faults, compared with the loop without."""

from collections import Counter

import pytest

from fault_proxy import FAULTS, FaultProxy
from loop_in_process import left_open
from loop_runs import adapter_of
from whitney_loop.local import serve


def check_that_faults_change_nothing(loop, executed_operations, all_sessions, tmp_path, *, cycles, **proxy_options):
    with serve(tmp_path / "plain") as service:
        code, summary, err = loop(service, cycles)
        assert code == 0, err
        expected = adapter_of(summary)
        operations = 4 * cycles + 2
        assert [seq_id for _, seq_id in executed_operations] == list(range(1, operations + 1))
    executed_operations.clear()
    with serve(tmp_path / "faulty") as service, FaultProxy(service, **proxy_options) as proxy:
        code, summary, err = loop(proxy, cycles)
        assert code == 0, err
        assert left_open(all_sessions()) == []
    assert adapter_of(summary) == expected
    assert executed_operations == [(summary["run_id"], seq_id) for seq_id in range(1, operations + 1)]
    assert summary["operations"]["optim_step"] == cycles == summary["cycles_done"]
    assert [len(session["runs"]) for session in all_sessions()] == [1, 1]  # no session and no run was made twice
    return proxy


@pytest.mark.long
@pytest.mark.parametrize("kind", FAULTS)
def test_one_kind_of_fault_on_half_of_all_exchanges_changes_nothing(
    loop, executed_operations, all_sessions, tmp_path, kind
):
    proxy = check_that_faults_change_nothing(
        loop, executed_operations, all_sessions, tmp_path, cycles=2, seed=3, rate=0.5, kinds=[kind]
    )
    assert proxy.faults


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, *[pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4)]])
def test_a_fault_on_a_fifth_of_all_exchanges_gives_the_same_adapter_and_runs_everything_once(
    loop, executed_operations, all_sessions, tmp_path, seed
):
    proxy = check_that_faults_change_nothing(loop, executed_operations, all_sessions, tmp_path, cycles=40, seed=seed)
    kinds = Counter(kind for kind, _, _ in proxy.faults)
    assert kinds.keys() == FAULTS.keys()
    assert 0.15 < len(proxy.faults) / proxy.exchanges < 0.25


def after(count, what):
    """Return a predicate: true for the requests that are ``what``, after the first ``count`` of them."""
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
        pytest.param("stall", "unknown", marks=pytest.mark.long),
    ],
)
def test_an_operation_without_an_answer_ends_the_loop_which_says_what_is_known_and_closes(
    loop, executed_operations, all_sessions, service, kind, outcome
):
    only = after(6, is_submit)
    with FaultProxy(service, rate=1, kinds=[kind], only=only) as proxy:
        code, summary, err = loop(proxy, 5, submit_timeout_s=1.0, exchange_timeout_s=1.0)
        assert left_open(all_sessions()) == []
    assert code == 1 and summary["status"] == "failed"
    assert f"outcome {outcome}" in err.splitlines()[-1] and "seq_id 7" in err.splitlines()[-1]
    assert "no usable answer" in summary["error"]
    assert [run["status"] for session in all_sessions() for run in session["runs"]] == ["cancelled"]
    assert all(count == 1 for count in Counter(executed_operations).values())


def test_a_service_that_answers_nothing_any_more_is_reported_with_ids_and_command(loop, service):
    only = after(9, lambda method, path: True)
    with FaultProxy(service, rate=1, kinds=["drop request"], only=only) as proxy:
        code, summary, err = loop(proxy, 5, submit_timeout_s=1.0, exchange_timeout_s=1.0)
        assert code == 1
        session_id, run_id = summary["session_id"], summary["run_id"]
        assert f"may still be open: run {run_id}" in err and f"may still be open: session {session_id}" in err
        assert f"python -m whitney_loop close {session_id} --base-url {proxy.base_url}" in err
        assert err.splitlines()[-1].startswith("error: no usable answer")
