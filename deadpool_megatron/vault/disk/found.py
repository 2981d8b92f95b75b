"""What lies in a node's directory that no vault has open: for its next agent, and to be written.

All that the control plane reads of slots itself; whatever else it wants to know, a vault tells it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import Generation, Inventory
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.disk.dump import dump_held
from deadpool_megatron.vault.errors import SegmentError
from deadpool_megatron.vault.shm.segment import Segment, SlotState, parse_name
from deadpool_megatron.vault.shm.table import Table


def found_slots(node: int, directory: Path) -> Inventory | None:
    """Returns what lies there before the vault of ``node`` starts; None where nothing is sealed.

    It stays as it is until the vault adopts a record, so this is a promise like that of a close.
    Raises SegmentError when there are slots that are not understood.
    """
    table = Table(directory)
    table.scan()
    table.require_read()
    table.remove_empty()  # of processes that died before they computed anything
    holdings = table.holdings()
    return Inventory(node, 0, holdings, table.layouts()) if holdings else None


def incarnations(node: int, directory: Path) -> dict[int, int]:
    """Returns local slot -> the highest incarnation of ``node`` whose slots are there: no process
    may get its name again, and with it the file."""
    found: dict[int, int] = {}
    for path in directory.glob("own-*.seg"):
        with contextlib.suppress(SegmentError):
            _, seat = parse_name(path.name)
            if seat is not None and seat.node == node:
                found[seat.slot] = max(found.get(seat.slot, -1), seat.incarnation)
    return found


def newest_sealed(directory: Path) -> Generation:
    """Returns the newest sealed generation of all segments; (-1, -1) where nothing is sealed."""
    newest = Generation(-1, -1)
    for path in directory.glob("*.seg"):
        with contextlib.suppress(SegmentError, OSError):
            segment = Segment.open(path, writable=False)
            for slot in range(segment.slots):
                if segment.state(slot) is SlotState.SEALED:
                    newest = max(newest, segment.generation(slot))
    return newest


def dump_kept(
    node: int, directory: Path, settings: Settings, kept: Mapping[int, int], base: Path
) -> list[str]:
    """Write what lies there on the ``kept`` line below ``base``; returns the files.

    Raises VaultError when it cannot be written; SegmentError, after all else has been written, when
    there are slots that are not understood.
    """
    state = VaultState(node, directory, settings, lambda _: None)
    state.table.scan()
    held = {holding.generation for holding in state.table.holdings()}
    written = dump_held(state, base, [one for one in held if is_kept(kept, one)])
    state.table.require_read()
    return written
