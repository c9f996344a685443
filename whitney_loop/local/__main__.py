"""The command ``python -m whitney_loop.local`` or ``whitney-loop serve``: the embedded service, for any client."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from whitney_loop.local.engine import load_backend
from whitney_loop.local.server import HOST, LocalServer
from whitney_loop.local.service import Service
from whitney_loop.local.storage import DEFAULT_STORAGE

_LOOPBACK = (HOST, "localhost", "::1")
DESCRIPTION = """Serve a model to any client of Whitney's API, until Ctrl-C.

    {prog} --port 8900

It prints the two variables that a client reads, WHITNEY_BASE_URL and WHITNEY_API_KEY. If WHITNEY_API_KEY is already
set, its key is kept; otherwise a new one is made. Without --engine it trains the tiny model byte-lm.

Exit codes: 0 ended by Ctrl-C or SIGTERM; 2 usage, or the engine, the port or the storage cannot be used."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m whitney_loop.local") -> int:
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    if options.engine_option and not options.engine:
        parser.error("--engine-option needs --engine")
    key_of_environment = os.environ.get("WHITNEY_API_KEY")
    api_key = key_of_environment or secrets.token_urlsafe()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, like Ctrl-C
    if not re.fullmatch(r"[!-~]+", api_key):
        return _failed("WHITNEY_API_KEY holds a space or a character outside ASCII, which no client can send")
    try:
        backend = load_backend(options.engine, options.engine_option) if options.engine else None
    except ValueError as error:
        return _failed(f"error: {error}")
    except KeyboardInterrupt:  # a model may take minutes to load
        return 0
    try:
        service = Service(options.storage, backend)
    except OSError as error:
        return _failed(f"cannot write to {options.storage}: {error.strerror}; choose another --storage")
    try:
        server = LocalServer(service, api_key, options.port, options.host)
    except OSError as error:
        where = f"--host {options.host} --port {options.port}"
        return _failed(f"cannot serve on {where}: {error.strerror}; choose another")
    if options.host not in _LOOPBACK:
        print("warning: the key and all data cross the network unencrypted", file=sys.stderr)
    try:
        trains = f"{backend.model} by {backend.name}" if backend else "byte-lm, for rehearsal"
        print(f"Serving {trains}. Storage: {options.storage.absolute()}. Ctrl-C ends it.")
        print(f"WHITNEY_BASE_URL={server.base_url}")
        print("WHITNEY_API_KEY=" + ("(from the environment)" if key_of_environment else api_key), flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second signal ends the process at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:
        server.stop()
    return 0


def _failed(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    address = parser.add_argument_group("address")
    address.add_argument("--port", type=_port, default=8900, metavar="N", help="0: any free port (default: 8900)")
    address.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST}, this machine only)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", metavar="MODULE:CALLABLE", help="returns the engine that trains (default: byte-lm)")
    engine.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of that callable; repeatable",
    )
    storage = parser.add_argument_group("storage")
    storage.add_argument(
        "--storage",
        type=Path,
        default=Path(DEFAULT_STORAGE),
        metavar="PATH",
        help=f"folder of states and adapters (default: {DEFAULT_STORAGE})",
    )
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not a port; expected 0 to 65535")
    return port


if __name__ == "__main__":
    sys.exit(main())
