"""The user's function: how it is found and called, and how its payload is checked."""

import re
import sys

import pytest

from loop_runs import GRPO, check_refused, left_behind, training_on, write_requests
from scripted_server import OFFER, ScriptedServer

MINE = """
import json, math, sys
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal, forward_backward_payload, lora_run

def raises(sample, cycle, request, ctx):
    if cycle == 1:
        raise LookupError("no reward for this one")
    return grpo(sample, cycle, request, ctx)

def exits(sample, cycle, request, ctx):
    sys.exit(0)

def junk(sample, cycle, request, ctx):
    return ["junk"]

def nan(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    payload["data"][1]["loss_inputs"]["logprobs"]["values"][3] = math.nan
    return payload

def bad_loss(sample, cycle, request, ctx):
    return grpo(sample, cycle, request, ctx) | {"loss_function": "dro"}

def skips(sample, cycle, request, ctx):
    ctx.metrics["reward/mean"] = 0.0
    raise NoGradientSignal("all rewards are 0")

def skips_once(sample, cycle, request, ctx):
    return skips(sample, cycle, request, ctx) if cycle == 0 else grpo(sample, cycle, request, ctx)

def skips_the(sample, cycle, request, ctx):
    if bytes(request["prompt"]["token_ids"]) == b"the ":
        raise NoGradientSignal("not this one")
    return grpo(sample, cycle, request, ctx)

def skips_cycle_0(sample, cycle, request, ctx):
    if cycle == 0:
        ctx.metrics["reward"] = [0.5, 0.5]
        raise NoGradientSignal("all alike")
    return grpo(sample, cycle, request, ctx)

def meddles(sample, cycle, request, ctx):
    request["prompt"]["token_ids"].append("junk")
    ctx.metrics |= {"loss": "two\\nlines", "cycle": 77}
    return grpo(sample, cycle, {"prompt": {"token_ids": [1]}}, ctx)

def looks(sample, cycle, request, ctx):
    ctx.state["calls"] = ctx.state.get("calls", 0) + 1
    assert ctx.state["calls"] == cycle + 1 and ctx.metrics == {}
    ctx.metrics["session"] = ctx.session_id
    assert (ctx.provider, ctx.model) == ("modal", "byte-lm")
    asked = {"input": {"token_ids": [1, 2]}}
    assert ctx.client.sampler_operation(ctx.run_id, ctx.sampler_id, "logprobs", asked)["logprobs"][0] is None
    return grpo(sample, cycle, request, ctx)

def opens_a_second_run(sample, cycle, request, ctx):
    ctx.resources.enter_context(lora_run(ctx.client, ctx.session_id, model=ctx.model, rank=2))
    if cycle == 1:
        raise LookupError("after a second run was opened")
    return grpo(sample, cycle, request, ctx)

def disagrees(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    disagrees.first = disagrees.first or request
    return payload | ({"loss_function": "ppo"} if disagrees.first != request else {})
disagrees.first = None

def disagrees_on_config(sample, cycle, request, ctx):
    disagrees_on_config.calls += 1
    high = 1.0 + disagrees_on_config.calls
    return grpo(sample, cycle, request, ctx) | {
        "loss_function": "ppo", "loss_config": {"clip_low_threshold": 0.5, "clip_high_threshold": high}}
disagrees_on_config.calls = 0

def bad_for_one(sample, cycle, request, ctx):
    payload = grpo(sample, cycle, request, ctx)
    return payload | ({"loss_function": "dro"} if bytes(request["prompt"]["token_ids"]) == b"the " else {})

def forgets_return(sample, cycle, request, ctx):
    grpo(sample, cycle, request, ctx)

def filters_all(sample, cycle, request, ctx):
    return forward_backward_payload([datum for datum in []], "importance_sampling")

def returns_no_data(sample, cycle, request, ctx):
    return grpo(sample, cycle, request, ctx) | {"data": []}

def takes_two(sample, cycle): ...

def takes_more(sample, cycle, request, ctx, *, temperature): ...

def takes_any(*arguments):
    return grpo(*arguments)

not_callable = 3
"""

BATCH = """
from grpo_build_loss import build_loss as grpo
from whitney_loop import NoGradientSignal

def build_loss(sample, cycle, request, ctx):
    raise AssertionError("build_batch_loss stands beside it")

def build_batch_loss(samples, cycle, requests, ctx):
    if cycle == 0:
        raise NoGradientSignal("cycle 0 is not for training")
    ctx.metrics["groups"] = len(samples)
    payloads = [grpo(sample, cycle, request, ctx) for sample, request in zip(samples, requests)]
    return payloads[0] | {"data": [datum for payload in payloads for datum in payload["data"]]}
"""

