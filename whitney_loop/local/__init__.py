"""An embedded, Whitney-compatible service on a loopback port, to rehearse a loop before it is billed.

``serve`` starts it inside a Python program; ``python -m whitney_loop.local`` starts it alone, for any client.
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

_POLL_S = 0.05  # the end of the with block may wait as long for the thread that accepts connections


@dataclass(frozen=True)
class Served:
    """The address of a running service, and the key that it expects."""

    base_url: str
    api_key: str = field(repr=False)


@contextmanager
def serve(storage: str | PathLike[str] | None = None, engine: Backend | None = None) -> Iterator[Served]:
    """Serve on a free port of 127.0.0.1 until the with block ends; then cancel the runs that are still active.

    ``storage`` is the folder of states and adapters; None: ``.whitney_local`` in the current folder. ``engine`` trains;
    None: the embedded byte-lm. Raise OSError if the storage cannot be written.
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
