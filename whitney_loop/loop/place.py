"""Where a loop trains: a service at a URL, or the embedded one, which is started here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from whitney_loop.client import WhitneyClient
from whitney_loop.errors import ConfigurationError
from whitney_loop.local import Backend, load_backend, serve
from whitney_loop.local.byte_lm import ByteLMBackend
from whitney_loop.local.requests import ServiceError, run_request
from whitney_loop.loop.options import LoopOptions, UsageError
from whitney_loop.loop.schedule import full_optimizer

_DRY_RUN_S = 15.0  # for the one question that a dry run asks a service


@dataclass(frozen=True)
class Place:
    """A client of the service that a loop trains on."""

    client: WhitneyClient
    embedded: bool
    description: str  # as the user is told
    decode: Callable[[Sequence[int]], str] | None = None  # of the engine, if it has a tokenizer


def is_embedded(options: LoopOptions) -> bool:
    """Return whether the loop trains on the embedded service. Raise UsageError if the options contradict each other."""
    if options.local and options.base_url is not None:
        raise UsageError("--local and --base-url contradict each other: leave one out")
    if options.base_url == "":
        raise UsageError("--base-url is empty: give a URL, or leave it out")
    if not options.local and (options.base_url or os.environ.get("WHITNEY_BASE_URL")):
        if options.engine:
            raise UsageError(
                "--engine needs the embedded service, but a base URL is set: pass --local, or leave --engine out"
            )
        return False
    if not options.local and os.environ.get("WHITNEY_API_KEY"):
        raise UsageError(
            "WHITNEY_API_KEY is set, but no base URL: set WHITNEY_BASE_URL or pass --base-url to train there, "
            "or pass --local to rehearse on the embedded service"
        )
    if options.ca_file is not None:
        raise UsageError("--ca-file is for a service at a URL, but the embedded one is used: leave it out")
    return True


def load_engine(options: LoopOptions) -> Backend | None:
    """Return the engine of the embedded service, with its model loaded; None if a service by URL trains.

    Raise UsageError if it cannot start, or would refuse the run that the options ask for.
    """
    if not is_embedded(options):
        return None
    if not options.engine:
        return ByteLMBackend()
    try:
        return load_backend(options.engine, options.engine_option)
    except ValueError as error:
        raise UsageError(f"{error}") from None


def require_within_limits(backend: Backend, options: LoopOptions, loss_function: str | None) -> None:
    """Raise UsageError if the engine would refuse the run, the loss or the optimizer that the options ask for."""
    try:
        run_request(options.provider, {"model": options.model, "lora": {"rank": options.lora_rank}}, backend)
    except ServiceError as error:
        raise UsageError(f"{error}") from None
    if loss_function not in {None, *backend.losses}:
        raise UsageError(f"{backend.name} has no loss {loss_function}; it has {', '.join(sorted(backend.losses))}")
    if full_optimizer(options)["grad_clip_norm"] > 0 and not backend.clips_gradients:
        raise UsageError(f"--optimizer grad_clip_norm: {backend.name} does not clip gradients; leave it out")


@contextmanager
def open_place(options: LoopOptions, backend: Backend | None) -> Iterator[Place]:
    """Yield a client of the service. The embedded service, in front of ``backend``, runs until the block ends.

    Raise UsageError if it cannot be used.
    """
    if backend is None:
        seconds: dict[str, Any] = {"submit_timeout_s": _DRY_RUN_S} if options.dry_run else {}
        try:
            client = WhitneyClient(
                options.base_url, operation_timeout_s=options.timeout, ca_file=options.ca_file, **seconds
            )
        except ConfigurationError as error:
            raise UsageError(error.message) from None
        with client:
            yield Place(client, False, f"{client.base_url} (as {options.provider}): what runs there may be billed")
        return
    with ExitStack() as stack:
        try:
            service = stack.enter_context(serve(options.storage, backend))
        except OSError as error:
            raise UsageError(f"the embedded service cannot start: {error}") from None
        client = WhitneyClient(service.base_url, service.api_key, operation_timeout_s=options.timeout)
        stack.enter_context(client)
        where = f"the embedded service at {client.base_url} (as {options.provider}): "
        where += "nothing is billed" if backend.stands_in else f"{backend.model} by {backend.name}"
        yield Place(client, True, where, backend.decode)
