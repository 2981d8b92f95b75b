"""An option costs nothing in the path of those who did not choose it: nor is its file loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from tests.common.programs import check_output
from tests.vault.harness import cluster, wait_until

# Vault, coordinator and the member's side of a vault; then, in a fork for each kind, an epoch of
# its plan is opened.
PROGRAM = """
import os, sys
from pathlib import Path
import deadpool_megatron.cluster.coordinator.service
import deadpool_megatron.vault.__main__
import deadpool_megatron.vault.vault_client
import deadpool_megatron.vault.memory
from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import plan_of_kind
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.slot_store import SlotStore

seats = {role: Seat(role, 0, 0) for role in range(3)}
nodes = {node: NodeAddress("host", node, f"rack{node}") for node in range(3)}
restore = Restore("initial", Generation(1, 0))
for kind in sys.argv[2:]:
    if os.fork() == 0:
        plan = plan_of_kind(kind, 1, 2)
        state = SlotStore(scheme_of, 0, Path(sys.argv[1], kind), Settings(), lambda _: None)
        state.adopt(EpochRecord(1, seats, nodes, restore, protection=plan))
        names = list(sys.modules)  # a thread may import meanwhile
        print(*(name for name in names if name.startswith("deadpool_megatron.")), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
PARITY = {"layout.parity_groups", "vault.schemes.parity", "vault.schemes.parity_decode"}
FILES = {
    "buddy": set[str](),
    "parity": PARITY,
    "local": set(),
    "local-twice": set(),
}
OPTIONAL = {*set[str]().union(*FILES.values()), "vault.schemes.parity_code"}


def test_no_file_of_another_scheme_is_loaded(tmp_path):
    told = check_output("-c", PROGRAM, tmp_path, *FILES)
    names = [line.replace("deadpool_megatron.", "").split() for line in told.splitlines()]
    found = [OPTIONAL.intersection(one) - {"vault.schemes.parity_code"} for one in names]
    assert dict(zip(FILES, found, strict=True)) == FILES


@pytest.mark.parametrize("kind", [SchemeKind.PARITY, SchemeKind.BUDDY])
def test_decoding_modules_are_loaded_before_a_loss(tmp_path, kind):
    """In a spare that holds nothing. Elsewhere it is not at all."""
    plan = ProtectionPlan(SchemeNumbers(kind, group=2))
    with cluster(tmp_path, 1) as running:
        running.open(replace(running.record(1), protection=plan))
        process = running.nodes[0].process
        maps = Path(f"/proc/{process.pid}/maps")

        def loaded() -> bool:
            return "numpy" in maps.read_text()

        if kind is SchemeKind.PARITY:
            wait_until(loaded, "numpy is loaded")
        else:
            assert not loaded()
