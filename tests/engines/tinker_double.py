"""A server that speaks Tinker's protocol, with byte-lm behind it; the tests use it in place of Tinker.

It answers with the SDK's own types, over HTTP, so the SDK itself is under test as well. By hand, for a loop:

    python tests/engines/tinker_double.py 8700        # prints the two variables that the SDK reads
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
from contextlib import contextmanager
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.types.try_again_response import TryAgainResponse

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from whitney_loop.local.byte_lm import ByteLM
from whitney_loop.local.engine import EngineError

MODEL = "byte-lm"
KEY = "tml-of-the-double"
_NUMPY = {proto.DTYPE_FLOAT32: "float32", proto.DTYPE_INT64: "int64"}


class Double:
    """The state of the server. Its fields are the faults that a test may ask for.

    ``averages``: over each sequence, as SkyRL does. ``damaged``: weights that are NaN. ``refuses``: the next request of
    this kind fails as the user's fault. ``holds``: requests of this kind are never answered.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.averages, self.damaged, self.refuses, self.holds = False, False, None, None
        self.models, self.samplers, self.sampler_sessions, self.results = {}, {}, {}, {}
        self.sessions, self.requests, self.cancelled = {}, [], []  # session → its finish, or None
        self.begun = threading.Event()  # a request that is held has come
        self.finished = threading.Event()  # a session has been finished
        self.base_url = None
        self._numbers, self._lock = count(), threading.Lock()

    # Each answers one path: a type of the SDK, bytes of protobuf, or None for an empty body.

    def client_config(self, body):
        return types.ClientConfigResponse()

    def client_dynamic_config(self, body):
        return types.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    def telemetry(self, body):
        return types.TelemetryResponse(status="accepted")

    def get_server_capabilities(self, body):
        model = types.SupportedModel(model_name=MODEL, max_context_length=4097, trainable=True)
        return types.GetServerCapabilitiesResponse(supported_models=[model])

    def create_session(self, body):
        session_id = f"session-{next(self._numbers)}"
        self.sessions[session_id] = None
        return types.CreateSessionResponse(session_id=session_id)

    def session_heartbeat(self, body):
        return types.SessionHeartbeatResponse()

    def finish(self, session_id, body):
        self.sessions[session_id] = body["reason"]["type"]
        for model_id in [each for each in self.models if each.startswith(f"{session_id}:")]:
            del self.models[model_id]
        self.finished.set()

    def cancel_future(self, body):
        self.cancelled.append(body["request_id"])

    def get_info(self, body):
        return types.GetInfoResponse(model_id=body["model_id"], model_data=types.ModelData(model_name=MODEL))

    def create_model(self, body):
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        config = body["lora_config"]
        self.models[model_id] = ByteLM(config["rank"], config["seed"])
        (self.folder / f"rank of {model_id}").write_text(str(config["rank"]))
        return types.CreateModelResponse(model_id=model_id)

    def load_weights(self, body):
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        saved = self.folder / body["path"].removeprefix("tinker://").replace("/", "_")
        model = ByteLM(int((saved / "rank").read_text()), 0)
        model.load_state(saved)
        self.models[model_id] = model
        (self.folder / f"rank of {model_id}").write_text((saved / "rank").read_text())
        return types.LoadWeightsResponse(path=body["path"])

    def forward_backward(self, message):
        model = self.models[message.model_id]
        data = [_datum_of(each) for each in message.data]
        payload = {"data": data, "loss_function": message.loss_fn, "loss_config": dict(message.loss_fn_config)}
        for datum in data:
            datum["loss_inputs"].setdefault("weights", {"values": [1.0] * len(datum["input"]["token_ids"])})
            weights = datum["loss_inputs"]["weights"]
            if self.averages:
                weights["values"] = [w / sum(weights["values"]) for w in weights["values"]]
        result = model.forward(payload) if message.forward_only else model.forward_backward(payload)
        answer = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        if not self.averages:  # SkyRL reports none
            answer.metrics["loss:sum"] = result["loss"]
        record = answer.loss_fn_outputs.add(num_datums=len(data))
        arrays = [np.array(output["logprobs"], "float32") for output in result["outputs"]]
        if self.damaged:
            arrays = [each * math.nan for each in arrays]
        field = record.fields["logprobs"]
        field.dtype, field.data = proto.DTYPE_FLOAT32, b"".join(each.tobytes() for each in arrays)
        field.offsets = np.cumsum([0, *(each.nbytes for each in arrays)], dtype="int64").tobytes()
        return answer.SerializeToString()

    def optim_step(self, body):
        result = self.models[body["model_id"]].optim_step(body["adam_params"])
        return types.OptimStepResponse(metrics={"grad_norm": result["grad_norm"]})

    def save_weights(self, body):
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        saved = self.folder / path.removeprefix("tinker://").replace("/", "_")
        saved.mkdir()
        self.models[body["model_id"]].save_state(saved)
        (saved / "rank").write_text((self.folder / f"rank of {body['model_id']}").read_text())
        return types.SaveWeightsResponse(path=path)

    def save_weights_for_sampler(self, body):
        sampler_id = f"sampler-{next(self._numbers)}"
        self.samplers[sampler_id] = self.models[body["model_id"]].sampler()
        return types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id)

    def save_weights_external(self, body):
        folder = self.folder / f"exported-{body['path']}"
        folder.mkdir()
        self.models[body["model_id"]].export_lora(folder, base_model=MODEL)
        path = f"tinker://{body['model_id']}/external_weights/{body['path']}"
        return types.SaveWeightsExternalResponse(path=path)

    def external_weights_urls(self, name, body):
        files = (self.folder / f"exported-{name}").iterdir()
        urls = {file.name: f"{self.base_url}/files/{file.parent.name}/{file.name}" for file in files}
        return types.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.now(timezone.utc))

    def asample(self, body):
        sampler = self.samplers[body["sampling_session_id"]]
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        params = {name: value for name, value in body["sampling_params"].items() if value is not None}
        request = {"prompt": {"token_ids": prompt}, "num_samples": body["num_samples"], "sampling_params": params}
        answer = proto.SampleResponse()
        for sequence in sampler.sample(request, str(params.get("seed"))):
            stop = proto.STOP_REASON_STOP if sequence["stop_reason"] == "stop" else proto.STOP_REASON_LENGTH
            tokens = np.array(sequence["tokens"], "int32").tobytes()
            answer.sequences.add(
                stop_reason=stop, tokens=tokens, logprobs=np.array(sequence["logprobs"], "float32").tobytes()
            )
        if body.get("prompt_logprobs"):
            answer.prompt_logprobs = np.array(sampler.logprobs(prompt), "float32").tobytes()  # None becomes NaN
        return answer.SerializeToString()

    # Futures: results are computed at once and fetched later.

    IN_A_FUTURE = (
        "create_model",
        "load_weights",
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "asample",
    )

    def submit(self, kind, body):
        request_id = f"request-{next(self._numbers)}"
        self.requests.append(kind)
        if kind == self.holds:
            self.results[request_id] = None
            self.begun.set()
        elif kind == self.refuses:
            self.refuses = None
            self.results[request_id] = types.RequestFailedResponse(error="as the test told it", category="user")
        else:
            try:
                with self._lock:
                    self.results[request_id] = getattr(self, kind)(body)
            except (EngineError, KeyError) as error:
                category = "user" if isinstance(error, EngineError) else "server"
                self.results[request_id] = types.RequestFailedResponse(error=repr(error), category=category)
        ids = [f"{request_id}-{i}" for i in range(body["num_samples"])] if kind == "asample" else None
        return types.UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)

    def retrieve_future(self, body):
        result = self.results[body["request_id"]]
        if result is None:
            return TryAgainResponse(type="try_again", request_id=body["request_id"], queue_state="active")
        return result


