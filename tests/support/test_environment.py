"""What members get for NCCL's sake, what is refused, and that docs and code say the same."""

from pathlib import Path

import pytest

from deadpool_megatron.support import environment as table
from deadpool_megatron.support.environment import VARIABLES, Otherwise

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_each_row(variable: table.Variable) -> None:
    """Under both of its names: what does the same passes, the contrary is named in one line."""
    contrary = variable.contrary[0] if variable.contrary else "other"
    for name in filter(None, (variable.name, variable.former_name)):
        for same in (variable.value, *variable.as_good, variable.value.swapcase()):
            assert table.complaint({name: same}) == ""
            assert table.warnings({name: same}) == []
        given = {name: contrary}
        refused, warned, aside = table.refused(given), table.warnings(given), table.set_aside(given)
        assert len(refused) == (variable.otherwise is Otherwise.REFUSED)
        assert len(warned) == (variable.otherwise is Otherwise.WARNED)
        assert len(aside) == (variable.otherwise is Otherwise.SET_ASIDE)
        assert bool(table.complaint(given)) == bool(refused or aside)
        for line in (*warned, *(line for _, line in refused + aside)):
            assert line.startswith(f"{name}={contrary} ")
            assert variable.reason in line
            assert "\n" not in line


def test_the_docs_have_the_tables() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for row in VARIABLES:
        names = "`, `".join(filter(None, (row.name, row.former_name)))
        other = f"{', '.join(row.contrary)} is " if row.contrary else ""
        assert (
            f"| `{names}` | {row.value} | {row.reason} | {other}{row.otherwise.value} |\n" in page
        )
    for version in table.REFUSED_VERSIONS:
        assert f"| {version.shown} | {version.reason} |\n" in page
