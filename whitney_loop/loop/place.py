"""Where a loop trains: a service at a URL, or the embedded one, which is started here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from whitney_loop.client import WhitneyClient
from whitney_loop.errors import ConfigurationError
from whitney_loop.local import serve
from whitney_loop.loop.options import LoopOptions, UsageError

EMBEDDED_MODEL = "byte-lm"


@dataclass(frozen=True)
class Place:
    """A client of the service that a loop trains on."""

    client: WhitneyClient
    embedded: bool
    description: str  # as the user is told


def is_embedded(options: LoopOptions) -> bool:
    """Whether options and environment mean the embedded service. Raise UsageError if they contradict each other."""
    if options.local and options.base_url is not None:
        raise UsageError("--local and --base-url contradict each other: leave one out")
    if options.base_url == "":
        raise UsageError("--base-url is empty: give a URL, or leave it out")
    if options.local:
        return True
    if options.base_url or os.environ.get("WHITNEY_BASE_URL"):
        return False
    if os.environ.get("WHITNEY_API_KEY"):
        raise UsageError(
            "WHITNEY_API_KEY is set, but no base URL: set WHITNEY_BASE_URL or pass --base-url to train there, "
            "or pass --local to rehearse on the embedded service"
        )
    return True


@contextmanager
def open_place(options: LoopOptions) -> Iterator[Place]:
    """A client of the service; the embedded service runs until the block ends. Raise UsageError if it cannot be used.

    ``options.local`` has been settled: true for the embedded service, whichever way it was chosen.
    """
    if not options.local:
        try:
            client = WhitneyClient(options.base_url, operation_timeout_s=options.timeout, ca_file=options.ca_file)
        except ConfigurationError as error:
            raise UsageError(error.message) from None
        yield Place(client, False, f"{client.base_url} (as {options.provider}): what runs there may be billed")
        return
    with ExitStack() as stack:
        try:
            service = stack.enter_context(serve(options.storage))
        except OSError as error:
            raise UsageError(f"the embedded service cannot start: {error}") from None
        client = WhitneyClient(service.base_url, service.api_key, operation_timeout_s=options.timeout)
        where = f"the embedded service at {client.base_url} (as {options.provider}): nothing is billed"
        yield Place(client, True, where)
