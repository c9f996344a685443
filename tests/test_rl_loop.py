"""The reference loop as its users run it: a process, with the service asked afterwards what it left behind."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loop_process import GRPO, LOOP, REMOTE, ROOT, adapter_of, elsewhere, environment, loop, summary_of
from scripted_server import ScriptedServer, operation, reply, run
from whitney_loop import WhitneyClient
from whitney_loop.local import serve

MINE = """
import math, sys, time
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal

def raises(sample, cycle, request, ctx):
    if cycle == 1:
        raise LookupError("no reward for this one")
    return grpo(sample, cycle, request, ctx)

def junk(sample, cycle, request, ctx):
    return ["junk"]

def nan(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    payload["data"][3]["loss_inputs"]["logprobs"]["values"][5] = math.nan
    return payload

def bad_loss(sample, cycle, request, ctx):
    return grpo(sample, cycle, request, ctx) | {"loss_function": "dro"}

def skips(sample, cycle, request, ctx):
    ctx.metrics["reward/mean"] = 0.0
    raise NoGradientSignal("all rewards are 0")

def skips_once(sample, cycle, request, ctx):
    return skips(sample, cycle, request, ctx) if cycle == 0 else grpo(sample, cycle, request, ctx)

def exits(sample, cycle, request, ctx):
    sys.exit(0)

def meddles(sample, cycle, request, ctx):
    request["prompt"]["token_ids"].append("junk")
    ctx.metrics |= {"loss": "two\\nlines", "cycle": 77}
    return grpo(sample, cycle, {"prompt": {"token_ids": [1]}}, ctx)

def waits(sample, cycle, request, ctx):
    print("waiting in build_loss", file=sys.stderr, flush=True)
    time.sleep(60)

def looks(sample, cycle, request, ctx):
    ctx.state["calls"] = ctx.state.get("calls", 0) + 1
    assert ctx.state["calls"] == cycle + 1 and ctx.metrics == {}
    ctx.metrics["session"] = ctx.session_id
    assert (ctx.provider, ctx.model) == ("modal", "byte-lm")
    asked = {"input": {"token_ids": [1, 2]}}
    assert ctx.client.sampler_operation(ctx.run_id, ctx.sampler_id, "logprobs", asked)["logprobs"][0] is None
    return grpo(sample, cycle, request, ctx)

def opens_a_second_run(sample, cycle, request, ctx):
    from whitney_loop import lora_run
    ctx.resources.enter_context(lora_run(ctx.client, ctx.session_id, model=ctx.model, rank=2))
    if cycle == 1:
        raise LookupError("after a second run was opened")
    return grpo(sample, cycle, request, ctx)

not_callable = 3
"""

DRO = """
LOSS_FUNCTION = "dro"
def build_loss(sample, cycle, request, ctx):
    raise AssertionError("never reached")
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("storage")) as running:
        yield running


@pytest.fixture
def client(service):
    return WhitneyClient(service.base_url, service.api_key)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mydro.py").write_text(DRO)
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "comma.py").write_text('OPERATIONS = ("forward")\ndef build_loss(*_): pass\n')
    return tmp_path


def rewards_of(done):
    return [float(found) for found in re.findall(r"reward/mean (\S+)", done.stderr)]


def left_behind(client, summary):
    session = client.session(summary["session_id"])
    return session["status"], [run["status"] for run in session["runs"]]


@pytest.mark.learns
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_command_of_the_readme_learns(folder, seed):
    done = loop(folder, "--build-loss", GRPO, "--cycles", "40", "--learning-rate", "0.1", "--seed", str(seed))
    assert done.returncode == 0, done.stderr
    rewards = rewards_of(done)
    assert len(rewards) == 40
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 >= 0.9


def test_the_plain_command_trains_on_the_embedded_service_and_says_so(folder):
    done = loop(folder, "--build-loss", GRPO)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"seed (\d+) was drawn: --seed \1 repeats this run", lines.pop(1))
    assert lines[0].startswith("training on the embedded service at http://127.0.0.1:")
    assert re.fullmatch(r"cycle 0  version 0  reward/mean \S+  loss \S+  tokens \d+  \d+\.\d\d s", lines[1]) and lines[
        2
    ].startswith("cycle 1  version 1  ")
    summary = summary_of(done)
    assert summary["where"] == "the embedded service" and summary["base_url"].startswith("http://127.0.0.1:")
    assert (summary["status"], summary["provider"], summary["model"]) == ("succeeded", "modal", "byte-lm")
    assert (summary["cycles_done"], summary["cycles_skipped"]) == (2, 0)
    assert summary["operations"] == {
        "save_weights_for_sampler": 2, "sample": 2, "forward_backward": 2, "optim_step": 2,
        "save_state": 1, "export_lora": 1,
    }  # fmt: skip
    assert 0 < summary["tokens_sampled"] == summary["tokens_trained"]
    adapter = Path(summary["artifact"]["uri"].removeprefix("file://"))
    assert (adapter / "adapter_model.safetensors").is_file()
    assert adapter.parent.parent == folder / ".whitney_local"
    assert (folder / ".whitney_local" / "states" / summary["state_id"]).is_dir()


