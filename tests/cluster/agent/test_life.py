"""The whole life of an agent, line by line: what it starts, orders, passes on, prints and writes.

The files in lives/ have lives, each with its options. A line at the margin is what happens to the
agent; below it, indented, is all that comes of it. A change that is meant changes these as well:
with ``DEADPOOL_TEST_WRITE=1`` in the environment they are written again, and the difference is read
like that of any other file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cluster.agent.world import World

LIVES = sorted((Path(__file__).parent / "lives").glob("*.txt"))


@pytest.mark.parametrize("path", LIVES, ids=[path.stem for path in LIVES])
def test_a_life_is_as_it_was_before(path: Path, tmp_path: Path) -> None:
    found: list[str] = []
    for number, life in enumerate(path.read_text().split("== ")[1:]):
        header, *script = [line for line in life.splitlines() if not line.startswith("    ")]
        found.append(f"== {header}")
        (tmp_path / str(number)).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            options = json.loads(header[header.index("{") :] if "{" in header else "{}")
            found += World(tmp_path / str(number), patch, **options).live(script)
    if os.environ.get("DEADPOOL_TEST_WRITE"):
        path.write_text("\n".join(found) + "\n")
    assert found == path.read_text().splitlines()
