"""What several tests of a training process need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.process.session_rig import Rig, session


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rig]:
    with session(monkeypatch, tmp_path) as made:
        yield made
