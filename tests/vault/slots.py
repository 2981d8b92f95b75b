"""Slots in files of a directory: filled, sealed and shown, for what calls say of them."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from deadpool_megatron.events import Event
from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm import segment
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, checksum, own_name
from deadpool_megatron.vault.shm.table import Table
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.vault.transport import Transport
from tests.vault.harness import content, make_layout, record_of

G, SEAT = Generation, Seat(0, 0, 0)
NAMES = ("shard", "tail", "extras@step")


def made(directory: Path, name: str, slots: int = 2, nbytes: int = 100) -> Segment:
    """A segment of that name with empty slots."""
    role, seat = segment.parse_name(name)
    layout = make_layout(role, nbytes, slots)
    return Segment.create(directory / name, layout, seat, NAMES)


def fill(
    one: Segment, slot: int, generation: Generation, names: Collection[str] = NAMES, epoch: int = 0
) -> None:
    """As its member does, 10 bytes of each part."""
    one.mark_writing(slot)
    one.begin(slot, generation, epoch or generation.lineage)
    for name in names:
        one.data(slot, name, 10)[:] = content(one.layout.role, generation, name, 10)
    one.fill(slot, dict.fromkeys(names, 10), epoch or generation.lineage)


def seal(one: Segment, slot: int, names: Collection[str] = NAMES, epoch: int = 0) -> None:
    """As its vault does."""
    for name in names:
        digest = checksum(one.data(slot, name, 10))
        one.seal_part(slot, name, 10, digest, epoch or one.generation(slot).lineage)
    one.set_state(slot, SlotState.SEALED)


def keep(one: Segment, slot: int, generation: Generation, names: Collection[str] = NAMES) -> None:
    """Both."""
    fill(one, slot, generation, names)
    seal(one, slot, names)


def short(generation: Generation) -> str:
    """Lineage and iteration."""
    return f"{generation.lineage}:{generation.iteration}"


def held(table: Table) -> dict[str, str]:
    """Role and generation of what a table says it holds, with the parts."""
    return {f"{h.role} {short(h.generation)}": " ".join(sorted(h.parts)) for h in table.holdings()}


def show(*segments: Segment) -> None:
    """What their slots hold, and whether sealed bytes are those that were sealed."""
    for one in segments:
        print(one.path.name, "frozen" if one.is_frozen() else "")
        for slot in range(one.slots):
            parts = []
            for name in (part.name for part in one.layout.parts):
                entry = one.entry(slot, name)
                words = [name, entry.state.name.lower(), entry.nbytes, f"in {entry.epoch}"]
                if entry.state is PartState.SEALED:
                    is_whole = checksum(one.data(slot, name, entry.nbytes)) == entry.checksum
                    words += [] if is_whole else ["DAMAGED"]
                if entry.state is not PartState.ABSENT:
                    parts.append(" ".join(map(str, words)))
            about = f"{short(one.generation(slot))} in {one.epoch(slot)}"
            print(f"  {slot} {one.state(slot).name.lower()} {about}: {', '.join(parts)}")


def vault(
    directory: Path, record: Any = None, *transports: Transport, **settings: Any
) -> SlotStore:
    """The state of node 0 in epoch 1 without its threads, with generations 4 and 5 of role 0, whose
    buddy is node 1. It says what agents and members are told."""

    def told(event: Event) -> None:
        facts = {k: v for k, v in event.data.items() if "seconds" not in k}
        print("told:", event.kind, event.role, event.iteration, facts)

    state = SlotStore(scheme_of, 0, directory, Settings(**settings), told, *transports)
    state.on_bad = lambda *about: print("bad:", *about)
    state.ledger.on_committed = lambda *about: print("committed:", *about)
    state.adopt(record or record_of())
    own = made(directory, own_name(0, SEAT))
    state.table.segments[own.path.name] = own
    keep(own, 0, Generation(1, 4))
    keep(own, 1, Generation(1, 5))
    return state