def test_the_same_seed_gives_the_same_adapter(folder):
    def adapter(seed, storage):
        arguments = ("--learning-rate", "0.1", "--seed", seed, "--storage", storage)
        return adapter_of(summary_of(loop(folder, "--build-loss", GRPO, *arguments)))

    assert adapter("7", "one") == adapter("7", "two") != adapter("8", "three")


def test_a_base_url_in_the_environment_is_where_it_trains(folder, service, client):
    done = loop(folder, "--build-loss", GRPO, "--seed", "1", *REMOTE, env=elsewhere(service))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"training on {service.base_url} (as modal): what runs there may be billed\n")
    summary = summary_of(done)
    assert summary["where"] == "the service of the base URL" and summary["base_url"] == service.base_url
    assert left_behind(client, summary) == ("closed", ["finished"])
    assert service.api_key not in done.stdout + done.stderr


def test_adding_local_to_the_command_of_a_real_run_rehearses_it(folder):
    request = json.loads((ROOT / "examples" / "sample.json").read_text())
    request["prompt"]["token_ids"] = [151644, 872, 198, 9906]
    (folder / "real.json").write_text(json.dumps(request))
    arguments = [
        "--build-loss",
        GRPO,
        "--model",
        "Qwen/Qwen3.5-0.8B",
        "--sample-json",
        "real.json",
        "--local",
        "--seed",
        "1",
    ]
    real = environment(WHITNEY_BASE_URL="https://whitney.invalid", WHITNEY_API_KEY="real")
    done = loop(folder, *arguments, env=real)
    assert done.returncode == 0, done.stderr
    assert "embedded service" in done.stderr.splitlines()[0]
    assert "byte-lm" in done.stderr.splitlines()[1] and "Qwen/Qwen3.5-0.8B" in done.stderr.splitlines()[1]
    assert summary_of(done)["model"] == "Qwen/Qwen3.5-0.8B"


def test_more_updates_train_more_often_on_the_same_sample(folder):
    done = loop(folder, "--build-loss", GRPO, "--cycles", "1", "--updates", "3", "--provider", "tinker")
    summary = summary_of(done)
    assert summary["operations"]["sample"] == 1 and summary["operations"]["optim_step"] == 3
    assert summary["tokens_trained"] == 3 * summary["tokens_sampled"]


def test_a_build_loss_may_use_its_context(folder):
    done = loop(folder, "--build-loss", "mine:looks")
    summary = summary_of(done)
    assert done.returncode == 0 and summary["operations"]["logprobs"] == 2
    assert f"session {summary['session_id']}" in done.stderr


def test_a_cycle_without_signal_is_skipped_and_said(folder, service, client):
    done = loop(folder, "--build-loss", "mine:skips_once", "--seed", "1", *REMOTE, env=elsewhere(service))
    assert done.returncode == 0
    skipped = r"cycle 0  version 0  reward/mean 0  skipped: all rewards are 0  tokens \d+  \S+ s"
    assert re.fullmatch(skipped, done.stderr.splitlines()[1])
    summary = summary_of(done)
    assert (summary["cycles_done"], summary["cycles_skipped"]) == (1, 1)


def test_where_every_cycle_is_skipped_the_loop_fails_but_ends_cleanly(folder, service, client):
    done = loop(folder, "--build-loss", "mine:skips", *REMOTE, env=elsewhere(service))
    assert done.returncode == 1 and "every cycle was skipped" in done.stderr
    assert left_behind(client, summary_of(done)) == ("closed", ["finished"])


def test_a_build_loss_that_raises_is_shown_with_its_own_traceback_and_all_is_cleaned_up(folder, service, client):
    done = loop(folder, "--build-loss", "mine:raises", *REMOTE, env=elsewhere(service))
    assert done.returncode == 1
    traceback = done.stderr[done.stderr.index("Traceback") :]
    assert 'mine.py", line' in traceback and "no reward for this one" in traceback
    assert "rl_loop.py" not in traceback and "client.py" not in traceback
    assert done.stderr.endswith("error: build_loss raised LookupError in cycle 1: no reward for this one\n")
    summary = summary_of(done)
    assert (summary["status"], summary["cycles_done"]) == ("failed", 1)
    assert left_behind(client, summary) == ("closed", ["cancelled"])


