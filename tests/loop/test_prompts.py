"""A data set of prompts: how it is read, and which prompts a cycle takes."""

import json

import pytest

from between import Recorder
from loop_runs import EXAMPLES, GRPO, check_refused, training_on
from whitney_loop import sample_request
from whitney_loop.loop import Request, fingerprint, read_requests, requests_of_cycle, write_prompts

PROMPTS = ["the ", "she ", "they ", "one ", "a ", "and ", "that ", "with "]
REQUESTS = [Request(sample_request(prompt.encode(), num_samples=4, max_tokens=6), prompt) for prompt in PROMPTS]


def token_ids(requests):
    return [request["prompt"]["token_ids"] for request in requests]


@pytest.mark.parametrize("form", ["array", "jsonl", "jsonl by its content", "spread array"])
def test_a_data_set_is_an_array_or_a_jsonl(form, tmp_path):
    path = tmp_path / ("data.jsonl" if form == "jsonl" else "data.json")
    lines = "\n\n".join(json.dumps(request, ensure_ascii=False) for request in REQUESTS)
    text = {"array": json.dumps(REQUESTS), "spread array": json.dumps(REQUESTS, indent=2)}.get(form, lines)
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le"):  # as editors and shells write it
        path.write_text(text, encoding=encoding)
        assert read_requests(path, embedded=False) == REQUESTS


def test_a_single_request_may_be_spread_over_lines(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(REQUESTS[0], indent=2))
    assert read_requests(path, embedded=False) == [REQUESTS[0]]


def test_the_example_request_is_the_default_on_the_embedded_service():
    default = read_requests(None, embedded=True)
    assert len(default) == 1 and default == read_requests(EXAMPLES / "sample.json", embedded=False)


