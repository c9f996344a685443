"""Nothing is left open, however the block ends; the embedded service is asked afterwards."""

import gc
import io
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from loop_in_process import left_open
from scripted_server import ScriptedServer, drop, interrupt, operation, refusal, reply, run, stall
from whitney_loop import (
    OperationFailed,
    OperationTimeout,
    RequestRejected,
    ServiceUnavailable,
    WhitneyClient,
    adamw_optimizer,
    lifecycle,
    lora_run,
    training_session,
)
from whitney_loop.__main__ import main
from whitney_loop.lifecycle import close_everything


@pytest.fixture
def client(service):
    return WhitneyClient(service.base_url, service.api_key)


def statuses(client, session_id):
    """Return the status of the session and those of its runs."""
    session = client.session(session_id)
    return session["status"], [run["status"] for run in session["runs"]]


def test_a_block_that_ends_finishes_the_run_and_closes_the_session(client):
    with training_session(client, provider="modal") as session_id:
        with lora_run(client, session_id, model="byte-lm", rank=2, seed=1) as run_id:
            client.run_operation(run_id, "save_weights_for_sampler", {})
        assert statuses(client, session_id) == ("open", ["finished"])
    assert statuses(client, session_id) == ("closed", ["finished"])


@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt(), SystemExit(3)])
def test_a_block_that_raises_cancels_every_run_and_closes_the_session(client, error):
    with pytest.raises(type(error)) as caught, training_session(client, provider="modal") as session_id:
        with lora_run(client, session_id, model="byte-lm", rank=2):
            with lora_run(client, session_id, model="byte-lm", rank=2):
                raise error
    assert caught.value is error
    assert statuses(client, session_id) == ("closed", ["cancelled", "cancelled"])


def test_an_inner_run_that_fails_does_not_cancel_the_outer_one(client):
    with training_session(client, provider="modal") as session_id:
        with lora_run(client, session_id, model="byte-lm", rank=2):
            with pytest.raises(OperationFailed), lora_run(client, session_id, model="byte-lm", rank=2) as inner:
                client.run_operation(inner, "optim_step", {"optimizer": adamw_optimizer(1e-3)})
    assert statuses(client, session_id) == ("closed", ["finished", "cancelled"])


def test_a_run_that_cannot_be_created_leaves_no_session_open(client):
    with pytest.raises(RequestRejected), training_session(client, provider="modal") as session_id:
        with lora_run(client, session_id, model="byte-lm", rank=-1):
            pytest.fail("there is no such run")
    assert statuses(client, session_id) == ("closed", [])


@pytest.mark.parametrize(("end", "status"), [("finish", "finished"), ("cancel", "cancelled")])
def test_a_run_that_the_block_itself_ended_keeps_its_status(client, end, status):
    with training_session(client, provider="modal") as session_id:
        with lora_run(client, session_id, model="byte-lm", rank=2) as run_id:
            getattr(client, end)(run_id)
    assert statuses(client, session_id) == ("closed", [status])


def error_in(caplog):
    """Return the only message that was logged as an error."""
    [error] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    return error


def test_a_clean_up_that_fails_is_logged_with_the_command_and_hides_nothing(caplog):
    script = [reply({"session_id": "ses-1"}), refusal(400, "no_close")]
    with ScriptedServer(*script) as server, pytest.raises(ZeroDivisionError):
        with training_session(WhitneyClient(server.base_url), provider="modal"):
            _ = 1 / 0
    command = f"python -m whitney_loop close ses-1 --base-url {server.base_url}"
    error = error_in(caplog)
    assert "may still be open: session ses-1" in error and command in error and "no_close" in error


def test_a_finish_that_fails_is_raised_and_the_run_is_cancelled():
    script = [
        reply({"session_id": "ses-1"}), reply({"run_id": "run-1"}), refusal(409, "run_not_active"), run("failed"),
        run("failed"), run("failed"), reply({"session_id": "ses-1", "status": "closed"}),
    ]  # fmt: skip
    with ScriptedServer(*script) as server, pytest.raises(RequestRejected, match="run_not_active"):
        client = WhitneyClient(server.base_url)
        with training_session(client, provider="modal") as session_id, lora_run(client, session_id, model="m"):
            pass
    assert server.asked == ["sessions", "runs", "finish", "run-1", "cancel", "run-1", "close"]


