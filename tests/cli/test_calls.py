"""What commands are made of and what it answers, line by line; see calls/."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deadpool_megatron.cli import compare
from deadpool_megatron.cli.run_result import read_result
from tests.common.calls import test_calls_are_answered_as_before  # noqa: F401
from tests.common.synthetic_run import write_run


def compared(
    directory: Path, change: Callable[[dict[str, Any]], object], name: str = "second", **more: Any
) -> compare.Comparison:
    """A run of eight roles held against one in which something is changed."""
    first = write_run(directory / f"{name}-first")
    second = write_run(directory / name, change=lambda final: change(final) and None, **more)
    return compare.compare_results(read_result(first), read_result(second))
