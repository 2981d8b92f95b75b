"""The limits of time: their defaults by device, and the table that people read."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from deadpool_megatron import arguments
from deadpool_megatron.cli.start import gpus
from deadpool_megatron.settings import NCCL_DEFAULTS, Settings

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
_ROW = re.compile(r"^\| `([a-z-]+)` \| ([\d.]+)(?:; with NCCL ([\d.]+))? \|", re.MULTILINE)


def settings(*given: str, nccl: bool) -> Settings:
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return arguments.settings_from(parser.parse_args(given), nccl=nccl)


def test_the_ladder_holds_for_each_device_and_the_page_says_its_numbers() -> None:
    table = PAGE.read_text().split("### The ladder of time limits")[1]
    rows = {name: (cpu, nccl or cpu) for name, cpu, nccl in _ROW.findall(table)}
    assert {"close", "rebuild", "hang"} <= rows.keys()
    for at, nccl in enumerate((False, True)):
        found = settings(nccl=nccl)
        for name, values in rows.items():
            field = name.replace("-", "_") + "_seconds"
            assert getattr(found, field) == float(values[at]), name
    named = {name.replace("-", "_") + "_seconds" for name, (a, b) in rows.items() if a != b}
    assert named == NCCL_DEFAULTS.keys()


def test_a_value_of_the_user_counts_with_both() -> None:
    for nccl in (False, True):
        assert settings("--deadpool-close-seconds", "12", nccl=nccl).close_seconds == 12.0


@pytest.mark.parametrize(
    ("communicator", "visible", "nccl"),
    [
        ("nccl", (), True),
        ("auto", ("0", "1"), True),
        ("auto", ("0",), False),  # not one for each: hidden, and the run is on CPUs
        ("auto", (), False),
        ("gloo", ("0", "1"), False),
        ("fake-nccl", ("0", "1"), False),
    ],
)
def test_a_run_has_nccls_limits_where_it_will_use_nccl(
    communicator: str, visible: tuple[str, ...], nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda _: visible)
    assert gpus.has_nccl_limits(communicator, 2, {}) is nccl
