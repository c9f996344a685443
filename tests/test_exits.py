"""Every exit cleans up: what ends the loop comes before and after each exchange, and between any two lines."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fault_proxy import FaultProxy
from loop_in_process import EXAMPLES, left_open
from whitney_loop import WhitneyClient, lifecycle, lora_run, training_session
from whitney_loop.local import serve
from whitney_loop.transport import Transport

CYCLES = 1
SECOND_RUN = "never_saturates:opens_a_second_run"


class Ends(Exception):
    """An error that nobody foresaw."""


@pytest.fixture
def service(everything, tmp_path):
    with serve(tmp_path / "storage") as running:
        yield running


@pytest.fixture
def ends(monkeypatch):
    """``ends({n: how})``: do ``how()`` at the n-th point, each exchange having one before and one after it."""
    points = {}
    seen = []
    exchange = Transport.exchange

    def point():
        seen.append(None)
        if len(seen) in points:
            points[len(seen)]()

    def exchanged(transport, *arguments, **options):
        point()
        try:
            return exchange(transport, *arguments, **options)
        finally:
            point()

    monkeypatch.setattr(Transport, "exchange", exchanged)

    def arrange(what):
        points.clear()
        seen.clear()
        points.update(what)
        return seen

    return arrange


def raises(error):
    def act():
        raise error

    return act


def sends(number):
    return lambda: signal.raise_signal(number)


def check_the_end(code, summary, err, expected, sessions):
    assert code == expected, err
    assert left_open(sessions) == []
    assert summary is None or summary["status"] == ("failed" if code == 1 else summary["status"])
    if code == 0:
        assert summary["status"] == "succeeded"
    if code > 128:
        name = {129: "SIGHUP", 130: "Ctrl-C", 143: "SIGTERM"}[code]
        assert f"ended by {name}" in err and "Traceback" not in err
        assert summary is None or summary["status"] == f"ended by {name}"
    if code == 1:
        assert "nobody foresaw" in err.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code", "stride"),
    [
        (raises(Ends("nobody foresaw")), 1, 1),
        (sends(signal.SIGINT), 130, 1),
        (sends(signal.SIGTERM), 143, 3),
        (sends(signal.SIGHUP), 129, 10),
    ],
    ids=["exception", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_before_and_after_every_exchange_an_end_leaves_nothing_open(loop, ends, service, everything, how, code, stride):
    for n in range(1, count_points(loop, ends, service) + 1, stride):
        ends({n: how})
        check_the_end(*loop(service, service.base_url, CYCLES, build_loss=SECOND_RUN), code, everything())


def count_points(loop, ends, service):
    seen = ends({})
    code, _, err = loop(service, service.base_url, CYCLES, build_loss=SECOND_RUN)
    assert code == 0, err
    assert len(seen) >= 2 * 14
    return len(seen)


@pytest.mark.long
def test_two_ends_at_any_two_points_leave_nothing_open_and_the_first_is_the_one_that_is_seen(
    loop, ends, service, everything
):
    hows = [(raises(Ends("nobody foresaw")), 1), (sends(signal.SIGINT), 130), (sends(signal.SIGTERM), 143)]
    total = count_points(loop, ends, service)
    chance = random.Random(4)
    for _ in range(50):
        first, second = chance.randrange(1, total + 1), chance.randrange(1, 8)
        (how, code), (again, _) = chance.choice(hows), chance.choice(hows[1:])
        ends({first: how, first + second: again})
        check_the_end(*loop(service, service.base_url, CYCLES, build_loss=SECOND_RUN), code, everything())


@pytest.mark.long
def test_a_service_that_dies_at_any_exchange_is_reported_with_the_ids_and_the_command(loop, service, everything):
    done = named = 0
    for alive in range(40):
        passed = []

        def dead(method, path, passed=passed, alive=alive):
            passed.append(path)
            return len(passed) > alive

        with FaultProxy(service.base_url, rate=1, kinds=["drop request"], only=dead) as proxy:
            code, summary, err = loop(service, proxy.base_url, CYCLES, submit_timeout_s=0.05)
        if code == 0:
            done = alive
            break
        assert code == 1 and "Traceback" not in err
        assert err.splitlines()[-1].startswith("error: no usable answer")
        # A session of which no id came can not be named; of the others, each that is open is, with its runs.
        for name in ("session_id", "run_id"):
            if summary and summary[name] in left_open(everything()):
                named += 1
                assert f"may still be open: {name[:-3]} {summary[name]}" in err
                assert f"python -m whitney_loop close {summary['session_id']} --base-url {proxy.base_url}" in err
    assert done >= 12 and named > 12


# Between any two lines


class Interrupted:
    """Raise KeyboardInterrupt when the n-th line of these files is about to run, for each n of ``numbers``."""

    def __init__(self, numbers, files):
        self.left, self.files = sorted(numbers), files
        self.lines = 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.called)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def called(self, frame, event, argument):
        return self.traced if Path(frame.f_code.co_filename) in self.files else None

    def traced(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.left and self.lines == self.left[0]:
                self.left.pop(0)
                self.trace_again(frame)
                raise KeyboardInterrupt
        return self.traced

    def trace_again(self, frame):
        """Python ends the tracing where a tracer raises; where more is to come, the frames outside go on with it."""
        # What is set here is unset by the raise, so the next call of anything starts it again by its profile.
        if self.left:
            sys.setprofile(self.resume)

    def resume(self, frame, event, argument):
        sys.setprofile(None)
        sys.settrace(self.called)
        while frame is not None:
            frame.f_trace = self.called(frame, "call", None)
            frame = frame.f_back


def use(client, error):
    with training_session(client, provider="modal") as session_id:
        with lora_run(client, session_id, model="byte-lm", rank=1) as run_id:
            client.run_operation(run_id, "save_weights_for_sampler", {})
            if error:
                raise error


LIFECYCLE = {Path(lifecycle.__file__)}
MANAGERS = LIFECYCLE | {Path(contextlib.__file__)}  # an interrupt between a manager's end of entry and its block


def use_interrupted(client, error, numbers, files):
    """Use, interrupted at these lines; how many lines there were, and how many interrupts."""
    with Interrupted(numbers, files) as interrupted:
        try:
            use(client, error)
        except KeyboardInterrupt:
            pass
        except Ends as raised:
            assert raised is error
    return interrupted.lines, len(numbers) - len(interrupted.left)


@pytest.mark.long
@pytest.mark.parametrize("files", [LIFECYCLE, MANAGERS], ids=["lifecycle", "contextlib as well"])
@pytest.mark.parametrize("error", [None, Ends("first")], ids=["ends well", "raises"])
def test_an_interrupt_between_any_two_lines_of_the_lifecycles_leaves_nothing_open(service, everything, error, files):
    client = WhitneyClient(service.base_url, service.api_key)
    n = 1
    while use_interrupted(client, error, [n], files)[1]:
        assert left_open(everything()) == [], n
        n += 1
    assert n > 40


@pytest.mark.long
def test_two_interrupts_between_any_lines_leave_nothing_open(service, everything):
    client = WhitneyClient(service.base_url, service.api_key)
    chance, twice = random.Random(5), 0
    for _ in range(100):
        first, error = chance.randrange(1, 60), chance.choice([None, Ends("first")])
        second = first + chance.randrange(1, 30)
        twice += use_interrupted(client, error, [first, second], LIFECYCLE)[1] == 2
        assert left_open(everything()) == [], (first, second, error)
    assert twice > 50


def test_an_interrupt_that_comes_out_in_place_of_the_first_error_does_not_hide_it(service):
    client = WhitneyClient(service.base_url, service.api_key)
    first = Ends("first")
    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            use(client, first)
        finally:  # between two managers
            raise KeyboardInterrupt
    assert lifecycle.first_error(caught.value) is first
    assert lifecycle.first_error(first) is first


def test_an_interrupt_in_the_handling_of_some_other_error_is_itself_the_first():
    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            raise Ends("handled, and no end of a block")
        except Ends:
            raise KeyboardInterrupt from None
    assert lifecycle.first_error(caught.value) is caught.value
    assert isinstance(lifecycle.first_error(caught.value, Ends), Ends)


def test_a_signal_that_comes_inside_a_finalizer_where_python_drops_what_is_raised_ends_the_loop_all_the_same(
    loop, service, everything
):
    build_loss = "never_saturates:is_interrupted_in_a_finalizer"
    code, summary, err = loop(service, service.base_url, 1000, build_loss=build_loss)
    check_the_end(code, summary, err, 143, everything())
    assert "ignored" not in err


# Real processes

# The loop as it is, but giving up a request after a second, so that a service that is gone does not cost minutes.
IMPATIENT = """
import functools, sys
sys.path.insert(0, {examples!r})
import loop_support
loop_support.WhitneyClient = functools.partial(loop_support.WhitneyClient, submit_timeout_s=1.0)
import rl_loop
sys.exit(rl_loop.main(sys.argv[1:]))
"""


def start(folder, base_url, key, build_loss="build_loss"):
    command = [sys.executable, "-c", IMPATIENT.format(examples=str(EXAMPLES)), "--build-loss"]
    command += [f"never_saturates:{build_loss}", "--model", "byte-lm", "--sample-json", "sample.json"]
    command += ["--lora-rank", "1", "--cycles", "100000", "--seed", "1", "--base-url", base_url]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | {"WHITNEY_API_KEY": key}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_real_signals_at_random_moments_clean_up_and_give_their_exit_code(loop, service, everything, tmp_path, seed):
    chance = random.Random(seed)
    number, code = chance.choice([(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    with start(tmp_path, service.base_url, service.api_key, "opens_a_second_run") as process:
        said = process.stderr.readline() + process.stderr.readline()  # where it trains, and the first cycle
        threading.Event().wait(chance.uniform(0, 0.05))
        process.send_signal(number)
        if seed % 2:  # once the first was seen: of two that wait, Python takes the one of the lower number first
            said += next(line for line in process.stderr if "cleaning up" in line)
            threading.Event().wait(chance.uniform(0, 0.02))
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, said + err
    assert "Traceback" not in err and json.loads(out)["session_id"]
    assert left_open(everything()) == []


def test_a_signal_that_was_ignored_when_the_loop_began_as_of_nohup_stays_ignored(loop, service, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a process is started with what its parent ignores
    try:
        process = start(tmp_path, service.base_url, service.api_key)
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        process.stderr.readline()
        process.stderr.readline()
        process.send_signal(signal.SIGHUP)
        assert all("cycle" in process.stderr.readline() for _ in range(20))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "SIGHUP" not in err


def test_a_service_process_that_is_killed_leaves_the_ids_and_the_command(loop, tmp_path):
    environment = os.environ | {"WHITNEY_API_KEY": "key-of-the-test"}
    command = [sys.executable, "-u", "-m", "whitney_loop.local", "--port", "0", "--storage", str(tmp_path / "s")]
    served = subprocess.Popen(command, cwd=EXAMPLES.parent, env=environment, text=True, stdout=subprocess.PIPE)
    with served:
        base_url = next(line for line in served.stdout if "WHITNEY_BASE_URL=" in line).strip().partition("=")[2]
        with start(tmp_path, base_url, "key-of-the-test") as process:
            said = process.stderr.readline() + process.stderr.readline()
            served.kill()
            out, err = process.communicate(timeout=60)
    summary = json.loads(out)
    assert process.returncode == 1 and summary["status"] == "failed", said + err
    assert f"may still be open: run {summary['run_id']}" in err
    assert f"may still be open: session {summary['session_id']}" in err
    assert f"python -m whitney_loop close {summary['session_id']} --base-url {base_url}" in err
    assert "error: no usable answer" in err.splitlines()[-1] and "Traceback" not in err
