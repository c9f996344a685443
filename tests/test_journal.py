"""A loop that is killed outright, with nothing of its own left to run, is cleaned up after by its journal."""

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from fault_proxy import FaultProxy
from loop_in_process import EXAMPLES, left_open
from scripted_server import ScriptedServer, reply, run
from whitney_loop import WhitneyClient
from whitney_loop.local import serve
from whitney_loop.local.service import Service

JOURNAL = ("--journal", "journal.json")
RECOVER = (*JOURNAL, "--recover")
KILLS = 30


@pytest.fixture
def service(everything, tmp_path):
    with serve(tmp_path / "storage") as running:
        yield running


def start(folder, base_url, key, *arguments, cycles=2):
    command = [sys.executable, str(EXAMPLES / "rl_loop.py"), "--build-loss", "never_saturates:opens_a_second_run"]
    command += ["--model", "byte-lm", "--sample-json", "sample.json", "--lora-rank", "1", "--cycles", str(cycles)]
    environment = os.environ | {"WHITNEY_BASE_URL": base_url, "WHITNEY_API_KEY": key}
    return subprocess.Popen(
        [*command, *arguments], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


class KilledAt:
    """A process that is killed when its n-th request to such a path has come, which is lost then, or its reply is."""

    def __init__(self, n, ending=""):
        self.n, self.ending, self.process, self.started = n, ending, None, threading.Event()
        self.come = 0

    def __call__(self, method, path):
        self.started.wait(10)
        self.come += path.endswith(self.ending)
        if self.come == self.n:
            self.process.kill()
        return self.come >= self.n


def killed(service, tmp_path, at, kind):
    """The journal of a loop that was killed there, which names the address where the service lives on."""
    with FaultProxy(service.base_url, rate=1, kinds=[kind], only=at) as proxy:
        at.process = start(tmp_path, proxy.base_url, service.api_key, *JOURNAL)
        at.started.set()
        at.process.communicate(timeout=60)
        assert at.process.returncode == -9
    journal = tmp_path / "journal.json"
    if journal.exists():
        journal.write_text(journal.read_text().replace(proxy.base_url, service.base_url))
    return journal


def check_that_recovery_closes_everything(loop, service, everything, journal):
    code, _, err = loop(service, service.base_url, 1, *RECOVER, submit_timeout_s=5.0, exchange_timeout_s=5.0)
    assert code == 0, err
    assert left_open(everything()) == [], err
    assert not journal.exists()


@pytest.mark.long
def test_thirty_kills_at_random_points_leave_nothing_open_that_recovery_does_not_close(
    loop, service, everything, tmp_path
):
    chance = random.Random(6)
    found = 0
    for _ in range(KILLS):
        at = KilledAt(chance.randrange(1, 32))
        journal = killed(service, tmp_path, at, chance.choice(["drop request", "drop reply"]))
        if left_open(everything()):
            assert service.api_key not in journal.read_text()
            found += 1
        check_that_recovery_closes_everything(loop, service, everything, journal)
    assert found > KILLS / 2


@pytest.mark.parametrize(("path", "left"), [("/sessions", 1), ("/runs", 2)])
def test_what_was_created_while_its_creator_was_killed_before_the_answer_is_closed_by_recovery(
    loop, service, everything, tmp_path, path, left
):
    journal = killed(service, tmp_path, KilledAt(1, path), "drop reply")
    assert len(left_open(everything())) == left
    kept = json.loads(journal.read_text())
    assert (kept["session_id"] is None) == (path == "/sessions") and kept["run_ids"] == []  # no id came
    check_that_recovery_closes_everything(loop, service, everything, journal)


def test_recovery_cancels_closes_and_polls_until_the_run_has_ended(loop, service, tmp_path):
    listed = reply({"session_id": "ses-1", "status": "open", "runs": [{"run_id": "run-1", "status": "active"}]})
    cancelled = [run("cancelling"), reply({"session_id": "ses-1", "status": "closed"})]
    with ScriptedServer(listed, *cancelled, run("cancelling"), run("cancelling"), *[run("cancelled")] * 2) as server:
        left_by_a_kill(tmp_path, service, base_url=server.base_url, session_id="ses-1", run_ids=["run-1"])
        _, _, err = loop(service, server.base_url, 1, *RECOVER)
    asked = [f"{request.method} {request.path.removeprefix('/v1/training')}" for request in server.requests]
    polls = ["GET /runs/run-1"] * 4  # three until it has ended; and the run that the journal names
    assert asked[:7] == ["GET /sessions/ses-1", "POST /runs/run-1/cancel", "POST /sessions/ses-1/close", *polls]
    assert asked[7:] == ["GET /capabilities"] and "session ses-1 is closed; cancelled: run-1" in err
    assert not (tmp_path / "journal.json").exists()


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
def test_a_kill_at_any_moment_leaves_nothing_open_that_recovery_does_not_close(
    loop, service, everything, tmp_path, delay
):
    process = start(tmp_path, service.base_url, service.api_key, *JOURNAL, cycles=1000)
    threading.Event().wait(delay)
    process.kill()
    process.communicate(timeout=60)
    code, _, err = loop(service, service.base_url, 1, *RECOVER)
    assert code == 0, err
    assert left_open(everything()) == []


def test_a_clean_end_and_a_cleaned_up_failure_leave_no_journal(loop, service, tmp_path):
    assert loop(service, service.base_url, 1, *JOURNAL)[0] == 0
    assert not (tmp_path / "journal.json").exists()
    assert loop(service, service.base_url, 1, *JOURNAL, build_loss="never_saturates:fails")[0] == 1
    assert not (tmp_path / "journal.json").exists()


def test_while_it_trains_the_journal_says_where_and_what_and_never_the_key(loop, service, tmp_path):
    code, summary, _ = loop(service, service.base_url, 1, *JOURNAL, build_loss="never_saturates:copies_the_journal")
    assert code == 0
    text = (tmp_path / "copy.json").read_text()
    journal = json.loads(text)
    assert (journal["base_url"], journal["session_id"]) == (service.base_url, summary["session_id"])
    assert journal["run_ids"] == [summary["run_id"]] and service.api_key not in text
    assert sorted(path.name for path in tmp_path.iterdir() if "journal" in path.name) == []


def test_a_session_that_could_not_be_closed_keeps_its_journal(loop, service, tmp_path):
    with FaultProxy(service.base_url, rate=1, kinds=["503"], only=lambda _, path: path.endswith("/close")) as proxy:
        assert loop(service, proxy.base_url, 1, *JOURNAL, submit_timeout_s=0.05)[0] == 1
        journal = json.loads((tmp_path / "journal.json").read_text())
    assert WhitneyClient(service.base_url, service.api_key).session(journal["session_id"])["status"] == "open"


SPOILS = """
import os

def spoils(sample, cycle, request, ctx):
    shutil.rmtree("kept")
    {how}
    return build_loss(sample, cycle, request, ctx)

def spoils_and_fails(*arguments):
    spoils(*arguments)
    return fails(*arguments)
"""


@pytest.fixture(params=["os.makedirs('kept/journal.json')", "open('kept', 'x').close()"], ids=["folder", "no folder"])
def spoilt(request, loop, tmp_path):
    """In the journal's place there is a folder then, or in that of its folder a file."""
    (tmp_path / "kept").mkdir()
    with (tmp_path / "never_saturates.py").open("a") as module:
        module.write(SPOILS.format(how=request.param))
    return "--journal", "kept/journal.json"


def test_a_journal_that_can_not_be_removed_hides_no_first_error(loop, service, everything, spoilt):
    code, summary, err = loop(service, service.base_url, 1, *spoilt, build_loss="never_saturates:spoils_and_fails")
    assert code == 1 and left_open(everything()) == []
    assert summary["error"] == "build_loss raised LookupError in cycle 0: as it was told"
    assert err.splitlines()[-1] == f"error: {summary['error']}"
    assert "journal kept/journal.json could not be removed: " in err


def test_a_journal_that_can_not_be_removed_is_told_of_after_a_good_end(loop, service, everything, spoilt):
    code, _, err = loop(service, service.base_url, 1, *spoilt, build_loss="never_saturates:spoils")
    assert code == 0 and left_open(everything()) == []
    assert "journal kept/journal.json could not be removed: " in err and "Traceback" not in err


@pytest.mark.parametrize(("ending", "made"), [("/capabilities", 0), ("/sessions", 1), ("/runs", 1)])
def test_a_journal_that_can_not_be_written_any_more_ends_the_loop_cleaned_up_with_one_line(
    loop, service, everything, tmp_path, ending, made
):
    def blocked(_, path):
        if path.endswith(ending):
            (tmp_path / "journal.json.draft").mkdir()
        return False

    with FaultProxy(service.base_url, rate=1, only=blocked) as proxy:
        code, summary, err = loop(service, proxy.base_url, 1, *JOURNAL)
    assert code == 1 and summary["status"] == "failed"
    assert len(everything()) == made and left_open(everything()) == []
    assert err.splitlines()[-1].startswith("error: journal journal.json could not be written: Is a directory")
    assert "Traceback" not in err and not (tmp_path / "journal.json").exists()


@contextlib.contextmanager
def files_of_at_most(size):
    """As on a full disk, a write is cut off there, and then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_is_cut_off_leaves_the_journal_whole_as_it_was(loop, tmp_path):
    from loop_journal import Journal, JournalLost

    path = tmp_path / "journal.json"
    journal = Journal("http://127.0.0.1:1", False, "modal")
    journal.write(path)
    before = path.read_text()
    journal.session_id = "ses-1"
    with files_of_at_most(len(before) // 2), pytest.raises(JournalLost, match="could not be written: File too large"):
        journal.write(path)
    assert path.read_text() == before
    journal.write(path)
    assert json.loads(path.read_text())["session_id"] == "ses-1"


def test_the_journal_and_then_its_name_in_the_folder_are_on_the_disk_before_the_session_is_asked_for(
    loop, service, tmp_path, monkeypatch
):
    seen = []
    create_session, fsync = Service.create_session, os.fsync
    path = tmp_path / "journal.json"

    def noted(number):
        fsync(number)
        synced = os.fstat(number)
        for file in (tmp_path, *tmp_path.glob("journal*")):  # the service syncs files of its own
            if os.path.samestat(synced, file.stat()):
                seen.append((file.name, path.read_text() != ""))

    def asked(of_service, *arguments):
        seen.append("asked")
        return create_session(of_service, *arguments)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Service, "create_session", asked)
    assert loop(service, service.base_url, 1, *JOURNAL)[0] == 0
    assert seen[:3] == [("journal.json.draft", False), (tmp_path.name, True), "asked"]
    assert seen[3:] == [("journal.json.draft", True), (tmp_path.name, True)] * 2  # the session's id, and the run's


def left_by_a_kill(tmp_path, service, **fields):
    client = WhitneyClient(service.base_url, service.api_key)
    key = str(uuid.uuid4())
    journal = {"base_url": service.base_url, "embedded": False, "provider": "modal", "session_key": key,
               "session_id": client.create_session("modal", idempotency_key=key), "run_ids": []}  # fmt: skip
    journal |= fields
    (tmp_path / "journal.json").write_text(json.dumps(journal))
    return client, journal


def test_a_start_that_finds_a_journal_stops_and_says_what_it_found(loop, service, everything, tmp_path):
    _, journal = left_by_a_kill(tmp_path, service)
    code, summary, err = loop(service, service.base_url, 1, *JOURNAL)
    assert (code, summary) == (2, None)
    assert journal["session_id"] in err and service.base_url in err and "--recover" in err.splitlines()[-1]
    assert len(everything()) == 1 and (tmp_path / "journal.json").exists()


def test_of_two_loops_that_start_at_once_one_trains_and_the_other_stops_with_nothing_created(
    service, everything, tmp_path, monkeypatch, loop
):
    neither_has_a_journal = threading.Barrier(2)
    one_has_ended = threading.Event()
    capabilities, create_session = Service.capabilities, Service.create_session

    def both_ask(of_service):
        neither_has_a_journal.wait(30)
        return capabilities(of_service)

    def after_the_end_of_one(of_service, *arguments):
        one_has_ended.wait(10)  # it is missed, and both train, where neither is stopped
        return create_session(of_service, *arguments)

    monkeypatch.setattr(Service, "capabilities", both_ask)
    monkeypatch.setattr(Service, "create_session", after_the_end_of_one)

    def ended(process):
        _, err = process.communicate(timeout=60)
        one_has_ended.set()
        return process.returncode, err

    both = [start(tmp_path, service.base_url, service.api_key, *JOURNAL, cycles=1) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        (code, err), (code_of_other, said) = sorted(pool.map(ended, both))
    assert (code, code_of_other) == (0, 2), err + said
    assert said.splitlines()[-1].startswith("error: --journal journal.json is there already"), said
    assert "Traceback" not in said
    assert len(everything()) == 1 and left_open(everything()) == []
    assert not (tmp_path / "journal.json").exists()


def test_an_empty_journal_stops_a_start_says_that_nothing_was_opened_and_is_removed_by_recovery(
    loop, service, everything, tmp_path
):
    (tmp_path / "journal.json").touch()  # of a loop that was killed between making and writing it
    code, _, err = loop(service, service.base_url, 1, *JOURNAL)
    assert code == 2 and "is there already" in err and "it is empty, so nothing was opened" in err
    assert everything() == [] and (tmp_path / "journal.json").exists()
    code, _, err = loop(service, service.base_url, 1, *RECOVER)
    assert code == 0 and "nothing to recover" in err and len(everything()) == 1
    assert not (tmp_path / "journal.json").exists()


def test_a_session_whose_id_never_came_is_found_by_the_key_of_the_journal(loop, service, everything, tmp_path):
    left_by_a_kill(tmp_path, service, session_id=None)
    code, _, err = loop(service, service.base_url, 1, *RECOVER)
    assert code == 0 and len(everything()) == 2 and left_open(everything()) == [], err


def test_a_journal_of_another_service_is_not_recovered_here_and_no_key_goes_there(loop, service, tmp_path):
    with ScriptedServer() as elsewhere:
        left_by_a_kill(tmp_path, service, base_url=elsewhere.base_url)
        code, _, err = loop(service, service.base_url, 1, *RECOVER)
    assert code == 2 and f"Recover with --base-url {elsewhere.base_url}" in err
    assert elsewhere.requests == []


def test_a_session_that_the_service_has_forgotten_is_nothing_to_close(loop, service, tmp_path):
    left_by_a_kill(tmp_path, service, session_id="ses-unknown")
    code, _, err = loop(service, service.base_url, 1, *RECOVER)
    assert code == 0 and "knows no such session any more" in err


def test_the_journal_of_an_embedded_service_has_nothing_to_recover(loop, service, tmp_path):
    left_by_a_kill(tmp_path, service, embedded=True)
    code, _, err = loop(service, service.base_url, 1, *JOURNAL)
    assert code == 2 and "start again with --recover" in err  # it may be of a loop that still runs
    code, _, err = loop(service, service.base_url, 1, *JOURNAL, "--recover")
    assert code == 0 and "there is nothing to recover" in err


def test_a_recovery_that_fails_keeps_the_journal(loop, service, tmp_path):
    with FaultProxy(service.base_url, rate=1, kinds=["503"]) as proxy:
        left_by_a_kill(tmp_path, service, base_url=proxy.base_url)
        code, _, err = loop(service, proxy.base_url, 1, *RECOVER, submit_timeout_s=0.05)
    assert code == 1 and "no usable answer" in err
    assert (tmp_path / "journal.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"base_url": 1}', "[" * 100_000])
def test_a_file_that_is_no_journal_is_left_alone(loop, service, tmp_path, text):
    (tmp_path / "journal.json").write_text(text)
    code, _, err = loop(service, service.base_url, 1, *RECOVER)
    assert code == 2 and "is no journal of a loop" in err
    assert (tmp_path / "journal.json").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--recover"], "--recover needs --journal"), (["--journal", "nowhere/x"], "can not be written: No such file")],
)
def test_a_journal_that_can_not_be_kept_is_refused(loop, service, everything, arguments, message):
    code, _, err = loop(service, service.base_url, 1, *arguments)
    assert code == 2 and message in err and everything() == []
