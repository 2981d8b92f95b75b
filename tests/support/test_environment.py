"""What members get for NCCL's sake, what is refused, and that docs and code say the same."""

from pathlib import Path

import pytest

from deadpool_megatron.support import environment as table
from deadpool_megatron.support.environment import VARIABLES, Otherwise

ROOT = Path(__file__).parents[2]


def test_what_is_not_set_is_set_and_what_the_user_has_set_stays() -> None:
    """Also under a former name, over which torch takes the one of today where there are both."""
    environment = {"NCCL_NVLS_ENABLE": "1", "PATH": "/bin", "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}
    own = dict(environment)
    table.complete(environment)
    expected = {variable.name: variable.value for variable in VARIABLES}
    del expected["TORCH_FR_BUFFER_SIZE"]
    assert environment == {**expected, **own}
    assert table.complaint({**expected, "PATH": "/bin"}) == ""
    assert table.warnings(expected) == []
    assert table.in_force(expected).startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=0 ")


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


def test_what_scripts_copy_is_set_aside_and_the_rest_stays() -> None:
    """Under both of its names; a member that finds it all the same, for its script has set it, is
    refused."""
    given = {"NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_DEBUG": "x"}
    environment = {**given, "TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
    assert [name for name, _ in table.set_aside(environment)] == [
        "NCCL_ASYNC_ERROR_HANDLING=1",
        "TORCH_NCCL_BLOCKING_WAIT=1",
    ]
    table.complete(environment)
    assert "NCCL_ASYNC_ERROR_HANDLING" not in environment
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert table.set_aside(environment) == []
    assert table.complaint(environment).startswith("TORCH_NCCL_USE_COMM_NONBLOCKING=1 ")
    assert environment["NCCL_DEBUG"] == "x"


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ((2, 21, 5), True),
        ((2, 26, 1), True),
        ((2, 26, 2), False),
        ((2, 28, 2), False),
        ((2, 28, 3), True),
        ((2, 28, 8), True),
        ((2, 28, 9), False),
    ],
)
def test_versions_that_cannot_abort_and_go_on_are_refused(
    version: tuple[int, int, int], refused: bool
) -> None:
    line = table.version_complaint(version)
    assert bool(line) == refused
    assert line.startswith(f"NCCL {'.'.join(map(str, version))} cannot be protected" * refused)


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
