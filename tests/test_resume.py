"""Checkpoints, and runs that go on from them as if they had never stopped; and what a dry run checks."""

import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from loop_process import GRPO, LOOP, REMOTE, adapter_of, elsewhere, environment, loop, summary_of
from scripted_server import ScriptedServer, refusal, reply
from whitney_loop import sample_request
from whitney_loop.local import serve

MINE = """
import os, sys, time
from grpo_build_loss import build_loss as grpo

def waits(sample, cycle, request, ctx):
    if cycle == 5 and not os.path.exists("go on"):
        print("waiting in cycle 5", file=sys.stderr, flush=True)
        time.sleep(60)
    return grpo(sample, cycle, request, ctx)

def fails(sample, cycle, request, ctx):
    raise LookupError("as it was told")

def keeps(sample, cycle, request, ctx):
    ctx.state["reference"] = ctx.sampler_id
    return grpo(sample, cycle, request, ctx)
"""
DRO = """
LOSS_FUNCTION = "dro"
def build_loss(sample, cycle, request, ctx):
    raise AssertionError("never reached")
"""
PROMPTS = ["the ", "she ", "they ", "one ", "a ", "and ", "that "]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mydro.py").write_text(DRO)
    requests = [sample_request(prompt.encode(), num_samples=4, max_tokens=6) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    return tmp_path


COMMON = ("--sample-json", "prompts.jsonl", "--lora-rank", "4", "--batch-size", "3", "--learning-rate", "0.1")


def run(folder, *arguments, build_loss=GRPO):
    done = loop(folder, "--build-loss", build_loss, *COMMON, *arguments)
    assert done.returncode == 0, done.stderr
    return done, summary_of(done)


def cycles_of(path):
    return [entry for entry in map(json.loads, path.read_text().splitlines()) if "cycle" in entry]


def without_times(entries):
    return [{name: value for name, value in entry.items() if not name.startswith("time/")} for entry in entries]


@pytest.mark.long
def test_ten_cycles_and_ten_more_in_another_process_give_the_weights_of_twenty(folder):
    _, whole = run(folder, "--seed", "1", "--cycles", "20", "--metrics", "whole.jsonl")
    _, first = run(folder, "--seed", "1", "--cycles", "10", "--metrics", "parts.jsonl")
    done, second = run(folder, "--cycles", "10", "--metrics", "parts.jsonl", "--resume-from", first["state_id"])
    assert f"resuming from {first['state_id']} at cycle 10" in done.stderr
    assert adapter_of(second) == adapter_of(whole) != adapter_of(first)
    parts = cycles_of(folder / "parts.jsonl")
    assert [entry["cycle"] for entry in parts] == list(range(20))
    assert without_times(parts) == without_times(cycles_of(folder / "whole.jsonl"))


def test_without_a_metrics_file_the_first_cycle_is_told(folder):
    _, whole = run(folder, "--seed", "1", "--cycles", "4")
    _, first = run(folder, "--seed", "1", "--cycles", "2")
    assert first["next_cycle"] == 2
    again = ("--seed", "1", "--cycles", "2", "--resume-from", first["state_id"], "--first-cycle", "2")
    assert adapter_of(run(folder, *again)[1]) == adapter_of(whole)


def test_a_state_is_saved_every_so_many_cycles_and_named_everywhere(folder):
    done, summary = run(folder, "--seed", "1", "--cycles", "5", "--save-every", "2", "--metrics", "m.jsonl")
    printed = re.findall(r"^saved (state-\w+): the next cycle is (\d)$", done.stderr, re.MULTILINE)
    entries = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    kept = [(entry["state_id"], entry["next_cycle"]) for entry in entries if "state_id" in entry]
    assert [number for _, number in kept] == [2, 4, 5]
    assert [(state, int(number)) for state, number in printed] == kept[:2]
    assert (summary["state_id"], summary["next_cycle"]) == kept[2]
    assert summary["operations"]["save_state"] == 3


def test_a_run_that_was_stopped_goes_on_at_the_cycle_after_its_last_state(folder):
    """Stopped in cycle 5, saved after cycle 3: cycle 4 is trained again, and stands in the file once."""
    _, whole = run(folder, "--seed", "1", "--cycles", "7", "--metrics", "whole.jsonl")
    command = [sys.executable, str(LOOP), "--build-loss", "mine:waits", *COMMON, "--seed", "1", "--cycles", "7"]
    command += ["--save-every", "2", "--metrics", "m.jsonl"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        said = ""
        for line in process.stderr:
            said += line
            if "waiting in cycle 5" in line:
                assert [entry["cycle"] for entry in cycles_of(folder / "m.jsonl")] == [0, 1, 2, 3, 4]  # flushed
                other = loop(folder, "--build-loss", GRPO, *COMMON, "--metrics", "m.jsonl", "--resume-from", "last")
                assert other.returncode == 2 and "--metrics m.jsonl: another loop is writing it" in other.stderr
                process.send_signal(signal.SIGINT)
                break
        stdout, stderr = process.communicate(timeout=60)
    said += stderr
    summary = json.loads(stdout)
    assert (process.returncode, summary["next_cycle"]) == (130, 4)
    assert f"to go on at cycle 4, the same command with: --resume-from {summary['state_id']} --cycles 3" in said
    with (folder / "m.jsonl").open("a") as file:
        file.write('{"cycle": 5, "cut o')
    (folder / "go on").touch()
    options = ("--cycles", "3", "--metrics", "m.jsonl", "--resume-from", "last")
    done, resumed = run(folder, *options, build_loss="mine:waits")
    assert adapter_of(resumed) == adapter_of(whole)
    assert without_times(cycles_of(folder / "m.jsonl")) == without_times(cycles_of(folder / "whole.jsonl"))
    assert "is moved to m.jsonl.superseded" in done.stderr
    assert (folder / "m.jsonl.superseded").read_text().count('"cycle": ') == 2


def test_the_way_to_go_on_that_is_printed_is_enough_without_a_metrics_file_or_a_seed(folder):
    command = [sys.executable, str(LOOP), "--build-loss", "mine:waits", *COMMON, "--cycles", "7", "--save-every", "2"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        said = "".join(iter(process.stderr.readline, "waiting in cycle 5\n"))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    (folder / "go on").touch()
    [seed] = re.findall(r"seed (\d+) was drawn", said)
    [options] = re.findall(r"the same command with: (.*)\n", stderr)
    _, whole = run(folder, "--seed", seed, "--cycles", "7")
    _, resumed = run(folder, *options.split())
    assert adapter_of(resumed) == adapter_of(whole)


def test_where_no_state_was_saved_nothing_to_go_on_from_is_promised(folder):
    done = loop(folder, "--build-loss", "mine:fails", *COMMON, "--metrics", "m.jsonl")
    assert done.returncode == 1 and "no state was saved, so there is none to go on from" in done.stderr


def test_what_trains_otherwise_after_a_resume_is_said(folder):
    run(folder, "--seed", "1", "--metrics", "m.jsonl")
    other = ("--learning-rate", "0.01", "--updates", "2")
    done, _ = run(folder, "--metrics", "m.jsonl", "--resume-from", "last", *other)
    assert "with other options than before: --learning-rate 0.1 → 0.01, --updates 1 → 2\n" in done.stderr
    done, _ = run(folder, "--metrics", "m.jsonl", "--resume-from", "last", *other)
    assert "with other options" not in done.stderr


def test_a_service_that_names_no_state_is_said(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(LOOP.parent))
    import loop_support

    class Client:
        def run_operation(self, run_id, kind, payload):
            return {}

    assert loop_support.saved_state(SimpleNamespace(client=Client(), run_id="r")) is None
    assert "warning: save_state gave no state_id" in capsys.readouterr().err


def test_a_state_may_start_a_training_of_its_own(folder):
    _, first = run(folder, "--seed", "1")
    own = ("--seed", "2", "--resume-from", first["state_id"], "--first-cycle", "0", "--metrics", "own.jsonl")
    run(folder, *own)
    assert [entry["cycle"] for entry in cycles_of(folder / "own.jsonl")] == [0, 1]


def test_what_a_build_loss_kept_is_said_not_to_come_back(folder):
    _, first = run(folder, "--seed", "1", "--metrics", "m.jsonl", build_loss="mine:keeps")
    assert "state" not in first["warnings"]
    done, second = run(folder, "--metrics", "m.jsonl", "--resume-from", "last", build_loss="mine:keeps")
    assert "build_loss keeps reference in ctx.state" in done.stderr and "state" in second["warnings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume-from", "state-1"), "which cycle comes next is not known; give --metrics"),
        (("--resume-from", "last"), "which cycle comes next is not known; give --metrics"),
        (("--resume-from", "last", "--first-cycle", "2"), "which cycle comes next is not known"),
        (("--first-cycle", "2"), "--first-cycle belongs to --resume-from"),
        (("--resume-from", "s", "--first-cycle", "-1"), "--first-cycle is -1"),
        (("--resume-from", "state-0", "--metrics", "m.jsonl"), "m.jsonl holds no such state"),
        (("--resume-from", "last", "--metrics", "none.jsonl"), "no state was saved in none.jsonl; remove it"),
        (("--resume-from", "s", "--first-cycle", "2"), "--first-cycle: give the --seed of that run too"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--lora-rank", "8"), "--lora-rank is 8, but 4 in the run"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--model", "m"), "--model is m, but byte-lm in the run"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--first-cycle", "3"), "the next cycle is 2: leave it out"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--seed", "2"), "--seed is 2, but 1 in the run"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--batch-size", "2"), "--batch-size is 2, but 3 in the run"),
        (("--resume-from", "last", "--metrics", "m.jsonl", "--sample-json", "o.jsonl"), "the data set is not the one"),
        (("--save-every", "0"), "--save-every is 0"),
    ],
)
def test_a_resume_that_could_not_go_on_exactly_is_refused_before_anything_is_created(folder, arguments, message):
    (folder / "o.jsonl").write_text((folder / "prompts.jsonl").read_text() + json.dumps(
        sample_request(b"all ", num_samples=4, max_tokens=6)))  # fmt: skip
    (folder / "none.jsonl").write_text('{"cycle": 0}\n')
    run(folder, "--seed", "1", "--metrics", "m.jsonl", "--storage", "elsewhere")
    before = (folder / "m.jsonl").read_bytes()
    done = loop(folder, "--build-loss", GRPO, *COMMON, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / ".whitney_local").exists() and (folder / "m.jsonl").read_bytes() == before


