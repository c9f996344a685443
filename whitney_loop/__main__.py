"""``whitney-loop COMMAND``, or ``python -m whitney_loop COMMAND``: train, rehearse, plot and clean up.

Each command reads its own arguments, and imports what it needs only when it is run.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence

import whitney_loop
from whitney_loop.callables import examples_folder
from whitney_loop.client import WhitneyClient
from whitney_loop.errors import ConfigurationError, WhitneyError, redacted
from whitney_loop.lifecycle import close_everything
from whitney_loop.wire import is_id

DESCRIPTION = """Train through Whitney's API. Without a base URL, rehearse on an embedded service: nothing is billed.

    {prog} train --build-loss grpo_build_loss:build_loss --cycles 40 --learning-rate 0.1

commands:
  train    reinforcement learning, with a reward or a loss that you write
  sft      supervised fine-tuning on prompts and completions
  distill  on-policy distillation from a frozen teacher
  plot     draw the metrics of runs as one HTML page
  serve    run the embedded service alone, for any client
  close    cancel the active runs of a session, and close it

`{prog} COMMAND --help` explains a command, its options and its exit codes."""

CLOSE_DESCRIPTION = """Cancel the active runs of a session, wait until they have ended, and close the session.

    {prog} ses-0123456789abcdef --base-url https://YOUR-WHITNEY-HOST

A loop prints the id of its session whenever it may still be open. The API key comes from WHITNEY_API_KEY.

Exit codes: 0 closed; 1 the service refused, or did not answer; 2 usage; 130 Ctrl-C."""


def main(arguments: Sequence[str] | None = None, prog: str = "whitney-loop") -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not know every character
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} COMMAND [OPTIONS]",
        description=DESCRIPTION.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"whitney-loop {whitney_loop.__version__}")
    command = parser.parse_args(arguments[:1] or ["--help"]).command
    return COMMANDS[command](arguments[1:], f"{prog} {command}")


def run_loop(file: str, arguments: Sequence[str], prog: str) -> int:
    """Run a loop of the examples: the same file as ``python examples/FILE``."""
    path = examples_folder() / file
    name = f"whitney_loop.examples.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of their class there
    spec.loader.exec_module(module)
    code: int = module.main(arguments, prog)
    return code


def run_module(name: str, arguments: Sequence[str], prog: str) -> int:
    code: int = importlib.import_module(name).main(arguments, prog)
    return code


def close(arguments: Sequence[str], prog: str) -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=CLOSE_DESCRIPTION.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("session_id", metavar="SESSION_ID", help="as the loop or the client printed it")
    where = parser.add_argument_group("the service")
    where.add_argument("--base-url", metavar="URL", help="default: WHITNEY_BASE_URL")
    where.add_argument("--ca-file", metavar="FILE", help="certificates (PEM) to trust instead of the system's")
    options = parser.parse_args(arguments)
    if not options.base_url and not os.environ.get("WHITNEY_BASE_URL"):
        parser.error("no service is named: give --base-url URL, or set WHITNEY_BASE_URL")
    if not is_id(options.session_id):  # not shown: it may disturb a terminal
        print("error: SESSION_ID is not a valid session id: copy it again from where it was printed", file=sys.stderr)
        return 2
    try:
        cancelled = close_everything(WhitneyClient(options.base_url, ca_file=options.ca_file), options.session_id)
    except WhitneyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        print(redacted(f"interrupted: session {options.session_id} may still be open"), file=sys.stderr)
        return 130
    for run_id in cancelled:
        print(redacted(f"cancelled run {run_id}"))
    print(redacted(f"closed session {options.session_id}"))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str], str], int]] = {
    "train": functools.partial(run_loop, "rl_loop.py"),
    "sft": functools.partial(run_loop, "sft_loop.py"),
    "distill": functools.partial(run_loop, "distillation_loop.py"),
    "plot": functools.partial(run_module, "whitney_loop.loop.plot"),
    "serve": functools.partial(run_module, "whitney_loop.local.__main__"),
    "close": close,
}

if __name__ == "__main__":
    sys.exit(main(prog="python -m whitney_loop"))
