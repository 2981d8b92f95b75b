"""Megatron on this machine, and what several tests of a training process need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.megatron import stand_ins

# The stand-ins come before the first import of anything of Megatron.
stand_ins.install()

from tests.member.session_rig import Rig, session  # noqa: E402


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rig]:
    with session(monkeypatch, tmp_path) as made:
        yield made
