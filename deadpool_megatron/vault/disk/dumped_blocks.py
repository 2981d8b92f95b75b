"""Coded blocks in the files of a dump, to make parts of that lie there as no bytes of their own."""

from __future__ import annotations

import logging
from pathlib import Path

from deadpool_megatron.layout.parity_groups import MEMBERS, combines, parity_numbers
from deadpool_megatron.layout.records import Decoding, Source, is_parity_role
from deadpool_megatron.vault.disk.dump import dump_files
from deadpool_megatron.vault.disk.sources import holds
from deadpool_megatron.vault.errors import SegmentError, is_shortage
from deadpool_megatron.vault.schemes.parity_decode import FileSupply, Supplier
from deadpool_megatron.vault.shm.segment import Segment, dump_name, parse_name

log = logging.getLogger(__name__)


def supplier(directory: Path) -> Supplier:
    """Blocks from the files in ``directory``; the node of a source is the one that wrote it."""
    return lambda source, part: FileSupply(directory / dump_name(source.role, source.node), part)


def dumped_decodings(directory: Path, role: int, part: str, iteration: int) -> list[Decoding]:
    """Return how a part can be computed from the files, the way with the most blocks first.

    The generation may have had another lineage in the run that wrote them. Reads descriptions and
    headers only: whether the bytes are intact turns out when they are used.
    """
    found: dict[tuple[tuple[int, ...], int, tuple[str, ...]], dict[int, tuple[Source, ...]]] = {}
    for dumped in _parity_files(directory, role):
        if holds(dumped, part, iteration) and holds(dumped, MEMBERS, iteration):
            layout = dumped.layout
            files = [one for other in layout.peers for one in dump_files(directory, other)]
            if not combines(layout, {one.layout.role: one.layout for one in files}):
                continue
            number, parities = parity_numbers(layout)
            key = layout.peers, parities, tuple(one.name for one in layout.parts)
            places = found.setdefault(key, {})
            block = len(layout.peers) + number
            places[block] = (*places.get(block, ()), _source(dumped))
    decodings = []
    for (group, parities, _), places in found.items():
        for number, other in enumerate(group):
            files = list(dump_files(directory, other)) if other != role else []
            held = tuple(_source(one) for one in files if holds(one, part, iteration))
            if held or any(part not in one.layout.shard_parts for one in files):
                places[number] = held
        if len(places) >= len(group):
            decodings.append(Decoding(group, parities, dict(sorted(places.items()))))
    return sorted(decodings, key=lambda one: (-len(one.blocks), one.group))


def _parity_files(directory: Path, role: int) -> list[Segment]:
    """Readable files of parity blocks of any group of ``role``."""
    found = []
    for path in sorted(directory.glob("dump-*-*.seg")):
        try:
            if is_parity_role(parse_name(path.name)[0]):
                dumped = Segment.open(path, writable=False)
                if role in dumped.layout.peers:
                    found.append(dumped)
        except (SegmentError, OSError) as error:
            if is_shortage(error):
                raise
            log.warning("dump: %s", error)
    return found


def _source(dumped: Segment) -> Source:
    return Source(int(dumped.path.stem.rsplit("-", 1)[1]), dumped.layout.role)