def test_a_build_loss_that_exits_has_failed(folder, service, client):
    done = loop(folder, "--build-loss", "mine:exits", *REMOTE, env=elsewhere(service))
    assert done.returncode == 1 and "error: build_loss raised SystemExit in cycle 0: 0" in done.stderr
    assert left_behind(client, summary_of(done)) == ("closed", ["cancelled"])


def test_what_a_build_loss_does_to_request_and_metrics_stays_its_own(folder):
    done = loop(folder, "--build-loss", "mine:meddles", "--seed", "1")
    assert done.returncode == 0, done.stderr
    cycles = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")][1:]
    assert cycles[1].startswith("cycle 1  version 1  loss two lines  user/cycle 77  reward/mean ")
    assert "logprobs" in summary_of(done)["warnings"]  # that the datums' prompt is another one does not go unseen


def test_a_second_run_that_a_build_loss_opened_is_cleaned_up_too(folder, service, client):
    done = loop(folder, "--build-loss", "mine:opens_a_second_run", *REMOTE, env=elsewhere(service))
    assert left_behind(client, summary_of(done)) == ("closed", ["cancelled"] * 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("junk", "in cycle 0, what modal would refuse: payload is a list of 1, expected an object"),
        ("nan", r"data[3].loss_inputs.logprobs.values[5] is nan"),
        ("bad_loss", "loss_function 'dro' is not advertised by modal"),
    ],
)
def test_what_the_provider_would_refuse_is_never_sent(folder, service, client, name, message):
    done = loop(folder, "--build-loss", f"mine:{name}", *REMOTE, env=elsewhere(service))
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    summary = summary_of(done)
    assert "forward_backward" not in summary["operations"]
    assert left_behind(client, summary) == ("closed", ["cancelled"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_mid_cycle_cancels_closes_and_exits_with_its_code(folder, service, client, number, code):
    command = [sys.executable, str(LOOP), "--build-loss", "mine:waits", *REMOTE]
    process = subprocess.Popen(
        command, cwd=folder, env=elsewhere(service), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        for line in process.stderr:
            if "waiting in build_loss" in line:
                process.send_signal(number)
                break
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    summary = json.loads(stdout)
    assert summary["status"].startswith("ended by")
    assert left_behind(client, summary) == ("closed", ["cancelled"])


def test_a_second_signal_stops_the_waiting_and_prints_the_command_that_closes(folder, tmp_path):
    """The service is stopped in build_loss, so that the clean-up hangs until the second signal comes."""
    environment_of_service = environment(WHITNEY_API_KEY="k-of-the-test")
    command = [sys.executable, "-u", "-m", "whitney_loop.local", "--port", "0", "--storage", str(tmp_path / "s")]
    hanging = subprocess.Popen(command, cwd=ROOT, env=environment_of_service, text=True, stdout=subprocess.PIPE)
    with hanging:
        try:
            base_url = next(line for line in hanging.stdout if "WHITNEY_BASE_URL=" in line).strip().partition("=")[2]
            env = environment(WHITNEY_API_KEY="k-of-the-test", WHITNEY_BASE_URL=base_url)
            command = [sys.executable, str(LOOP), "--build-loss", "mine:waits", *REMOTE]
            process = subprocess.Popen(
                command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            with process:
                said = ""
                for line in process.stderr:
                    said += line
                    if "waiting in build_loss" in line:
                        hanging.send_signal(signal.SIGSTOP)
                        process.send_signal(signal.SIGINT)
                    if "cleaning up run" in line:
                        process.send_signal(signal.SIGINT)
                        break
                stdout, stderr = process.communicate(timeout=60)
        finally:
            hanging.send_signal(signal.SIGCONT)
            hanging.terminate()
    said += stderr
    session_id = json.loads(stdout)["session_id"]
    assert process.returncode == 130, said
    assert "Traceback" not in said and "k-of-the-test" not in said
    assert "may still be open: run run-" in said
    assert f"python -m whitney_loop close {session_id} --base-url {base_url}" in said


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:build_loss", "no module 'nowhere' in the current folder or in examples/"),
        ("algorithms.nowhere:build_loss", "no module 'algorithms.nowhere'"),
        ("mine:build_los", "module 'mine' has no 'build_los'"),
        ("mine:not_callable", "'not_callable' of 'mine' is of type int, not callable"),
        ("broken:build_loss", "importing 'broken' raised ModuleNotFoundError: No module named 'no_such_library'"),
        ("exits:build_loss", "importing 'exits' raised SystemExit: 3"),
        (".mine:junk", "expected MODULE:CALLABLE"),
        ("mine", "expected MODULE:CALLABLE"),
        (":x", "expected MODULE:CALLABLE"),
        ("mydro:build_loss", "LOSS_FUNCTION: loss_function 'dro' is not advertised by modal"),
        ("comma:build_loss", "comma.OPERATIONS is 'forward', expected a tuple of names"),
    ],
)
def test_a_build_loss_that_can_not_be_used_is_one_line_and_nothing_is_created(folder, spec, message):
    with ScriptedServer() as server:
        env = environment(WHITNEY_BASE_URL=server.base_url, WHITNEY_API_KEY="k")
        done = loop(folder, "--build-loss", spec, *REMOTE, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert server.requests == []


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"WHITNEY_API_KEY": "k"}, "WHITNEY_API_KEY is set, but no base URL"),
        (["--local", "--base-url", "http://127.0.0.1:1"], {}, "--local and --base-url contradict"),
        (["--base-url", "http://127.0.0.1:1"], {}, "--model is required"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m"], {}, "--sample-json is required"),
        (["--base-url", "http://example.com", *REMOTE], {}, "https only"),
        (["--base-url", "https://example.com", *REMOTE], {}, "no API key"),
        (["--base-url", ""], {}, "--base-url is empty"),
        (["--storage", "mine.py"], {}, "the embedded service can not start"),
        (["--sample-json", "deep.json"], {}, "--sample-json deep.json"),
        (["--cycles", "0"], {}, "--cycles is 0, expected at least 1"),
        (["--updates", "-1"], {}, "--updates is -1"),
        (["--batch-size", "2"], {}, "--batch-size is 2, but"),
        (["--batch-size", "0"], {}, "--batch-size is 0"),
        (["--max-datums", "0"], {}, "--max-datums is 0"),
        (["--lora-rank", "0"], {}, "--lora-rank is 0"),
        (["--timeout", "nan"], {}, "--timeout is nan"),
        (["--seed", "-1"], {}, "--seed is -1"),
        (["--seed", str(2**63)], {}, "expected 0 to 2^63 − 1"),
        (["--learning-rate", "nan"], {}, "--learning-rate: optimizer.learning_rate is nan"),
        (["--sample-json", "nowhere.json"], {}, "nowhere.json"),
        (["--sample-json", "mine.py"], {}, "--sample-json mine.py: "),
        (["--sample-json", "empty.json"], {}, "--sample-json empty.json: request.prompt is missing"),
    ],
)
def test_what_can_not_be_run_is_refused_with_the_reason_before_anything_is_created(
    folder, arguments, variables, message
):
    (folder / "empty.json").write_text("{}")
    (folder / "deep.json").write_text("[" * 200_000)
    done = loop(folder, "--build-loss", GRPO, *arguments, env=environment(**variables))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / ".whitney_local").exists()


