"""Computing a part that nobody holds whole from k coded blocks of other vaults, or of a dump.

Making a parity block (:mod:`.parity_maker`) is the same thing: :func:`combine` computes any block.

The blocks arrive at once, a thread and a connection for each, in pieces; each round of pieces is
decoded straight into the slot while the next one arrives, so the memory needed is that of 2k pieces
whatever the size of the part. Every block is held against its own checksum, a data block also
against what the parity was computed from, and the result against the checksum that its owner gave
it when it was whole. A block that fails is replaced by another, and the part begun again. That
snapshots can be rebuilt from parity over groups of nodes is REFT's (its AEC), the code zfec's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import xxhash

from deadpool_megatron import failpoints
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.parity_groups import MEMBERS, Members
from deadpool_megatron.layout.records import Decoding, EpochRecord, RoleLayout, Source
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import MALFORMED, RestoreUnavailable, VaultError
from deadpool_megatron.vault.schemes.parity_blocks import Arrival, Block, BlockError, Supplier
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.vault.shm.table import Place

if TYPE_CHECKING:
    from deadpool_megatron.vault.schemes.parity_code import Coder

log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.05
_CHANCES = 2  # bytes damaged on the way come whole the next time; damaged at home they do not

Target = Callable[[RoleLayout], AbstractContextManager[tuple[Segment, int]]]
Seal = Callable[[Segment, int, str, int, int], Place]
# Number of a block -> the place it is taken from; None for one that is all zeros.
Choice = Mapping[int, Source | None]


def load_code(parities: int) -> None:
    """Import what decoding needs while nothing is lost: later it would be a part of the recovery,
    of seconds where Python lies on a slow file system. Without the package decoding says so."""
    with contextlib.suppress(ModuleNotFoundError):
        from deadpool_megatron.vault.schemes.parity_code import Coder

        Coder(1, max(1, parities))


def combine(
    coder: Coder,
    wanted: int,
    numbers: Collection[int],
    blocks: Sequence[Arrival],
    view: memoryview,
    size: int,
    **about: object,
) -> int:
    """Compute block ``wanted`` into ``view`` from those of ``numbers``, of which the ones that are
    not among ``blocks`` are all zeros, in pieces of ``size`` bytes. Returns its checksum, when
    every block was what it should be; raises BlockError. ``about``: of the fault point.
    """
    digest = xxhash.xxh3_64()
    nothing = dict.fromkeys(numbers, memoryview(b""))
    for start in range(0, len(view), size):
        failpoints.hit("vault.decode", **about)
        piece = view[start : start + size]
        pieces = {block.number: block.take(len(piece)) for block in blocks}
        coder.decode({**nothing, **pieces}, wanted, piece)
        digest.update(piece)
        for block in blocks:
            block.give_back()
    for block in blocks:
        block.finish()
    return digest.intdigest()


class _WrongResultError(Exception):
    """All blocks were as their places vouch for them, but what came out was not the part."""


class _Candidates:
    """The blocks of a decoding that may still be used, and where they are."""

    def __init__(self, decoding: Decoding, silent: set[int]) -> None:
        self._count = len(decoding.group)
        self._silent = silent
        self._zeros = {number for number, places in decoding.blocks.items() if not places}
        self._left = {n: list(places) for n, places in decoding.blocks.items() if places}
        self._wrong: set[frozenset[tuple[int, Source | None]]] = set()
        self._untold: set[Source] = set()
        self._damaged: Counter[tuple[Source, bool]] = Counter()

    def choose(self) -> Choice | None:
        """k blocks, those of nodes that kept us waiting last; None when too few are left.

        There is always parity among them, as the data blocks without the wanted one are too few,
        and at least one of it says what it was computed from.
        """

        def is_silent(source: Source) -> bool:
            return source.node in self._silent

        left = {n: sorted(found, key=is_silent) for n, found in self._left.items() if found}
        order = sorted(left, key=lambda number: (is_silent(left[number][0]), number))
        for numbers in itertools.combinations((*sorted(self._zeros), *order), self._count):
            places = [[*left.get(number, (None,))] for number in sorted(numbers)]
            for chosen in itertools.product(*places):
                choice = dict(zip(sorted(numbers), chosen, strict=True))
                told = any(n >= self._count and s not in self._untold for n, s in choice.items())
                if told and frozenset(choice.items()) not in self._wrong:
                    return choice
        return None

    def drop_together(self, choice: Choice) -> None:
        """These do not give the part, whichever of them is to blame."""
        self._wrong.add(frozenset(choice.items()))

    def drop(self, error: BlockError, late: bool) -> bool:
        """Take a failure into account; True when its place is given up for what it was asked."""
        source = error.source
        if source is None:
            self._zeros.discard(error.number)
            return False
        about = (source, error.members)
        self._damaged[about] += error.damaged
        if not error.final and not error.damaged:
            self._silent.add(source.node)
        if not error.final and not late and self._damaged[about] < _CHANCES:
            return False
        if error.members:
            self._untold.add(source)
        else:
            self._left[error.number].remove(source)
        return True


class Decoder:
    """Decodes parts of one role for one epoch. One thread; :meth:`cut` from any.

    ``supplier``: where blocks come from. ``target``: the claimed slot for the role. ``seal``: vouch
    for a part in it; raises VaultError when the epoch was closed.
    """

    def __init__(
        self,
        state: VaultState,
        record: EpochRecord,
        role: int,
        supplier: Supplier,
        target: Target,
        seal: Seal,
    ) -> None:
        self._state = state
        self._record = record
        self._role = role
        self._generation = record.restore.generation
        self._supplier = supplier
        self._target = target
        self._seal = seal
        self._blocks: list[Block] = []
        self._members: dict[Source, Members] = {}
        self._silent: set[int] = set()

    def cut(self) -> None:
        """Break all connections: the epoch is over."""
        for block in list(self._blocks):
            block.cut()

    def obtain(
        self,
        layout: RoleLayout,
        name: str,
        decoding: Decoding,
        tried: list[tuple[int, int, str]],
        deadline: float,
    ) -> Place:
        """A verified place for the part. ``deadline``: monotonic; until then places that do not
        answer are asked again. ``tried``: gets an entry for each place that is given up.

        Raises RestoreUnavailable, or VaultError when there is no room or the epoch was closed.
        """
        # Not at the top: where nothing is coded a vault can do without numpy and its threads.
        from deadpool_megatron.vault.schemes.parity_code import Coder

        try:
            coder = Coder(len(decoding.group), decoding.parities)
        except ModuleNotFoundError as error:
            here = (self._state.node, self._role, f"cannot decode: {error}")
            raise RestoreUnavailable(name, (*tried, here)) from error
        candidates = _Candidates(decoding, self._silent)
        while (choice := candidates.choose()) is not None:
            if not self._state.is_open(self._record.epoch):
                raise VaultError(f"epoch {self._record.epoch} was closed during the restore")
            late = time.monotonic() > deadline
            try:
                return self._attempt(layout, name, decoding, coder, choice)
            except _WrongResultError:
                candidates.drop_together(choice)
                why = f"block of {sorted(choice)}, which give other bytes than the role had"
                tried += [(one.node, one.role, why) for one in choice.values() if one is not None]
                if late:
                    break
                continue
            except BlockError as error:
                log.info("role %d part %s: block %d: %s", self._role, name, error.number, error)
                if candidates.drop(error, late) and error.source is not None:
                    tried.append((error.source.node, error.source.role, str(error)))
            except ConnectionError as error:  # no slot is free yet
                if late:
                    raise VaultError(f"part {name} of role {self._role}: {error}") from error
            with self._state.changed:
                self._state.changed.wait_for(
                    lambda: not self._state.is_open(self._record.epoch), timeout=_PAUSE_SECONDS
                )
        raise RestoreUnavailable(name, tuple(tried))

    def _attempt(
        self, layout: RoleLayout, name: str, decoding: Decoding, coder: Coder, choice: Choice
    ) -> Place:
        started = time.monotonic()
        members = self._members_of(name, decoding, choice)
        nbytes, expected = members.contributions[self._role][name]
        blocks = self._blocks = self._needed(members, name, choice)
        try:
            with self._target(layout) as (segment, slot):
                if nbytes > segment.capacity(name):
                    number = max(choice)
                    why = f"names a part of {nbytes} bytes, which does not fit"
                    raise BlockError(number, choice[number], why, final=True)
                if not self._state.open_part(segment, slot, name, self._record.epoch):
                    raise VaultError(f"epoch {self._record.epoch} was closed during the restore")
                for block in blocks:
                    block.begin()
                view = segment.data(slot, name, nbytes)
                about = {"role": self._role, "iteration": self._generation.iteration, "part": name}
                wanted, size = decoding.group.index(self._role), self._state.settings.chunk_bytes
                found = combine(coder, wanted, choice, blocks, view, size, **about)
                if found != expected:
                    self._report_wrong(name, choice, expected, found)
                    raise _WrongResultError
                place = self._seal(segment, slot, name, nbytes, expected)
        finally:
            for block in blocks:
                block.cut()
            self._blocks = []
        self._report(name, choice, nbytes, time.monotonic() - started)
        return place

    def _needed(self, members: Members, name: str, choice: Choice) -> list[Block]:
        """The chosen blocks that have to be fetched; a role that contributed nothing has none."""
        blocks = []
        for number, source in choice.items():
            wanted = None
            if number < len(members.group):
                wanted = members.contributions.get(members.group[number], {}).get(name)
                if wanted is None:
                    continue
            if source is None:
                raise BlockError(number, None, "was contributed, but nobody is said to hold it")
            blocks.append(self._block(number, source, name, wanted))
        return blocks

    def _block(
        self, number: int, source: Source, part: str, wanted: tuple[int, int] | None
    ) -> Block:
        supply = self._supplier(source, part)
        return Block(self._state, supply, number, source, self._generation, part, wanted)

    def _members_of(self, name: str, decoding: Decoding, choice: Choice) -> Members:
        """Return what the parity was computed from, as one of the chosen parity blocks says."""
        failed = None
        for number, source in sorted(choice.items(), reverse=True):
            if number < len(decoding.group) or source is None:
                break
            try:
                return self._told_by(number, source, name, decoding)
            except BlockError as error:
                failed = failed or error
        assert failed is not None, "a parity block is always among them, and is never all zeros"
        raise failed

    def _told_by(self, number: int, source: Source, name: str, decoding: Decoding) -> Members:
        members = self._members.get(source)
        if members is None:
            block = self._block(number, source, MEMBERS, None)
            self._blocks = [block]
            try:
                members = Members.decode(block.small())
            except MALFORMED as error:
                why = f"{MEMBERS}: {error}"
                raise BlockError(number, source, why, members=True, final=True) from error
            finally:
                block.cut()
                self._blocks = []
        facts = (members.group, members.parities, len(members.group) + members.number)
        if facts != (decoding.group, decoding.parities, number):
            raise BlockError(number, source, f"is block {facts[2]} of {facts[0]}", final=True)
        if name not in members.contributions.get(self._role, ()):
            raise BlockError(number, source, "was computed without the part", final=True)
        self._members[source] = members
        return members

    def _report(self, name: str, choice: Choice, nbytes: int, seconds: float) -> None:
        state = self._state
        state.reports.counters["parts decoded"] += 1
        state.reports.counters["bytes decoded"] += nbytes
        state.reports.send(
            Event(
                Kind.DECODED,
                epoch=self._record.epoch,
                node=state.node,
                role=self._role,
                iteration=self._generation.iteration,
                data={
                    "part": name,
                    "bytes": nbytes,
                    "seconds": seconds,
                    "blocks": {str(n): one.to_list() for n, one in choice.items() if one},
                },
            )
        )

    def _report_wrong(self, name: str, choice: Choice, expected: int, found: int) -> None:
        where = "decoded from " + ", ".join(
            f"role {one.role} on node {one.node}" for one in choice.values() if one is not None
        )
        self._state.reports.counters["corruption"] += 1
        self._state.reports.corruption(self._role, self._generation, name, where, expected, found)
