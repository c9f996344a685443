"""Operations: their order, their outcome if an answer is lost, and the wait for their end."""

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripted_client import client_of, step
from scripted_server import ScriptedServer, drop, interrupt, operation, refusal, reply, run, stall
from whitney_loop import (
    OperationFailed,
    OperationTimeout,
    RequestRejected,
    RunBroken,
    ServiceUnavailable,
    UnexpectedResponse,
    WhitneyClient,
    WhitneyError,
    lora_run,
    result_sampler_id,
    training_session,
)

# The outcome


def test_an_operation_without_an_answer_has_an_unknown_outcome_and_breaks_the_run():
    with ScriptedServer(run(), stall, reply({"run_id": "run-1", "status": "cancelled"})) as server:
        client = client_of(server, submit_timeout_s=0.3, exchange_timeout_s=0.3)
        with pytest.raises(ServiceUnavailable) as caught:
            step(client)
        assert caught.value.outcome == "unknown" and caught.value.seq_id == 1
        with pytest.raises(RunBroken, match=r"outcome of optim_step \(seq_id 1\) is unknown") as broken:
            step(client)
        assert broken.value.outcome == "not_sent"
        assert client.cancel("run-1")["status"] == "cancelled"
    assert len(server.requests) == 3


def test_an_operation_without_a_connection_was_not_sent_and_the_run_goes_on(pauses):
    with ScriptedServer(run(), operation()) as server:
        client = client_of(server, submit_timeout_s=0.5)
        step(client)
    with pytest.raises(ServiceUnavailable, match="ConnectionRefused") as caught:
        step(client)
    assert caught.value.outcome == "not_sent" and caught.value.attempts >= 1
    with pytest.raises(ServiceUnavailable):  # and not RunBroken
        step(client)


def test_a_forked_process_cannot_operate_the_run_of_its_parent(monkeypatch):
    with ScriptedServer(run(), operation()) as server:
        client = client_of(server)
        step(client)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RunBroken, match="this process was forked from the one that operates run-1") as refused:
            step(client)
    assert refused.value.outcome == "not_sent" and len(server.requests) == 2


def test_a_refused_operation_takes_no_number():
    with ScriptedServer(run(next_seq_id=5), refusal(422, "invalid_payload"), operation(seq_id=5)) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected):
            step(client)
        step(client)
    assert [request.json["seq_id"] for request in server.requests[1:]] == [5, 5]


def test_a_payload_that_is_no_json_takes_no_number_and_sends_nothing():
    with ScriptedServer(run(), operation()) as server:
        client = client_of(server)
        for payload in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises(ValueError, match="the payload cannot be written as JSON"):
                client.run_operation("run-1", "forward_backward", payload)
        step(client)
    assert [request.method for request in server.requests] == ["GET", "POST"]


@pytest.mark.parametrize("code", ["seq_conflict", "seq_gap"])
def test_a_conflict_is_never_asked_again_and_a_lost_order_breaks_the_run(code):
    with ScriptedServer(run(), refusal(409, code)) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert caught.value.attempts == 1
        with pytest.raises(RunBroken, match=f"disagree about the order since optim_step .seq_id 1.: {code}"):
            step(client)


def test_a_conflict_that_is_not_about_the_order_does_not_break_the_run():
    with ScriptedServer(run(), refusal(409, "run_not_active"), operation()) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert caught.value.attempts == 1
        assert step(client) == {"answer": 42}


def test_a_401_after_a_lost_reply_leaves_the_outcome_unknown(pauses):
    with ScriptedServer(run(), drop, refusal(401, "unauthorized")) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert caught.value.outcome == "unknown"
        with pytest.raises(RunBroken):
            step(client)


def test_a_refused_resend_of_an_operation_that_the_run_has_taken_can_be_settled(pauses):
    script = [run(), drop, refusal(409, "already_saved"), run(next_seq_id=2), run(next_seq_id=2), operation(seq_id=2)]
    with ScriptedServer(*script) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected, match="already_saved") as caught:
            step(client)
        assert caught.value.outcome == "unknown"
        with pytest.raises(RunBroken):
            step(client)
        client.settle()
        assert client.accepted == {"optim_step": 1} and step(client) == {"answer": 42}


def test_a_refused_resend_of_an_operation_that_the_run_has_not_taken_is_rejected(pauses):
    with ScriptedServer(run(), drop, refusal(422, "odd_payload"), run(), operation()) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert caught.value.outcome == "rejected" and step(client) == {"answer": 42}


