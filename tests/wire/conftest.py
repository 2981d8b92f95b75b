"""Certificates are made once."""

from __future__ import annotations

import pytest

from tests.wire import certificates


@pytest.fixture(scope="session")
def tls_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def foreign_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of somebody else's authority."""
    return certificates.make(tmp_path_factory.mktemp("foreign"))