MODULES = {
    "mine": MINE,
    "batch": BATCH,
    "mydro": 'LOSS_FUNCTION = "dro"\ndef build_loss(sample, cycle, request, ctx): ...\n',
    "broken": "import no_such_library\n",
    "fails": "import helper\n",
    "helper": "\n\nlimit = 1 / 0\n",
    "typo": "def f(:\n",
    "tells": "import os\nraise LookupError(os.environ['WHITNEY_API_KEY'])\n",
    "exits": "raise SystemExit(3)\n",
    "cancelled": "import asyncio\nraise asyncio.CancelledError\n",
    "comma": 'OPERATIONS = ("forward")\ndef build_loss(sample, cycle, request, ctx): ...\n',
    "needy": 'OPERATIONS = ("teleport",)\ndef build_loss(sample, cycle, request, ctx): ...\n',
    "batch_of_two": "def build_loss(sample, cycle, request, ctx): ...\ndef build_batch_loss(samples, cycle): ...\n",
    "odd_batch": "def build_loss(sample, cycle, request, ctx): ...\nbuild_batch_loss = 3\n",
}
PROMPTS = ["the ", "she ", "they ", "one ", "a ", "and ", "that ", "with "]


@pytest.fixture
def folder(tmp_path):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    write_requests(tmp_path / "one.jsonl", ["the "], max_tokens=8)
    write_requests(tmp_path / "prompts.jsonl", PROMPTS)
    return tmp_path


@pytest.fixture
def train(run_loop, folder, remote):
    """Train with a function of this file on another service, with one prompt or with ``batch`` of them."""

    def run(build_loss, *arguments, batch=0):
        data = ("--sample-json", "prompts.jsonl", "--batch-size", batch) if batch else ("--sample-json", "one.jsonl")
        common = ("--model", "byte-lm", "--lora-rank", "1", "--seed", "1", *data)
        return run_loop("rl_loop", "--build-loss", build_loss, *common, *arguments, **training_on(remote))

    return run


# How it is found


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:build_loss", "no module 'nowhere' in the current folder or among the examples"),
        ("algorithms.nowhere:build_loss", "no module 'algorithms.nowhere'"),
        ("mine:build_los", "has no 'build_los'"),
        ("mine:raise", "mine.py) has no 'raise'; did you mean 'raises'?"),
        ("json:build_loss", "module 'json' (/"),  # not the user's own json.py: the path shows it
        ("minee:raises", "no module 'minee' in the current folder or among the examples; did you mean 'mine'?"),
        ("algorithms.gspoo:build_loss", "did you mean 'algorithms.gspo'?"),
        ("mine.py:raises", "expected MODULE:CALLABLE, MODULE as it is imported; did you mean mine:raises?"),
        ("./mine:raises", "did you mean mine:raises?"),
        ("code/mine.py:raises", "did you mean mine:raises?"),
        ("mine:takes_two", "takes_two(sample, cycle) cannot be called with four arguments: (sample, cycle, request,"),
        ("mine:takes_more", "cannot be called with four arguments"),
        ("batch_of_two:build_loss", "build_batch_loss(samples, cycle) cannot be called with four arguments: (samples,"),
        ("mine:not_callable", "'not_callable' of 'mine' is of type int, not callable"),
        ("odd_batch:build_loss", "'build_batch_loss' of 'odd_batch' is of type int"),
        (".mine:junk", "expected MODULE:CALLABLE"),
        ("mine", "expected MODULE:CALLABLE"),
        (":x", "expected MODULE:CALLABLE"),
        ("mydro:build_loss", "LOSS_FUNCTION: loss_function 'dro' is not advertised by modal"),
        ("comma:build_loss", "comma.OPERATIONS is 'forward', expected a tuple of names"),
    ],
)
def test_an_unusable_build_loss_is_refused_in_one_line(run_loop, folder, spec, message):
    done = run_loop("rl_loop", "--build-loss", spec)
    check_refused(done, message)
    assert done.stderr.startswith("error: ")


