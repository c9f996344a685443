"""The deployment that the contract tests ask, and the report that they end with."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from contract.deployment import Api, Run, Unspeakable, accepted, build
from contract.report import report_of


@pytest.fixture(scope="session", name="build")
def _build() -> type[build]:
    return build


@pytest.fixture(scope="package")
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The deployment of the options or the embedded service; every session that was opened is closed at the end."""
    option = request.config.getoption
    url, provider, model = option("--contract-url"), option("--contract-provider"), option("--contract-model")
    with ExitStack() as stack:
        if url:
            try:
                api = Api(url.rstrip("/"), option("--contract-key"), provider, model, embedded=False)
            except Unspeakable as error:
                pytest.exit(str(error), returncode=2)
        else:
            from whitney_loop.local import serve

            served = stack.enter_context(serve(tmp_path_factory.mktemp("storage")))
            api = Api(served.base_url, served.api_key, provider, model, embedded=True, patience_s=20.0)
        report_of(request.config).api = api
        stack.callback(api.close_all)
        if threading.current_thread() is threading.main_thread():  # SIGTERM ends the tests as Ctrl-C does: cleaned up
            previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, previous)
        try:
            accepted(api.call("GET", "capabilities"))
        except AssertionError as error:
            pytest.exit(f"this is no deployment that can be asked: {error}", returncode=2)
        yield api


@pytest.fixture
def api(deployment: Api) -> Iterator[Api]:
    """The deployment; the sessions and runs that are the test's own end with it."""
    deployment.ledger.last = ""
    yield deployment
    deployment.clean_up_after_test()


@pytest.fixture
def session_id(api: Api) -> str:
    """A session of the test's own."""
    return api.open_session()


@pytest.fixture
def run(api: Api) -> Run:
    """A run that tests share, since each run may be billed: none may end it or expect its seq_ids to begin at 1."""
    return api.shared_run()


@pytest.fixture
def sampler_id(run: Run) -> str:
    """The first sampler of the shared run."""
    return run.first_sampler_id or run.save()


@pytest.fixture
def settled_run(run: Run) -> Run:
    """The shared run without a pending gradient: a step at learning rate 0 uses it up, or fails if there is none."""
    run.operation("optim_step", build.optimizer(learning_rate=0.0))
    return run


@pytest.fixture
def own_run(api: Api) -> Run:
    """A run of the test's own."""
    return api.run(seed=7)


@pytest.fixture(scope="package")
def ended_runs() -> dict[str, tuple[Run, dict[str, Any]]]:
    return {}


@pytest.fixture
def ended_run(api: Api, ended_runs: dict[str, tuple[Run, dict[str, Any]]]) -> Callable[[str], Any]:
    """A run that was finished or cancelled, shared by all tests, and its only operation, a save."""

    def get(end: str) -> tuple[Run, dict[str, Any]]:
        if end not in ended_runs:
            run = api.run()
            saved = run.operation("save_weights_for_sampler", {})
            run.end(end)
            ended_runs[end] = run, saved
        return ended_runs[end]

    return get


@pytest.fixture
def run_of(api: Api) -> Callable[[str], Run]:
    """The shared run of a provider; one that the options do not name is possible on the embedded service only."""

    def get(provider: str) -> Run:
        if not api.embedded and provider != api.provider:
            pytest.skip(f"it holds of {provider}: run again with --contract-provider {provider}")
        return api.shared_run(provider)

    return get


@pytest.fixture
def embedded(api: Api) -> None:
    """For sentences about the embedded service's numbers: another one may round, average, or hold another model."""
    if not api.embedded:
        pytest.skip("formula values and files are the embedded service's own")


# The report


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--contract-url"):  # its user wants the table, not our tracebacks
        if config.option.tbstyle == "auto":
            config.option.tbstyle = "no"
        if config.option.reportchars == "fE":
            config.option.reportchars = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report_of(item.config).add(item, report, call.excinfo.value if call.excinfo else None)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := report_of(config).lines():
        terminalreporter.section("the contract")
        for line in lines:
            terminalreporter.write_line(line)