def _datum_of(message):
    tokens = [token for chunk in message.model_input for token in np.frombuffer(chunk.encoded_text.tokens, "int32")]
    tensors = {
        name: {"values": np.frombuffer(tensor.dense, _NUMPY[tensor.dtype]).tolist()}
        for name, tensor in message.loss_fn_inputs.items()
    }
    return {"input": {"token_ids": [int(token) for token in tokens]}, "loss_inputs": tensors}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = self.path.strip("/").split("/")
        double = self.server.double
        if parts[0] == "files":
            self._send(200, "application/octet-stream", (double.folder / parts[1] / parts[2]).read_bytes())
        elif parts[-1] == "external_weights_urls":
            self._answer(double.external_weights_urls(parts[-2], None))
        else:
            self._answer(getattr(double, parts[-1])(None))

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.removeprefix("/api/v1/").replace("/", "_")
        double = self.server.double
        if name == "forward_backward":
            self._answer(double.submit(name, proto.ForwardBackwardRequest.FromString(content)))
            return
        body = json.loads(content or b"{}")
        if name.endswith("_finish"):
            self._answer(double.finish(name.removeprefix("sessions_").removesuffix("_finish"), body))
        elif name in Double.IN_A_FUTURE:
            self._answer(double.submit(name, body))
        else:
            self._answer(getattr(double, name)(body))

    def _answer(self, result):
        if isinstance(result, bytes):
            self._send(200, "application/x-protobuf", result)
        else:
            self._send(200, "application/json", b"{}" if result is None else result.model_dump_json().encode())

    def _send(self, status, kind, content):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def running(folder, port=0):
    """A double on a loopback port, until the block ends."""
    with ThreadingHTTPServer(("127.0.0.1", port), _Handler) as server:
        server.double = double = Double(folder)
        double.base_url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield double
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage, running(storage, int(sys.argv[1])) as started:
        print(f"TINKER_BASE_URL={started.base_url} TINKER_API_KEY={KEY}", flush=True)
        threading.Event().wait()
