"""An option costs nothing in the path of those who did not choose it: nor is its file loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Vault, coordinator and the member's side of a vault; then an epoch of the plan is opened.
PROGRAM = """
import sys
from pathlib import Path
import deadpool_megatron.cluster.coordinator.service
import deadpool_megatron.vault.__main__
import deadpool_megatron.vault.member.client
import deadpool_megatron.vault.memory
from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import plan_of_kind
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.state import VaultState

seats = {role: Seat(role, 0, 0) for role in range(3)}
nodes = {node: NodeAddress("host", node, f"rack{node}") for node in range(3)}
restore = Restore("initial", Generation(1, 0))
plan = plan_of_kind(sys.argv[1], Settings(), 1, 2)
state = VaultState(0, Path(sys.argv[2]), Settings(), lambda _: None)
state.adopt(EpochRecord(1, seats, nodes, restore, protection=plan))
print(*(name for name in sys.modules if name.startswith("deadpool_megatron.")))
"""
PARITY = {
    "layout.parity_groups",
    *(f"vault.schemes.parity{one}" for one in ("", "_decode")),
}
FILES = {
    "buddy": set[str](),
    "parity": PARITY,
    "recompute": {"vault.schemes.recompute"},
    "local": {"vault.schemes.local"},
    "local-twice": {"vault.schemes.local"},
}
OPTIONAL = {
    *set[str]().union(*FILES.values()),
    "vault.schemes.parity_code",
    "vault.disk.dumped_blocks",
}


@pytest.mark.parametrize("kind", FILES)
def test_no_file_of_another_scheme_is_loaded(kind: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, kind, str(tmp_path)]
    told = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout
    loaded = {name.removeprefix("deadpool_megatron.") for name in told.split()}
    assert (loaded & OPTIONAL) - {"vault.schemes.parity_code"} == FILES[kind]
