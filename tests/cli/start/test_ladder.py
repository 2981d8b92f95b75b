"""The limits of time: their defaults by device, and the table that people read."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from deadpool_megatron import arguments
from deadpool_megatron.cluster.agent.fence import Fence
from deadpool_megatron.cluster.journal.terms import Rhythm
from deadpool_megatron.settings import NCCL_DEFAULTS, Settings, SettingsError, flag_name

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
_ROW = re.compile(r"^\| `([a-z-]+)` \| ([\d.]+)(?:; with NCCL ([\d.]+))? \|", re.MULTILINE)


def settings(*given: str, nccl: bool) -> Settings:
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    communicator = "nccl" if nccl else ""
    return arguments.settings_from(parser.parse_args(given), communicator=communicator)


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


def test_a_new_coordinator_is_waited_for_as_long_as_the_old_one() -> None:
    """With more patience for silence alone, every node ended its members after a takeover: of 12 s
    it took the part that the fence is of 60 s, which is less than a few beats."""
    patient = ("--deadpool-node-silence-seconds", "60")
    with pytest.raises(SettingsError, match=r"--deadpool-rejoin-seconds \(12 s\) must be at least"):
        settings(*patient, nccl=False)
    chosen = settings(*patient, "--deadpool-rejoin-seconds", "60", nccl=False)
    fence = Fence(chosen)
    fence.heard(0.0, 1)
    fence.looked(1, "1 1", 0.0)
    fence.looked(1, "1 1", 2.0)
    claimed = 2.0 + Rhythm.of(chosen).beat
    fence.looked(2, "2 1", claimed)
    assert not fence.verdict(2.0 + chosen.fence_seconds)


LIMITS = [one.name for one in dataclasses.fields(Settings) if one.name.endswith("_seconds")]


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9"])
def test_a_limit_that_no_clock_can_wait_for_is_refused(name: str, value: str) -> None:
    """No coordinator could be started with an infinite one, and the run did not end either."""
    with pytest.raises(SettingsError, match=f"^{flag_name(name)} must be above 0 and at most"):
        settings(flag_name(name), value, nccl=False)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--deadpool-memory-gb", "1e12", "must be between 0 and 1000000000, got 1000000000000.0"),
        ("--deadpool-rate-limit-gbps", "nan", "must be between 0 and 1000000000, got nan"),
        ("--deadpool-cadence", "9" * 5000, "must be auto or a number from 1 to 1000, got '999"),
        ("--deadpool-restarts-in-place", "-1", "must be at least 0, got -1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(flag: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"{flag} {said}")):
        settings(flag, value, nccl=False)
