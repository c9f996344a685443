"""Options of the contract tests, and an environment that holds no deployment of Whitney.

pytest reads options only from a conftest that it finds before it collects, so they stand here, not in contract/.
"""

from __future__ import annotations

import os
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