def test_a_lost_operation_that_arrives_late_is_found_by_settling_again():
    script = [run(), stall, run(), refusal(409, "seq_conflict"), run(next_seq_id=2), operation(seq_id=2)]
    with ScriptedServer(*script) as server:
        client = client_of(server, submit_timeout_s=0.3, exchange_timeout_s=0.3)
        with pytest.raises(ServiceUnavailable):
            step(client)
        client.settle(timeout_s=5)
        assert client.accepted == {}
        with pytest.raises(RequestRejected, match="seq_conflict"):
            step(client)
        client.settle(timeout_s=5)
        assert client.accepted == {"optim_step": 1} and step(client) == {"answer": 42}


def test_a_seq_id_that_another_client_took_is_not_settled():
    with ScriptedServer(run(), refusal(409, "seq_conflict")) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected):
            step(client)
        client.settle()
        with pytest.raises(RunBroken, match="A run has one client"):
            step(client)


def test_a_second_client_on_a_run_is_told_that_a_run_has_one(caplog):
    with ScriptedServer(run(next_seq_id=5), operation(seq_id=5)) as server:
        step(client_of(server))
    assert "run-1 was operated by another client before: a run has one client" in caplog.text


def test_an_interrupt_while_sending_leaves_the_outcome_unknown():
    with ScriptedServer(run(), interrupt) as server:
        client = client_of(server)
        with pytest.raises(KeyboardInterrupt):
            step(client)
        with pytest.raises(RunBroken):
            step(client)


def test_a_failed_operation_says_why_and_the_run_goes_on():
    failed = operation("failed", error={"code": "no_gradients", "message": "nothing to step on", "retryable": False})
    with ScriptedServer(run(), failed, operation(seq_id=2)) as server:
        client = client_of(server)
        with pytest.raises(OperationFailed, match="optim_step failed: nothing to step on") as caught:
            step(client)
        assert (caught.value.code, caught.value.outcome, caught.value.seq_id) == ("no_gradients", "failed", 1)
        assert step(client) == {"answer": 42}


# Failed without effect, and may be repeated


def busy(seq_id, kind="optim_step"):
    error = {"code": "gpu_lost", "message": "a worker was lost", "retryable": True}
    return operation("failed", error=error, seq_id=seq_id, operation_id=f"op-{seq_id}", kind=kind)


def test_a_failed_operation_that_may_be_repeated_takes_the_next_numbers_until_it_succeeds(pauses, caplog):
    with ScriptedServer(run(), busy(1), busy(2), operation(seq_id=3)) as server:
        assert step(client_of(server)) == {"answer": 42}
    first, *_, last = [request.json for request in server.requests[1:]]
    assert (first["seq_id"], last["seq_id"]) == (1, 3) and first["payload"] == last["payload"]
    assert pauses == [1, 5] and "a worker was lost (seq_id 1); submitted again in 1 s" in caplog.text


def test_an_operation_that_fails_each_time_is_repeated_three_times(pauses):
    with ScriptedServer(run(), *map(busy, range(1, 6))) as server, pytest.raises(OperationFailed, match="was lost"):
        step(client_of(server))
    assert len(server.requests) == 5 and len(pauses) == 3


def test_a_failed_operation_is_not_repeated_beyond_its_time_limit(pauses):
    with ScriptedServer(run(), busy(1)) as server, pytest.raises(OperationFailed, match="was lost"):
        client_of(server).run_operation("run-1", "optim_step", {}, timeout_s=0.9)
    assert pauses == []


def test_a_failed_operation_that_another_one_has_followed_is_not_repeated(monkeypatch):
    with ScriptedServer(run(), busy(1), operation(seq_id=2)) as server:
        client = client_of(server)
        monkeypatch.setattr(time, "sleep", lambda _: client.submit_operation("run-1", "optim_step", {}))
        with pytest.raises(OperationFailed, match="was lost"):
            step(client)
    assert len(server.requests) == 3


def test_sampler_operations_that_fail_are_repeated_among_the_others(pauses):
    """The repetition may come before or after the second submission, since results are fetched in parallel."""
    script = [busy(1, "sample"), *[operation(seq_id=seq_id, kind="sample") for seq_id in (2, 3)]]
    with ScriptedServer(run(), *script) as server:
        payloads = [{"n": 1}, {"n": 2}]
        results = client_of(server).sampler_operations("run-1", "smp-1", "sample", payloads)
    assert results == [{"answer": 42}] * 2
    assert sorted(request.json["payload"]["n"] for request in server.requests[1:]) == [1, 1, 2]


