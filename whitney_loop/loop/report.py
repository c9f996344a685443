"""Printing: progress and errors on stderr, one summary on stdout. A failure to print never ends a training."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whitney_loop.errors import (
    OperationFailed,
    RequestRejected,
    UnexpectedResponse,
    WhitneyError,
    redacted,
    redacted_json,
)

USUAL_COLUMNS = 120
REFUSED_FOR_ITS_CONTENT = (None, 400, 413, 422)  # HTTP; others, such as 401, concern no single request


class CallableError(Exception):
    """The user's function raised an exception, which is the ``__cause__``."""


@dataclass
class Summary:
    """The facts of one training, printed as a line of JSON when it ends; ``results`` are those of the one loop."""

    status: str = "failed"
    where: str = ""  # the service; empty until it is known: then no summary is printed
    base_url: str = ""
    provider: str = ""
    model: str = ""
    session_id: str | None = None
    run_id: str | None = None
    seed: int | None = None
    ended_by: str | None = None  # the option that ended it before its last cycle
    next_cycle: int | None = None
    state_id: str | None = None
    artifact: Any = None
    cycles_done: int = 0
    cycles_skipped: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    warnings: list[str] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def line(self) -> str:
        facts = vars(self) | self.results
        del facts["results"]
        if self.error is None:
            del facts["error"]
        return json.dumps(redacted_json(facts))


def say(line: str) -> None:
    """Print one line on stderr, if that is possible. Control characters, such as a service's line breaks, are shown."""
    _print(redacted(visible(line)), "stderr")


def print_summary(summary: Summary) -> None:
    """Print the summary on stdout; if that is not possible, say so on stderr."""
    if problem := _print(summary.line(), "stdout"):
        say(f"warning: the summary could not be written to stdout: {problem}")


def _print(line: str, stream_name: str) -> str:
    """Print the line. Return why that failed, or an empty string."""
    stream = getattr(sys, stream_name)
    if stream is None:  # Python was started with it closed, as by 2>&-
        return "it is closed"
    try:
        encoding = stream.encoding or "utf-8"
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except Exception as error:  # a full disk, a reader that left, a closed terminal, a stream of the user's own
        # Python would try again to write what is left in its buffer when it exits, and end with code 120.
        setattr(sys, stream_name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process
        return f"{error}"
    return ""


def visible(text: str) -> str:
    """Return the text with an escape such as ``\\x1b`` in place of each control character."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cut(text: str, columns: int) -> str:
    """Return the visible text, cut to ``columns`` of a terminal, in which some characters are two columns wide."""
    shown = visible(text[: columns + 1])
    width = fits = 0
    for index, char in enumerate(shown):
        width += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width < columns:
            fits = index + 1  # with one more for the "…"
        if width > columns:
            return f"{shown[:fits]}…"
    return shown


def terminal_columns() -> int:
    """Return the width of the terminal behind stderr, or a usual width if there is no terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (AttributeError, OSError, ValueError):  # it is closed, a file, or a stream of the user's own
        return USUAL_COLUMNS


def formatted(metrics: Mapping[str, Any]) -> str:
    """``name value`` pairs for a progress line, without those that are None."""
    shown = {
        name: f"{value:.4g}" if isinstance(value, float) else str(value)
        for name, value in metrics.items()
        if value is not None
    }
    return "  ".join(" ".join(f"{name} {text}".split()) for name, text in shown.items())


def show_error(error: BaseException) -> str:
    """Print the error that ended the loop; return it in one line. Only the user's code and defects get a traceback."""
    cause = error.__cause__
    expected = isinstance(error, (WhitneyError, ValueError, CallableError))
    if isinstance(error, CallableError) and cause is not None:
        own = cause.__traceback__.tb_next if cause.__traceback__ else None  # without this package's own frame
        _say_traceback(cause.with_traceback(own))
    elif not expected:
        _say_traceback(error)
    message = redacted(f"{_place(error)}{error}" if expected else repr(error))
    say(f"error: {message}")
    return message


def _place(error: BaseException) -> str:
    """Return the file and line of the request that the error is about, to begin its message; empty if it is none."""
    if not isinstance(error, (RequestRejected, OperationFailed, UnexpectedResponse)):
        return ""
    is_about_it = error.status in REFUSED_FOR_ITS_CONTENT and hasattr(error.payload, "where")
    return f"{error.payload.where}: " if is_about_it else ""


def _say_traceback(error: BaseException) -> None:
    for line in "".join(traceback.format_exception(error)).splitlines():
        say(line)


@contextlib.contextmanager
def log_on_stderr() -> Iterator[None]:
    """Show the package's log, such as retries and open ids, however the user's module configures logging."""
    log, handler = logging.getLogger("whitney_loop"), _Said(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            say(self.format(record))
