"""Ten thousand mutations of what a user gives and of what a service answers: success, or an error that names the field.

Seeded; the number in a failure's message gives the same mutation again.
"""

import copy
import json
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from whitney_loop import (
    ServiceUnavailable,
    WhitneyClient,
    WhitneyError,
    adamw_optimizer,
    check_payload,
    completion_logprobs,
    completion_values,
    forward_backward_payload,
    group_mean_advantages,
    lora_run,
    result_sampler_id,
    result_sequences,
    rl_datum,
    sample_request,
    sft_datum,
    tensor,
    training_session,
    transport,
)
from whitney_loop.local import serve
from whitney_loop.payloads import check_logprobs_request, check_optimizer_payload, check_sample_request

PAYLOAD_MUTATIONS, REQUEST_MUTATIONS, HELPER_MUTATIONS = 4000, 2000, 2000
SERVED_MUTATIONS, RESPONSE_MUTATIONS = 1000, 1000  # ten thousand in all

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
    """Every place in a JSON value, as paths."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(value, chance, junk):
    """The value with one to three things replaced, dropped, doubled or added."""
    holder = {"it": copy.deepcopy(value)}
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        *path, key = chance.choice(list(places(holder["it"], ("it",))))
        parent = holder
        for step in path:
            parent = parent[step]
        how = chance.choice(["replace", "replace", "replace", "drop", "add", "double"])
        if how == "drop" and path:
            del parent[key]
        elif how == "add" and isinstance(parent, dict) and path:
            parent[chance.choice(["x", "values", "seed", "", "\ud800"])] = copy.deepcopy(chance.choice(junk))
        elif how == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[key] = copy.deepcopy(chance.choice(junk))
    return holder["it"]


def names_a_field(error, fields):
    """Whether the message says where."""
    return any(field in str(error) for field in fields) and len(str(error)) < 1000


def seeds():
    rl = [rl_datum([1, 2], [3, 4], [-1.0, -2.0], 0.5), rl_datum([1], [5], [-1.0], [1.0])]
    clipped = [rl_datum([1], [5, 6], [-1.0, -1.0], 1.0, clip_low=0.8, clip_high=1.2)]
    return [
        (forward_backward_payload([sft_datum([1, 2], [3])], "cross_entropy"), "modal"),
        (forward_backward_payload(rl, "importance_sampling"), "tinker"),
        (forward_backward_payload(rl, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}), "modal"),
        (forward_backward_payload(clipped, "cispo"), "tinker"),
    ]


PAYLOAD_FIELDS = ("payload", "data", "loss_function", "loss_config", "provider")


def test_every_payload_passes_or_is_refused_with_the_field():
    chance, refused = random.Random(1), 0
    for number in range(PAYLOAD_MUTATIONS):
        payload, provider = chance.choice(seeds())
        payload = mutated(payload, chance, IN_PROCESS_JUNK)
        try:
            check_payload(payload, provider)
        except ValueError as error:
            refused += 1
            assert names_a_field(error, PAYLOAD_FIELDS), (number, str(error))
        else:
            json.dumps(payload, allow_nan=False)  # what passes can be sent
    assert PAYLOAD_MUTATIONS / 2 < refused < PAYLOAD_MUTATIONS


REQUESTS = [
    (sample_request([1, 2], num_samples=2, max_tokens=4, seed=1, stop=[3]), check_sample_request,
     ("request", "prompt", "num_samples", "sampling_params")),
    ({"input": {"token_ids": [1, 2]}}, check_logprobs_request, ("request", "input")),
    ({"optimizer": adamw_optimizer(0.1)}, check_optimizer_payload, ("payload", "optimizer")),
]  # fmt: skip


def test_every_request_passes_or_is_refused_with_the_field():
    chance, refused = random.Random(2), 0
    for number in range(REQUEST_MUTATIONS):
        request, check, fields = chance.choice(REQUESTS)
        request = mutated(request, chance, IN_PROCESS_JUNK)
        try:
            check(request)
        except ValueError as error:
            refused += 1
            assert names_a_field(error, fields), (number, str(error))
        else:
            json.dumps(request, allow_nan=False)
    assert REQUEST_MUTATIONS / 2 < refused < REQUEST_MUTATIONS


HELPERS = [
    (rl_datum, [[1, 2], [3, 4], [-1.0, -2.0], 0.5]),
    (rl_datum, [[1, 2], [3, 4], [-1.0, -2.0], [0.5, 0.5]]),
    (sft_datum, [[1, 2], [3, 4]]),
    (tensor, ["float32", [1.0, 2.0]]),
    (tensor, ["int64", [1, 2]]),
    (group_mean_advantages, [[1.0, 2.0, 3.0]]),
    (lambda *arguments: sample_request(arguments[0], num_samples=arguments[1], max_tokens=arguments[2]), [[1], 2, 3]),
    (adamw_optimizer, [0.1]),
    (completion_logprobs, [{"logprobs": [None, -1.0, -2.0]}, [1]]),
    (completion_values, [{"values": [1.0, 2.0]}, [1]]),
]


def test_every_helper_gives_a_result_or_says_which_argument():
    chance, refused = random.Random(3), 0
    for number in range(HELPER_MUTATIONS):
        helper, arguments = chance.choice(HELPERS)
        changed = mutated(arguments, chance, IN_PROCESS_JUNK)
        if not isinstance(changed, list) or len(changed) != len(arguments):
            continue  # Python itself says what is wrong with a call
        try:
            helper(*changed)
        except ValueError as error:
            refused += 1
            assert re.search(r"\w+", str(error)) and len(str(error)) < 1000, (number, str(error))
    assert refused > HELPER_MUTATIONS / 4


@pytest.mark.long
def test_the_service_does_each_mutated_operation_whole_or_not_at_all(tmp_path):
    chance = random.Random(4)
    sent = {"succeeded": 0, "failed": 0, "refused": 0}
    with serve(tmp_path) as service:
        client = WhitneyClient(service.base_url, service.api_key)
        session_id = client.create_session("modal")
        run_id = client.create_lora_run(session_id, model="byte-lm", rank=1, seed=1)
        sampler_id = result_sampler_id(client.run_operation(run_id, "save_weights_for_sampler", {}))
        for number in range(SERVED_MUTATIONS * 5 // 4):
            before = client.run(run_id)["next_seq_id"]
            kind, seed = chance.choice([
                ("forward_backward", seeds()[0][0]), ("forward_backward", seeds()[2][0]),
                ("optim_step", {"optimizer": adamw_optimizer(0.01)}), ("save_weights_for_sampler", {}),
                ("sample", REQUESTS[0][0]), ("logprobs", REQUESTS[1][0]),
            ])  # fmt: skip
            payload = seed if number % 5 == 0 else mutated(seed, chance, JUNK)
            if kind == "sample":
                keep_small(payload)
            try:
                if kind in ("sample", "logprobs"):
                    client.sampler_operation(run_id, sampler_id, kind, payload)
                else:
                    client.run_operation(run_id, kind, payload)
                how = "succeeded"
            except WhitneyError as error:
                how = "failed" if error.outcome == "failed" else "refused"
                assert error.outcome in ("failed", "rejected") and error.code != "internal_error", (number, error)
            except ValueError as error:
                how = "refused"
                assert kind in str(error), (number, error)
            sent[how] += 1
            taken = client.run(run_id)["next_seq_id"] - before
            assert taken == (how != "refused"), (number, kind, how)
        assert client.run(run_id)["status"] == "active"
        client.finish(run_id)
        client.close_session(session_id)
    assert min(sent["succeeded"], sent["refused"]) > 50


def keep_small(request):
    """A request that is legal and enormous is no fault, but takes its time."""
    if not isinstance(request, dict):
        return
    params = request.get("sampling_params")
    for holder, name in ((request, "num_samples"), (params, "max_tokens")):
        if isinstance(holder, dict) and type(holder.get(name)) is int:
            holder[name] = min(holder[name], 8)


# What a service may answer


class Mutating(BaseHTTPRequestHandler):
    """Answers as a service would, one answer in three mutated."""

    protocol_version = "HTTP/1.0"
    chance = random.Random(5)
    mutations = 0

    def do_GET(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        answer = self.honest(body if isinstance(body, dict) else {})
        if self.chance.random() < 1 / 3:
            type(self).mutations += 1
            answer = mutated(answer, self.chance, JUNK)
        raw = json.dumps(answer).encode()  # NaN and the like as Python writes them
        self.send_response(self.chance.choice([200] * 20 + [404, 409, 422]))
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_GET  # noqa: N815 - http.server's name

    def honest(self, body):
        path = self.path.partition("?")[0].rstrip("/").split("/")
        if path[-1] == "capabilities":
            return {"providers": {"modal": {"operations": ["sample"], "models": []}}}
        if "operations" in path:
            result = {"sampler_id": "smp-1", "version": 0, "sequences": [
                {"tokens": [1, 2], "logprobs": [-1.0, -2.0], "stop_reason": "stop"}]}  # fmt: skip
            return {"operation_id": "op-1", "run_id": "run-1", "kind": body.get("kind", "sample"), "seq_id":
                    body.get("seq_id", 1), "status": "succeeded", "result": result, "error": None}  # fmt: skip
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


FIELDS = ("session_id", "run_id", "operation_id", "next_seq_id", "status", "result", "sampler_id", "sequences",
          "kind", "seq_id", "providers", "operations", "provider", "no JSON object", "refused", "run run-1",
          "not cancelled or", "not closed", "no usable answer", "not offer", "sampled_")  # fmt: skip


@pytest.mark.long
def test_whatever_a_service_answers_gives_a_result_or_a_whitney_error_that_names_the_field(mutating, monkeypatch):
    monkeypatch.setattr(transport, "_FIRST_BACKOFF_S", 0.001)
    number = raised = 0
    while Mutating.mutations < RESPONSE_MUTATIONS:
        number += 1
        client = WhitneyClient(mutating, "", submit_timeout_s=0.02, operation_timeout_s=0.03, exchange_timeout_s=5.0)
        try:
            use(client)
        except ServiceUnavailable:
            raised += 1
        except (WhitneyError, ValueError) as error:
            raised += 1
            assert names_a_field(error, FIELDS), (number, str(error))
    assert raised > number / 4
