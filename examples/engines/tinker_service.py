"""An engine that trains on Tinker, or on a server that speaks its protocol (SkyRL), through the ``tinker`` SDK.

    pip install "tinker>=0.38"                                      # Python 3.11 or later
    export TINKER_API_KEY=…  TINKER_BASE_URL=…                      # the SDK's own; without a URL it is Tinker itself
    python examples/rl_loop.py --engine engines.tinker_service:make --engine-option model=Qwen/Qwen3-8B …

What trains there may be billed. Each run has a session of its own there, since only the end of a session frees its
model; the SDK keeps it alive, and it is finished when the run ends. What differs from other engines:

- The server must add a loss up, not average it. A forward at the start of each run compares its ``loss:sum``; if it
  differs or is not reported, the run fails. ``averages=true`` is for a server that divides by the length of each
  sequence (SkyRL on JAX). The engine undoes that, but not the division by the number of sequences, which hardly
  changes the steps of AdamW.
- ``cross_entropy`` and ``importance_sampling`` are computed there. Every other loss costs one more forward and
  is sent as importance sampling with the same gradient: ``logprobs`` are those of this forward, ``advantages`` are
  minus the slopes, d loss / d logprob.
  There is no value head, so no ``ppo_critic``.
- ``grad_clip_norm`` is refused unless you say ``clips_gradients=true``: Tinker clips, SkyRL on JAX ignores it.
- ``grad_norm`` is missing if the server does not report one.
- The engine cannot see the weights. If a step makes them NaN, it succeeds, and every later forward fails.
- Equal seeds give equal samples only if the server's sampler does so.
- A state names a checkpoint on the server, and is lost with it. An adapter is exported by the server and downloaded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import math
import secrets
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import tinker
    from tinker import types
except ImportError as error:
    raise ImportError('this engine needs the Tinker SDK: pip install "tinker>=0.38"') from error

from whitney_loop.local.engine import Backend, EngineError, JSONObject
from whitney_loop.local.objectives import CLIPPING, LOG_RATIO_LIMIT, OBJECTIVES, evaluate

_PROCEED_S = 1.0  # how often a run is asked whether it is being cancelled
_CLOSE_S = 10.0  # else a server that is gone delays the end of a run; the SDK keeps trying in the background
_FLOAT32_MIN, _FLOAT32_MAX = 1.1754943508222875e-38, 3.4028234663852886e38


def make(
    model: str, tokenizer: str = "", averages: bool = False, clips_gradients: bool = False, silence_s: float = 30.0
) -> Backend:
    """Return the engine for one of the server's models.

    ``tokenizer``: folder or name for transformers, which decodes the texts that a loop prints. ``averages`` and
    ``clips_gradients``: see above. ``silence_s``: a server that answers nothing for so long is given up.
    """
    return TinkerBackend(model, tokenizer, averages, clips_gradients, silence_s)


class TinkerBackend(Backend):
    """One model of the server. Raises ValueError if the server does not train it."""

    name = "tinker-service"
    losses = frozenset(OBJECTIVES) - {"ppo_critic"}

    def __init__(self, model: str, tokenizer: str, averages: bool, clips_gradients: bool, silence_s: float) -> None:
        self.model, self.averages, self.clips_gradients, self.silence_s = model, averages, clips_gradients, silence_s
        connecting = _in_thread(tinker.RestClient)
        try:
            self.rest = connecting.result(silence_s)
            models = self.rest.get_server_capabilities().result(silence_s).supported_models
        except concurrent.futures.TimeoutError:
            raise ConnectionError(f"the server has not answered in {silence_s:g} s; see TINKER_BASE_URL") from None
        known = {each.model_name: each for each in models if each.trainable is not False}
        if model not in known:
            raise ValueError(f"the server does not train {model!r}; it trains {', '.join(sorted(known))}")
        if known[model].max_context_length is not None:
            self.context_length = known[model].max_context_length - 1  # to score a text, the SDK samples a token more
        if tokenizer:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(tokenizer)
            self.vocabulary = len(loaded)
            self.decode = lambda token_ids: str(loaded.decode(list(token_ids)))

    def new_run(self, *, rank: int, seed: int, proceed: Callable[[], None]) -> TinkerRun:
        return TinkerRun(self, rank, seed, proceed)

    def wait(self, future: Any, proceed: Callable[[], None]) -> Any:
        """Return the result of an SDK's future; call ``proceed`` every second meanwhile.

        A queue may take hours, so that alone is no error. A server that for ``silence_s`` does not even say what it
        can do is gone: ConnectionError. The SDK alone would ask for ever.
        """
        awaited = future.future() if hasattr(future, "future") else future
        question, asked = None, time.monotonic()
        try:
            while not concurrent.futures.wait([awaited], _PROCEED_S).done:
                proceed()
                if time.monotonic() - asked > self.silence_s:
                    if question is not None and not question.done():
                        raise ConnectionError(f"the Tinker server has not answered for {self.silence_s:g} s")
                    question, asked = self.rest.get_server_capabilities().future(), time.monotonic()
        except BaseException:
            awaited.cancel()
            raise
        finally:
            if question is not None:
                question.cancel()
        try:
            return awaited.result()
        except tinker.RequestFailedError as failure:
            if failure.category is types.RequestErrorCategory.User:  # it was refused, so it changed nothing
                raise EngineError("refused_by_tinker", str(failure)) from failure
            raise


class TinkerRun:
    """One training client in a session of its own; an ``Engine``."""

    def __init__(self, backend: TinkerBackend, rank: int, seed: int, proceed: Callable[[], None]) -> None:
        self._backend, self._proceed = backend, proceed
        self._open(lambda: self._service.create_lora_training_client(backend.model, rank=rank, seed=seed % 2**31))

    def _open(self, create: Callable[[], Any]) -> None:
        """Begin a session, and make the training client in it. If that fails, the session is finished."""
        self._service = tinker.ServiceClient()
        opening = _in_thread(lambda: create().result())
        try:
            self._training = self._wait(opening)
            if not self._backend.averages:
                self._require_sums()
        except BaseException as failure:
            opening.add_done_callback(lambda _: self._service.close("errored"))
            if isinstance(failure, tinker.APIStatusError):
                raise EngineError("refused_by_tinker", str(failure)) from failure
            raise
        self._step, self._has_gradient = 0, False

    def _require_sums(self) -> None:
        """Raise EngineError unless the loss of two tokens is the sum of theirs."""
        tensors = {"target_tokens": [1, 2], "weights": [1.0, 1.0]}
        output = self._wait(self._training.forward([_datum([0, 1], tensors)], "cross_entropy"))
        found, expected = output.metrics.get("loss:sum"), -sum(_logprobs(output)[0])
        if found is None or not math.isclose(found, expected, rel_tol=0.01):  # it may compute in bfloat16
            told = "tells no loss:sum" if found is None else f"calls the sum {found}"
            raise EngineError(
                "other_reduction",
                f"the loss of two tokens is {expected}, and the server {told}. If it averages over a "
                "sequence, start the engine with --engine-option averages=true",
            )

    def forward(self, payload: JSONObject) -> JSONObject:
        """Run one forward; the loss is computed here."""
        return _evaluated(payload, self._forward(payload["data"]))[0]

    def _forward(self, data: list[JSONObject]) -> list[list[float]]:
        inputs = [_datum(each["input"]["token_ids"], _values(each, "target_tokens", "weights")) for each in data]
        return _logprobs(self._wait(self._training.forward(inputs, "cross_entropy")))

    def forward_backward(self, payload: JSONObject) -> JSONObject:
        """Send a loss that the server has as it is; carry any other by importance sampling."""
        loss_function, data, result = payload["loss_function"], payload["data"], None
        if loss_function == "cross_entropy" and not self._backend.averages:
            sent = [_values(datum, "target_tokens", "weights") for datum in data]
        elif loss_function == "importance_sampling" and all(map(_ratios_are_limited, data)):
            sent = [_with_weighted_advantages(datum) for datum in data]
        else:
            logprobs = self._forward(data)
            result, slopes = _evaluated(payload, logprobs)
            loss_function = "importance_sampling"
            sent = [
                _values(datum, "target_tokens") | {"logprobs": p, "advantages": [-slope for slope in slopes_of_datum]}
                for datum, p, slopes_of_datum in zip(data, logprobs, slopes, strict=True)
            ]
        if self._backend.averages:
            for tensors in sent:
                tensors["advantages"] = [a * len(tensors["advantages"]) for a in tensors["advantages"]]
        if not all(abs(value) <= _FLOAT32_MAX for tensors in sent for values in tensors.values() for value in values):
            raise EngineError("non_finite_loss", "a slope of the loss is beyond float32; nothing was accumulated")
        inputs = [_datum(datum["input"]["token_ids"], tensors) for datum, tensors in zip(data, sent, strict=True)]
        output = self._wait(self._training.forward_backward(inputs, loss_function))
        self._has_gradient = True
        try:
            return result or _evaluated(payload, _logprobs(output))[0]
        except EngineError as failure:
            raise RuntimeError("the loss is not finite, and its gradient was added") from failure

    def optim_step(self, optimizer: JSONObject) -> JSONObject:
        """Take one step by the server's AdamW."""
        if not self._has_gradient:
            raise EngineError("no_gradients", "optim_step needs a forward_backward since the last step")
        decay = optimizer["learning_rate"] * optimizer["weight_decay"]
        if optimizer["eps"] < _FLOAT32_MIN or decay > _FLOAT32_MAX:
            raise EngineError("non_finite_update", "in float32 this eps is 0, or this decay infinite; nothing changed")
        fields = {name: value for name, value in optimizer.items() if name != "type"}
        metrics = self._wait(self._training.optim_step(types.AdamParams(**fields))).metrics or {}
        self._has_gradient = False
        self._step += 1
        norms = [value for name, value in metrics.items() if name.split("/")[-1].split(":")[0] == "grad_norm"]
        return {"step": self._step} | ({"grad_norm": norms[0]} if norms else {})

    def sampler(self) -> TinkerSampler:
        """Return a snapshot, which lives as long as the session."""
        sampling = self._wait(self._training.save_weights_and_get_sampling_client())
        return TinkerSampler(sampling, self._step, self._wait)

    def save_state(self, folder: Path) -> int:
        """Save a checkpoint on the server, and its path here."""
        saved = self._wait(self._training.save_state(_new_name()))
        (folder / "state.json").write_text(json.dumps({"path": saved.path, "step": self._step}), encoding="utf-8")
        return self._step

    def load_state(self, folder: Path) -> None:
        """Begin another session from the checkpoint, with its optimizer."""
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        path, step = (state.get(name) for name in ("path", "step")) if isinstance(state, dict) else (None, None)
        if not isinstance(path, str) or type(step) is not int:
            raise ValueError(f"{folder} names no checkpoint")
        self.close()
        self._open(lambda: self._service.create_training_client_from_state_with_optimizer(path))
        self._step = step

    def export_lora(self, folder: Path, *, base_model: str) -> None:
        """Let the server export the adapter, and download it."""
        try:
            saved = self._wait(self._training.save_weights_external(_new_name()))
        except tinker.NotFoundError as failure:
            raise EngineError("export_failed", "this server does not export adapters") from failure
        urls = self._wait(self._backend.rest.get_external_weights_urls(saved.path)).urls
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            if name not in urls:
                raise EngineError("export_failed", f"the server exported no {name}")
            with urllib.request.urlopen(urls[name]) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)

    def close(self) -> None:
        """Finish the session, which frees the model and every sampler."""
        with contextlib.suppress(tinker.NotFoundError):  # SkyRL ends a session when its heartbeat ends, as it now does
            self._service.close("success").result(_CLOSE_S)

    def _wait(self, future: Any) -> Any:
        return self._backend.wait(future, self._proceed)


