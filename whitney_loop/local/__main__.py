"""``python -m whitney_loop.local --port 8900``: the embedded service alone, for any client, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import sys
from pathlib import Path

from whitney_loop.local.byte_lm import MODEL
from whitney_loop.local.server import HOST, LocalServer
from whitney_loop.local.service import Service
from whitney_loop.local.storage import DEFAULT_STORAGE

LOOPBACK = (HOST, "localhost", "::1")


def main() -> int:
    options = _parser().parse_args()
    key_of_environment = os.environ.get("WHITNEY_API_KEY")
    api_key = key_of_environment or secrets.token_urlsafe()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: KeyboardInterrupt
    if not re.fullmatch(r"[!-~]+", api_key):
        print("WHITNEY_API_KEY holds a space or a character outside ASCII, which no client can send", file=sys.stderr)
        return 2
    try:
        service = Service(options.storage)
    except OSError as error:
        print(f"cannot write to {options.storage}: {error.strerror}; choose another --storage", file=sys.stderr)
        return 2
    try:
        server = LocalServer(service, api_key, options.port, options.host)
    except OSError as error:
        where = f"--host {options.host} --port {options.port}"
        print(f"cannot serve on {where}: {error.strerror}; choose another", file=sys.stderr)
        return 2
    if options.host not in LOOPBACK:
        print("warning: the key and all data cross the network unencrypted", file=sys.stderr)
    try:
        print(f"Serving {MODEL}, for rehearsal. Storage: {options.storage.absolute()}. Ctrl-C ends it.")
        print(f"WHITNEY_BASE_URL={server.base_url}")
        print("WHITNEY_API_KEY=" + ("(from the environment)" if key_of_environment else api_key), flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends it at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:
        server.stop()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m whitney_loop.local", description=__doc__)
    parser.add_argument("--port", type=_port, default=8900, help="0 takes a free one (default: 8900)")
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST}, this machine only)")
    parser.add_argument(
        "--storage",
        type=Path,
        default=Path(DEFAULT_STORAGE),
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