def test_a_folder_of_the_users_own_that_hides_the_algorithms_is_named(run_loop, folder, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "algorithms"]:
        monkeypatch.delitem(sys.modules, name)
    (folder / "algorithms").mkdir()
    (folder / "algorithms" / "__init__.py").touch()
    done = run_loop("rl_loop", "--build-loss", "algorithms.ppo:build_loss")
    assert done.returncode == 2
    assert "algorithms/__init__.py hides the algorithms of the examples; give that folder another" in done.stderr


@pytest.mark.parametrize(
    ("module", "message", "place"),
    [
        ("broken", "ModuleNotFoundError: No module named 'no_such_library'", 'broken.py", line 1'),
        ("fails", "ZeroDivisionError: division by zero", 'helper.py", line 3'),
        ("typo", "SyntaxError: invalid syntax", 'typo.py", line 1'),
        ("exits", "SystemExit: 3", 'exits.py", line 1'),
        ("cancelled", "CancelledError: ", 'cancelled.py", line 2'),
    ],
)
def test_a_module_that_fails_at_import_is_refused_with_its_traceback(run_loop, folder, module, message, place):
    done = run_loop("rl_loop", "--build-loss", f"{module}:build_loss", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --build-loss: importing '{module}' raised {message}")
    assert place in done.stderr
    assert "importlib" not in done.stderr and "callables.py" not in done.stderr
    assert not (folder / ".whitney_local").exists()


def test_a_key_that_a_module_shows_at_import_is_hidden(run_loop, folder):
    done = run_loop("rl_loop", "--build-loss", "tells:build_loss", "--local", WHITNEY_API_KEY="never-shown-here")
    assert done.returncode == 2 and "LookupError: [key]" in done.stderr and "never-shown-here" not in done.stderr


def test_a_build_loss_may_take_any_arguments(train):
    assert train("mine:takes_any", "--dry-run").returncode == 0


def test_operations_of_a_module_are_required_before_a_session(run_loop, folder):
    with ScriptedServer(OFFER) as server:
        data = ("--model", "byte-lm", "--sample-json", "one.jsonl")
        done = run_loop("rl_loop", "--build-loss", "needy:build_loss", *data, **training_on(server))
    assert done.returncode == 1 and "does not offer teleport for modal" in done.stderr
    assert [request.method for request in server.requests] == ["GET"]


# How it is called


def test_a_build_loss_may_use_its_context(train):
    done = train("mine:looks")
    assert done.returncode == 0, done.stderr
    assert done.summary["operations"]["logprobs"] == 2
    assert f"session {done.summary['session_id']}" in done.stderr


def test_a_build_loss_changes_neither_the_request_nor_the_loops_metrics(train):
    done = train("mine:meddles")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("cycle 1 ")]
    assert line.startswith("cycle 1 ") and line.endswith(" left  loss two lines  user/cycle 77")
    assert "logprobs" in done.summary["warnings"]  # another prompt in the datums is noticed


def test_a_second_run_of_a_build_loss_is_cleaned_up(train, remote):
    done = train("mine:opens_a_second_run")
    assert left_behind(remote, done.summary) == ("closed", ["cancelled"] * 3)


def test_a_build_batch_loss_is_called_once_for_all_requests(train):
    done = train("batch:build_loss", batch=4)
    assert done.returncode == 0, done.stderr
    assert "build_batch_loss of its module is called once a cycle instead" in done.stderr
    assert "skipped: cycle 0 is not for training" in done.stderr
    assert re.search(r"^cycle 1 .* groups 4", done.stderr, re.MULTILINE)
    assert (done.summary["cycles_done"], done.summary["cycles_skipped"]) == (1, 1)


# Cycles and groups without a gradient signal


def test_a_cycle_without_signal_is_skipped_and_printed(train):
    done = train("mine:skips_once")
    assert done.returncode == 0
    skipped = r"^cycle 0 +reward/mean 0 +–  +kl – +grad_norm – .* left  skipped: all rewards are 0$"
    assert re.search(skipped, done.stderr, re.MULTILINE)
    assert (done.summary["cycles_done"], done.summary["cycles_skipped"]) == (1, 1)


def test_a_loop_that_skips_every_cycle_fails_but_ends_cleanly(train, remote):
    done = train("mine:skips")
    assert done.returncode == 1 and "every cycle was skipped" in done.stderr
    assert left_behind(remote, done.summary) == ("closed", ["finished"])


SPARSE = """
def reward(tokens, request):
    return tokens == list(b"four")
"""


