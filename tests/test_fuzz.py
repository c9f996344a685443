"""Mutated arguments and mutated answers of a service: each gives a result, or an error that names the place.

The mutations are drawn from a seed, so a failure can be repeated; its message has the number of the mutation.
FUZZ_TIMES=4 in the environment makes ten thousand of them.
"""

import copy
import json
import math
import os
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from whitney_loop import (
    OperationFailed,
    RequestRejected,
    ServiceUnavailable,
    WhitneyClient,
    WhitneyError,
    adamw_optimizer,
    all_zero,
    batch_normalize,
    check_payload,
    completion_logprobs,
    completion_values,
    critic_datum,
    forward_backward_payload,
    generalized_advantages,
    group_mean_advantages,
    kl_adjust_advantages,
    kl_shaped_returns,
    leave_one_out_baseline,
    length_normalize,
    logprobs_request,
    lora_run,
    result_sampler_id,
    result_sequences,
    rl_datum,
    sample_request,
    sft_datum,
    soft_advantages,
    tensor,
    training_session,
    transport,
)
from whitney_loop.local import serve
from whitney_loop.payloads import check_logprobs_request, check_optimizer_payload, check_sample_request

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
PAYLOAD_MUTATIONS, REQUEST_MUTATIONS, HELPER_MUTATIONS = 1000 * TIMES, 500 * TIMES, 500 * TIMES
SERVED_MUTATIONS, RESPONSE_MUTATIONS = 250 * TIMES, 250 * TIMES

DEEP = json.loads("[" * 300 + "]" * 300)
JUNK = [
    None, True, False, 0, -1, 1, 0.0, -0.0, 1.5, 1e-320, 1e300, -1e300, 2**63, -(2**63), 2**64, 10**400, float("nan"),
    float("inf"), float("-inf"), "", "x", "1", "nan", "\u0000", "\ud800", "é" * 50, "x" * 5000,
    [], [[]], [None], {}, {"": None}, [0] * 50, ["1", 2], {"token_ids": [1]}, {"values": []}, DEEP,
]  # fmt: skip
IN_PROCESS_JUNK = [
    *JUNK,
    10**5000,
    [10**5000],
    b"bytes",
    (1, 2),
    {1, 2},
    object(),
    1j,
    iter([1]),
    range(3),
    type,
    {1: 2},
]


