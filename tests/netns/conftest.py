"""Which machines can run these tests, and who asked for them."""

from __future__ import annotations

import os

import pytest

from tests.netns.hosts import missing

ENVIRONMENT_NAME = "DEADPOOL_TEST_NETNS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--netns") or os.environ.get(ENVIRONMENT_NAME) == "1"
    reason = missing() if wanted else f"changes namespaces: ask by --netns or {ENVIRONMENT_NAME}=1"
    for item in items:
        if item.get_closest_marker("netns") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))
