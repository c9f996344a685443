"""The command-line options that all loops share, and the parser that a dataclass of options gives.

A loop's options are one frozen dataclass: each field is one option, with its default and its help beside it.
"""

from __future__ import annotations

import argparse
import functools
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from whitney_loop.losses import LOSS_SUPPORT

REQUIRED: Any = MISSING  # as the default of an option that must be given
LONGEST_TIMEOUT_S = 1e9  # 30 years, which a socket can still take
LEARNING_RATE = 1e-6  # of Whitney's own example; safe for a language model
SCHEDULES = ("constant", "linear", "cosine")
LAST = "last"  # as --resume-from: the newest state in the metrics file
HELP_COLUMN = 32  # of a help page: behind the longest option
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH"}


class UsageError(Exception):
    """The command cannot be run as given. Nothing was created; exit code 2."""


def option(
    default: Any,
    help: str,
    *,
    group: str,
    metavar: str | None = None,
    at_least: int | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """Return the field of one option. Its default is REQUIRED if it must be given, () if it is repeatable."""
    about = {"help": help, "group": group, "metavar": metavar, "at_least": at_least, "choices": choices}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The options of every loop."""

    provider: str = option("modal", "whose losses and rules apply", group="what to train", choices=sorted(LOSS_SUPPORT))
    model: str | None = option(None, "required unless the embedded service is used", group="what to train")
    lora_rank: int = option(32, "rank (size) of the LoRA adapter that is trained", group="what to train", at_least=1)
    seed: int | None = option(None, "for adapter, sampling and data order; default: random", group="what to train")

    base_url: str | None = option(
        None, "service to train on; default: WHITNEY_BASE_URL", group="where to train", metavar="URL"
    )
    ca_file: str | None = option(
        None, "certificates (PEM) to trust instead of the system's", group="where to train", metavar="FILE"
    )
    local: bool = option(False, "rehearse on the embedded service, even if a URL is set", group="where to train")
    storage: Path | None = option(
        None, "folder of the embedded service; default: .whitney_local", group="where to train"
    )
    engine: str | None = option(
        None,
        "engine to rehearse on, such as engines.torch_lora:make",
        group="where to train",
        metavar="MODULE:CALLABLE",
    )
    engine_option: Sequence[str] = option(
        (), "an argument for --engine; repeatable", group="where to train", metavar="NAME=VALUE"
    )
    timeout: float = option(3600.0, "seconds that one operation may take", group="where to train")

    learning_rate: float | None = option(
        None, f"for AdamW; default: what the engine suggests, else {LEARNING_RATE:g}", group="optimizer"
    )
    optimizer: Sequence[str] = option(
        (), "grad_clip_norm, weight_decay, beta1, beta2 or eps; repeatable", group="optimizer", metavar="NAME=VALUE"
    )
    schedule: str = option("constant", ", ".join(SCHEDULES), group="optimizer", metavar="NAME", choices=SCHEDULES)
    warmup: int = option(0, "cycles in which the learning rate rises", group="optimizer", at_least=0)

    stop_at: Sequence[str] = option(
        (), "end when its mean over 3 cycles reaches VALUE; repeatable", group="when to stop", metavar="METRIC:VALUE"
    )
    token_budget: int | None = option(
        None, "end after N tokens, sampled plus trained, in this process", group="when to stop", at_least=1
    )
    max_minutes: float | None = option(None, "end after X minutes in this process", group="when to stop")

    metrics: Path | None = option(
        None, "write a line of metrics per cycle (see plot)", group="metrics and resumption", metavar="FILE.jsonl"
    )
    log: str | None = option(
        None,
        "your function, called with each record of the metrics",
        group="metrics and resumption",
        metavar="MODULE:CALLABLE",
    )
    save_every: int | None = option(
        None,
        "save a state after every N cycles, and at the end",
        group="metrics and resumption",
        metavar="N",
        at_least=1,
    )
    resume_from: str | None = option(
        None,
        f"continue from a saved state; {LAST!r}: the newest in --metrics",
        group="metrics and resumption",
        metavar="STATE_ID",
    )
    first_cycle: int | None = option(
        None, "cycle to resume at, without a metrics file", group="metrics and resumption", metavar="N", at_least=0
    )

    dry_run: bool = option(
        False, "check all that needs no session, print the largest cost, stop", group="start and clean-up"
    )
    journal: Path | None = option(
        None, "file that keeps the session id, for --recover after a kill", group="start and clean-up", metavar="PATH"
    )
    recover: bool = option(False, "first close the session that the journal names", group="start and clean-up")


Options = TypeVar("Options", bound=LoopOptions)


def parse_options(kind: type[Options], arguments: Sequence[str] | None, description: str, prog: str) -> Options:
    """Read the command line into ``kind``. A usage error or ``--help`` raises SystemExit, as argparse does."""
    required = [entry for entry in fields(kind) if entry.default is MISSING]
    shown = [f"{flag_of(entry.name)} {entry.metadata['metavar']}" for entry in required]
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=" ".join([prog, *shown, "[OPTIONS]"]),  # all options here would hide the error below them
        description=description,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=HELP_COLUMN),
        allow_abbrev=False,
    )
    kinds = typing.get_type_hints(kind)
    groups: dict[str, Any] = {}
    shared = {entry.name for entry in fields(LoopOptions)}
    for entry in sorted(fields(kind), key=lambda entry: entry.name in shared):  # the loop's own options come first
        title = entry.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_option(groups[title], entry, kinds[entry.name])
    return kind(**vars(parser.parse_args(arguments)))


def _add_option(group: Any, entry: Field[Any], kind: Any) -> None:
    flag, about = flag_of(entry.name), entry.metadata
    if kind is bool:
        group.add_argument(flag, action="store_true", help=about["help"])
        return
    if entry.default == ():
        group.add_argument(flag, action="append", default=[], metavar=about["metavar"], help=about["help"])
        return
    if isinstance(kind, types.UnionType):  # X | None
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    required = entry.default is MISSING
    default = None if required else entry.default
    group.add_argument(
        flag,
        type=kind,
        required=required,
        default=default,
        choices=about["choices"],
        metavar=about["metavar"] or (None if about["choices"] else _METAVARS[kind]),
        help=about["help"] + ("" if default is None else f" (default: {default})"),
    )


def check_ranges(options: LoopOptions) -> None:
    """Raise UsageError if an option is out of range, or lacks another one that it needs."""
    for entry in fields(options):
        value, least = getattr(options, entry.name), entry.metadata["at_least"]
        if least is not None and value is not None and value < least:
            raise UsageError(f"{flag_of(entry.name)} is {value}, expected at least {least}")
    if not 0 < options.timeout < LONGEST_TIMEOUT_S:
        raise UsageError(f"--timeout is {options.timeout}, expected seconds above 0 and below {LONGEST_TIMEOUT_S:g}")
    for goal in options.stop_at:
        parse_goal(goal)
    if options.max_minutes is not None and not options.max_minutes > 0:
        raise UsageError(f"--max-minutes is {options.max_minutes}, expected minutes above 0")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed is {options.seed}, expected 0 to 2^63 − 1")
    if options.engine_option and not options.engine:
        raise UsageError("--engine-option needs --engine")
    if options.recover and not options.journal:
        raise UsageError("--recover needs --journal PATH")


def parse_goal(text: str) -> tuple[str, float]:
    """Return (metric, value) of a ``--stop-at METRIC:VALUE``. Raise UsageError if it is not of this form."""
    metric, _, number = text.rpartition(":")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not metric or not math.isfinite(value):
        raise UsageError(f"--stop-at is {text!r}, expected METRIC:VALUE, such as reward/mean:0.9")
    return metric, value


def flag_of(name: str) -> str:
    """Return the command-line name of an option."""
    return f"--{name.replace('_', '-')}"
