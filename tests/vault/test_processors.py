"""Processors and priority of a vault, and settings that are refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.settings import Settings, SettingsError
from deadpool_megatron.vault.processors import choose_cpus

CPUS = st.sets(st.integers(0, 300), min_size=1)


@given(CPUS)
def test_a_list_is_read_as_it_is_written_and_must_be_allowed(cpus: set[int]) -> None:
    pairs = [f"{min(cpus)}-{max(cpus)}", *map(str, cpus)]
    assert choose_cpus(",".join(pairs), range(301)) == {*range(min(cpus), max(cpus) + 1)}
    with pytest.raises(ValueError, match="not among"):
        choose_cpus(",".join(map(str, cpus)), cpus - {max(cpus)})


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
        "from deadpool_megatron.vault.processors import place_process\n"
        "before = os.nice(0)\n"
        f"place_process('{cpu}', 3)\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        f"assert seen == [{{{cpu}}}], seen\n"
        "assert os.nice(0) == min(19, before + 3)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
    ],
)
def test_bad_settings_are_refused(setting: str, value: object) -> None:
    with pytest.raises(SettingsError, match=setting.replace("_", "-")):
        Settings(**{setting: value})  # type: ignore[arg-type]