def test_submitted_operations_and_run_operations_are_never_repeated(pauses):
    with ScriptedServer(run(), busy(1), busy(2), busy(3, "sample")) as server:
        client = client_of(server)
        with pytest.raises(OperationFailed):
            client.submit_operation("run-1", "optim_step", {}).result()
        with pytest.raises(OperationFailed):
            client.run_operations("run-1", "optim_step", [{}])
        with pytest.raises(OperationFailed):
            client.submit_sampler_operation("run-1", "smp-1", "sample", {}).result()
    assert len(server.requests) == 4


# Waiting for the result


def test_a_long_poll_past_the_read_timeout_is_asked_again_and_is_no_error(caplog):
    with ScriptedServer(run(), operation("queued"), stall, operation()) as server:
        assert step(client_of(server, exchange_timeout_s=0.2)) == {"answer": 42}
    assert polls(server) == ["wait_s=20", "wait_s=0"]
    assert caplog.records == []


def polls(server):
    paths = [request.path.partition("?") for request in server.requests[2:]]
    assert {path for path, _, _ in paths} == {"/v1/training/runs/run-1/operations/op-1"}
    return [query for _, _, query in paths]


def test_a_poll_that_ends_with_408_is_no_trouble_however_often(pauses, caplog):
    with ScriptedServer(run(), operation("queued"), *[refusal(408, "not_yet")] * 6, operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert pauses == [0.02 * 2**k for k in range(6)] and caplog.records == []


def test_a_long_poll_that_a_gateway_cuts_off_is_followed_by_a_short_one(pauses, caplog):
    cut = refusal(504, "gateway_timeout")
    with ScriptedServer(run(), operation("queued"), cut, operation("running"), cut, operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert polls(server) == ["wait_s=20", "wait_s=0"] * 2
    assert caplog.records == []


def test_a_short_poll_that_ends_with_504_is_retried_as_a_short_one(pauses):
    with ScriptedServer(run(), operation("queued"), *[refusal(504, "gateway_timeout")] * 2) as server:
        with pytest.raises(RequestRejected, match="script_ended"):
            step(client_of(server))
    assert polls(server) == ["wait_s=20", "wait_s=0", "wait_s=0"]


def test_a_server_that_does_not_hold_the_poll_is_polled_with_a_growing_pause(pauses):
    running = [operation("running")] * 6
    with ScriptedServer(run(), operation("queued"), *running, operation()) as server:
        step(client_of(server))
    assert pauses == [0.02 * 2**k for k in range(6)]


def test_a_poll_is_retried_after_lost_answers_and_errors(pauses):
    with ScriptedServer(run(), operation("running"), drop, refusal(503, "busy"), operation()) as server:
        assert step(client_of(server)) == {"answer": 42}


def test_operations_are_submitted_in_order_before_the_first_result_is_awaited():
    script = [operation("queued", seq_id=seq_id, operation_id=f"op-{seq_id}") for seq_id in (1, 2)]
    script += [operation(seq_id=seq_id, operation_id=f"op-{seq_id}", result={"n": seq_id}) for seq_id in (1, 2)]
    with ScriptedServer(run(), *script) as server:
        client = client_of(server)
        pending = [client.submit_operation("run-1", "optim_step", {}) for _ in range(2)]
        assert [handle.seq_id for handle in pending] == [1, 2]
        assert [handle.result() for handle in pending] == [{"n": 1}, {"n": 2}]
        assert pending[0].result() == {"n": 1}  # kept, so not fetched again
    assert [request.method for request in server.requests] == ["GET", "POST", "POST", "GET", "GET"]


def test_two_threads_that_wait_for_one_result_ask_for_it_once():
    asked, answer = threading.Event(), threading.Event()

    def held(connection):
        asked.set()
        answer.wait(10)
        connection.sendall(operation())

    with ScriptedServer(run(), operation("queued"), held) as server, ThreadPoolExecutor(2) as pool:
        pending = client_of(server).submit_operation("run-1", "optim_step", {})
        first = pool.submit(pending.result)
        asked.wait(10)
        second = pool.submit(pending.result)
        answer.set()
        assert first.result() == second.result() == {"answer": 42}
    assert [request.method for request in server.requests] == ["GET", "POST", "GET"]


STRAY = {
    "404": refusal(404, "not_found"),
    "a page": reply("<html>Welcome</html>"),
    "a page that says 403": reply("<html>Prove that you are human</html>", 403),
}


@pytest.mark.parametrize("stray", STRAY.values(), ids=STRAY)
def test_a_stray_answer_to_a_poll_does_not_lose_an_accepted_operation(stray, pauses):
    with ScriptedServer(run(), operation("queued"), stray, operation("running"), stray, stray, operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert len(server.requests) == 7


@pytest.mark.parametrize("stray", STRAY.values(), ids=STRAY)
def test_a_stray_answer_that_comes_three_times_is_believed(stray, pauses):
    with (
        ScriptedServer(run(), operation("queued"), stray, stray, stray) as server,
        pytest.raises(WhitneyError) as caught,
    ):
        step(client_of(server))
    assert caught.value.outcome == "unknown" and len(server.requests) == 5


def test_a_result_whose_poll_failed_can_be_asked_for_again():
    with ScriptedServer(run(), operation("queued"), refusal(403, "forbidden"), operation()) as server:
        pending = client_of(server).submit_operation("run-1", "optim_step", {})
        with pytest.raises(RequestRejected):
            pending.result()
        assert pending.result() == {"answer": 42}


def test_an_operation_that_does_not_end_in_time_is_reported_with_an_unknown_outcome():
    with ScriptedServer(run(), operation("running"), stall, operation("running")) as server:
        client = client_of(server, operation_timeout_s=0.3)
        with pytest.raises(OperationTimeout, match=r"optim_step \(seq_id 1\) is 'running' after 0 s") as caught:
            step(client)
    assert caught.value.outcome == "unknown" and caught.value.seq_id == 1


@pytest.fixture
def is_stopped(monkeypatch):
    """``is_stopped(hours)``: advance the clock, as if the process or its container had been stopped."""
    monotonic, stopped = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(stopped))
    return lambda hours: stopped.append(hours * 3600)


@pytest.mark.parametrize("answer", [operation("running"), refusal(503, "busy"), refusal(408, "not_yet"), drop])
def test_a_process_that_was_stopped_past_the_deadline_polls_once_more(answer, is_stopped):
    def stopped_meanwhile(connection):
        is_stopped(5)
        drop(connection) if answer is drop else connection.sendall(answer)

    with ScriptedServer(run(), operation("queued"), stopped_meanwhile, operation()) as server:
        assert step(client_of(server)) == {"answer": 42}
    assert len(server.requests) == 4


@pytest.mark.parametrize("wait", ["wait_until_terminal", "close_session"])
def test_a_wait_for_a_run_or_a_session_polls_once_more_after_it_was_stopped(wait, is_stopped):
    def stopped_meanwhile(connection):
        is_stopped(5)
        connection.sendall(reply({"status": "ending"}))

    ended = {"wait_until_terminal": "cancelled", "close_session": "closed"}[wait]
    before = [reply({"status": "open"})] if wait == "close_session" else []
    with ScriptedServer(*before, stopped_meanwhile, reply({"status": ended})) as server:
        assert getattr(client_of(server), wait)("id-1")["status"] == ended


def test_only_one_poll_follows_the_deadline(is_stopped):
    def stopped_meanwhile(connection):
        is_stopped(5)
        connection.sendall(operation("running"))

    with ScriptedServer(run(), operation("queued"), stopped_meanwhile, operation("running")) as server:
        with pytest.raises(OperationTimeout):
            step(client_of(server))
    assert len(server.requests) == 4


def test_a_result_that_has_expired_leaves_the_outcome_unknown_but_not_the_order():
    with ScriptedServer(run(), operation("running"), refusal(410, "expired"), operation(seq_id=2)) as server:
        client = client_of(server)
        with pytest.raises(RequestRejected) as caught:
            step(client)
        assert (caught.value.code, caught.value.outcome) == ("expired", "unknown")
        step(client)


# Answers of the wrong shape


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply([1, 2]), "not a JSON object"),
        (reply({"status": "queued"}), "optim_step: operation_id is None"),
        (operation(operation_id=7), "optim_step: operation_id is 7"),
        (operation(status=None), "optim_step: status is None"),
        (operation(seq_id=9), "optim_step: seq_id is 9 in the answer, expected 1"),
        (operation(seq_id=True), "seq_id is True"),
        (operation(run_id="run-2"), "optim_step: run_id is 'run-2' in the answer, expected 'run-1'"),
        (operation(kind="sample"), "kind is 'sample' in the answer, expected 'optim_step'"),
        (operation(result="done"), "optim_step: result is 'done', expected an object"),
        (operation("failed", error="oh"), "optim_step failed: the service gives no reason"),
    ],
)
def test_an_answer_of_the_wrong_shape_names_the_operation_and_the_field(answer, message):
    with ScriptedServer(run(), answer) as server, pytest.raises(WhitneyError, match=message):
        step(client_of(server))


