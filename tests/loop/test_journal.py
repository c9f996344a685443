"""The journal: after a loop was killed, --recover closes what it left open."""

import errno
import json
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from fault_proxy import FaultProxy
from loop_in_process import left_open
from processes import read_until, start_impatient_loop
from scripted_server import OFFER, ScriptedServer, reply, run
from whitney_loop import WhitneyClient
from whitney_loop.local.service import Service
from whitney_loop.loop import journal as journal_module
from whitney_loop.loop.journal import Journal, recover_session

JOURNAL = ("--journal", "journal.json")
RECOVER = (*JOURNAL, "--recover")
EXCHANGES = 24  # of a loop of one cycle that opens a second run, and two more


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal.json"


def facts_of(journal):
    """Return the facts of all its lines."""
    facts = {}
    for line in journal.read_text().splitlines():
        facts |= json.loads(line)
    return facts


# Kills


class KilledAt:
    """Kill the process at its n-th request to a path with this ending; this and all later requests meet a fault."""

    def __init__(self, n, ending=""):
        self.n, self.ending, self.process, self.started = n, ending, None, threading.Event()
        self.come = 0

    def __call__(self, method, path):
        self.started.wait(10)
        self.come += path.endswith(self.ending)
        if self.come == self.n:
            self.process.kill()
        return self.come >= self.n


def kill_loop(service, folder, at, kind):
    """Run a loop until it is killed, and replace the proxy's address in its journal by that of the service."""
    with FaultProxy(service, rate=1, kinds=[kind], only=at) as proxy:
        at.process = start_impatient_loop(folder, proxy, *JOURNAL, build_loss="opens_a_second_run", cycles=1)
        at.started.set()
        at.process.communicate(timeout=60)
    journal = folder / "journal.json"
    if journal.exists():
        journal.write_text(journal.read_text().replace(proxy.base_url, service.base_url))
    return at.process.returncode


def check_that_recovery_closes_everything(loop, service, all_sessions, journal):
    more = RECOVER if journal.exists() else JOURNAL
    code, _, err = loop(service, 1, *more, submit_timeout_s=5.0, exchange_timeout_s=5.0)
    assert code == 0, err
    assert left_open(all_sessions()) == [], err
    assert not journal.exists()


@pytest.mark.parametrize("kind", ["drop request", "drop reply"])
@pytest.mark.parametrize("stride", [12, pytest.param(1, marks=pytest.mark.long)])
def test_after_a_kill_at_any_exchange_recovery_closes_everything(
    loop, service, all_sessions, tmp_path, journal, kind, stride
):
    left = 0
    for n in range(2, EXCHANGES, stride):
        if kill_loop(service, tmp_path, KilledAt(n), kind) == 0:
            break  # it ended before its n-th exchange
        if left_open(all_sessions()):
            assert service.api_key not in journal.read_text()
            left += 1
        check_that_recovery_closes_everything(loop, service, all_sessions, journal)
    assert n > 20 - stride and left > n // stride / 2


@pytest.mark.parametrize(("path", "left"), [("/sessions", 1), ("/runs", 2)])
def test_recovery_closes_what_was_created_without_an_answer(loop, service, all_sessions, tmp_path, journal, path, left):
    assert kill_loop(service, tmp_path, KilledAt(1, path), "drop reply") == -9
    assert len(left_open(all_sessions())) == left
    assert ("session_id" in journal.read_text().partition("\n")[2]) == (path == "/runs")
    check_that_recovery_closes_everything(loop, service, all_sessions, journal)


@pytest.mark.parametrize("delay", [0.2, 0.3, 0.4])
def test_after_a_kill_at_any_moment_recovery_closes_everything(
    loop, user_module, service, all_sessions, tmp_path, journal, delay
):
    process = start_impatient_loop(tmp_path, service, *JOURNAL)
    threading.Event().wait(delay)
    process.kill()
    process.communicate(timeout=60)
    check_that_recovery_closes_everything(loop, service, all_sessions, journal)


# What the journal holds, and when it goes


def test_a_closed_session_leaves_no_journal(loop, service, journal):
    assert loop(service, 1, *JOURNAL)[0] == 0
    assert not journal.exists()
    assert loop(service, 1, *JOURNAL, build_loss="never_saturates:fails")[0] == 1
    assert not journal.exists()


