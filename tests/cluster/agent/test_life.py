"""The whole life of an agent: what it starts, orders, passes on, prints and writes; see lives/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.agent.world import World
from tests.common import lives

LIVES = sorted((Path(__file__).parent / "lives").glob("*.txt"))


def live(script: Sequence[str], options: dict[str, Any], directory: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        return World(directory, patch, **options).live(script)


@pytest.mark.parametrize("path", LIVES, ids=[path.stem for path in LIVES])
def test_agent_lives_as_recorded(path, tmp_path):
    lives.compare(path, live, tmp_path)
