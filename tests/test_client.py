"""WhitneyClient: sessions, runs, and what a service offers."""

import pytest

from scripted_client import KEY, client_of
from scripted_server import ScriptedServer, refusal, reply, run
from whitney_loop import (
    ConfigurationError,
    OperationFailed,
    OperationTimeout,
    RequestRejected,
    UnexpectedResponse,
    WhitneyClient,
)

# Waiting for the end of a run or a session


def test_a_run_status_that_is_not_known_is_not_terminal(pauses):
    with ScriptedServer(run("resting"), run("cancelling"), run("cancelled")) as server:
        assert client_of(server).wait_until_terminal("run-1")["status"] == "cancelled"


def test_a_run_that_does_not_end_in_time_is_reported():
    with ScriptedServer(run("cancelling")) as server, pytest.raises(OperationTimeout, match="'cancelling' after 0 s"):
        client_of(server).wait_until_terminal("run-1", timeout_s=0)


CLOSED = reply({"session_id": "ses-1", "status": "closed"})


@pytest.mark.parametrize("answer", [{"status": "open"}, {"status": "closing"}, {"status": ["closed"]}, {}])
def test_a_session_is_closed_once_it_says_so_and_is_polled_until_then(answer, pauses):
    with ScriptedServer(*[reply(answer)] * 5, CLOSED) as server:
        client = client_of(server)
        assert client.close_session("ses-1")["status"] == "closed"
    assert [(request.method, request.path.rpartition("/")[2]) for request in server.requests] == [
        ("POST", "close"), *[("GET", "ses-1")] * 5,
    ]  # fmt: skip
    assert pauses == [0.02 * 2**k for k in range(4)] and client.closed_sessions == {"ses-1"}


@pytest.mark.parametrize("status", [404, 410])
def test_a_session_that_is_gone_after_its_close_is_closed(status, pauses):
    with ScriptedServer(reply({}), refusal(status, "gone")) as server:
        client = client_of(server)
        client.close_session("ses-1")
    assert client.closed_sessions == {"ses-1"}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([refusal(404, "gone")], RequestRejected),
        ([reply({}), refusal(403, "no")], RequestRejected),
        ([reply({"status": "open"})] * 40, OperationTimeout),
    ],
)
def test_a_session_that_may_still_be_open_does_not_count_as_closed(script, error):
    with ScriptedServer(*script) as server:
        client = client_of(server)
        with pytest.raises(error):
            client.close_session("ses-1", timeout_s=0.3)
    assert client.closed_sessions == set()


@pytest.mark.parametrize("call", ["run", "finish", "cancel", "wait_until_terminal"])
def test_an_answer_about_another_run_is_not_believed(call):
    with ScriptedServer(run("finished"), run("finished")) as server:
        with pytest.raises(UnexpectedResponse, match="run run-2: run_id is 'run-1' in the answer, expected 'run-2'"):
            getattr(client_of(server), call)("run-2")


@pytest.mark.parametrize("call", ["session", "close_session"])
@pytest.mark.parametrize("other", ["ses-2", None, 7])
def test_an_answer_about_another_session_is_not_believed(call, other):
    with ScriptedServer(reply({"session_id": other, "status": "closed"})) as server:
        client = client_of(server)
        with pytest.raises(UnexpectedResponse, match="session ses-1: session_id is .* in the answer, expected 'ses-1'"):
            getattr(client, call)("ses-1")
    assert client.closed_sessions == set()


def test_a_poll_of_a_closing_session_that_answers_about_another_one_is_not_believed():
    with ScriptedServer(reply({}), reply({"session_id": "ses-2", "status": "closed"})) as server:
        with pytest.raises(UnexpectedResponse, match="session_id is 'ses-2'"):
            client_of(server).close_session("ses-1")


# A run that is being allocated


def test_a_run_that_is_still_allocated_is_awaited_and_that_is_said_once(pauses, caplog):
    with ScriptedServer(*[run("allocating")] * 4, run("active")) as server:
        assert client_of(server).create_lora_run("ses-1", model="m") == "run-1"
    assert [request.method for request in server.requests] == ["POST", *["GET"] * 4]
    assert [record.getMessage() for record in caplog.records] == ["run run-1 is being allocated: waiting for it"]


