"""An embedded, Whitney-compatible service on a loopback port, to rehearse a loop before it is billed.

``serve`` starts it for one process; ``python -m whitney_loop.local`` serves it alone, for any client.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from whitney_loop.local.engine import Backend, load_backend
from whitney_loop.local.server import LocalServer
from whitney_loop.local.service import Service
from whitney_loop.local.storage import DEFAULT_STORAGE

__all__ = ["Backend", "Served", "load_backend", "serve"]

_POLL_S = 0.05  # how long the end of the with block may wait for the accepting thread


@dataclass(frozen=True)
class Served:
    """The address of the service, and the key that it asks for."""

    base_url: str
    api_key: str = field(repr=False)


@contextmanager
def serve(storage: str | PathLike[str] | None = None, engine: Backend | None = None) -> Iterator[Served]:
    """Serve on a free port of 127.0.0.1 until the block ends; runs that are still active then are cancelled.

    ``storage`` is the folder of states and adapters; None is ``.whitney_local`` in the current folder. ``engine`` is
    what trains; None is the embedded byte-lm. Raises OSError if the storage cannot be written.
    """
    api_key = secrets.token_urlsafe()
    server = LocalServer(Service(Path(storage or DEFAULT_STORAGE), engine), api_key)
    accepting = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="whitney_loop.local", daemon=True)
    accepting.start()
    try:
        yield Served(server.base_url, api_key)
    finally:
        server.shutdown()
        accepting.join()
        server.stop()
