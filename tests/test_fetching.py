"""Many operations at once: submitted in order, fetched meanwhile, returned in order."""

import os
import signal
import threading

import pytest

from between import Between
from fault_proxy import FaultProxy
from whitney_loop import (
    OperationFailed,
    OperationTimeout,
    RequestRejected,
    WhitneyClient,
    fetching,
    result_sampler_id,
    transport,
)

WAIT_S = 20.0  # a test that goes wrong ends; one that goes right never waits for it
LOGPROBS = [{"input": {"token_ids": [97] * length}} for length in (1, 2, 3, 4)]


def failed(answer):
    return answer | {"status": "failed", "result": None, "error": {"code": "oops", "message": "it was told to"}}


def a_sampler(client):
    run_id = client.create_lora_run(client.create_session("modal"), model="byte-lm", rank=1, seed=1)
    return run_id, result_sampler_id(client.run_operation(run_id, "save_weights_for_sampler", {}))


def seq_id_in(path):
    """Return the seq_id in a poll's path: 1 is the save, 2 the first of the operations that are submitted together."""
    return int(path.partition("?")[0].rpartition("-")[2])


def lengths(results):
    return [len(result["logprobs"]) for result in results]


def test_each_result_is_handed_over_as_it_arrives_and_all_are_returned_in_order(service):
    third_has_come, order, threads = threading.Event(), [], set()

    class HoldsTheFirst(Between):
        def before(self, path):
            if path.partition("?")[0].endswith("-2") and "/operations/" in path:
                assert third_has_come.wait(WAIT_S)

    def on_result(index, result):
        order.append(index)
        threads.add(threading.current_thread())
        assert len(result["logprobs"]) == index + 1
        if index == 2:
            third_has_come.set()

    with HoldsTheFirst(service) as slow, WhitneyClient(slow.base_url, service.api_key) as client:
        run_id, sampler_id = a_sampler(client)
        results = client.sampler_operations(run_id, sampler_id, "logprobs", LOGPROBS, on_result=on_result)
    assert lengths(results) == [1, 2, 3, 4]
    assert sorted(order) == [0, 1, 2, 3] and order.index(2) < order.index(0)
    assert threads == {threading.current_thread()}


def test_a_result_is_fetched_while_later_operations_are_not_yet_submitted(service):
    first_is_polled = threading.Event()

    class Notes(Between):
        def before(self, path):
            if path.partition("?")[0].endswith("-2"):
                first_is_polled.set()

        def after(self, path, body, answer):  # a client that gets the result at once does not poll
            return answer | {"status": "queued", "result": None} if body and answer.get("kind") else answer

    def payloads():
        yield LOGPROBS[0]
        assert first_is_polled.wait(WAIT_S)
        yield LOGPROBS[1]

    with Notes(service) as noted, WhitneyClient(noted.base_url, service.api_key) as client:
        run_id, sampler_id = a_sampler(client)
        assert lengths(client.sampler_operations(run_id, sampler_id, "logprobs", payloads())) == [1, 2]


def test_the_first_failure_in_the_order_of_the_payloads_is_raised_and_the_rest_still_run(service):
    second_has_come = threading.Event()

    class FailsTwo(Between):
        def before(self, path):
            if "/operations/" in path and seq_id_in(path) == 3:
                assert second_has_come.wait(WAIT_S)

        def after(self, path, body, answer):
            if body is None and "/operations/" in path:
                second_has_come.set() if answer["seq_id"] == 4 else None
                return failed(answer) if answer["seq_id"] in (3, 4) else answer
            return answer | {"status": "queued"} if answer.get("kind") else answer

    with FailsTwo(service) as failing, WhitneyClient(failing.base_url, service.api_key) as client:
        run_id, sampler_id = a_sampler(client)
        with pytest.raises(OperationFailed, match="logprobs failed: it was told to") as caught:
            client.sampler_operations(run_id, sampler_id, "logprobs", LOGPROBS)
        assert (caught.value.index, caught.value.payload, caught.value.seq_id) == (1, LOGPROBS[1], 3)
        assert client.accepted["logprobs"] == 4
        assert client.run(run_id)["status"] == "active"


def test_a_payload_that_is_refused_is_named_and_what_was_accepted_before_still_runs(service):
    with WhitneyClient(service.base_url, service.api_key) as client:
        run_id, sampler_id = a_sampler(client)
        with pytest.raises(RequestRejected) as caught:
            client.sampler_operations(run_id, sampler_id, "logprobs", [*LOGPROBS[:2], {}, LOGPROBS[3]])
        assert (caught.value.index, caught.value.payload) == (2, {})
        assert client.run(run_id)["next_seq_id"] == 4
        assert lengths(client.sampler_operations(run_id, sampler_id, "logprobs", LOGPROBS)) == [1, 2, 3, 4]


def test_a_cycle_of_forty_prompts_takes_at_most_nine_connections(service):
    with FaultProxy(service, rate=0) as proxy, WhitneyClient(proxy.base_url, service.api_key) as client:
        run_id, sampler_id = a_sampler(client)
        assert lengths(client.sampler_operations(run_id, sampler_id, "logprobs", LOGPROBS * 10)) == [1, 2, 3, 4] * 10
        assert proxy.connections <= 9


def test_ctrl_c_ends_the_threads_although_the_service_holds_their_polls(service):
    may_end = threading.Event()

    class Holds(Between):
        def before(self, path):
            if "/operations/" in path and seq_id_in(path) > 1:
                if seq_id_in(path) == 5:
                    os.kill(os.getpid(), signal.SIGINT)
                may_end.wait(WAIT_S)

        def after(self, path, body, answer):
            return answer | {"status": "queued"} if body and answer.get("kind") == "logprobs" else answer

    with Holds(service) as held, WhitneyClient(held.base_url, service.api_key) as client:
        run_id, sampler_id = a_sampler(client)
        before = set(threading.enumerate())
        with pytest.raises(KeyboardInterrupt):
            client.sampler_operations(run_id, sampler_id, "logprobs", LOGPROBS)
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith(fetching.THREAD_NAME):
                thread.join(WAIT_S / 2)
                assert not thread.is_alive()
        may_end.set()


def test_an_operation_may_take_its_time_again_if_those_before_it_have_ended_meanwhile():
    fetchers = fetching._Fetchers(operations=None, on_result=None)

    class Slow:
        sampler_id, times = None, 0

        def result(self):
            self.times += 1
            if self.times < 3:
                fetchers._ended += 1  # another one has
            if self.times < 4:
                raise OperationTimeout("not yet", outcome="unknown")

    slow = Slow()
    with pytest.raises(OperationTimeout):
        fetchers._result(slow, {})
    assert slow.times == 3


def test_trouble_that_all_threads_meet_is_logged_once(service, caplog, monkeypatch):
    monkeypatch.setattr(transport, "_backoff_s", lambda _: 0.5)
    troubled = set()

    class Troubles(Between):
        def after(self, path, body, answer):
            return answer | {"status": "queued"} if body and answer.get("kind") == "logprobs" else answer

    def first_poll(method, path):
        is_poll = method == "GET" and "/operations/" in path and seq_id_in(path) > 1 and path not in troubled
        troubled.add(path)
        return is_poll

    with Troubles(service) as polled, FaultProxy(polled, rate=1, kinds=["503"], only=first_poll) as proxy:
        with WhitneyClient(proxy.base_url, service.api_key) as client:
            run_id, sampler_id = a_sampler(client)
            client.sampler_operations(run_id, sampler_id, "logprobs", LOGPROBS)
    assert len(proxy.faults) == 4 and len(caplog.records) == 1
