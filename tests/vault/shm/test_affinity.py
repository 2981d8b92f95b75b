"""Where a vault runs and where slots lie: lists of processors, priority, NUMA nodes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.settings import Settings, SettingsError
from deadpool_megatron.vault.shm import affinity
from deadpool_megatron.vault.shm.affinity import (
    choose_cpus,
    format_cpus,
    memory_near,
    parse_cpus,
)

CPUS = st.sets(st.integers(0, 300), min_size=1)


@given(CPUS)
def test_lists_of_processors_are_read_as_they_are_written(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


@given(CPUS)
def test_auto_takes_the_last_quarter_and_never_nothing(allowed: set[int]) -> None:
    chosen = choose_cpus("auto", allowed)
    assert chosen
    assert chosen <= allowed
    assert len(chosen) == max(1, len(allowed) // 4)
    assert min(chosen) > max(allowed - chosen, default=-1)


def test_a_process_puts_itself_in_its_place() -> None:
    """In a process of its own: neither can be taken back without privileges."""
    cpu = max(os.sched_getaffinity(0))
    code = (
        "import os, threading\n"
        "from deadpool_megatron.vault.shm.affinity import settle_process\n"
        "before = os.nice(0)\n"
        f"settle_process('{cpu}', 3)\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        f"assert seen == [{{{cpu}}}], seen\n"
        "assert os.nice(0) == min(19, before + 3)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def policy() -> int:
    """The memory policy of this thread, as the kernel says."""
    mode = ctypes.c_int(-1)
    number = affinity._GET_MEMPOLICY[platform.machine()]
    if ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, 0, None, 0) != 0:
        pytest.skip("the kernel tells nobody its memory policy here")
    return mode.value


def test_memory_is_asked_for_near_a_node_and_the_default_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(affinity, "memory_nodes", lambda: frozenset({0, 1}))
    with memory_near(0) as near:
        assert policy() == (1 if near else 0)
        # Whoever has set a policy himself keeps it.
        with memory_near(0) as again:
            assert not again
        assert policy() == (1 if near else 0)
    assert policy() == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dscp", 64),
        ("dscp", -1),
        ("rate_limit_gbps", -0.1),
        ("rate_limit_gbps", float("nan")),
        ("rate_limit_gbps", float("inf")),
        ("vault_nice", 20),
        ("vault_cpus", "1-"),
        ("vault_cpus", "all"),
        ("numa", "on"),
    ],
)
def test_bad_settings_are_refused(setting: str, value: object) -> None:
    with pytest.raises(SettingsError, match=setting.replace("_", "-")):
        Settings(**{setting: value})  # type: ignore[arg-type]