def test_a_session_whose_creation_got_no_answer_is_found_by_its_key_and_closed():
    script = [stall, reply({"session_id": "ses-1"}), reply({"session_id": "ses-1", "status": "closed"})]
    with ScriptedServer(*script) as server:
        client = WhitneyClient(server.base_url, submit_timeout_s=0.3, exchange_timeout_s=0.3)
        with pytest.raises(ServiceUnavailable) as caught, training_session(client, provider="modal"):
            pytest.fail("there is no id")
    assert caught.value.outcome == "unknown"
    lost, again, close = server.requests
    assert lost.headers["idempotency-key"] == again.headers["idempotency-key"]
    assert close.path == "/v1/training/sessions/ses-1/close"


def test_a_run_whose_creation_got_no_answer_is_found_by_its_key_and_cancelled():
    script = [stall, reply({"run_id": "run-1"}), run("cancelling"), run("cancelled")]
    with ScriptedServer(*script) as server:
        client = WhitneyClient(server.base_url, submit_timeout_s=0.3, exchange_timeout_s=0.3)
        with pytest.raises(ServiceUnavailable), lora_run(client, "ses-1", model="m"):
            pytest.fail("there is no id")
    lost, again, cancel, poll = server.requests
    assert lost.headers["idempotency-key"] == again.headers["idempotency-key"]
    assert cancel.path == "/v1/training/runs/run-1/cancel" and poll.path == "/v1/training/runs/run-1"


def test_a_run_that_is_interrupted_during_allocation_is_found_by_its_key_and_cancelled():
    script = [run("allocating"), interrupt, run("allocating"), run("cancelling"), run("cancelled")]
    with ScriptedServer(*script) as server, pytest.raises(KeyboardInterrupt):
        with lora_run(WhitneyClient(server.base_url), "ses-1", model="m"):
            pytest.fail("it is not allocated")
    assert server.asked == ["runs", "run-1", "runs", "cancel", "run-1"]


def test_a_run_that_gives_no_answer_while_it_is_allocated_is_cancelled(gives_up_at_once):
    script = [run("allocating"), drop, run("allocating"), run("cancelling"), run("cancelled")]
    with ScriptedServer(*script) as server, pytest.raises(ServiceUnavailable):
        with lora_run(WhitneyClient(server.base_url), "ses-1", model="m"):
            pytest.fail("it is not allocated")
    assert len(server.requests) == 5


def test_a_second_interrupt_that_comes_before_the_clean_up_shortens_it_too(monkeypatch):
    monkeypatch.setattr(lifecycle, "_LAST_TRY_S", 0.1)
    script = [reply({"session_id": "ses-1"}), stall, stall]
    with ScriptedServer(*script) as server, pytest.raises(KeyboardInterrupt):
        with training_session(WhitneyClient(server.base_url), provider="modal"):
            try:
                raise KeyboardInterrupt
            finally:
                raise KeyboardInterrupt
    assert server.asked == ["sessions", "close"]  # asked once


def test_a_run_that_the_block_cancelled_may_still_be_ending():
    script = [
        reply({"run_id": "run-1"}), run("cancelling"), refusal(409, "run_not_active"),
        run("cancelling"), run("cancelled"),
    ]  # fmt: skip
    with ScriptedServer(*script) as server:
        client = WhitneyClient(server.base_url)
        with lora_run(client, "ses-1", model="m") as run_id:
            client.cancel(run_id)
    assert len(server.requests) == 5


def test_a_run_that_cannot_be_cancelled_does_not_keep_the_session_open():
    runs = [{"run_id": "run-1", "status": "active"}, {"run_id": "run-2", "status": "active"}, "odd", {"status": []}]
    ended = reply({"status": "cancelled"})
    script = [
        reply({"session_id": "ses-1", "runs": runs}), refusal(409, "no"), ended, reply({"status": "closed"}),
        ended, ended,
    ]  # fmt: skip
    with ScriptedServer(*script) as server:
        assert close_everything(WhitneyClient(server.base_url), "ses-1") == ["run-1", "run-2"]
    assert server.asked == ["ses-1", "cancel", "cancel", "close", "run-1", "run-2"]