class TinkerSampler:
    """A snapshot of the weights on the server; a ``Sampler``."""

    def __init__(self, sampling: Any, version: int, wait: Callable[[Any], Any]) -> None:
        self._sampling, self.version, self._wait = sampling, version, wait

    def sample(self, request: JSONObject, seed: str) -> list[JSONObject]:
        return self.sample_many([(request, seed)])[0]

    def sample_many(self, requests: list[tuple[JSONObject, str]]) -> list[list[JSONObject]]:
        """Submit all of them, then wait for each."""
        futures = [self._submit(request, seed) for request, seed in requests]
        try:
            responses = [self._wait(future) for future in futures]
        except BaseException:
            for future in futures:
                future.future().cancel()  # the SDK tells the server
            raise
        return [self._sequences(request, each) for (request, _), each in zip(requests, responses, strict=True)]

    def _submit(self, request: JSONObject, seed: str) -> Any:
        params = dict(request["sampling_params"])
        params["seed"] = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big") >> 1  # 31 bits
        params["stop"] = params.get("stop") or None  # an empty list would also switch off the end of text
        prompt = types.ModelInput.from_ints(request["prompt"]["token_ids"])
        return self._sampling.sample(prompt, request["num_samples"], types.SamplingParams(**params))

    def _sequences(self, request: JSONObject, response: Any) -> list[JSONObject]:
        params, prompt = request["sampling_params"], request["prompt"]["token_ids"]
        logprobs = [list(sequence.logprobs) for sequence in response.sequences]
        if (params.get("temperature", 1.0), params.get("top_p", 1.0), params.get("top_k", -1)) != (1.0, 1.0, -1):
            # These may be of the distribution that was sampled; the contract asks for the policy's own.
            texts = [types.ModelInput.from_ints([*prompt, *sequence.tokens]) for sequence in response.sequences]
            scores = [self._sampling.compute_logprobs(text) for text in texts]
            logprobs = [self._wait(each)[-len(own) :] for each, own in zip(scores, logprobs, strict=True)]
        return [
            {"tokens": list(sequence.tokens), "logprobs": own, "stop_reason": sequence.stop_reason}
            for sequence, own in zip(response.sequences, logprobs, strict=True)
        ]

    def logprobs(self, token_ids: list[int]) -> list[float | None]:
        later = len(token_ids) - 1
        if not later:
            return [None]
        found = self._wait(self._sampling.compute_logprobs(types.ModelInput.from_ints(token_ids)))
        return [None, *found[-later:]]  # some servers leave the first one out

    def close(self) -> None:
        """Do nothing: a sampler ends with the session of its run."""


