"""What the loops of this folder share: where they train, how they end, and what they say."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from whitney_loop import LOSS_SUPPORT, ConfigurationError, WhitneyClient, WhitneyError
from whitney_loop.local import serve

EMBEDDED_MODEL = "byte-lm"

Summary = dict[str, Any]


class UsageError(Exception):
    """The command can not be run as given. Nothing was created; exit code 2."""


class CallableError(Exception):
    """The user's callable raised; the cause is what it raised."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends the loop, cleaned up, as Ctrl-C does."""


@dataclass
class Place:
    """Where a loop trains."""

    client: WhitneyClient
    embedded: bool


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where and what to train, the same in every loop."""
    parser.add_argument("--provider", choices=sorted(LOSS_SUPPORT), default="modal")
    parser.add_argument("--model", help=f"required away from the embedded service; on it {EMBEDDED_MODEL}")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, help="of the run: adapter and sampling (default: the service draws one)")
    parser.add_argument("--base-url", help="the service to train on (default: WHITNEY_BASE_URL)")
    parser.add_argument("--local", action="store_true", help="rehearse on the embedded service, whatever is set")
    parser.add_argument("--storage", type=Path, help="folder of the embedded service (default: .whitney_local)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one operation (default: 3600)")


def is_embedded(options: argparse.Namespace) -> bool:
    """Whether these options and the environment mean the embedded service. Raises UsageError where they contradict."""
    if options.local and options.base_url:
        raise UsageError("--local and --base-url contradict each other: leave one out")
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
def place_to_train(options: argparse.Namespace) -> Iterator[Place]:
    """The client to train with; the embedded service is started where that is meant, and ended with the block."""
    if not is_embedded(options):
        try:
            client = WhitneyClient(options.base_url, operation_timeout_s=options.timeout)
        except ConfigurationError as error:
            raise UsageError(error.message) from None
        say(f"training on {client.base_url} ({options.provider}): what runs there is billed")
        yield Place(client, embedded=False)
        return
    with serve(options.storage) as service:
        client = WhitneyClient(service.base_url, service.api_key, operation_timeout_s=options.timeout)
        say(f"training on the embedded service at {client.base_url} (as {options.provider}): nothing is billed")
        yield Place(client, embedded=True)


def run_loop(options: argparse.Namespace, train: Callable[[Place, Summary], int]) -> int:
    """Run ``train`` where the options say, with every exit cleaned up; print the summary; the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    summary: Summary = {}
    try:
        with place_to_train(options) as place:
            where = "the embedded service" if place.embedded else "a service elsewhere"
            summary |= {"status": "failed", "where": where, "base_url": place.client.base_url}
            summary |= {"provider": options.provider, "model": options.model, "session_id": None, "run_id": None}
            try:
                code = train(place, summary)
            finally:
                summary["operations"] = dict(place.client.accepted)
        summary["status"] = "succeeded" if code == 0 else "failed"
    except UsageError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt as interrupt:
        name, code = ("SIGTERM", 143) if isinstance(interrupt, Terminated) else ("Ctrl-C", 130)
        summary["status"] = f"ended by {name}"
        say(f"ended by {name}")
    except Exception as error:
        code = 1
        summary["error"] = show_error(error)
    if summary.get("session_id"):
        print(json.dumps(summary), flush=True)
    return code


def show_error(error: Exception) -> str:
    """Say on stderr what ended the loop; the same in one line. Only the user's own code and bugs get a traceback."""
    cause = error.__cause__
    if isinstance(error, CallableError) and cause is not None:
        own = cause.__traceback__.tb_next if cause.__traceback__ else None  # without this file's own frame
        traceback.print_exception(type(cause), cause, own)
    elif not isinstance(error, (WhitneyError, ValueError)):
        traceback.print_exception(error)
    message = f"{error}" if isinstance(error, (WhitneyError, CallableError, ValueError)) else repr(error)
    say(f"error: {message}")
    return message


def say(line: str) -> None:
    """One line of progress, on stderr: stdout holds the summary only."""
    print(line, file=sys.stderr, flush=True)


def formatted(metrics: dict[str, Any]) -> str:
    """``name value`` pairs for a progress line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


def _terminate(*_: object) -> NoReturn:
    raise Terminated