@pytest.mark.parametrize("status", [404, 410])
def test_runs_that_are_gone_with_their_session_have_ended(status):
    runs = [{"run_id": "run-1", "status": "active"}]
    gone = refusal(status, "gone")
    with ScriptedServer(reply({"runs": runs}), run("cancelling"), reply({}), gone, gone) as server:
        client = WhitneyClient(server.base_url)
        assert close_everything(client, "ses-1") == ["run-1"]
    assert client.closed_sessions == {"ses-1"}


@pytest.fixture
def hours(monkeypatch):
    """Pauses take no time, and the clock goes on as if they had."""
    monotonic, paused = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(paused))
    monkeypatch.setattr(time, "sleep", paused.append)


STILL_OPEN = [reply({"session_id": "ses-1", "status": "open"})] * 300  # more than is asked for in twice 300 s


def test_a_session_that_does_not_become_closed_is_said_to_be_open_with_the_command(hours, caplog):
    with ScriptedServer(*STILL_OPEN) as server:
        client = WhitneyClient(server.base_url)
        with pytest.raises(OperationTimeout, match="session ses-1 is 'open' after 300 s, not closed") as caught:
            with training_session(client, provider="modal"):
                pass
    command = f"python -m whitney_loop close ses-1 --base-url {server.base_url}"
    error = error_in(caplog)
    assert "may still be open: session ses-1" in error and command in error and "not closed" in error
    assert caught.value.outcome == "unknown" and client.closed_sessions == set()


def test_the_close_command_fails_if_the_session_does_not_become_closed(hours, capsys):
    with ScriptedServer(*STILL_OPEN) as server:
        assert main(["close", "ses-1", "--base-url", server.base_url]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("error: session ses-1 is 'open' after 300 s, not closed")


def test_an_interrupt_during_clean_up_stops_the_waiting_and_tries_the_close_once(caplog):
    script = [reply({"session_id": "ses-1"}), reply({"run_id": "run-1"}), interrupt, reply({"status": "closed"})]
    with ScriptedServer(*script) as server, pytest.raises(ZeroDivisionError):
        client = WhitneyClient(server.base_url)
        with training_session(client, provider="modal") as session_id, lora_run(client, session_id, model="m"):
            _ = 1 / 0
    assert server.asked == ["sessions", "runs", "cancel", "close"]
    error = error_in(caplog)
    assert "may still be open: run run-1" in error and "KeyboardInterrupt" in error


# However it ends


class Unforeseen(Exception):
    """An error that nobody foresaw."""


def use(client, error=None):
    with training_session(client, provider="modal") as session_id:
        with lora_run(client, session_id, model="byte-lm", rank=1) as run_id:
            client.run_operation(run_id, "save_weights_for_sampler", {})
            if error:
                raise error


def raise_unforeseen():
    raise Unforeseen


def send_interrupt():
    signal.raise_signal(signal.SIGINT)


def count_points(client, interrupt_at):
    seen = interrupt_at({})
    use(client)
    return len(seen)


@pytest.mark.parametrize(
    ("error", "act"), [(None, raise_unforeseen), (None, send_interrupt), (ZeroDivisionError(), send_interrupt)]
)
def test_an_end_before_or_after_any_exchange_leaves_nothing_open(client, interrupt_at, all_sessions, act, error):
    for n in range(1, count_points(client, interrupt_at) + 1):
        interrupt_at({n: act})
        with pytest.raises((Unforeseen, KeyboardInterrupt, ZeroDivisionError)):
            use(client, error)
        assert left_open(all_sessions()) == [], n


def test_the_first_of_two_ends_at_any_exchanges_is_seen_and_nothing_is_left_open(client, interrupt_at, all_sessions):
    for first in range(1, count_points(client, interrupt_at) + 1):
        for second in range(first + 1, first + 8, 2):
            interrupt_at({first: raise_unforeseen, second: send_interrupt})
            with pytest.raises(Unforeseen):
                use(client)
            assert left_open(all_sessions()) == [], (first, second)


# Python itself leaves a socket to the garbage collection if the signal comes while it connects.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("signals", [10, pytest.param(200, marks=pytest.mark.long)])
def test_a_signal_at_a_random_moment_leaves_nothing_open(client, all_sessions, signals):
    chance, interrupted = random.Random(signals), 0
    main = threading.main_thread().ident

    def interrupt(delay_s):
        threading.Event().wait(delay_s)
        signal.pthread_kill(main, signal.SIGINT)

    for number in range(signals):
        sender = threading.Thread(target=interrupt, args=(chance.uniform(0, 0.04),))
        try:
            sender.start()
            use(client)
            sender.join()
            threading.Event().wait(10)  # the signal ends this
        except KeyboardInterrupt:
            interrupted += 1
        sender.join()
        gc.collect()  # a context manager that was interrupted while entering cleans up when it is freed
        assert left_open(all_sessions()) == [], number
    assert interrupted == signals


# Logging that fails


class RaisingHandler(logging.Handler):
    def emit(self, record):
        raise RuntimeError("this handler fails")


def fails(*arguments, **options):
    raise RuntimeError("this part of logging fails")


@pytest.fixture(params=["handler", "filter", "record factory", "closed stderr"])
def logging_that_fails(request, monkeypatch):
    """The logging set-up of a user, in which every line raises."""
    root, logger = logging.getLogger(), logging.getLogger("whitney_loop")
    handler = RaisingHandler()
    if request.param == "filter":
        handler = logging.NullHandler()
        monkeypatch.setattr(logger, "filters", [lambda record: record.no_such_attribute])
    if request.param == "record factory":
        monkeypatch.setattr(logging, "_logRecordFactory", fails)
    if request.param == "closed stderr":
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
        handler = logging.StreamHandler(closed)
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.DEBUG)  # the embedded service logs every request
    logger.manager._clear_cache()  # of the levels that were asked for before
    with pytest.raises((RuntimeError, AttributeError, ValueError)):
        logger.error("it does raise")