def _evaluated(payload: JSONObject, logprobs: list[list[float]]) -> tuple[JSONObject, list[list[float]]]:
    """Return the result of a forward, and d loss / d logprob of each datum."""
    loss_function, loss, clipped, counted = payload["loss_function"], 0.0, 0, 0
    slopes: list[list[float]] = []
    for index, (datum, p) in enumerate(zip(payload["data"], logprobs, strict=True)):
        outcome = evaluate(loss_function, p, _values(datum, *datum["loss_inputs"]), payload["loss_config"])
        loss += outcome.loss
        if not math.isfinite(loss):
            raise EngineError("non_finite_loss", f"the loss is {loss} at data[{index}]; nothing was changed")
        clipped += outcome.clipped
        counted += outcome.counted
        slopes.append(list(outcome.slopes))
    metrics = {"loss:sum": loss}
    if loss_function in CLIPPING:
        metrics["clip_frac"] = clipped / counted if counted else 0.0
    return {"loss": loss, "metrics": metrics, "outputs": [{"logprobs": p} for p in logprobs]}, slopes


def _ratios_are_limited(datum: JSONObject) -> bool:
    """Return whether no ratio can exceed the limit that the contract's loss has: the server's loss has none."""
    lowest: float = min(_values(datum, "logprobs")["logprobs"])
    return lowest >= -LOG_RATIO_LIMIT


