"""One operation of a run: its state, and the calls of the engine that execute it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from whitney_loop.local.engine import BatchSampler, Engine, EngineError, JSONObject, Sampler
from whitney_loop.local.log import log
from whitney_loop.local.objectives import provider_defaults
from whitney_loop.local.requests import RunSettings
from whitney_loop.local.storage import Storage

CHANGES_WEIGHTS = frozenset({"forward_backward", "optim_step"})


class Cancelled(Exception):
    """Raised by ``proceed``, through the engine, to stop an operation of a run that is being cancelled."""


@dataclass
class Operation:
    """An accepted operation."""

    operation_id: str
    run_id: str
    kind: str
    seq_id: int
    fingerprint: str
    payload: JSONObject
    sampler: Sampler | None
    status: str = "queued"
    result: JSONObject | None = None
    error: JSONObject | None = None

    def end(self, status: str, *, result: JSONObject | None = None, error: JSONObject | None = None) -> None:
        self.status, self.result, self.error = status, result, error
        self.payload, self.sampler = {}, None  # these can be large, and are no longer needed

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "running")

    def body(self) -> JSONObject:
        names = ("operation_id", "run_id", "kind", "seq_id", "status", "result", "error")
        return {name: getattr(self, name) for name in names}


def fingerprint(sampler_id: str | None, kind: str, payload: JSONObject) -> str:
    """Return a hash that is equal if two requests with one ``seq_id`` ask for the same operation."""
    return hashlib.sha256(json.dumps([sampler_id, kind, payload], sort_keys=True).encode()).hexdigest()


def execute(operation: Operation, engine: Engine, settings: RunSettings, storage: Storage) -> JSONObject:
    """Return the result of an operation of any kind but ``save_weights_for_sampler``, which the run executes itself."""
    kind, payload, sampler = operation.kind, operation.payload, operation.sampler
    if sampler is not None:
        if kind == "logprobs":
            return {"logprobs": sampler.logprobs(payload["input"]["token_ids"])}
        return {"sequences": sampler.sample(payload, _sampling_seed(operation, settings)), "version": sampler.version}
    if kind == "forward":
        return engine.forward(_with_defaults(payload, settings))
    if kind == "forward_backward":
        return engine.forward_backward(_with_defaults(payload, settings))
    if kind == "optim_step":
        return engine.optim_step(payload["optimizer"])
    if kind == "save_state":
        return storage.save_state(engine, settings)
    return storage.export_lora(engine, settings)


def sample_together(batch: Sequence[Operation], settings: RunSettings) -> dict[int, JSONObject]:
    """Return the results of several samples of one sampler by ``seq_id``; {} if each must be executed alone."""
    sampler = batch[0].sampler
    if len(batch) == 1 or not isinstance(sampler, BatchSampler):
        return {}
    try:
        answers = sampler.sample_many([(each.payload, _sampling_seed(each, settings)) for each in batch])
        return {
            each.seq_id: {"sequences": sequences, "version": sampler.version}
            for each, sequences in zip(batch, answers, strict=True)
        }
    except Exception as failure:
        if not isinstance(failure, (EngineError, Cancelled)):
            log(logging.WARNING, "sample_many broke; each sample is executed alone", failure)
        return {}


def error_of(failure: Exception, engine_name: str, what: str) -> JSONObject:
    """Return the error for the client. If it is no EngineError, its text may contain secrets and is only logged."""
    if isinstance(failure, EngineError):
        return {"code": failure.code, "message": str(failure), "retryable": False}
    log(logging.ERROR, f"{what}: {engine_name} broke", failure)
    message = f"{engine_name} broke ({type(failure).__name__}); see the service's log (whitney_loop.local)"
    return {"code": "internal_error", "message": message, "retryable": False}


def close_all(things: Sequence[Engine | Sampler]) -> None:
    for each in things:
        try:
            each.close()
        except Exception as error:
            log(logging.ERROR, f"{type(each).__name__} could not be closed", error)


def _sampling_seed(operation: Operation, settings: RunSettings) -> str:
    seed = operation.payload["sampling_params"].get("seed")
    return f"run:{settings.seed}:{operation.seq_id}" if seed is None else f"request:{seed}"


def _with_defaults(payload: JSONObject, settings: RunSettings) -> JSONObject:
    """Return the payload with the provider's own defaults for the keys that its ``loss_config`` leaves out."""
    defaults = provider_defaults(settings.provider, payload["loss_function"])
    return payload | {"loss_config": {**defaults, **payload["loss_config"]}}