# A dry run


def checks_of(done):
    return {
        line[8:].partition(": ")[0]: (line[:7].strip(), line.partition(": ")[2]) for line in done.stdout.splitlines()
    }


NAMES = [
    "build_loss and loss table", "options", "sample requests", "start and metrics file", "journal",
    "service, key and capabilities",
]  # fmt: skip


def test_a_dry_run_lists_what_was_checked_and_creates_no_session(folder):
    with serve(folder / "storage") as service:
        arguments = ("--dry-run", "--build-loss", GRPO, *REMOTE, "--metrics", "m.jsonl")
        done = loop(folder, *arguments, env=elsewhere(service))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = checks_of(done)
    assert list(checks) == NAMES and {verdict for verdict, _ in checks.values()} == {"ok"}
    assert not (folder / "m.jsonl").exists()
    assert service.api_key not in done.stdout + done.stderr


def test_a_dry_run_asks_for_capabilities_and_nothing_else(folder):
    offer = {"operations": ["forward_backward", "optim_step", "save_weights_for_sampler", "sample"]}
    with ScriptedServer(reply({"providers": {"modal": offer}})) as server:
        env = environment(WHITNEY_BASE_URL=server.base_url, WHITNEY_API_KEY="k")
        done = loop(folder, "--dry-run", "--build-loss", GRPO, *REMOTE, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(request.method, request.path) for request in server.requests] == [("GET", "/v1/training/capabilities")]