def places(value, path=()):
    """Yield the path of every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(value, chance, junk):
    """Return the value with one to three places replaced, dropped, doubled or added, and the paths of these places."""
    changed = []
    holder = {"it": copy.deepcopy(value)}
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        *path, key = chance.choice(list(places(holder["it"], ("it",))))
        parent = holder
        for step in path:
            parent = parent[step]
        how = chance.choice(["replace", "replace", "replace", "drop", "add", "double"])
        if how == "add" and isinstance(parent, dict) and path:
            key = chance.choice(["x", "values", "seed", "", "\ud800"])
        changed.append((*path, key)[1:])
        if how == "drop" and path:
            del parent[key]
        elif how == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[key] = copy.deepcopy(chance.choice(junk))
    return holder["it"], changed


def named(path):
    """Return a path as messages write it, up to its last name: a message about an entry may name the whole list."""
    while path and not isinstance(path[-1], str):
        path = path[:-1]
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)[1:]


def says_where(error, changed):
    """Return whether the message begins with one of the changed places, or with a place inside it."""
    message = str(error).removeprefix("payload.").removeprefix("request.")
    places = [named(path) for path in changed]
    if len(changed) > 1:  # the first change may have shifted the list in which the second was made
        message, places = (re.sub(r"\[\d+\]", "[]", text) for text in (message, "\n".join(places)))
        places = places.split("\n")
    return len(message) < 1000 and any(message.startswith(place) or in_relation(message, place) for place in places)


def in_relation(message, place):
    """Match a message that begins with another place, which contradicts the changed one."""
    if place.endswith("input.token_ids"):
        return re.match(
            r"data\[\d*\]\.loss_inputs\.\w+\.values has \d+ entries, but input\.token_ids has \d+;", message
        )
    if place.endswith("weights.values"):
        return re.match(r"data\[\d*\]\.loss_inputs\.clip_\w+_threshold\.values\[\d*\] is ", message)
    return None


def seeds():
    rl = [rl_datum([1, 2], [3, 4], [-1.0, -2.0], 0.5), rl_datum([1], [5], [-1.0], [1.0])]
    clipped = [rl_datum([1], [5, 6], [-1.0, -1.0], 1.0, clip_low=0.8, clip_high=1.2)]
    return [
        (forward_backward_payload([sft_datum([1, 2], [3])], "cross_entropy"), "modal"),
        (forward_backward_payload(rl, "importance_sampling"), "tinker"),
        (forward_backward_payload(rl, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}), "modal"),
        (forward_backward_payload(clipped, "cispo"), "tinker"),
    ]


def test_every_payload_passes_or_is_refused_with_the_field():
    chance, refused = random.Random(1), 0
    for number in range(PAYLOAD_MUTATIONS):
        payload, provider = chance.choice(seeds())
        payload, changed = mutated(payload, chance, IN_PROCESS_JUNK)
        try:
            check_payload(payload, provider)
        except ValueError as error:
            refused += 1
            assert says_where(error, changed), (number, changed, str(error))
        else:
            json.dumps(payload, allow_nan=False)  # a payload that passes can be sent
    assert PAYLOAD_MUTATIONS / 2 < refused < PAYLOAD_MUTATIONS


REQUESTS = [
    (sample_request([1, 2], num_samples=2, max_tokens=4, seed=1, stop=[3]), check_sample_request),
    ({"input": {"token_ids": [1, 2]}}, check_logprobs_request),
    ({"optimizer": adamw_optimizer(0.1)}, check_optimizer_payload),
]


def test_every_request_passes_or_is_refused_with_the_field():
    chance, refused = random.Random(2), 0
    for number in range(REQUEST_MUTATIONS):
        request, check = chance.choice(REQUESTS)
        request, changed = mutated(request, chance, IN_PROCESS_JUNK)
        try:
            check(request)
        except ValueError as error:
            refused += 1
            assert says_where(error, changed), (number, changed, str(error))
        else:
            json.dumps(request, allow_nan=False)
    assert REQUEST_MUTATIONS / 2 < refused < REQUEST_MUTATIONS


PROMPT, SAMPLED, LOGPROBS = {"prompt_tokens": [1, 2]}, {"sampled_tokens": [3, 4]}, {"sampled_logprobs": [-1.0, -2.0]}
REFERENCE, REWARDS = {"reference_logprobs": [-1.0, -3.0]}, {"rewards": [1.0, 2.0, 3.0]}
HELPERS = [  # with arguments, under the names that messages use for them
    (rl_datum, PROMPT | SAMPLED | LOGPROBS | {"advantage": 0.5}),
    (rl_datum, PROMPT | SAMPLED | LOGPROBS | {"advantage": [0.5, 0.5]}),
    (sft_datum, PROMPT | {"completion_tokens": [3, 4]}),
    (critic_datum, PROMPT | SAMPLED | {"values": [0.5, 0.5], "returns": [1.0, 0.0]}),
    (tensor, {"dtype": "float32", "values": [1.0, 2.0]}),
    (tensor, {"dtype": "int64", "values": [1, 2]}),
    (completion_logprobs, {"result": {"logprobs": [None, -1.0, -2.0]}, "prompt_tokens": [1]}),
    (completion_values, {"result": {"values": [1.0, 2.0]}, "prompt_tokens": [1]}),
    (group_mean_advantages, REWARDS),
    (leave_one_out_baseline, REWARDS),
    (all_zero, {"advantages": [0.0, 0.0]}),
    (length_normalize, {"advantage": 1.0, "completion_length": 3}),
    (lambda *given: soft_advantages(given[0], beta=given[1]), REWARDS | {"beta": 0.5}),
    (lambda *given: kl_adjust_advantages(*given[:3], kl_coef=given[3]),
     {"advantages": [1.0, 1.0]} | LOGPROBS | REFERENCE | {"kl_coef": 0.1}),
    (lambda *given: kl_shaped_returns(*given[:3], kl_coef=given[3]),
     {"reward": 1.0} | LOGPROBS | REFERENCE | {"kl_coef": 0.1}),
    (lambda *given: generalized_advantages(*given[:2], gamma=given[2], gae_lambda=given[3]),
     {"rewards": [0.0, 1.0], "values": [0.5, 0.5], "gamma": 1.0, "gae_lambda": 0.9}),
    (batch_normalize, {"advantages": [[1.0, 2.0], [3.0]]}),
    (forward_backward_payload,
     {"data": [sft_datum([1, 2], [3])], "loss_function": "ppo", "loss_config": {"value_clip": 1.0}}),
    (adamw_optimizer, {"optimizer.learning_rate": 0.1}),
    (logprobs_request, {"input.token_ids": [1, 2]}),
    (lambda *given: sample_request(given[0], num_samples=given[1], max_tokens=given[2]),
     {"prompt.token_ids": [1], "num_samples": 2, "sampling_params.max_tokens": 3}),
]  # fmt: skip
TOO_LARGE = "the numbers given are so large that result "  # of sums and products of several arguments


def names_the_argument(error, given, changed):
    """Return whether the message begins with an argument, and names the changed one or compares lengths."""
    message = str(error)
    if not message.startswith((*given, TOO_LARGE)) or len(message) >= 1000:
        return False
    words = ["expected one each", "one per token", TOO_LARGE, *{path[0] for path in changed}]
    return any(word in message for word in words)


def test_every_helper_gives_a_result_or_says_which_argument():
    chance, called, refused = random.Random(3), 0, 0
    while called < HELPER_MUTATIONS:
        helper, given = chance.choice(HELPERS)
        arguments, changed = mutated(given, chance, IN_PROCESS_JUNK)
        if not isinstance(arguments, dict) or list(arguments) != list(given):
            continue  # Python itself says what is wrong with a call
        called += 1
        try:
            helper(*arguments.values())
        except ValueError as error:
            refused += 1
            assert names_the_argument(error, given, changed), (called, changed, str(error))
    assert refused > HELPER_MUTATIONS / 4


OPERATIONS = [
    ("forward_backward", seeds()[0][0]), ("forward_backward", seeds()[2][0]),
    ("optim_step", {"optimizer": adamw_optimizer(0.01)}), ("save_weights_for_sampler", {}),
    ("sample", REQUESTS[0][0]), ("logprobs", REQUESTS[1][0]),
]  # fmt: skip
OPERATIONS_PER_RUN = 100  # a legal step can be so large that no later operation succeeds


@pytest.mark.long
def test_the_service_does_each_mutated_operation_whole_or_not_at_all(tmp_path):
    """A second run does only the operations that succeeded in the first; both end with the same state."""
    chance = random.Random(4)
    sent = {"succeeded": 0, "failed": 0, "refused": 0}
    with serve(tmp_path) as service:
        client = WhitneyClient(service.base_url, service.api_key)
        session_id = client.create_session("modal")
        for first in range(0, SERVED_MUTATIONS * 5 // 4, OPERATIONS_PER_RUN):
            run_id, twin_id = (client.create_lora_run(session_id, model="byte-lm", rank=1, seed=1) for _ in range(2))
            sampler_id = result_sampler_id(client.run_operation(run_id, "save_weights_for_sampler", {}))
            for number in range(first, min(first + OPERATIONS_PER_RUN, SERVED_MUTATIONS * 5 // 4)):
                kind, payload = chance.choice(OPERATIONS)
                payload = payload if number % 5 == 0 else mutated(payload, chance, JUNK)[0]
                if kind == "sample":
                    keep_small(payload)
                how = do(client, run_id, sampler_id, kind, payload, number)
                sent[how] += 1
                if how == "succeeded" and kind in ("forward_backward", "optim_step"):
                    client.run_operation(twin_id, kind, payload)
            assert client.run(run_id)["status"] == "active"
            assert end_of(client, run_id, tmp_path) == end_of(client, twin_id, tmp_path), first
        client.close_session(session_id)
    assert min(sent["succeeded"], sent["refused"]) > 50, sent


def do(client, run_id, sampler_id, kind, payload, number):
    """Do an operation; return ``succeeded``, ``failed`` or ``refused``. Only a refused one takes no seq_id."""
    before = client.run(run_id)["next_seq_id"]
    how = "succeeded"
    try:
        if kind in ("sample", "logprobs"):
            client.sampler_operation(run_id, sampler_id, kind, payload)
        else:
            client.run_operation(run_id, kind, payload)
    except WhitneyError as error:
        how = "failed" if error.outcome == "failed" else "refused"
        assert error.outcome in ("failed", "rejected") and error.code != "internal_error", (number, error)
    except ValueError as error:
        how = "refused"
        assert str(error).startswith(f"{kind}: the payload cannot be written as JSON"), (number, error)
    assert client.run(run_id)["next_seq_id"] - before == (how != "refused"), (number, kind, how)
    return how


def end_of(client, run_id, storage):
    """Return the state of a run: its gradient, shown by a step at learning rate 0, its weights, moments and step."""
    try:
        step = client.run_operation(run_id, "optim_step", {"optimizer": adamw_optimizer(0.0, grad_clip_norm=1.0)})
    except OperationFailed as error:
        step = error.code
    state_id = client.run_operation(run_id, "save_state", {})["state_id"]
    client.finish(run_id)
    return step, (storage / "states" / state_id / "engine" / "state.json").read_bytes()


def keep_small(request):
    """Limit the sizes in a request: a huge one is legal, but takes long."""
    if not isinstance(request, dict):
        return
    params = request.get("sampling_params")
    for holder, name in ((request, "num_samples"), (params, "max_tokens")):
        if isinstance(holder, dict) and type(holder.get(name)) is int:
            holder[name] = min(holder[name], 8)


# Mutated answers of a service


class Mutating(BaseHTTPRequestHandler):
    """Answers as a service would, but mutates one answer in three."""

    protocol_version = "HTTP/1.0"
    chance = random.Random(5)
    mutations = 0
    operation = ("", 0)  # kind and seq_id of the newest
    whole_answers = 0.0  # that the client still gets; every later one is cut off
    changed: ClassVar[list] = []  # since the client began: (path, answer)
    wrong: ClassVar[list] = []  # those of these answers that no client may accept

    def do_GET(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        if "kind" in body:
            type(self).operation = (body["kind"], body["seq_id"])
        answer = self.honest()
        status = self.chance.choice([200] * 20 + REFUSALS)
        if self.chance.random() < 1 / 3:
            type(self).mutations += 1
            answer, paths = mutated(answer, self.chance, JUNK)
            self.changed += [(path, answer) for path in paths]
            if status == 200 and "operations" in self.path and is_json(answer) and is_wrong(answer, *self.operation):
                self.wrong.append(answer)
        raw = json.dumps(answer).encode()  # NaN and the like as Python writes them
        type(self).whole_answers -= 1
        if self.whole_answers < 0:
            raw = raw[: len(raw) // 2]
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_GET  # noqa: N815 - http.server's name

    def honest(self):
        path = self.path.partition("?")[0].rstrip("/").split("/")
        if path[-1] == "capabilities":
            return {"providers": {"modal": {"operations": ["sample"], "models": []}}}
        if "operations" in path:
            result = {"sampler_id": "smp-1", "version": 0, "sequences": [
                {"tokens": [1, 2], "logprobs": [-1.0, -2.0], "stop_reason": "stop"}]}  # fmt: skip
            kind, seq_id = self.operation
            return {"operation_id": "op-1", "run_id": "run-1", "kind": kind, "seq_id": seq_id,
                    "status": "succeeded", "result": result, "error": None}  # fmt: skip
        status = {"cancel": "cancelled", "run-1": "cancelled", "close": "closed"}.get(path[-1], "open")
        run = {"run_id": "run-1", "session_id": "ses-1", "status": status, "next_seq_id": 1}
        return run | {"provider": "modal", "runs": [run]}

    def log_message(self, *_):
        pass


@pytest.fixture
def mutating():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mutating)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def use(client):
    client.require_operations("modal", ["sample"])
    with training_session(client, provider="modal") as session_id:
        client.session(session_id)
        with lora_run(client, session_id, model="m") as run_id:
            saved = client.run_operation(run_id, "save_weights_for_sampler", {})
            sample = client.sampler_operation(run_id, result_sampler_id(saved), "sample", {})
            for sequence in result_sequences(sample):
                rl_datum([1], sequence["tokens"], sequence["logprobs"], 1.0)


REFUSALS = [404, 409, 422]
CLIENTS_PER_BREAK = 10  # for one client in so many, the service breaks off after 0 to 9 answers
NO_ANSWER = r"no usable answer from http\S+ within the time limit; last: (answered \d+ with a body|TimeoutError:) "
NO_OBJECT = r"(the service |)answered \d+ with a body that is not a JSON object"
CAPABILITIES = (
    r"capabilities: (providers|modal\.operations) is not |\S+ does not offer (provider 'modal'|sample for modal);"
)
ANSWER_FIELDS = ("session_id", "run_id", "operation_id", "next_seq_id", "status", "providers")  # that must be there
# Messages that do not have the form "NAME is …"
OTHER_WORDS = {
    "status": r"(run run-1|session ses-1|\w+ \(seq_id \d+\)) is .* after .* s, not ",
    "tokens": r"sample: result\.sequences\[\d\]\.logprobs is .*, one per token, not|sampled_tokens\[\d+\] is",
    "logprobs": r"sampled_logprobs\[\d+\] is",
    "providers": CAPABILITIES,
    "modal": CAPABILITIES,
    "operations": CAPABILITIES,
}


def is_json(answer):
    try:
        json.dumps(answer, allow_nan=False)
    except ValueError:
        return False
    return True


def is_wrong(answer, kind, seq_id):
    """Return whether it answers another operation, has no result, or has not one logprob per token."""
    if not isinstance(answer, dict):
        return True
    if answer.get("kind", kind) != kind or type(answer.get("seq_id", seq_id)) is not int:
        return True
    if answer.get("seq_id", seq_id) != seq_id or answer.get("status") != "succeeded":
        return answer.get("seq_id", seq_id) != seq_id
    result = answer.get("result")
    if not isinstance(result, dict) or kind != "sample":
        return not isinstance(result, dict)
    sequences = result.get("sequences")
    return not isinstance(sequences, list) or any(
        not isinstance(sequence, dict) or not isinstance(sequence.get("logprobs"), list)
        or not isinstance(sequence.get("tokens"), list) or len(sequence["logprobs"]) != len(sequence["tokens"])
        for sequence in sequences
    )  # fmt: skip


def tells(error, changed):
    """Return whether the message says which field of the answers is wrong, and how."""
    message = error.message if isinstance(error, WhitneyError) else str(error)
    if isinstance(error, RequestRejected):
        return error.status in REFUSALS and message.startswith("the service refused: ")
    if len(message) >= 1000:
        return False
    if re.match(f"{NO_ANSWER}|{NO_OBJECT}", message):
        return True
    for path, answer in changed:
        for name in [[key for key in path if isinstance(key, str)][-1]] if path else ANSWER_FIELDS:
            inner = r"(\.\w+|\[\d+\])*"
            if name == "result" and not (isinstance(answer, dict) and isinstance(answer.get("result"), dict)):
                inner = ""
            if re.search(rf"(^|[ .]){re.escape(name)}{inner} is .*(expected|, not an? )", message):
                return True
            if name in OTHER_WORDS and re.match(OTHER_WORDS[name], message):
                return True
    return False


@pytest.mark.long
def test_every_answer_of_a_service_gives_a_result_or_an_error_that_names_the_field(mutating, monkeypatch):
    monkeypatch.setattr(transport, "_FIRST_BACKOFF_S", 0.001)
    number = raised = unavailable = 0
    while Mutating.mutations < RESPONSE_MUTATIONS:
        number += 1
        Mutating.changed.clear()
        Mutating.wrong.clear()
        Mutating.whole_answers = number // CLIENTS_PER_BREAK % 10 if number % CLIENTS_PER_BREAK == 0 else math.inf
        client = WhitneyClient(mutating, "", submit_timeout_s=0.02, operation_timeout_s=0.03, exchange_timeout_s=5.0)
        try:
            use(client)
        except (WhitneyError, ValueError) as error:
            raised += 1
            unavailable += isinstance(error, ServiceUnavailable)
            assert tells(error, Mutating.changed), (number, Mutating.changed, str(error))
        else:
            assert Mutating.wrong == [], number
    assert raised > number / 4
    assert unavailable > 0