def test_a_journal_says_where_and_what_and_never_the_key(loop, service, tmp_path):
    code, summary, _ = loop(service, 1, *JOURNAL, build_loss="never_saturates:copies_the_journal")
    assert code == 0
    facts = facts_of(tmp_path / "copy.json")
    assert (facts["base_url"], facts["session_id"]) == (service.base_url, summary["session_id"])
    assert service.api_key not in (tmp_path / "copy.json").read_text()
    assert not [path for path in tmp_path.iterdir() if "journal" in path.name]


def test_a_session_that_could_not_be_closed_keeps_its_journal(loop, service, journal):
    with FaultProxy(service, rate=1, kinds=["503"], only=lambda _, path: path.endswith("/close")) as proxy:
        assert loop(proxy, 1, *JOURNAL, submit_timeout_s=1.0)[0] == 1
    session_id = facts_of(journal)["session_id"]
    assert WhitneyClient(service.base_url, service.api_key).session(session_id)["status"] == "open"


def test_the_journal_is_on_the_disk_before_the_session_is_asked_for(loop, service, journal, monkeypatch):
    seen = []
    create_session, fsync = Service.create_session, os.fsync

    def synced(number):
        fsync(number)
        if journal.exists() and os.path.samestat(os.fstat(number), journal.stat()):  # the service syncs its own files
            seen.append(facts_of(journal)["session_id"])

    def asked(of_service, *arguments):
        seen.append("asked")
        return create_session(of_service, *arguments)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Service, "create_session", asked)
    code, summary, _ = loop(service, 1, *JOURNAL)
    assert code == 0 and seen == [None, "asked", summary["session_id"]]