GOOD = json.dumps(REQUESTS[0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.jsonl", f"{GOOD}\n\n{{}}\n", "d.jsonl:3: request.prompt is missing"),
        ("d.jsonl", f"{GOOD}\n{GOOD[:-1]}\n", "d.jsonl:2: Expecting ',' delimiter at column"),
        ("d.json", f"{GOOD}\n{GOOD}\n[]\n", "d.json:3: request is []"),
        ("d.json", f"[{GOOD}, {{}}]", "d.json, entry 1 of the array (the first is 0): request.prompt is missing"),
        ("d.json", "[]", "d.json: holds no request"),
        ("d.jsonl", "\n", "d.jsonl: holds no request"),
        ("d.json", "{}", "d.json: request.prompt is missing"),
        ("d.json", "import json\n", "d.json: Expecting value"),
        ("d.json", "[" * 200_000, "d.json: "),
        ("d.jsonl", GOOD.replace("116", '"t"'), "d.jsonl:1: prompt.token_ids[0] is 't'"),
        ("d.jsonl", f"{GOOD}\n" + "[" * 200_000, "d.jsonl:2: "),
        ("d.jsonl", f"{GOOD}\n".encode() + b'{"prompt": "\xff"}', "d.jsonl:2: 'utf-8' codec can't decode byte 0xff"),
        ("nowhere/d.json", None, "nowhere/d.json: No such file or directory"),
        (
            "d.json",
            '["What is 7 * 6?"]',
            "d.json, entry 0 of the array (the first is 0): request is 'What is 7 * 6?', expected an object; tokenize",
        ),
        ("d.json", GOOD.replace('{"token_ids": [116, 104, 101, 32]}', '"the "'), "object; tokenize the text first"),
        ("d.json", GOOD.replace("[116, 104, 101, 32]", '"the "'), "token id; tokenize the text first"),
        ("d.json", GOOD.replace("116", '"the"'), "integer of at least 0; tokenize the text first"),
        ("d.jsonl", GOOD[:-1] + ', "metadata": "ice"}', "d.jsonl:1: metadata is 'ice', expected an object"),
        (
            "d.jsonl",
            GOOD[:-1] + ', "answer": "ice"}',
            "request.answer is not a known field; known: prompt, num_samples",
        ),
    ],
)
def test_a_bad_request_is_named_by_file_and_line(run_loop, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    done = run_loop("rl_loop", "--build-loss", GRPO, "--sample-json", name)
    check_refused(done, message)
    assert done.stderr.startswith(f"error: --sample-json {name}")


def test_each_epoch_has_every_request_once_in_an_order_of_its_own():
    taken = [ids for cycle in range(16) for ids in token_ids(requests_of_cycle(REQUESTS, 3, 1, cycle))]
    epochs = [taken[start : start + 8] for start in range(0, 48, 8)]
    assert all(sorted(epoch) == sorted(token_ids(REQUESTS)) for epoch in epochs)
    assert len({json.dumps(epoch) for epoch in epochs}) == 6
    assert epochs[0] != token_ids(requests_of_cycle(REQUESTS, 8, 2, 0))


def test_the_requests_of_a_cycle_depend_on_seed_and_cycle_alone():
    first = [requests_of_cycle(REQUESTS, 3, 1, cycle) for cycle in range(10)]
    assert requests_of_cycle(REQUESTS, 3, 1, 7) == first[7]
    seeds = [request["sampling_params"]["seed"] for cycle in first for request in cycle]
    assert len(set(seeds)) == 30 and all(0 <= seed < 2**31 for seed in seeds)
    assert all("seed" not in request["sampling_params"] for request in REQUESTS)


def test_a_request_with_a_seed_keeps_it():
    own = Request(sample_request(b"the ", num_samples=4, max_tokens=6, seed=0), "the one")
    assert requests_of_cycle([own], 1, 1, 5) == [own]


def test_the_fingerprint_of_a_data_set_stays_the_same_in_later_versions():
    """Metrics files hold it: if it changed, runs of earlier versions could not be resumed."""
    assert fingerprint([{"prompt": {"token_ids": [1, 2]}, "num_samples": 2}]) == "5314126bbd7666a6"


def test_a_fingerprint_tells_data_sets_apart():
    assert fingerprint(REQUESTS) == fingerprint(REQUESTS[:]) != fingerprint(REQUESTS[1:])


# Metadata beside the payload of a prompt

ANSWERS = {"hot:": "ice", "dry:": "wet"}
MINE = """
from whitney_loop import NoGradientSignal

def build_loss(sample, cycle, request, ctx):
    again = request | {"num_samples": 1}
    ctx.client.sampler_operation(ctx.run_id, ctx.sampler_id, "sample", again)
    ctx.metrics["answer"] = request["metadata"]["answer"]
    raise NoGradientSignal("enough")
"""


def write_answers(path, answers):
    pairs = [(list(prompt.encode()), {"answer": answer}) for prompt, answer in answers.items()]
    write_prompts(path, pairs, num_samples=2, max_tokens=1)


def test_a_prompt_file_with_metadata_is_written_and_read(tmp_path):
    path = tmp_path / "answers.jsonl"
    write_answers(path, ANSWERS)
    requests = read_requests(path, embedded=False)
    assert [bytes(request["prompt"]["token_ids"]).decode() for request in requests] == list(ANSWERS)
    assert [request["metadata"] for request in requests] == [{"answer": answer} for answer in ANSWERS.values()]
    write_answers(path, ANSWERS | {"dry:": "damp"})
    assert fingerprint(read_requests(path, embedded=False)) != fingerprint(requests)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([-1], {}), r"prompts\[1\]: prompt.token_ids\[0\] is -1"),
        (([1], "ice"), r"prompts\[1\]: metadata is 'ice', expected an object"),
        (([1], {"answer": {1, 2}}), r"prompts\[1\]: .*set is not JSON serializable"),
    ],
)
def test_a_pair_that_cannot_be_written_is_named_by_its_index(tmp_path, pair, message):
    with pytest.raises(ValueError, match=message):
        write_prompts(tmp_path / "answers.jsonl", [([1], {}), pair], num_samples=2, max_tokens=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("build_loss", ["mine:build_loss", "algorithms.dapo:build_loss"])
def test_metadata_reaches_the_users_function_and_is_never_sent(run_loop, tmp_path, remote, build_loss):
    """Also if the function samples again: mine always does, dapo if all rewards are equal, which is frequent here."""
    write_answers(tmp_path / "answers.jsonl", ANSWERS)
    (tmp_path / "mine.py").write_text(MINE)
    common = ("--sample-json", "answers.jsonl", "--model", "byte-lm", "--lora-rank", "1", "--seed", "1")
    with Recorder(remote) as service:
        done = run_loop("rl_loop", "--build-loss", build_loss, *common, **training_on(service))
    payloads = service.of_kind("sample")
    assert len(payloads) > 2
    assert all(payload.keys() == {"prompt", "num_samples", "sampling_params"} for payload in payloads)
    if build_loss == "mine:build_loss":
        assert "answer ice" in done.stderr and "answer wet" in done.stderr