def _with_weighted_advantages(datum: JSONObject) -> JSONObject:
    """Return the tensors of importance sampling as the server takes them: without weights."""
    tensors = _values(datum, "target_tokens", "logprobs", "advantages")
    weights = _values(datum, "weights")["weights"]
    return tensors | {"advantages": [w * a for w, a in zip(weights, tensors["advantages"], strict=True)]}


def _values(datum: JSONObject, *names: str) -> JSONObject:
    return {name: datum["loss_inputs"][name]["values"] for name in names}


def _datum(token_ids: list[int], tensors: JSONObject) -> Any:
    inputs = {
        name: types.TensorData(values, "int64" if name == "target_tokens" else "float32", [len(values)])
        for name, values in tensors.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(token_ids), loss_fn_inputs=inputs)


def _logprobs(output: Any) -> list[list[float]]:
    logprobs = [each["logprobs"].tolist() for each in output.loss_fn_outputs]
    if not all(math.isfinite(p) for each in logprobs for p in each):
        raise EngineError("non_finite_loss", "the server's logprobs are not finite: its weights are useless")
    return logprobs


def _new_name() -> str:
    return f"whitney-{secrets.token_hex(8)}"


def _in_thread(call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Return the future of a call that may block for ever, as the SDK does while it connects."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return future
