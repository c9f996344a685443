"""Options of the contract tests, and an environment that holds no deployment of Whitney.

pytest reads options only from a conftest that it finds before it collects, so they stand here, not in contract/.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from whitney_loop import errors

pytest_plugins = ["loop_runs", "loop_in_process", "scripted_client", "tls"]  # fixtures, and asserts that show values


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contract", "the black-box tests of the HTTP contract; default: the embedded service")
    group.addoption("--contract-url", help="base URL of another deployment; what it runs may be billed")
    group.addoption("--contract-key", help="its API key")
    group.addoption("--contract-provider", default="modal", help="provider of the sessions (default: modal)")
    group.addoption("--contract-model", default="byte-lm", help="model of the runs (default: byte-lm)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Python itself leaves a socket to the garbage collection if a signal comes while it connects: no failure."""
    for item in items:
        if "interrupt_at" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session", autouse=True)
def signals_that_nohup_or_a_shell_ignores() -> None:
    """Give them their usual handlers: a loop leaves alone what is ignored, and the tests send it such signals."""
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    for name, handler in usual.items():
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
            signal.signal(getattr(signal, name), handler)


@pytest.fixture(scope="session", autouse=True)
def no_whitney_environment() -> Iterator[None]:
    """Remove the settings of a real deployment: no test may reach it or be billed by it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WHITNEY_")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def keys_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget a test's API keys after it: each service has its own, and every answer is searched for all known keys."""
    monkeypatch.setattr(errors, "_secrets", dict(errors._secrets))