def test_a_journal_that_cannot_be_begun_stops_the_start(loop, service, all_sessions, journal, monkeypatch):
    def fails(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    code, _, err = loop(service, 1, *JOURNAL)
    assert code == 2 and f"--journal {journal} cannot be written: No space left on device" in err
    assert not journal.exists() and all_sessions() == []


def test_an_id_that_cannot_be_noted_is_reported_only(capsys):
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        Journal("key", full).note_session("ses-1")
    assert "warning: --journal /dev/full could not be written: No space left on device" in capsys.readouterr().err


TAKES_ITS_PLACE = """
import os

def takes_its_place(sample, cycle, request, ctx):
    shutil.rmtree("kept")
    {how}
    raise LookupError("as it was told")
"""


@pytest.mark.parametrize("how", ["os.makedirs('kept/journal.json')", "open('kept', 'x').close()"])
def test_a_file_that_took_the_journals_place_is_left_alone_and_hides_no_error(
    loop, service, all_sessions, user_module, tmp_path, how
):
    (tmp_path / "kept").mkdir()
    user_module(TAKES_ITS_PLACE.format(how=how))
    name = "never_saturates:takes_its_place"
    code, summary, err = loop(service, 1, "--journal", "kept/journal.json", build_loss=name)
    assert code == 1 and left_open(all_sessions()) == []
    assert err.splitlines()[-1] == f"error: {summary['error']}" and "as it was told" in summary["error"]
    assert (tmp_path / "kept").exists()


CHANGES_FOLDER = """
import os
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
"""


def test_files_of_the_loop_stay_where_they_are_if_the_users_code_changes_the_folder(
    loop, service, user_module, tmp_path, journal
):
    request = tmp_path / "sample.json"
    user_module(CHANGES_FOLDER)
    more = ("--metrics", "m.jsonl", "--sample-json", str(request))
    code, _, err = loop(service, 1, *JOURNAL, *more)
    assert code == 0, err
    assert not journal.exists() and (tmp_path / "m.jsonl").stat().st_size
    assert [*(tmp_path / "elsewhere").iterdir()] == []


# Starts that find a journal


def leave_journal(journal, service, **fields):
    """A session, and the journal of a loop that was killed after it had opened it."""
    key = str(uuid.uuid4())
    session_id = WhitneyClient(service.base_url, service.api_key).create_session("modal", idempotency_key=key)
    facts = {"base_url": service.base_url, "embedded": False, "provider": "modal", "session_key": key}
    journal.write_text(json.dumps(facts | {"session_id": session_id} | fields) + "\n")
    return session_id


def test_a_start_that_finds_a_journal_stops_and_says_what_it_found(loop, service, all_sessions, journal):
    session_id = leave_journal(journal, service)
    code, summary, err = loop(service, 1, *JOURNAL)
    assert (code, summary) == (2, None)
    assert session_id in err and service.base_url in err and "--recover" in err.splitlines()[-1]
    assert len(all_sessions()) == 1 and journal.exists()


def test_recovery_cancels_closes_and_polls_until_the_run_has_ended(loop, service, journal):
    listed = reply({"session_id": "ses-1", "status": "open", "runs": [{"run_id": "run-1", "status": "active"}]})
    closed = reply({"session_id": "ses-1", "status": "closed"})
    with ScriptedServer(OFFER, listed, run("cancelling"), closed, run("cancelling"), run("cancelled")) as server:
        leave_journal(journal, service, base_url=server.base_url, session_id="ses-1")
        _, _, err = loop(server, 1, *RECOVER)
    asked = [f"{request.method} {request.path.removeprefix('/v1/training')}" for request in server.requests]
    polls = ["GET /runs/run-1"] * 2
    assert asked[1:6] == ["GET /sessions/ses-1", "POST /runs/run-1/cancel", "POST /sessions/ses-1/close", *polls]
    assert ": closed; runs cancelled: run-1" in err and not journal.exists()


@pytest.mark.parametrize("is_left", [True, False], ids=["recovering", "beginning"])
def test_only_one_of_two_loops_that_start_at_once_trains_and_the_other_creates_nothing(
    user_module, service, all_sessions, tmp_path, journal, monkeypatch, is_left
):
    both_have_asked = threading.Barrier(2)
    one_has_ended = threading.Event()
    capabilities, create_session = Service.capabilities, Service.create_session
    if is_left:
        leave_journal(journal, service)

    def asked_by_both(of_service):
        both_have_asked.wait(30)
        return capabilities(of_service)

    def after_the_end_of_one(of_service, *arguments):
        one_has_ended.wait(10)  # if neither loop stops, both train after 10 s, and the test fails
        return create_session(of_service, *arguments)

    monkeypatch.setattr(Service, "capabilities", asked_by_both)
    monkeypatch.setattr(Service, "create_session", after_the_end_of_one)

    def ended(process):
        _, err = process.communicate(timeout=60)
        one_has_ended.set()
        return process.returncode, err

    more = RECOVER if is_left else JOURNAL
    both = [start_impatient_loop(tmp_path, service, *more, cycles=1) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        (code, err), (code_of_other, said) = sorted(pool.map(ended, both))
    assert (code, code_of_other) == (0, 2), err + said
    assert said.splitlines()[-1].startswith(f"error: --journal {journal} "), said
    assert "Traceback" not in said
    assert len(all_sessions()) == 1 + is_left and left_open(all_sessions()) == []
    assert not journal.exists()


def test_recovery_refuses_the_journal_of_a_loop_that_still_runs(
    loop, user_module, service, all_sessions, tmp_path, journal
):
    with start_impatient_loop(tmp_path, service, *JOURNAL) as process:
        read_until(process.stderr, "cycle 0")
        code, _, err = loop(service, 1, *RECOVER)
        assert code == 2 and f"--journal {journal} is held by a loop that still runs" in err
        assert len(left_open(all_sessions())) == 2  # its session and its run
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143 and not journal.exists()


def test_a_metrics_file_in_use_stops_a_start_before_it_recovers(
    loop, user_module, service, all_sessions, tmp_path, journal
):
    session_id = leave_journal(journal, service)
    with start_impatient_loop(tmp_path, service, "--metrics", "m.jsonl") as process:
        read_until(process.stderr, "cycle 0")
        code, _, err = loop(service, 1, *RECOVER, "--metrics", "m.jsonl")
        process.terminate()
        process.communicate(timeout=60)
    assert code == 2 and "another loop is writing it" in err
    assert left_open(all_sessions()) == [session_id] and journal.exists()


def test_recovery_removes_only_the_file_that_it_has_read(service, journal, monkeypatch):
    def replaced(client, session_id):
        journal.unlink()
        journal.write_text("the next loop's")
        return []

    leave_journal(journal, service)
    monkeypatch.setattr(journal_module, "close_everything", replaced)
    recover_session(journal, WhitneyClient(service.base_url, service.api_key))
    assert journal.read_text() == "the next loop's"


def test_a_journal_that_recovery_took_before_it_was_locked_stops_its_loop(
    loop, service, all_sessions, journal, monkeypatch
):
    def taken(file):
        journal.unlink()
        return True

    monkeypatch.setattr(journal_module, "lock", taken)
    code, _, err = loop(service, 1, *JOURNAL)
    assert code == 2 and "was taken by another loop that started at the same time" in err
    assert all_sessions() == []


def test_an_empty_journal_is_of_a_loop_that_had_created_nothing(loop, service, all_sessions, journal):
    journal.touch()  # of a loop that was killed between creating and writing it
    code, _, err = loop(service, 1, *JOURNAL)
    assert code == 2 and "is empty: its loop had created nothing" in err
    assert all_sessions() == [] and journal.exists()
    code, _, err = loop(service, 1, *RECOVER)
    assert code == 0 and "nothing to recover" in err and len(all_sessions()) == 1
    assert not journal.exists()


def test_a_session_whose_id_never_came_is_found_by_the_key_of_the_journal(loop, service, all_sessions, journal):
    leave_journal(journal, service, session_id=None)
    code, _, err = loop(service, 1, *RECOVER)
    assert code == 0 and len(all_sessions()) == 2 and left_open(all_sessions()) == [], err


def test_a_second_line_that_was_cut_off_counts_as_missing(loop, service, all_sessions, journal):
    leave_journal(journal, service, session_id=None)
    with journal.open("a") as file:
        file.write('{"session_id": "ses-')
    code, _, err = loop(service, 1, *RECOVER)
    assert code == 0 and len(all_sessions()) == 2 and left_open(all_sessions()) == [], err


def test_a_journal_of_another_service_is_not_recovered_here_and_no_key_goes_there(loop, service, journal):
    with ScriptedServer() as elsewhere:
        leave_journal(journal, service, base_url=elsewhere.base_url)
        code, _, err = loop(service, 1, *RECOVER)
    assert code == 2 and f"Recover with --base-url {elsewhere.base_url}" in err
    assert elsewhere.requests == []


def test_recovery_ends_well_if_the_service_has_forgotten_the_session(loop, service, journal):
    leave_journal(journal, service, session_id="ses-unknown")
    code, _, err = loop(service, 1, *RECOVER)
    assert code == 0 and "session ses-unknown on" in err and "the service no longer knows it" in err


def test_a_journal_of_an_embedded_service_has_nothing_to_recover(loop, service, journal):
    leave_journal(journal, service, embedded=True)
    code, _, err = loop(service, 1, *JOURNAL)
    assert code == 2 and "Start again with --recover" in err
    code, _, err = loop(service, 1, *RECOVER)
    assert code == 0 and "there is nothing to recover" in err


def test_a_recovery_that_fails_keeps_the_journal(loop, service, journal):
    with FaultProxy(service, rate=1, kinds=["503"], only=lambda _, path: "capab" not in path) as proxy:
        leave_journal(journal, service, base_url=proxy.base_url)
        code, summary, err = loop(proxy, 1, *RECOVER, submit_timeout_s=1.0)
    assert code == 1 and "no usable answer" in err and summary["status"] == "failed"
    assert journal.exists()


TEXTS = ["{", "[]\n", "{}\n", '{"base_url": 1}\n', "[" * 100_000, "\x00\n", "text"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_file_that_is_not_a_journal_is_left_alone(loop, service, journal, text):
    journal.write_text(text)
    code, _, err = loop(service, 1, *RECOVER)
    assert code == 2 and "is not a journal of a loop" in err
    assert journal.read_text() == text


@pytest.mark.parametrize("create", [os.mkfifo, os.mkdir])
def test_a_journal_that_is_not_a_regular_file_is_left_alone(loop, service, journal, create):
    create(journal)
    code, _, err = loop(service, 1, *RECOVER)
    assert code == 2 and "is not a regular file" in err
    assert journal.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--recover"], "--recover needs --journal"), (["--journal", "nowhere/x"], "there is no such folder to write in")],
)
def test_a_journal_that_cannot_be_kept_is_refused(loop, service, all_sessions, arguments, message):
    code, _, err = loop(service, 1, *arguments)
    assert code == 2 and message in err and all_sessions() == []
