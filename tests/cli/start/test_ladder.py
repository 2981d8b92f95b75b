"""The limits of time: their defaults by device, and the table that people read."""

import argparse
import re

import pytest

from deadpool_megatron import arguments
from deadpool_megatron.cluster.agent.fence import Fence
from deadpool_megatron.cluster.journal.terms import HeartbeatTiming
from deadpool_megatron.settings import FIELDS, Settings, SettingsError, flag_name, has_flag
from tests.common.pages import site_reference

_ROW = re.compile(r"^\| `(?:--deadpool-)?([a-z-]+)` \| ([^|]+) \| ([^|]*) \|.* \|$", re.MULTILINE)


def settings(*given: str, nccl: bool) -> Settings:
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    communicator = "nccl" if nccl else ""
    return arguments.settings_from(parser.parse_args(given), communicator=communicator)


def test_ladder_holds_for_each_device_with_the_numbers_of_the_page():
    page = site_reference().settings_chapter().partition("### Order")[0]
    rows = {name.replace("-", "_"): (cpu, nccl or cpu) for name, cpu, nccl in _ROW.findall(page)}
    assert rows.keys() == FIELDS.keys()
    assert "|  |\n" not in page.replace("|  |  |", ""), "each has a meaning"
    for at, nccl in enumerate((False, True)):
        found = settings(nccl=nccl)
        for name in LIMITS:
            assert getattr(found, name) == float(rows[name][at]), name
    assert sum(map(has_flag, FIELDS)) <= 32


@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("times", [0.5, 20])
def test_limits_scale_with_the_settings_of_a_site(nccl, times):
    """So that none outgrows another: once, with more patience for silence alone, every node ended
    its members after a takeover."""
    usual = settings(nccl=nccl)
    for name in ("node_silence_seconds", "rebuild_seconds", "start_seconds"):
        value = times * getattr(usual, name)
        found = settings(flag_name(name), str(value), nccl=nccl)
        for limit, entry in FIELDS.items():
            if entry.metadata.get("of") == name and not entry.metadata["floor"]:
                assert getattr(found, limit) == pytest.approx(times * getattr(usual, limit))
    assert settings("--deadpool-hang-seconds", "7200", nccl=nccl).first_step_seconds == 7200


def test_fence_waits_for_a_new_coordinator_as_long_as_for_the_old():
    chosen = settings("--deadpool-node-silence-seconds", "60", nccl=False)
    fence = Fence(chosen)
    fence.record_contact(0.0, 1)
    fence.record_read(1, "1 1", 0.0)
    fence.record_read(1, "1 1", 2.0)
    claimed = 2.0 + HeartbeatTiming.of(chosen).beat
    fence.record_read(2, "2 1", claimed)
    assert not fence.verdict(2.0 + chosen.fence_seconds)


@pytest.mark.parametrize("nccl", [False, True])
def test_settings_take_another_value(nccl):
    assert settings("--deadpool-set", "close-seconds=12", nccl=nccl).close_seconds == 12.0
    for unknown in ("closed-seconds=90", "hang-seconds=90", "dscp=high"):
        with pytest.raises(SystemExit):
            settings("--deadpool-set", unknown, nccl=nccl)


LIMITS = [name for name in FIELDS if name.endswith("_seconds")]


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9"])
def test_a_limit_that_no_clock_can_wait_for_is_refused(name, value):
    """No coordinator could be started with an infinite one, and the run did not end either."""
    with pytest.raises(SettingsError, match=f"^{flag_name(name)} must be above 0 and at most"):
        Settings(**{name: float(value)})