def test_a_run_that_is_active_at_once_is_not_polled():
    with ScriptedServer(run()) as server:
        assert client_of(server).create_lora_run("ses-1", model="m") == "run-1"
    assert len(server.requests) == 1


@pytest.mark.parametrize("before", [[], [run("allocating")]])
def test_a_run_whose_allocation_fails_raises_with_the_service_s_words(before):
    error = {"code": "out_of_memory", "message": "the model needs 9 GB"}
    failed = reply({"run_id": "run-1", "status": "failed", "error": error})
    with ScriptedServer(*before, failed) as server:
        with pytest.raises(OperationFailed, match="run run-1 failed: the model needs 9 GB") as caught:
            client_of(server).create_lora_run("ses-1", model="m")
    assert (caught.value.code, caught.value.outcome) == ("out_of_memory", "failed")


def test_a_run_that_is_not_allocated_in_time_is_reported():
    with ScriptedServer(*[run("allocating")] * 9) as server:
        with pytest.raises(OperationTimeout, match="run run-1 is 'allocating' after 0 s, not allocated"):
            client_of(server, operation_timeout_s=0.05).create_lora_run("ses-1", model="m")


# Answers of the wrong shape


def test_a_created_session_without_an_id_is_reported():
    with ScriptedServer(reply({"id": "x"})) as server, pytest.raises(UnexpectedResponse, match="session_id is None"):
        client_of(server).create_session("modal")


# What the service offers


@pytest.mark.parametrize("body", [{"operations": ["sample"]}, {"providers": {"modal": {"operations": ["sample"]}}}])
def test_offered_operations_are_read_in_both_forms(body):
    with ScriptedServer(reply(body), reply(body)) as server:
        client_of(server).require_operations("modal", ["sample"])
        with pytest.raises(ConfigurationError, match="does not offer logprobs for modal; it has sample"):
            client_of(server).require_operations("modal", ["sample", "logprobs"])


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ({"providers": {"tinker": {}}}, ConfigurationError, "does not offer provider 'modal'; it has tinker"),
        ({"providers": {"modal": {}}}, UnexpectedResponse, "modal.operations is not a list"),
        ({"providers": []}, UnexpectedResponse, "providers is not an object"),
        ({}, UnexpectedResponse, "providers is not an object"),
    ],
)
def test_insufficient_capabilities_are_refused(body, error, message):
    with ScriptedServer(reply(body)) as server, pytest.raises(error, match=message):
        client_of(server).require_operations("modal", ["sample"])


# How it is made


def test_url_and_key_come_from_the_environment(monkeypatch):
    with pytest.raises(ConfigurationError, match="set WHITNEY_BASE_URL"):
        WhitneyClient()
    with ScriptedServer(reply({})) as server:
        monkeypatch.setenv("WHITNEY_BASE_URL", server.base_url)
        monkeypatch.setenv("WHITNEY_API_KEY", "from-the-environment")
        WhitneyClient().capabilities()
    assert server.requests[0].headers["authorization"] == "Bearer from-the-environment"


@pytest.mark.parametrize("name", ["operation_timeout_s", "submit_timeout_s", "exchange_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, None, "60", True, float("nan"), float("inf"), 1e300])
def test_a_time_out_that_is_no_positive_number_is_refused_at_once(name, value):
    with pytest.raises(ConfigurationError, match=f"{name} is .*, expected seconds: a number above 0"):
        WhitneyClient("http://127.0.0.1:1", KEY, **{name: value})


@pytest.mark.parametrize(("length", "is_taken"), [(1, True), (300, True), (301, False), (0, False)])
def test_an_id_has_1_to_300_characters(length, is_taken):
    with ScriptedServer(reply({"session_id": "s" * length})) as server:
        create = client_of(server).create_session
        if is_taken:
            assert create("modal") == "s" * length
        else:
            with pytest.raises(UnexpectedResponse, match="session_id"):
                create("modal")
