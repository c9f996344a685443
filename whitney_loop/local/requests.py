"""The rules for the body of a request: fields, types, ranges, the provider's tables and the engine's limits."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from whitney_loop.local.engine import Backend, JSONObject
from whitney_loop.losses import LOSS_SUPPORT, require_advertised_loss
from whitney_loop.payloads import (
    check_logprobs_request,
    check_optimizer_payload,
    check_payload,
    check_sample_request,
)

RUN_KINDS = ("save_weights_for_sampler", "forward", "forward_backward", "optim_step", "save_state", "export_lora")
SAMPLER_KINDS = ("sample", "logprobs")

_MAX_MODEL_CHARS = 200
_MAX_INTEGER = 2**63 - 1  # of an int64
_DRAWN_SEEDS = 2**31  # drawn seeds fit into an int32, for scripts that need that
_MAX_RESULT_BYTES = 256 * 2**20  # the client reads no larger body
# Upper bounds in JSON: a sequence takes 57 bytes for braces, names and stop_reason; a token takes 5 for its id and 26
# for its logprob. So 8 million tokens fit into one result.
_SEQUENCE_BYTES = 64
_TOKEN_BYTES = 32


class ServiceError(Exception):
    """A refused request: its HTTP ``status``, ``code``, message, and ``extra`` fields of the error object."""

    def __init__(self, status: int, code: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.extra = extra


def invalid(message: str) -> ServiceError:
    return ServiceError(422, "invalid_payload", message)


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, as they were requested."""

    provider: str
    model: str
    rank: int
    seed: int
    resume_from: str | None


def session_request(body: JSONObject) -> str:
    """Return the provider of a new session."""
    _check_fields(body, required={"provider"})
    provider = body["provider"]
    if not isinstance(provider, str) or provider not in LOSS_SUPPORT:
        raise invalid(f"provider is {shown(provider)}; expected one of {', '.join(sorted(LOSS_SUPPORT))}")
    return provider


def run_request(provider: str, body: JSONObject, backend: Backend) -> RunSettings:
    """Return the settings of a new run."""
    _check_fields(body, required={"model", "lora"}, optional={"seed", "resume_from"})
    model, lora, resume_from = body["model"], body["lora"], body.get("resume_from")
    if not isinstance(model, str) or not model.isprintable() or not 0 < len(model) <= _MAX_MODEL_CHARS:
        raise invalid(f"model is {shown(model)}; expected a name of 1 to {_MAX_MODEL_CHARS} printable characters")
    if model != backend.model and not backend.stands_in:
        raise invalid(f"model is {shown(model)}; {backend.name} trains only {shown(backend.model)} here")
    if not isinstance(lora, dict):
        raise invalid(f'lora is {shown(lora)}; expected {{"rank": …}}')
    _check_fields(lora, required={"rank"}, prefix="lora.")
    rank = _integer("lora.rank", lora["rank"], 1, backend.largest_rank or _MAX_INTEGER)
    seed = body.get("seed")
    seed = secrets.randbelow(_DRAWN_SEEDS) if seed is None else _integer("seed", seed, 0, _MAX_INTEGER)
    if resume_from is not None and not isinstance(resume_from, str):
        raise invalid(f"resume_from is {shown(resume_from)}; expected a state_id")
    return RunSettings(provider, model, rank, seed, resume_from)


def operation_request(body: JSONObject) -> tuple[int, str, JSONObject]:
    """Return ``seq_id``, ``kind`` and ``payload`` of an operation; ``check_operation`` checks the last two."""
    _check_fields(body, required={"kind", "seq_id", "payload"})
    kind, payload = body["kind"], body["payload"]
    if not isinstance(kind, str):
        raise invalid(f"kind is {shown(kind)}; expected the name of an operation")
    if not isinstance(payload, dict):
        raise invalid(f"payload is {shown(payload)}; expected a JSON object")
    return _integer("seq_id", body["seq_id"], 1, _MAX_INTEGER), kind, payload