def test_failing_logging_neither_stops_a_clean_up_nor_hides_the_error(logging_that_fails, client, all_sessions):
    with pytest.raises(ZeroDivisionError):
        use(client, ZeroDivisionError())
    assert len(all_sessions()) == 1 and left_open(all_sessions()) == []


def test_failing_logging_does_not_hide_the_error_if_the_clean_up_fails(logging_that_fails):
    script = [reply({"session_id": "ses-1"}), refusal(400, "no_close")]
    with ScriptedServer(*script) as server, pytest.raises(ZeroDivisionError):
        with training_session(WhitneyClient(server.base_url), provider="modal"):
            _ = 1 / 0


def test_failing_logging_does_not_stop_a_retry(logging_that_fails, pauses):
    with ScriptedServer(run(), drop, operation()) as server:
        assert WhitneyClient(server.base_url).run_operation("run-1", "optim_step", {}) == {"answer": 42}
    assert len(pauses) == 1


# The command


def test_the_close_command_cancels_what_runs_and_closes(service, client):
    session_id = client.create_session("modal")
    run_id = client.create_lora_run(session_id, model="byte-lm", rank=2)
    environment = os.environ | {"WHITNEY_API_KEY": service.api_key}
    command = [sys.executable, "-m", "whitney_loop", "close", session_id, "--base-url", service.base_url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"cancelled run {run_id}\nclosed session {session_id}\n")
    assert statuses(client, session_id) == ("closed", ["cancelled"])

    command[4] = "ses-unknown"
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1


@pytest.mark.parametrize("session_id", ["\udcff\udcfe", "", "ses-1\x1b[2J", "s" * 301])
def test_the_close_command_rejects_an_invalid_session_id_with_a_one_line_error(session_id):
    command = [sys.executable, "-m", "whitney_loop", "close", session_id, "--base-url", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: SESSION_ID is not a valid session id") and done.stderr.count("\n") == 1
