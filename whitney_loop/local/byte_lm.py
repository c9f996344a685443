"""The embedded engine: it trains the model of ``byte_model.py`` and samples from it.

Weights are never changed in place: a step makes a new ``Policy``, and a sampler keeps the one that it was made with.
Sampler and trainer both use ``Policy.logprobs``, so for the same version their logprobs are equal.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

from whitney_loop.local import safetensors
from whitney_loop.local.byte_model import (
    END,
    INPUTS,
    LORA_ALPHA,
    VOCABULARY,
    Policy,
    Slopes,
    contexts_of,
    flat,
    folded,
    initial_weights,
    number_of_weights,
)
from whitney_loop.local.engine import Backend, EngineError, JSONObject
from whitney_loop.local.objectives import CLIPPING, OBJECTIVES, evaluate

_STATE_FORMAT = "whitney-loop byte_lm 3"  # increase the number when the base text or the layout changes


class ByteLM:
    """The model, gradients and optimizer of one run; an ``Engine``.

    ``rank`` is that of the adapter, at least 1. ``seed`` decides the initial A and nothing else. ``proceed`` is called
    before each datum and each sampled token, and may raise. Memory: 25 kB times the rank for each version that a
    sampler keeps, and 75 kB times the rank for moments and gradients.
    Raise ValueError if ``rank`` is below 1.
    """

    def __init__(self, rank: int, seed: int | str, proceed: Callable[[], None] = lambda: None) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        weights = initial_weights(rank, seed)
        self._rank = rank
        self._proceed = proceed
        self._policy = Policy(weights, rank)
        self._moment1 = [0.0] * len(weights)
        self._moment2 = [0.0] * len(weights)
        self._gradient: list[float] | None = None
        self._step = 0

    def forward(self, payload: JSONObject) -> JSONObject:
        """Return ``{"loss", "metrics", "outputs"}``; change nothing.

        Outputs of ``ppo_critic`` also have ``values``; value i depends on input tokens i − 1 and i. Its data may lack
        ``values`` and ``returns``; such a datum adds nothing to the loss.
        Raise EngineError ``non_finite_loss`` if the loss is NaN or infinite.
        """
        return self._evaluate(payload)[0]

    def forward_backward(self, payload: JSONObject) -> JSONObject:
        """Return what ``forward`` returns, and add the gradient to the accumulated one.

        Raise EngineError ``non_finite_loss`` if the loss or the gradient is NaN or infinite; then nothing is added.
        """
        result, slopes, d_head = self._evaluate(payload)
        gradient = self._policy.adapter_gradient(slopes) + d_head
        if self._gradient is not None:
            gradient = list(map(add, self._gradient, gradient))
        if not all(map(math.isfinite, gradient)):
            raise EngineError("non_finite_loss", "the gradient is not finite; nothing was accumulated")
        self._gradient = gradient
        return result

    def _evaluate(self, payload: JSONObject) -> tuple[JSONObject, Slopes, list[float]]:
        """Return the result of ``forward``, d loss / d logprobs, and d loss / d head."""
        loss_function, config = payload["loss_function"], payload.get("loss_config", {})
        trains_head = loss_function == "ppo_critic"
        loss, clipped, counted = 0.0, 0, 0
        outputs = []
        slopes: Slopes = {}
        d_head = [0.0] * INPUTS
        for index, datum in enumerate(payload["data"]):
            self._proceed()
            tensors = {name: tensor["values"] for name, tensor in datum["loss_inputs"].items()}
            targets = folded(tensors["target_tokens"])
            contexts = contexts_of(folded(datum["input"]["token_ids"]))
            p = [self._policy.logprobs(context)[target] for context, target in zip(contexts, targets, strict=True)]
            output = {"logprobs": p}
            if trains_head:
                output["values"] = [self._policy.value(context) for context in contexts]
            outcome = evaluate(loss_function, output["values"] if trains_head else p, tensors, config)
            loss += outcome.loss
            if not math.isfinite(loss):
                raise EngineError("non_finite_loss", f"the loss is {loss} at data[{index}]; nothing was changed")
            clipped += outcome.clipped
            counted += outcome.counted
            outputs.append(output)
            for context, target, slope in zip(contexts, targets, outcome.slopes, strict=True):
                if trains_head:
                    for row in context:
                        d_head[row] += slope
                elif slope != 0:
                    of_targets = slopes.setdefault(context, {})
                    of_targets[target] = of_targets.get(target, 0.0) + slope
        metrics = {"loss:sum": loss}
        if loss_function in CLIPPING:
            metrics["clip_frac"] = clipped / counted if counted else 0.0
        return {"loss": loss, "metrics": metrics, "outputs": outputs}, slopes, d_head

    def optim_step(self, optimizer: JSONObject) -> JSONObject:
        """Take one AdamW step (decoupled decay, arXiv 1711.05101); return ``{"step", "grad_norm"}``.

        ``grad_norm`` is the norm before clipping. Raise EngineError ``no_gradients`` if nothing was accumulated since
        the last step, and ``non_finite_update`` if a weight or moment would overflow; then nothing changes, and the
        gradients are kept.
        """
        if self._gradient is None:
            raise EngineError("no_gradients", "optim_step needs a forward_backward since the last step")
        gradient = self._gradient
        norm = math.hypot(*gradient)
        limit = optimizer["grad_clip_norm"]
        if 0 < limit < norm:
            gradient = [g * (limit / norm) for g in gradient]
        try:
            weights, moment1, moment2 = _adamw(
                self._policy.weights, gradient, self._moment1, self._moment2, self._step + 1, optimizer
            )
        except ZeroDivisionError:
            raise EngineError("non_finite_update", "the update divides by zero; use an eps above 0") from None
        if not all(map(math.isfinite, chain([norm], weights, moment2))):
            raise EngineError("non_finite_update", f"the step overflows (grad_norm {norm}); nothing was changed")
        self._replace(weights, moment1, moment2, self._step + 1)
        return {"step": self._step, "grad_norm": norm}

    def _replace(self, weights: list[float], moment1: list[float], moment2: list[float], step: int) -> None:
        self._policy.clear_cache()
        self._policy = Policy(weights, self._rank)
        self._moment1, self._moment2, self._step = moment1, moment2, step
        self._gradient = None

    def sampler(self) -> ByteLMSampler:
        """Return the current weights as a sampler. Nothing is copied, since weights are never changed in place."""
        return ByteLMSampler(self._policy, self._step, self._proceed)

    def save_state(self, folder: Path) -> int:
        """Write weights, moments and step as JSON, which keeps every number exactly; return the step.

        Accumulated gradients are not part of a state.
        """
        numbers = {"weights": self._policy.weights, "moment1": self._moment1, "moment2": self._moment2}
        state = {"format": _STATE_FORMAT, "step": self._step} | numbers
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        return self._step

    def load_state(self, folder: Path) -> None:
        """Take weights, moments and step from a folder that ``save_state`` wrote; drop accumulated gradients.

        Raise ValueError if the state is damaged, of another format or of another rank; then nothing changes.
        """
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("format") != _STATE_FORMAT:
            raise ValueError(f"{folder} holds no state of the format {_STATE_FORMAT!r}")
        if type(state.get("step")) is not int or state["step"] < 0:
            raise ValueError(f"{folder}: step is {state.get('step')!r}; expected a count")
        weights, moment1, moment2 = (_numbers(state, name, self._rank) for name in ("weights", "moment1", "moment2"))
        self._replace(weights, moment1, moment2, state["step"])

    def export_lora(self, folder: Path, *, base_model: str) -> None:
        """Write a PEFT adapter into ``folder``.

        Its tensors are F32 and belong to one linear layer ``bigram``: lora_A [rank, 514], lora_B [257, rank]. The value
        head is in states only, since PEFT has no place for it.
        Raise EngineError ``non_finite_export`` if a weight does not fit into F32.
        """
        layer = "base_model.model.bigram"
        a_columns = zip(*self._policy.a, strict=True)
        tensors = {
            f"{layer}.lora_A.weight": safetensors.Tensor([self._rank, INPUTS], flat(a_columns)),
            f"{layer}.lora_B.weight": safetensors.Tensor([VOCABULARY, self._rank], flat(self._policy.b)),
        }
        try:
            # PEFT rejects a file without "format". The model that was rehearsed is not the base of these weights.
            content = safetensors.encode(tensors, {"format": "pt", "rehearsed_model": base_model})
        except OverflowError as error:
            raise EngineError("non_finite_export", f"a weight does not fit into F32: {error}") from error
        (folder / "adapter_model.safetensors").write_bytes(content)
        config = json.dumps(_peft_config(self._rank), indent=2)
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class ByteLMSampler:
    """The frozen weights of one version; a ``Sampler``. ``version`` is the number of steps that made them."""

    def __init__(self, policy: Policy, version: int, proceed: Callable[[], None]) -> None:
        self._policy = policy
        self.version = version
        self._proceed = proceed

    def sample(self, request: JSONObject, seed: str) -> list[JSONObject]:
        """Return ``num_samples`` sequences ``{"tokens", "logprobs", "stop_reason"}`` that continue the prompt.

        Sequence i depends on the request, ``seed`` and i, but not on ``num_samples``. ``logprobs`` are the policy's
        own, before temperature, top_k and top_p.
        """
        params = request["sampling_params"]
        prompt = folded(request["prompt"]["token_ids"])
        stops = {END, *params.get("stop", ())}  # an id of another tokenizer is never sampled, so it stops nothing
        choices = self._policy.choices(params)

        def continuation(rng: random.Random) -> JSONObject:
            tokens: list[int] = []
            logprobs: list[float] = []
            context = contexts_of(prompt[-2:])[-1]
            while len(tokens) < params["max_tokens"]:
                self._proceed()
                candidates, cumulative = choices(context)
                point = rng.random() * cumulative[-1]
                token = candidates[bisect(cumulative, point, hi=len(candidates) - 1)]
                tokens.append(token)
                logprobs.append(self._policy.logprobs(context)[token])
                if token in stops:
                    return {"tokens": tokens, "logprobs": logprobs, "stop_reason": "stop"}
                context = (context[-1] - VOCABULARY, VOCABULARY + token)
            return {"tokens": tokens, "logprobs": logprobs, "stop_reason": "length"}

        return [continuation(random.Random(f"{seed}:{i}")) for i in range(request["num_samples"])]

    def logprobs(self, token_ids: list[int]) -> list[float | None]:
        """Return the logprob of each token given the tokens before it; the first is None."""
        tokens = folded(token_ids)
        contexts = contexts_of(tokens[:-1])
        return [None, *(self._policy.logprobs(c)[token] for c, token in zip(contexts, tokens[1:], strict=True))]

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class ByteLMBackend(Backend):
    """Gives every run the embedded model, whichever model the run names."""

    name = "byte-lm"
    model = "byte-lm"
    stands_in = True
    losses = frozenset(OBJECTIVES)
    largest_rank = 256  # 25 MB for a run, and already slow
    suggested_learning_rate = 0.1  # for a rehearsal; a real language model needs a far smaller one

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in folded(token_ids) if token != END).decode(errors="replace")

    def new_run(self, *, rank: int, seed: int, proceed: Callable[[], None]) -> ByteLM:
        return ByteLM(rank, seed, proceed)


def _adamw(
    weights: list[float],
    gradient: list[float],
    moment1: list[float],
    moment2: list[float],
    step: int,
    optimizer: Mapping[str, float],
) -> tuple[list[float], list[float], list[float]]:
    """Return new weights and moments, those after step number ``step``, counted from 1; change no given list."""
    rate, eps, beta1, beta2 = (optimizer[key] for key in ("learning_rate", "eps", "beta1", "beta2"))
    kept = 1 - rate * optimizer["weight_decay"]
    new1, new2 = 1 - beta1, 1 - beta2
    moment1 = [beta1 * m + new1 * g for m, g in zip(moment1, gradient, strict=True)]
    moment2 = [beta2 * v + new2 * g * g for v, g in zip(moment2, gradient, strict=True)]
    rate /= 1 - beta1**step  # this line and the next one correct the bias of moments that start at zero
    unbias = 1 / math.sqrt(1 - beta2**step)
    roots = map(math.sqrt, moment2)
    weights = [
        kept * w - rate * (m / (unbias * root + eps)) for w, m, root in zip(weights, moment1, roots, strict=True)
    ]
    return weights, moment1, moment2


def _numbers(state: Mapping[str, Any], name: str, rank: int) -> list[float]:
    """Return one list of a state. Raise ValueError unless it has one finite float for each weight of a model."""
    values, expected = state.get(name), number_of_weights(rank)
    if not isinstance(values, list) or len(values) != expected:
        found = f"{len(values)} numbers" if isinstance(values, list) else f"of type {type(values).__name__}"
        raise ValueError(f"{name} is {found}; expected a list of {expected} for rank {rank}")
    if not all(type(value) is float and math.isfinite(value) for value in values):
        raise ValueError(f"{name} holds an entry that is not a finite float")
    return values


def _peft_config(rank: int) -> JSONObject:
    return {
        "peft_type": "LORA",
        "task_type": None,  # PEFT's task types are for models of transformers; this model is a single layer
        "base_model_name_or_path": ByteLMBackend.name,
        "target_modules": ["bigram"],
        "r": rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
