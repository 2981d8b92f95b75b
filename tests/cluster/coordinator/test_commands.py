"""Numbers for agents that attach at the same time; other commands are in calls/requests.txt."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deadpool_megatron.cluster.journal.journal import Journal
from tests.cluster.coordinator.asked import Coordinator


class InStep(Journal):
    """A journal of which each reader waits until another reader has listed it as well."""

    def __init__(self, directory: Path, both: threading.Barrier) -> None:
        super().__init__(directory)
        self._both = both

    def numbers(self, kind: str) -> list[int]:
        found = super().numbers(kind)
        self._both.wait(20.0)
        return found


@pytest.mark.parametrize("coordinators", [1, 2])
async def test_agents_of_a_host_that_attach_at_once_get_different_numbers(tmp_path, coordinators):
    """An old coordinator and its successor may both get a request."""
    both = threading.Barrier(2)
    asked = [Coordinator(InStep(tmp_path / "journal", both)) for _ in range(coordinators)]
    with ThreadPoolExecutor(2) as threads:
        given = [
            threads.submit(asked[n % coordinators].commands._attach, "host", range(3))
            for n in range(2)
        ]
    assert sorted(answer.result()["node"] for answer in given) == [3, 4]
