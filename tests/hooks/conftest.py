"""Megatron on this machine: the stand-ins come before the first import of anything of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.platform import select_platform

select_platform().install()

from tests.hooks.session_rig import Rig, session  # noqa: E402


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rig]:
    with session(monkeypatch, tmp_path) as made:
        yield made
