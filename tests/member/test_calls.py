"""What is called in the hooks and what it answers, line by line; see calls/."""

from pathlib import Path

import pytest

from tests.common import lives, statements

CALLS = sorted((Path(__file__).parent / "calls").glob("*.txt"))


@pytest.mark.parametrize("path", CALLS, ids=[path.stem for path in CALLS])
def test_calls_are_answered_as_before(path: Path, tmp_path: Path) -> None:
    lives.compare(path, statements.live, tmp_path)