def test_a_dry_run_warns_of_what_can_be_known_beforehand(folder):
    request = sample_request(b"the ", num_samples=4, max_tokens=6, temperature=0.7)
    (folder / "r.json").write_text(json.dumps(request))
    with serve(folder / "storage") as service:
        arguments = ("--dry-run", "--build-loss", GRPO, *REMOTE, "--sample-json", "r.json", "--learning-rate", "0.1")
        done = loop(folder, *arguments, env=elsewhere(service))
    assert done.returncode == 0 and done.stderr.count("warning: ") == 2
    assert "a request samples with temperature 0.7" in done.stderr and "--learning-rate 0.1 is outside" in done.stderr


def test_a_dry_run_asks_for_save_state_where_it_is_to_be_used_on_the_way(folder):
    offer = {"operations": ["forward_backward", "optim_step", "save_weights_for_sampler", "sample"]}
    with ScriptedServer(reply({"providers": {"modal": offer}})) as server:
        env = environment(WHITNEY_BASE_URL=server.base_url, WHITNEY_API_KEY="k")
        done = loop(folder, "--dry-run", "--build-loss", GRPO, *REMOTE, "--save-every", "2", env=env)
    assert done.returncode == 2 and "does not offer save_state for modal" in done.stdout


def test_a_dry_run_can_show_what_the_terminals_encoding_can_not(folder):
    (folder / "odd.jsonl").write_text('{"prompt": {"token_ids": [1]}, "\\ud800": 1}\n')
    done = loop(folder, "--dry-run", "--build-loss", GRPO, "--sample-json", "odd.jsonl")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "FAILED  sample requests" in done.stdout
    assert list(checks_of(done)) == NAMES


def test_a_dry_run_tells_everything_that_is_wrong_at_once(folder):
    with ScriptedServer(refusal(401, "unauthorized")) as server:
        env = environment(WHITNEY_BASE_URL=server.base_url, WHITNEY_API_KEY="k")
        wrong = ("--model", "m", "--sample-json", "nowhere.json", "--cycles", "0", "--resume-from", "state-1")
        wrong += ("--journal", "nowhere/journal.json")
        done = loop(folder, "--dry-run", "--build-loss", "mydro:build_loss", *wrong, env=env)
    checks = checks_of(done)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert list(checks) == NAMES and {verdict for verdict, _ in checks.values()} == {"FAILED"}
    assert "'dro' is not advertised by modal" in checks[NAMES[0]][1]
    assert "can not be written" in checks[NAMES[4]][1]
    assert "status 401" in checks[NAMES[5]][1]


def test_a_dry_run_foresees_what_a_journal_would_do_and_leaves_it(folder):
    (folder / "journal.json").touch()
    done = loop(folder, "--dry-run", "--build-loss", GRPO, "--journal", "journal.json")
    assert done.returncode == 2 and "journal.json is there already" in checks_of(done)["journal"][1]
    done = loop(folder, "--dry-run", "--build-loss", GRPO, "--journal", "journal.json", "--recover")
    assert done.returncode == 0 and "closed first" in checks_of(done)["journal"][1]
    assert (folder / "journal.json").exists()
    done = loop(folder, "--dry-run", "--build-loss", GRPO, "--journal", "other.json")
    assert done.returncode == 0 and not (folder / "other.json").exists()
