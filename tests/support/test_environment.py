"""What members get for NCCL's sake, what is refused, and that docs and code say the same."""

import pytest

from deadpool_megatron.support import environment as table
from deadpool_megatron.support.environment import VARIABLES, Policy
from tests.common.pages import DOCS, site_reference


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_variables_conflict_under_both_names(variable):
    """Under both of its names: equivalent values pass, a conflicting one is named in one line."""
    conflicting = variable.conflicting[0] if variable.conflicting else "other"
    for name in filter(None, (variable.name, variable.former_name)):
        for same in (variable.value, *variable.equivalent, variable.value.swapcase()):
            assert table.error_message({name: same}) == ""
            assert table.warnings({name: same}) == []
        given = {name: conflicting}
        refused, warned = table.refused(given), table.warnings(given)
        overridden = table.overridden(given)
        assert len(refused) == (variable.policy is Policy.REFUSED)
        assert len(warned) == (variable.policy is Policy.WARNED)
        assert len(overridden) == (variable.policy is Policy.OVERRIDDEN)
        assert bool(table.error_message(given)) == bool(refused or overridden)
        for line in (*warned, *(line for _, line in refused + overridden)):
            assert line.startswith(f"{name}={conflicting} ")
            assert variable.reason in line
            assert "\n" not in line


def test_the_docs_have_the_tables():
    page = site_reference().on_page_markdown((DOCS / "gpu.md").read_text())
    for row in VARIABLES:
        names = "`, `".join(filter(None, (row.name, row.former_name)))
        other = f"{', '.join(row.conflicting)} is " if row.conflicting else ""
        assert f"| `{names}` | {row.value} | {row.reason} | {other}{row.policy.value} |\n" in page
    for version in table.REFUSED_VERSIONS:
        assert f"| {version.shown} | {version.reason} |\n" in page
