"""Files and directories that are trusted, and orders that are refused; see calls/."""

from pathlib import Path

import pytest

from tests.common import lives, statements
from tests.security.users import needs_root

CALLS = Path(__file__).parent / "calls"


@pytest.mark.timeout(20)  # a pipe would be waited for
@pytest.mark.parametrize(
    "name", ["ownership", "orders", pytest.param("of_other_users", marks=needs_root)]
)
def test_calls_are_answered_as_before(name, tmp_path):
    lives.compare(CALLS / f"{name}.txt", statements.live, tmp_path)
