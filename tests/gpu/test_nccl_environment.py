"""What members get for NCCL's sake, what is refused, and that docs and code say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron import nccl_environment
from deadpool_megatron.nccl_environment import VARIABLES, Otherwise

ROOT = Path(__file__).parents[2]
REFUSED = [variable for variable in VARIABLES if variable.otherwise is Otherwise.REFUSED]


def test_what_is_not_set_is_set_and_what_the_user_has_set_stays() -> None:
    environment = {"NCCL_NVLS_ENABLE": "1", "PATH": "/bin"}
    nccl_environment.complete(environment)
    expected = {variable.name: variable.value for variable in VARIABLES}
    assert environment == {**expected, "NCCL_NVLS_ENABLE": "1", "PATH": "/bin"}


def test_a_value_under_the_former_name_is_not_overruled() -> None:
    """Torch takes the name of today where there are both."""
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}
    nccl_environment.complete(environment)
    assert "TORCH_FR_BUFFER_SIZE" not in environment


def test_what_members_get_is_not_refused() -> None:
    environment: dict[str, str] = {}
    nccl_environment.complete(environment)
    assert nccl_environment.complaint(environment) == ""
    assert nccl_environment.warnings(environment) == []
    assert nccl_environment.in_force(environment).startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=0 ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "yes"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("NCCL_BLOCKING_WAIT", "true"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"),
        ("TORCH_NCCL_PROPAGATE_ERROR", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1"),
        ("TORCH_FR_BUFFER_SIZE", "0"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"),
    ],
)
def test_a_contrary_value_is_one_line_that_names_it_and_says_what_to_do(
    name: str, value: str
) -> None:
    environment = {name: value}
    nccl_environment.complete(environment)
    line = nccl_environment.complaint(environment)
    assert line.startswith(f"{name}={value} cannot be protected with NCCL: ")
    assert "unset it, or set it to " in line
    assert "\n" not in line


def test_all_contrary_values_are_in_the_line() -> None:
    environment = {one.name: one.contrary[0] if one.contrary else "other" for one in REFUSED}
    line = nccl_environment.complaint(environment)
    assert all(f"{name}={value}" in line for name, value in environment.items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_BLOCKING_WAIT", "false"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "0"),
        ("TORCH_FR_BUFFER_SIZE", "20000"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "20000"),
        ("TORCH_NCCL_ENABLE_MONITORING", "NO"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO"),
        ("TORCH_DISTRIBUTED_DEBUG", "off"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ],
)
def test_what_does_the_same_or_is_the_users_to_choose_passes(name: str, value: str) -> None:
    assert nccl_environment.complaint({name: value}) == ""
    assert nccl_environment.warnings({name: value}) == []


def test_nvlink_sharp_is_the_users_choice_with_a_warning() -> None:
    assert nccl_environment.complaint({"NCCL_NVLS_ENABLE": "1"}) == ""
    [line] = nccl_environment.warnings({"NCCL_NVLS_ENABLE": "1"})
    assert line.startswith("NCCL_NVLS_ENABLE=1 is taken as set")


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ((2, 21, 5), True),
        ((2, 25, 1), True),
        ((2, 26, 1), True),
        ((2, 26, 2), False),
        ((2, 27, 7), False),
        ((2, 28, 2), False),
        ((2, 28, 3), True),
        ((2, 28, 8), True),
        ((2, 28, 9), False),
        ((2, 30, 4), False),
    ],
)
def test_versions_that_cannot_abort_and_go_on_are_refused(
    version: tuple[int, int, int], refused: bool
) -> None:
    line = nccl_environment.version_complaint(version)
    assert bool(line) == refused
    if refused:
        assert line.startswith(f"NCCL {'.'.join(map(str, version))} cannot be protected")


def test_the_docs_have_the_tables() -> None:
    assert nccl_environment.as_markdown() in (ROOT / "docs" / "gpu.md").read_text()
