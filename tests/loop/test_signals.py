"""Signals at any moment, and user code that swallows exceptions, starts processes, or leaves threads."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loop_in_process import left_open
from loop_runs import adapter_of
from processes import read_until, start_impatient_loop
from whitney_loop import WhitneyClient
from whitney_loop.local.run import Run

SWALLOWS = """
import signal

class RaisesWhenFreed:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def is_interrupted_in_a_finalizer(sample, cycle, request, ctx):
    ctx.state["freed"] = RaisesWhenFreed() if cycle == 0 else None
    return build_loss(sample, cycle, request, ctx)

def swallows_everything(sample, cycle, request, ctx):
    try:
        signal.raise_signal(signal.SIGINT)
    except:
        pass
    return build_loss(sample, cycle, request, ctx)

def replaces_it(sample, cycle, request, ctx):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        raise RuntimeError("release unlocked lock")
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops it, and says so
@pytest.mark.parametrize(
    ("name", "code"), [("is_interrupted_in_a_finalizer", 143), ("swallows_everything", 130), ("replaces_it", 143)]
)
def test_a_signal_whose_exception_is_swallowed_or_replaced_ends_the_loop_all_the_same(
    loop, service, all_sessions, user_module, name, code
):
    user_module(SWALLOWS)
    ended, summary, err = loop(service, 1000, build_loss=f"never_saturates:{name}")
    assert ended == code and summary["cycles_done"] < 2, err
    assert left_open(all_sessions()) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_signal_at_a_random_moment_cleans_up_and_gives_its_exit_code(
    user_module, service, all_sessions, tmp_path, seed
):
    chance = random.Random(seed)
    number, *codes = [(signal.SIGINT, 130), (signal.SIGTERM, 143)][seed // 2]
    with start_impatient_loop(tmp_path, service, build_loss="opens_a_second_run") as process:
        said = read_until(process.stderr, "cycle 0")
        threading.Event().wait(chance.uniform(0, 0.05))
        process.send_signal(number)
        if seed % 2:  # after the first was handled: of two pending signals, Python handles the lower number first
            said += read_until(process.stderr, "closing what is open")
            threading.Event().wait(chance.uniform(0, 0.02))
            process.send_signal(signal.SIGINT)
            codes.append(-signal.SIGINT)  # if it came after the summary
        out, err = process.communicate(timeout=60)
    assert process.returncode in codes, said + err
    assert "Traceback" not in err and json.loads(out)["session_id"]
    assert left_open(all_sessions()) == []


def test_a_signal_that_was_ignored_at_the_start_as_by_nohup_stays_ignored(user_module, service, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a process is started with what its parent ignores
    try:
        process = start_impatient_loop(tmp_path, service)
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        read_until(process.stderr, "cycle 0")
        process.send_signal(signal.SIGHUP)
        read_until(process.stderr, "cycle 20")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "SIGHUP" not in err


HANGS = """
import threading
from concurrent.futures import ThreadPoolExecutor

def hangs_in_a_thread(sample, cycle, request, ctx):
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    return build_loss(sample, cycle, request, ctx)
"""


def test_a_signal_after_the_summary_ends_a_process_whose_threads_never_end(user_module, service, tmp_path):
    user_module(HANGS)
    loop = start_impatient_loop(tmp_path, service, build_loss="hangs_in_a_thread", cycles=1)
    with loop as process:
        assert json.loads(process.stdout.readline())["status"] == "succeeded"
        while process.poll() is None:  # one that comes while the summary is being printed is ignored
            process.terminate()
            threading.Event().wait(0.05)
    assert process.returncode == -signal.SIGTERM


FORKS = """
import multiprocessing, os, sys

fork = multiprocessing.get_context("fork")

def runs_for_ever(started):
    while True:
        try:
            while True:
                started.set()
        except:
            pass

def terminates_a_stubborn_grader(sample, cycle, request, ctx):
    started = fork.Event()
    grader = fork.Process(target=runs_for_ever, args=(started,))
    grader.start()
    started.wait()
    grader.terminate()
    grader.join()
    ctx.metrics["exitcode"] = grader.exitcode
    return build_loss(sample, cycle, request, ctx)

def grades_in_a_pool(sample, cycle, request, ctx):
    with fork.Pool(2) as pool:
        ctx.metrics["graded"] = sum(pool.map(bool, sample["sequences"]))
    return build_loss(sample, cycle, request, ctx)

def forks(leave, sample, cycle, request, ctx):
    child = os.fork()
    if child == 0:
        leave()
        return build_loss(sample, cycle, request, ctx)
    ctx.metrics["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return build_loss(sample, cycle, request, ctx)

def fails_in_a_child(*arguments):
    return forks(lambda: [][0], *arguments)

def goes_on_in_a_child(*arguments):
    return forks(lambda: None, *arguments)

def exits_in_a_child(*arguments):
    return forks(lambda: sys.exit(3), *arguments)
"""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("terminates_a_stubborn_grader", "exitcode -15"),
        ("grades_in_a_pool", "graded 2"),
        ("fails_in_a_child", "child 1"),
        ("exits_in_a_child", "child 3"),
        ("goes_on_in_a_child", "child 1"),
    ],
)
def test_a_process_that_the_users_code_forks_ends_by_itself_and_the_loop_goes_on(
    user_module, service, all_sessions, tmp_path, name, shown
):
    user_module(FORKS)
    with start_impatient_loop(tmp_path, service, build_loss=name, cycles=2) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and json.loads(out)["cycles_done"] == 2, err
    assert err.count(shown) == 2
    assert err.count("Traceback") == (2 if name == "fails_in_a_child" else 0)
    assert [run["status"] for session in all_sessions() for run in session["runs"]] == ["finished"]
    assert left_open(all_sessions()) == []