def check_operation(kind: str, payload: JSONObject, *, at_sampler: bool, provider: str, backend: Backend) -> None:
    """Raise ServiceError if the operation is invalid. ``at_sampler``: it was sent to the path of a sampler."""
    try:
        _check_kind(kind, at_sampler)
        if kind in ("forward", "forward_backward"):
            _check_advertised(payload.get("loss_function"), provider)
            check_payload(payload, provider, kind=kind)
            _check_computed(payload["loss_function"], provider, backend)
            for index, datum in enumerate(payload["data"]):
                targets = datum["loss_inputs"]["target_tokens"]["values"]
                _check_text(f"data[{index}].input.token_ids", datum["input"]["token_ids"], backend)
                _check_vocabulary(f"data[{index}].loss_inputs.target_tokens.values", targets, backend)
        elif kind == "optim_step":
            check_optimizer_payload(payload)
            _check_clipping(payload["optimizer"], backend)
        elif kind == "sample":
            check_sample_request(payload)
            params = payload["sampling_params"]
            _check_result_size(payload["num_samples"], params["max_tokens"])
            _check_text("prompt.token_ids", payload["prompt"]["token_ids"], backend, params["max_tokens"])
            _check_vocabulary("sampling_params.stop", params.get("stop", ()), backend)
        elif kind == "logprobs":
            check_logprobs_request(payload)
            _check_text("input.token_ids", payload["input"]["token_ids"], backend)
        elif payload:
            raise ValueError(f"{kind} takes an empty payload, {{}}; found {', '.join(sorted(payload))}")
    except ValueError as error:
        raise invalid(str(error)) from error


def _check_kind(kind: str, at_sampler: bool) -> None:
    here, there = (SAMPLER_KINDS, RUN_KINDS) if at_sampler else (RUN_KINDS, SAMPLER_KINDS)
    if kind in there:
        right_path = "runs/{run_id}/operations" if at_sampler else "runs/{run_id}/samplers/{sampler_id}/operations"
        raise ValueError(f"{kind} does not belong to this path; send it to /v1/training/{right_path}")
    if kind not in here:
        raise ValueError(f"kind {shown(kind)} is unknown; expected one of {', '.join(here)}")


def _check_advertised(loss: object, provider: str) -> None:
    if not isinstance(loss, str):
        return  # check_payload rejects it
    try:
        require_advertised_loss(provider, loss)
    except ValueError as error:
        raise ServiceError(422, "unsupported_loss", str(error)) from error


def _check_computed(loss: str, provider: str, backend: Backend) -> None:
    if loss not in backend.losses:
        computed = ", ".join(sorted(LOSS_SUPPORT[provider] & backend.losses))
        raise ServiceError(
            422,
            "unsupported_loss",
            f"{provider} has loss_function {loss!r}, but {backend.name} does not compute it; it computes {computed}",
        )


def _check_text(name: str, token_ids: Sequence[int], backend: Backend, max_tokens: int = 0) -> None:
    """Raise ValueError if a text, and the ``max_tokens`` that may follow, do not fit into the model."""
    _check_vocabulary(name, token_ids, backend)
    if backend.context_length is not None and len(token_ids) + max_tokens > backend.context_length:
        further = f" and max_tokens is {max_tokens}" if max_tokens else ""
        raise ValueError(
            f"{name} has {len(token_ids)} tokens{further}; "
            f"{backend.model} takes at most {backend.context_length} tokens in all"
        )


def _check_vocabulary(name: str, token_ids: Sequence[int], backend: Backend) -> None:
    if backend.vocabulary is None or max(token_ids, default=0) < backend.vocabulary:
        return
    index = next(index for index, token in enumerate(token_ids) if token >= backend.vocabulary)
    raise ValueError(
        f"{name}[{index}] is {token_ids[index]}; the token ids of {backend.model} are below {backend.vocabulary}"
    )


def _check_clipping(optimizer: Mapping[str, Any], backend: Backend) -> None:
    if optimizer["grad_clip_norm"] > 0 and not backend.clips_gradients:
        raise ValueError(
            f"optimizer.grad_clip_norm is {optimizer['grad_clip_norm']}, but {backend.name} does not clip gradients; "
            "send 0"
        )


def _check_result_size(num_samples: int, max_tokens: int) -> None:
    if num_samples * (_SEQUENCE_BYTES + max_tokens * _TOKEN_BYTES) > _MAX_RESULT_BYTES:
        raise ValueError(
            f"num_samples {num_samples} with sampling_params.max_tokens {max_tokens} may give more than the "
            f"{_MAX_RESULT_BYTES} bytes that a client reads of one answer; lower one of them, or take several samples"
        )


def _check_fields(
    body: JSONObject, *, required: AbstractSet[str], optional: AbstractSet[str] = frozenset(), prefix: str = ""
) -> None:
    if missing := sorted(required - body.keys()):
        raise invalid(f"missing: {', '.join(prefix + name for name in missing)}")
    if unknown := sorted(body.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise invalid(f"unknown: {', '.join(prefix + shown(name) for name in unknown)}; expected {known}")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(f"{name} is {shown(value)}; expected an integer from {low} to {high}")
    return value


def shown(value: object) -> str:
    """Return a value for a message, as truncated JSON."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