def test_operations_that_a_module_needs_are_asked_for_before_a_session_exists(folder):
    (folder / "needy.py").write_text('OPERATIONS = ("teleport",)\ndef build_loss(*_): pass\n')
    offered = ["forward_backward", "optim_step", "save_weights_for_sampler", "sample"]
    with ScriptedServer(reply({"operations": offered})) as server:
        env = environment(WHITNEY_BASE_URL=server.base_url, WHITNEY_API_KEY="k")
        done = loop(folder, "--build-loss", "needy:build_loss", *REMOTE, env=env)
    assert done.returncode == 1 and "does not offer teleport for modal" in done.stderr
    assert [request.method for request in server.requests] == ["GET"]


def test_a_sample_that_can_not_be_trained_on_ends_the_run_before_build_loss_sees_it(folder):
    offer = reply({"operations": ["forward_backward", "optim_step", "save_weights_for_sampler", "sample"]})
    saved = operation(kind="save_weights_for_sampler", result={"sampler_id": "smp-1", "version": 0})
    sampled = operation(kind="sample", seq_id=2, result={"sequences": [{"tokens": [1, 2], "logprobs": [-1.0]}]})
    script = [offer, reply({"session_id": "ses-1"}), run(), run(), run(), saved, sampled]
    script += [run("cancelling"), run("cancelled"), reply({"session_id": "ses-1", "status": "closed"})]
    with ScriptedServer(*script) as server:
        env = environment(WHITNEY_BASE_URL=server.base_url, WHITNEY_API_KEY="k")
        done = loop(folder, "--build-loss", "mydro:build_loss", *REMOTE, "--provider", "tinker", env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "sequences[0]" in done.stderr.splitlines()[-1] and "logprobs" in done.stderr.splitlines()[-1]


def test_a_key_that_is_refused_is_one_line(folder, service):
    env = environment(WHITNEY_BASE_URL=service.base_url, WHITNEY_API_KEY="wrong")
    done = loop(folder, "--build-loss", GRPO, *REMOTE, env=env)
    assert done.returncode == 1 and "status 401" in done.stderr and "Traceback" not in done.stderr
