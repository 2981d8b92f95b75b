"""Segments of a group with parity blocks, written by hand: what is decoded from in these tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deadpool_megatron.layout.parity_groups import INPUTS, BlockInputs, ParityGroup, parity_layout
from deadpool_megatron.layout.records import Generation, RoleLayout, Seat, extras_part
from deadpool_megatron.vault.schemes.parity_code import Coder
from deadpool_megatron.vault.shm.segment import Segment, checksum, copy_name, own_name
from tests.vault.harness import content, make_layout

GENERATION = Generation(1, 3)
EXTRAS = extras_part("step")


@dataclass
class CodedGroup:
    """Roles 0 .. k-1 on the nodes of their numbers, parity block j on node k+j. Shards differ in
    length. The last node keeps the extras of every role."""

    data: int
    parities: int
    nbytes: int = 64 << 10
    lacking: int | None = None  # role without the part "tail"
    layouts: dict[int, RoleLayout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles = tuple(range(self.data))
        self.layouts = {r: make_layout(r, self.nbytes - 4099 * ((r + 1) % 3)) for r in roles}
        if self.lacking is not None:
            layout = self.layouts[self.lacking]
            parts = tuple(part for part in layout.parts if part.name != "tail")
            self.layouts[self.lacking] = replace(layout, parts=parts)
        numbers = tuple((1 << 33) + j for j in range(self.parities))
        self.group = ParityGroup(roles, numbers, self.holders)
        for j, number in enumerate(numbers):
            self.layouts[number] = parity_layout(self.layouts, self.group, j, self.parities)

    @property
    def holders(self) -> tuple[int, ...]:
        """Nodes of the parity blocks."""
        return tuple(range(self.data, self.data + self.parities))

    def part(self, role: int, name: str) -> bytes:
        """What a role has."""
        (nbytes,) = [part.nbytes for part in self.layouts[role].parts if part.name == name]
        return self.bytes_of(role, name, 777 if name == EXTRAS else nbytes)

    def bytes_of(self, role: int, name: str, nbytes: int) -> bytes:
        """The bytes that the harness expects."""
        return content(role, GENERATION, name, nbytes)

    def parity(self, j: int, name: str) -> bytes:
        """A parity block of a shard part."""
        names = {role: self.layouts[role].shard_parts for role in self.group.roles}
        parts = [self.part(role, name) if name in names[role] else b"" for role in names]
        block = bytearray(max(map(len, parts)))
        coder, numbers = Coder(self.data, self.parities), range(self.data)
        combination = coder.begin(numbers, self.data + j, memoryview(block))
        for i, part in enumerate(parts):
            combination.add(i, 0, memoryview(part))
        return bytes(block)

    def members(self, j: int) -> BlockInputs:
        """What the vault that computed block ``j`` would have written of it."""
        contributions = {}
        for role in self.group.roles:
            parts = {name: self.part(role, name) for name in self.layouts[role].shard_parts}
            contributions[role] = {
                name: (len(part), checksum(memoryview(part))) for name, part in parts.items()
            }
        return BlockInputs(self.group.roles, j, self.parities, contributions)

    def write(self, directories: Mapping[int, Path], lost: set[int]) -> None:
        """All that is left without the ``lost`` roles' nodes."""
        keeper = directories[self.holders[-1]]
        for role in self.group.roles:
            layout = self.layouts[role]
            if role not in lost:
                seat = Seat(role, 0, 0)
                parts = {name: self.part(role, name) for name in (*layout.shard_parts, EXTRAS)}
                seal(directories[role] / own_name(role, seat), layout, seat, parts)
            extras = {EXTRAS: self.part(role, EXTRAS)}
            seal(keeper / copy_name(role), layout, None, extras)
        for j, number in enumerate(self.group.blocks):
            layout = self.layouts[number]
            names = [part.name for part in layout.parts if part.name != INPUTS]
            parts = {name: self.parity(j, name) for name in names}
            parts[INPUTS] = self.members(j).encode()
            seal(directories[self.holders[j]] / copy_name(number), layout, None, parts)


def seal(path: Path, layout: RoleLayout, seat: Seat | None, parts: Mapping[str, bytes]) -> None:
    """A segment with one sealed slot."""
    path.unlink(missing_ok=True)
    segment = Segment.create(path, layout, seat, tuple(parts))
    segment.open_slot(0, GENERATION, 1)
    for name, part in parts.items():
        segment.data(0, name, len(part))[:] = part
        segment.seal_part(0, name, len(part), checksum(memoryview(part)), 1)


def flip(path: Path, part: str) -> None:
    """Damage one byte behind everybody's back."""
    Segment.open(path).data(0, part)[5] ^= 0x10
