"""The output of a loop; and a stream that fails does not change how the loop ends."""

import json
import os
import pty
import subprocess
import sys

import pytest

from loop_in_process import left_open
from processes import read_until, start_impatient_loop
from scripted_server import OFFER, ScriptedServer, operation, reply, run
from whitney_loop.errors import RequestRejected
from whitney_loop.loop import Request
from whitney_loop.loop.report import Summary, formatted, print_summary, say, show_error, visible


@pytest.fixture
def started(user_module, service, tmp_path):
    """``started(...)``: a loop of 20 cycles, on the service, with these options of ``start_impatient_loop``."""

    def start(**options):
        return start_impatient_loop(tmp_path, service, **({"cycles": 20} | options))

    return start


def check_that_it_trained(process, out):
    assert process.returncode == 0
    assert json.loads(out)["status"] == "succeeded" and json.loads(out)["cycles_done"] == 20


def test_a_closed_stderr_loses_the_progress_only(started):
    with started(shell=["sh", "-c", 'exec "$@" 2>&-', "sh"]) as process:
        out, _ = process.communicate(timeout=60)
    check_that_it_trained(process, out)


def test_a_reader_of_stderr_that_leaves_loses_the_progress_only(started):
    with started() as process:
        read_until(process.stderr, "cycle 0")
        process.stderr.close()
        out = process.stdout.read()
    check_that_it_trained(process, out)


def test_a_full_disk_under_stderr_loses_the_progress_only(started):
    with open("/dev/full", "w") as full, started(stderr=full) as process:  # noqa: PTH123
        out, _ = process.communicate(timeout=60)
    check_that_it_trained(process, out)


def test_a_reader_of_both_streams_that_leaves_as_head_does_changes_no_exit_code(started, all_sessions):
    with started(stderr=subprocess.STDOUT) as process:
        read_until(process.stdout, "cycle 0")
        process.stdout.close()
    assert process.returncode == 0
    assert [run["status"] for session in all_sessions() for run in session["runs"]] == ["finished"]


def test_a_summary_that_cannot_be_written_is_told_on_stderr_and_changes_no_exit_code(started):
    with open("/dev/full", "w") as full, started(stdout=full) as process:  # noqa: PTH123
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "warning: the summary could not be written to stdout: [Errno 28]" in err.splitlines()[-1]


def test_a_terminal_that_is_closed_ends_the_loop_with_its_summary(started, all_sessions, tmp_path):
    ours, theirs = pty.openpty()
    as_terminal = [sys.executable, "-c", TAKES_THE_TERMINAL]
    with (tmp_path / "out").open("w") as out:
        process = started(shell=as_terminal, cycles=100_000, stdin=theirs, stderr=theirs, stdout=out)
    os.close(theirs)
    with process:
        with open(ours, errors="replace") as terminal:  # noqa: PTH123
            read_until(terminal, "cycle 0")
        process.wait(60)
    assert process.returncode == 129
    assert json.loads((tmp_path / "out").read_text())["status"] == "ended by SIGHUP"
    assert left_open(all_sessions()) == []


TAKES_THE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Odd:
    """An object in place of a stream, without a stream's methods."""


@pytest.mark.parametrize("stream", [None, Odd()])
def test_streams_that_are_missing_or_odd_do_no_harm(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    say("a line")
    print_summary(Summary())
    for replaced in {sys.stderr, sys.stdout} - {stream}:
        replaced.close()


def test_an_encoding_that_lacks_a_character_shows_it_escaped(started):
    with started(variables={"PYTHONIOENCODING": "ascii"}, build_loss="fäils") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and "has no 'f\\xe4ils'" in err


def test_control_characters_are_shown_and_never_obeyed():
    assert visible("a\x1b[2J\r\n\u2028\u202e b é 漢") == r"a\x1b[2J\r\n\u2028\u202e b é 漢"


def test_a_service_can_forge_no_line_and_control_no_terminal(loop):
    forged = "\x1b[2J\nerror: forged"
    ids = {"session_id": "ses-1", "run_id": "run-1", "next_seq_id": 1, "note": f"note{forged}", "status": "active"}
    failed = operation("failed", kind="save_weights_for_sampler", error={"code": "x", "message": f"failed{forged}"})
    script = [OFFER, *[reply(ids)] * 4, failed, run("cancelled"), run("cancelled")]
    script += [reply({"session_id": "ses-1", "status": "closed"})] * 2

    with ScriptedServer(*script) as server:
        code, _, err = loop(server, 1)
    assert code == 1
    assert r"note\x1b[2J\nerror: forged" in err and r"failed\x1b[2J\nerror: forged" in err
    assert "\x1b" not in err and not any(line.startswith("error: forged") for line in err.splitlines())


def test_metrics_are_shown_short_and_on_one_line():
    assert formatted({"loss": 0.123456, "none": None, "text": "two\nlines"}) == "loss 0.1235  text two lines"


RAISES = """
import asyncio

def gives_up(*arguments):
    raise {error}

def gives_up_at_the_end(sample, cycle, request, ctx):
    ctx.resources.callback(gives_up)
    return build_loss(sample, cycle, request, ctx)
"""


@pytest.mark.parametrize("error", ["LookupError", "asyncio.CancelledError", "GeneratorExit", "SystemExit"])
@pytest.mark.parametrize("name", ["gives_up", "gives_up_at_the_end"])
def test_an_error_of_the_users_code_is_shown_with_its_own_traceback(
    loop, service, all_sessions, user_module, error, name
):
    user_module(RAISES.format(error=error))
    code, summary, err = loop(service, 1, build_loss=f"never_saturates:{name}")
    assert left_open(all_sessions()) == []
    assert code == 1 and summary["status"] == "failed"
    kind = error.rpartition(".")[2]
    assert err.splitlines()[-1] == f"error: {summary['error']}" and kind in summary["error"]
    assert "in gives_up\n" in err and "in _call\n" not in err
    assert "CallableError" not in err and "cleaning up" not in err


@pytest.mark.parametrize(
    ("status", "begin"), [(422, "error: p.jsonl:7: no such token ["), (401, "error: no such token [")]
)
def test_an_error_about_the_content_of_a_request_begins_with_its_file_and_line(capsys, status, begin):
    error = RequestRejected("no such token", outcome="rejected", status=status)
    error.index, error.payload = 1, Request({}, "p.jsonl:7")
    show_error(error)
    assert capsys.readouterr().err.startswith(begin)