@pytest.mark.parametrize(("field", "other", "own"), [("operation_id", "op-2", "op-1"), ("run_id", "run-2", "run-1")])
def test_a_poll_that_answers_for_another_operation_is_not_believed(field, other, own):
    with ScriptedServer(run(), operation("queued"), operation(**{field: other})) as server:
        with pytest.raises(UnexpectedResponse, match=f"{field} is '{other}' in the answer, expected '{own}'"):
            step(client_of(server))


def test_an_answer_that_names_no_run_is_taken_as_that_of_the_run():
    answer = {"operation_id": "op-1", "status": "succeeded", "result": {"answer": 42}}
    with ScriptedServer(run(), reply(answer)) as server:
        assert step(client_of(server)) == {"answer": 42}


def test_a_run_without_a_usable_next_seq_id_is_reported():
    with ScriptedServer(run(next_seq_id="1")) as server, pytest.raises(UnexpectedResponse, match="next_seq_id is '1'"):
        step(client_of(server))


def test_a_failed_operation_carries_where_it_was_sent():
    failed = operation("failed", error={"code": "no_gradients", "message": "nothing to step on"})
    with ScriptedServer(run(), failed) as server, pytest.raises(OperationFailed) as caught:
        step(client_of(server))
    assert (caught.value.method, caught.value.path) == ("POST", "/v1/training/runs/run-1/operations")


