"""The requirements and the selection of these tests, and their measurements."""

import os

import pytest

from tests.netns.lab.hosts import missing

ENVIRONMENT_NAME = "DEADPOOL_TEST_NETNS"
_MEASURED: list[str] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--netns") or os.environ.get(ENVIRONMENT_NAME) == "1"
    reason = missing() if wanted else f"changes namespaces: ask by --netns or {ENVIRONMENT_NAME}=1"
    for item in items:
        if item.get_closest_marker("netns") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _MEASURED:
        terminalreporter.section("measured on hosts made of namespaces")
    for line in _MEASURED:
        terminalreporter.write_line(line)


@pytest.fixture
def measured():
    """Note a row ``fault | what happened`` for the end of the session."""
    return lambda fault, happened: _MEASURED.append(f"{fault} | {happened}")