LEAVES_A_GRADER = """
import multiprocessing, os, signal, time

def sleeps(pipe):
    pipe.recv()

def leaves_a_grader_and_is_killed(*arguments):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    context.Process(target=sleeps, args=(theirs,)).start()
    open("grader", "w").write(str(multiprocessing.active_children()[0].pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_that_the_worker_of_a_killed_loop_holds_are_refused(loop, user_module, service, tmp_path):
    user_module(LEAVES_A_GRADER)
    options = ["--metrics", "m.jsonl", "--journal", "journal.json"]
    name = "leaves_a_grader_and_is_killed"
    devnull = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # the worker would hold pipes open
    start_impatient_loop(tmp_path, service, *options, build_loss=name, **devnull).wait(60)
    grader = int((tmp_path / "grader").read_text())
    try:
        code, _, err = loop(service, 1, "--metrics", "m.jsonl")
        assert code == 2 and "another loop is writing it, or a process that such a loop started still runs" in err
        code, _, err = loop(service, 1, "--journal", "journal.json", "--recover")
        assert code == 2 and "is held by a loop that still runs, or by a process that it started" in err
    finally:
        os.kill(grader, signal.SIGKILL)


@pytest.fixture
def steps(monkeypatch):
    """The seq_ids of the optimizer steps that the service has taken."""
    taken = set()
    submit = Run.submit

    def noted(run, seq_id, kind, *rest):
        operation = submit(run, seq_id, kind, *rest)
        taken.update([seq_id] if kind == "optim_step" else [])
        return operation

    monkeypatch.setattr(Run, "submit", noted)
    return taken


@pytest.mark.long
def test_an_interrupt_at_any_exchange_saves_the_whole_cycles_unless_the_next_has_made_a_step(
    loop, service, interrupt_at, all_sessions, steps
):
    """The client cannot know if the service has taken the operation that was interrupted."""
    seen = interrupt_at({})
    expected = adapter_of(loop(service, 2)[1])
    saved = 0
    for n in range(1, len(seen) + 1):
        steps.clear()
        interrupt_at({n: lambda: signal.raise_signal(signal.SIGINT)})
        code, summary, err = loop(service, 2)
        assert code == 130 and left_open(all_sessions()) == [], err
        if summary is None or summary["cycles_done"] != 1:
            continue  # nothing is trained yet, or everything is
        assert (summary["state_id"] is None) == (len(steps) == 2), (n, err)
        if summary["state_id"] is None:
            assert "no state is saved: cycle 1 has made an optimizer step" in err
            continue
        saved += 1
        interrupt_at({})
        again = ("--resume-from", summary["state_id"], "--first-cycle", "1")
        assert adapter_of(loop(service, 1, *again)[1]) == expected, n
    assert saved >= 10


def test_the_state_is_saved_although_an_interrupted_operation_arrives_late(
    loop, service, interrupt_at, all_sessions, monkeypatch
):
    """It arrives after the client asked the run about it, and takes the seq_id that the last save was to have."""
    submit, points = Run.submit, []

    def noted(run, seq_id, kind, *rest):
        points.extend([len(seen)] if kind == "forward_backward" else [])
        return submit(run, seq_id, kind, *rest)

    def arrive():
        run_id = all_sessions()[-1]["runs"][0]["run_id"]
        client = WhitneyClient(service.base_url, service.api_key)
        client.run_operation(run_id, "save_weights_for_sampler", {})  # whatever it was

    monkeypatch.setattr(Run, "submit", noted)
    seen = interrupt_at({})
    expected = adapter_of(loop(service, 2)[1])
    before_it, after_the_question = points[1], points[1] + 2
    interrupt_at({before_it: lambda: signal.raise_signal(signal.SIGINT), after_the_question: arrive})
    code, summary, err = loop(service, 2)
    assert code == 130 and summary["state_id"] and summary["operations"]["forward_backward"] == 2, err
    interrupt_at({})
    again = ("--resume-from", summary["state_id"], "--first-cycle", "1")
    assert adapter_of(loop(service, 1, *again)[1]) == expected


def test_a_signal_that_reaches_a_forked_process_at_its_first_moment_ends_it():
    """Hooks of a fork run in their order in the child, so that the first one is earlier than the loop's."""
    code = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from whitney_loop.loop.signals import handle_signals
handle_signals()
child = os.fork()
if child == 0:
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{signal.SIGTERM:d}\n"
