"""What several tests of journals need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.journal.etcd_server import EtcdServer


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()
