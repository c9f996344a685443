"""Ctrl-C, SIGTERM and SIGHUP end a loop by an exception, so that everything it opened is closed.

A process has one handler for each signal, so it runs one loop at a time, and what came is kept here, in the module.
"""

from __future__ import annotations

import os
import signal

ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

_handled: list[int] = []  # the signals that end this process's loop
_received: list[int] = []  # in their order


class EndedBySignal(KeyboardInterrupt):
    """A signal ends the loop. It is a KeyboardInterrupt, so that ``except Exception`` lets it pass."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name


def handle_signals() -> None:
    """Let a signal raise EndedBySignal in the main thread. One that is ignored, as under nohup, stays so."""
    _received.clear()
    _handled[:] = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    _set(_raise)


def ignore_signals() -> None:
    """Let a signal do nothing: all is closed, or reported as open, and the summary is to be printed."""
    _set(signal.SIG_IGN)


def restore_default_signals() -> None:
    """Let a signal end the process at once, even if threads of the user's code never end."""
    _set(signal.SIG_DFL)


def raise_if_signalled() -> None:
    """Raise EndedBySignal if a signal came whose exception was swallowed, by a bare ``except:`` or a finalizer."""
    if _received:
        raise EndedBySignal(_received[0])


def _set(handler: object) -> None:
    for number in _handled:
        signal.signal(number, handler)  # type: ignore[arg-type]


def _raise(number: int, _: object) -> None:
    _received.append(number)
    raise EndedBySignal(_received[0])  # a second one ends the waiting; the loop was ended by the first


def _hold_signals() -> None:
    if _handled:
        signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _release_signals() -> None:
    if _handled:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _handled)


def _end_child_by_signals() -> None:
    restore_default_signals()
    _release_signals()


if hasattr(os, "register_at_fork"):
    # A worker that the user's code forks must end when it is told to, and print no traceback. A signal that comes
    # before it has the default actions is held until then: otherwise it would be lost.
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_end_child_by_signals)