# With the embedded service


@pytest.fixture
def sampler(service):
    """A client of the embedded service, a run, and a sampler of it."""
    with WhitneyClient(service.base_url, service.api_key) as client:
        with training_session(client, provider="modal") as session_id:
            with lora_run(client, session_id, model="byte-lm", rank=1) as run_id:
                saved = client.run_operation(run_id, "save_weights_for_sampler", {})
                yield client, run_id, result_sampler_id(saved)


PAYLOADS = [{"input": {"token_ids": [1] * (1 + n % 7)}} for n in range(400)]
LENGTHS = [1 + n % 7 for n in range(400)]


def test_threads_may_share_a_run_and_each_operation_takes_effect_once(sampler):
    client, run_id, sampler_id = sampler

    def ask(payload):
        return client.sampler_operation(run_id, sampler_id, "logprobs", payload)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, PAYLOADS[:20]))
    assert [len(result["logprobs"]) for result in results] == LENGTHS[:20]
    assert client.run(run_id)["next_seq_id"] == 22
    assert client.accepted == {"save_weights_for_sampler": 1, "logprobs": 20}


def test_two_threads_lose_no_result_beyond_those_that_a_service_keeps(sampler):
    client, run_id, sampler_id = sampler

    def ask(_):
        return client.sampler_operations(run_id, sampler_id, "logprobs", PAYLOADS[:200])

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(ask, range(2)):
            assert [len(result["logprobs"]) for result in results] == LENGTHS[:200]


def test_no_payloads_give_no_results(sampler):
    client, run_id, _ = sampler
    assert client.run_operations(run_id, "save_weights_for_sampler", []) == []


def test_a_result_that_nobody_holds_is_not_kept_by_the_client():
    with ScriptedServer(run(), operation()) as server:
        client = client_of(server)
        pending = client.submit_operation("run-1", "optim_step", {})
        pending.result()
        known = weakref.ref(pending)
        del pending
        gc.collect()
        assert known() is None


def test_any_number_may_be_submitted_before_the_first_result_is_awaited(sampler):
    client, run_id, sampler_id = sampler
    pending = [client.submit_sampler_operation(run_id, sampler_id, "logprobs", payload) for payload in PAYLOADS]
    assert [len(handle.result()["logprobs"]) for handle in pending] == LENGTHS