def test_a_rehearsal_that_skips_every_cycle_says_what_it_exercised_and_how_to_go_on(train, run_loop, folder):
    (folder / "sparse.py").write_text(SPARSE)
    done = run_loop("rl_loop", "--build-loss", GRPO, "--reward", "sparse:reward", "--lora-rank", "1", "--seed", "1")
    assert done.returncode == 1 and done.summary["cycles_skipped"] == 2
    assert (
        "\nexercised: sampling, your functions, save_state, export_lora and the clean-up; not exercised:" in done.stderr
    )
    assert "\nto go on: " in done.stderr and "part marks" in done.stderr and "--engine" in done.stderr
    assert "exercised" not in train("mine:skips").stderr  # of another service


def test_a_group_without_signal_is_left_out(train):
    done = train("mine:skips_the", "--cycles", "1", batch=8)
    assert (done.summary["cycles_done"], done.summary["cycles_skipped"]) == (1, 0)
    assert done.summary["tokens_trained"] < done.summary["tokens_sampled"]


def test_a_cycle_in_which_no_group_has_signal_is_skipped(train):
    done = train("mine:skips_cycle_0", batch=4)
    assert " left  skipped: none of 4 groups has a signal; the first: all alike\n" in done.stderr
    assert (done.summary["cycles_done"], done.summary["cycles_skipped"]) == (1, 1)
    assert done.summary["operations"]["forward_backward"] == 1


# What it must not do


def test_an_exception_is_shown_with_the_users_own_traceback(train, remote):
    done = train("mine:raises")
    assert done.returncode == 1
    traceback = done.stderr[done.stderr.index("Traceback") :]
    assert 'mine.py", line' in traceback and "no reward for this one" in traceback
    assert "user_loss.py" not in traceback and "client.py" not in traceback
    assert "error: build_loss raised LookupError in cycle 1: no reward for this one\n" in done.stderr
    assert (done.summary["status"], done.summary["cycles_done"]) == ("failed", 1)
    assert left_behind(remote, done.summary) == ("closed", ["cancelled"])


def test_a_filter_that_leaves_nothing_is_told_of_no_gradient_signal(train):
    done = train("mine:filters_all")
    assert done.returncode == 1 and "if there is nothing to train on, raise NoGradientSignal" in done.stderr


def test_a_build_loss_that_exits_has_failed(train, remote):
    done = train("mine:exits")
    assert done.returncode == 1 and "error: build_loss raised SystemExit in cycle 0: 0" in done.stderr
    assert left_behind(remote, done.summary) == ("closed", ["cancelled"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("junk", "in cycle 0, what modal would refuse: payload is a list of 1, expected an object"),
        ("nan", "data[1].loss_inputs.logprobs.values[3] is nan"),
        ("bad_loss", "loss_function 'dro' is not advertised by modal"),
        ("forgets_return", "build_loss returned None in cycle 0 (is its return missing?): return a payload, or"),
        ("returns_no_data", "no data in cycle 0: if nothing is left to train on, raise NoGradientSignal"),
    ],
)
def test_a_payload_that_the_provider_would_refuse_is_never_sent(train, remote, name, message):
    done = train(f"mine:{name}")
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert "forward_backward" not in done.summary["operations"]
    assert left_behind(remote, done.summary) == ("closed", ["cancelled"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("disagrees", "loss_function 'importance_sampling' in cycle 0 for request 0 of 4, but 'ppo' in cycle 0 for "),
        ("disagrees_on_config", "loss_config {'clip_low_threshold': 0.5, 'clip_high_threshold': 2.0} in cycle 0 for "),
        ("bad_for_one", "of 4, what modal would refuse: loss_function 'dro' is not advertised by modal"),
    ],
)
def test_groups_that_do_not_fit_together_are_never_sent(train, name, message):
    done = train(f"mine:{name}", "--cycles", "3", batch=4)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.summary["operations"].get("forward_backward", 0) < 2


def test_a_module_of_the_current_folder_is_loaded_before_one_of_the_same_name_in_the_examples(run_loop, tmp_path):
    mine = "import sys\nfrom grpo_build_loss import build_loss as grpo\n\n"
    mine += "def build_loss(*arguments):\n    print('mine', file=sys.stderr)\n    return grpo(*arguments)\n"
    (tmp_path / "minimal_loop.py").write_text(mine)
    done = run_loop("rl_loop", "--build-loss", "minimal_loop:build_loss", "--lora-rank", "1", "--cycles", "1")
    assert done.returncode == 0 and "mine" in done.stderr.splitlines()
