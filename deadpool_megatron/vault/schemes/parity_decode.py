"""Decodes a part that no node holds whole, from k coded blocks of other vaults or of a dump.

The blocks arrive in parallel, each by its own thread and connection, and every piece is added to
the slot as it arrives (:mod:`.parity_code`), so k pieces of memory are enough for a part of any
size. Every block is compared with the checksum at its source, a data block also with the
contribution from which the parity was computed, and the result with the checksum of its owner. If a
block fails, another block replaces it, and the part is restarted. Rebuilding snapshots from parity
over groups of nodes follows REFT (its AEC); the code is that of zfec.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from deadpool_megatron import failpoints
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.parity_groups import INPUTS, BlockInputs
from deadpool_megatron.layout.records import (
    Decoding,
    EpochRecord,
    Generation,
    Recipe,
    RoleLayout,
    Source,
)
from deadpool_megatron.vault.errors import MALFORMED, RestoreUnavailable, VaultError
from deadpool_megatron.vault.shm.segment import PartState, Segment, checksum, dump_name
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.vault.transport import UNREACHABLE, Channel, ask_part, begin_thread

if TYPE_CHECKING:
    from deadpool_megatron.vault.schemes.parity_code import Coder, Combination

log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.05
# The tries for a damaged block: bytes damaged on the way arrive intact the next time, unlike bytes
# damaged at the source.
_MAX_TRIES = 2
_MAX_SMALL_BYTES = 16 << 20

# Bytes and checksum of a part, and a function that fills a piece from a start byte on; the pieces
# are read in order.
Reader = tuple[int, int, Callable[[int, memoryview], None]]
# Claims a slot for a part of a role, for the time of a ``with`` statement.
Claim = Callable[[RoleLayout], AbstractContextManager[tuple[Segment, int]]]
# Number of a block -> its source; None for a block that is all zeros.
Choice = Mapping[int, Source | None]


def load_code(parities: int) -> None:
    """Import the modules for decoding while nothing is lost: in a recovery that could cost seconds
    where Python lies on a slow file system. A missing package is reported by the decoding."""
    with contextlib.suppress(ModuleNotFoundError):
        from deadpool_megatron.vault.schemes.parity_code import Coder

        Coder(1, max(1, parities))


@dataclass(eq=False)
class BlockError(Exception):
    """A block that did not arrive. ``final``: it will never arrive from this source; ``damaged``:
    its bytes are wrong; ``inputs``: the missing part is the list of its contributions."""

    number: int
    source: Source | None
    reason: str
    final: bool = False
    damaged: bool = False
    inputs: bool = False

    def __str__(self) -> str:
        return self.reason


class BlockSource(ABC):
    """A block at a source. ``wanted``: its expected bytes and checksum; None for parity, whose
    checksum only the source knows. For one thread, except for :meth:`cut`. Public methods raise
    BlockError. The others raise VaultError when the source cannot give the block, OSError or
    WireError when the source was not reached.
    """

    where: str  # for people

    def __init__(
        self,
        store: SlotStore,
        generation: Generation,
        number: int,
        source: Source,
        part: str,
        wanted: tuple[int, int] | None = None,
    ) -> None:
        self.name = f"block-{source.role}-from-{source.node}"
        self._store = store
        self._generation = generation
        self._number = number
        self._source = source
        self._part = part
        self._wanted = wanted
        self.moved_at = time.monotonic()  # when the last bytes arrived

    def add_to(self, combination: Combination) -> None:
        """Fetch the block piece by piece, until it is whole or no longer needed."""
        with self._reader() as (nbytes, expected, read):
            if self._wanted not in (None, (nbytes, expected)):
                raise VaultError("holds other bytes than the parity was computed from")
            size = self._store.settings.chunk_bytes
            buffer, digest = memoryview(bytearray(min(nbytes, size))), xxhash.xxh3_64()
            for start in range(0, nbytes, size):
                about = {"role": self._source.role, "part": self._part}
                failpoints.hit("vault.decode", iteration=self._generation.iteration, **about)
                piece = buffer[: nbytes - start]
                read(start, piece)
                self.moved_at = time.monotonic()
                digest.update(piece)
                if not combination.add(self._number, start, piece):
                    raise ConnectionError("is no longer needed")
            self._check(digest.intdigest(), expected)

    def read_small(self) -> bytes:
        """Return the bytes of a small part."""
        with self._reader() as (nbytes, expected, read):
            if not 0 <= nbytes <= _MAX_SMALL_BYTES:
                raise VaultError(f"{self._part} of {nbytes} bytes")
            content = bytearray(nbytes)
            read(0, memoryview(content))
            self._check(xxhash.xxh3_64_intdigest(content), expected)
        return bytes(content)

    def error(self, reason: str, *, final: bool = False, damaged: bool = False) -> BlockError:
        """Return an error of this block."""
        is_inputs = self._part == INPUTS
        return BlockError(self._number, self._source, reason, final, damaged, is_inputs)

    def cut(self) -> None:  # noqa: B027  a file needs no cut
        """Make the other methods fail soon; from any thread."""

    @abstractmethod
    def _request(self) -> AbstractContextManager[Reader]:
        """Request the part and return its reader; free the resources at the end."""

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Reader]:
        try:
            with self._request() as reader:
                yield reader
        except VaultError as error:
            raise self.error(str(error), final=True) from error
        except UNREACHABLE as error:
            raise self.error(f"{type(error).__name__}: {error}") from error

    def _check(self, found: int, expected: int) -> None:
        if found != expected:
            reports = self._store.reports
            about = (self._source.role, self._generation, self._part, self.where)
            reports.corruption(*about, expected, found)
            raise self.error("checksum does not match", damaged=True)


class VaultBlock(BlockSource):
    """A block in the memory of a vault, fetched by a connection of its own."""

    _channel: Channel | None = None
    _over = False

    def __init__(self, epoch: int, *about: Any) -> None:
        super().__init__(*about)
        self.where = f"from node {self._source.node}"
        self._epoch = epoch

    @contextlib.contextmanager
    def _request(self) -> Iterator[Reader]:
        with contextlib.closing(self._store.gate.dial(self._source.node)) as channel:
            self._channel = channel
            if self._over or not self._store.gate.is_open(self._epoch):
                raise ConnectionError("the epoch was closed while connecting")
            found = ask_part(channel, self._epoch, self._source, self._generation, self._part)
            yield *found, lambda _, target: channel.receive_bulk(target)

    def cut(self) -> None:
        self._over = True
        channel = self._channel
        if channel is not None:
            channel.shutdown()


class DumpedBlock(BlockSource):
    """A block in a file of a dump; the node of its source is the node that wrote the file."""

    def __init__(self, directory: Path, *about: Any) -> None:
        super().__init__(*about)
        self._path = directory / dump_name(self._source.role, self._source.node)
        self.where = str(self._path)

    @contextlib.contextmanager
    def _request(self) -> Iterator[Reader]:
        dumped = Segment.open(self._path, writable=False)
        entry = dumped.entry(0, self._part)
        if entry.state is not PartState.SEALED:
            raise VaultError("not in the file")
        yield entry.nbytes, entry.checksum, partial(dumped.read_into, 0, self._part)


class _WrongResultError(Exception):
    """All blocks match their checksums, but the decoded part does not. ``args``: its expected and
    its actual checksum."""


class _Candidates:
    """The blocks of a decoding that may still be used, with their sources."""

    def __init__(self, decoding: Decoding, silent: set[int]) -> None:
        self._count = len(decoding.group)
        self._silent = silent
        self._zeros = {number for number, places in decoding.blocks.items() if not places}
        self._sources = {n: list(places) for n, places in decoding.blocks.items() if places}
        self._wrong_choices: set[frozenset[tuple[int, Source | None]]] = set()
        self._without_inputs: set[Source] = set()
        self._damaged: Counter[tuple[Source, bool]] = Counter()

    def choose(self) -> Choice | None:
        """Return k blocks, those of silent nodes last; None when too few are left.

        The choice includes parity, as the data blocks without the wanted block are too few, and at
        least one parity block in it has a list of contributions.
        """

        def is_silent(source: Source) -> bool:
            return source.node in self._silent

        left = {n: sorted(places, key=is_silent) for n, places in self._sources.items() if places}
        order = sorted(left, key=lambda number: (is_silent(left[number][0]), number))
        for numbers in itertools.combinations((*sorted(self._zeros), *order), self._count):
            places = [[*left.get(number, (None,))] for number in sorted(numbers)]
            for chosen in itertools.product(*places):
                choice = dict(zip(sorted(numbers), chosen, strict=True))
                has_inputs = any(
                    n >= self._count and s not in self._without_inputs for n, s in choice.items()
                )
                if has_inputs and frozenset(choice.items()) not in self._wrong_choices:
                    return choice
        return None

    def drop_together(self, choice: Choice) -> None:
        """Exclude a choice of blocks that gave a wrong part together."""
        self._wrong_choices.add(frozenset(choice.items()))

    def drop(self, error: BlockError, late: bool) -> bool:
        """Note a failure. Return whether its source is excluded for this part from now on."""
        source = error.source
        if source is None:
            self._zeros.discard(error.number)
            return False
        about = (source, error.inputs)
        self._damaged[about] += error.damaged
        if not error.final and not error.damaged:
            self._silent.add(source.node)
        if not error.final and not late and self._damaged[about] < _MAX_TRIES:
            return False
        if error.inputs:
            self._without_inputs.add(source)
        else:
            self._sources[error.number].remove(source)
        return True


class Decoder:
    """Decodes, for an epoch, shard parts of a role of which no node holds a whole copy. For one
    thread; any thread may call :meth:`cut`.

    ``target`` claims the slot for the role's parts.
    """

    def __init__(self, store: SlotStore, record: EpochRecord, role: int, target: Claim) -> None:
        self._store = store
        self._gate = store.gate
        self._record = record
        self._role = role
        self._generation = record.restore.generation
        self._target = target
        self._blocks: list[BlockSource] = []
        self._inputs: dict[Source, BlockInputs] = {}
        self._silent: set[int] = set()

    def cut(self) -> None:
        """Break all connections: the epoch is over."""
        for block in list(self._blocks):
            block.cut()

    def obtain(
        self,
        layout: RoleLayout,
        name: str,
        recipe: Recipe,
        tried: list[tuple[int, int, str]],
        deadline: float,
    ) -> Place | None:
        """Decode a part of the restored generation; None if the recipe has no blocks of it.

        ``tried`` gets an entry for each source that failed. ``deadline``: monotonic; silent sources
        are retried until then. Raises RestoreUnavailable, or VaultError when there is no memory or
        the epoch was closed.
        """
        decoding = recipe.decodings.get(name)
        if decoding is None:
            return None
        # Not at the top: where nothing is coded a vault can do without numpy and its threads.
        from deadpool_megatron.vault.schemes.parity_code import Coder

        try:
            coder = Coder(len(decoding.group), decoding.parities)
        except ModuleNotFoundError as error:
            here = (self._gate.node, self._role, f"cannot decode: {error}")
            raise RestoreUnavailable(name, (*tried, here)) from error
        candidates = _Candidates(decoding, self._silent)
        while (choice := candidates.choose()) is not None:
            self._gate.require_open(self._record.epoch)
            late = time.monotonic() > deadline
            try:
                return self._attempt(layout, name, decoding, coder, choice)
            except _WrongResultError as error:
                candidates.drop_together(choice)
                store, used = (
                    self._store,
                    [source for source in choice.values() if source is not None],
                )
                where = ", ".join(f"role {source.role} on node {source.node}" for source in used)
                about = (self._role, self._generation, name, f"decoded from {where}")
                store.reports.corruption(*about, *error.args)
                reason = f"block of {sorted(choice)}, which give other bytes than the role had"
                tried += [(source.node, source.role, reason) for source in used]
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
            self._gate.pause(self._record.epoch, _PAUSE_SECONDS)
        raise RestoreUnavailable(name, tuple(tried))

    def _attempt(
        self, layout: RoleLayout, name: str, decoding: Decoding, coder: Coder, choice: Choice
    ) -> Place:
        started, store, epoch = time.monotonic(), self._store, self._record.epoch
        inputs = self._inputs_of(name, decoding, choice)
        nbytes, expected = inputs.contributions[self._role][name]
        blocks = self._blocks = self._needed(inputs, name, choice)
        try:
            with self._target(layout) as (segment, slot):
                if nbytes > segment.capacity(name):
                    number = max(choice)
                    reason = f"names a part of {nbytes} bytes, which does not fit"
                    raise BlockError(number, choice[number], reason, final=True)
                store.open_part(segment, slot, name, epoch)
                view, wanted = segment.data(slot, name, nbytes), decoding.group.index(self._role)
                self._add_up(blocks, coder.begin(choice, wanted, view))
                found = checksum(view)
                if found != expected:
                    raise _WrongResultError(expected, found)
                place = store.seal_copy(segment, slot, name, nbytes, expected, epoch)
        finally:
            for block in blocks:
                block.cut()
            self._blocks = []
        self._report(name, choice, nbytes, time.monotonic() - started)
        return place

    def _add_up(self, blocks: list[BlockSource], combination: Combination) -> None:
        """Add all blocks, each by its own thread. Raises the first BlockError."""
        results: queue.SimpleQueue[tuple[BlockSource, BlockError | None]] = queue.SimpleQueue()
        limit = 3 * self._store.settings.connect_seconds  # for connect, handshake and answer

        def fetch(block: BlockSource) -> None:
            try:
                block.add_to(combination)
                results.put((block, None))
            except BlockError as error:
                results.put((block, error))

        try:
            for block in blocks:
                begin_thread(block.name, partial(fetch, block))
            left = {*blocks}
            while left:
                try:
                    block, error = results.get(timeout=limit)
                except queue.Empty:
                    block = min(left, key=lambda block: block.moved_at)
                    if time.monotonic() - block.moved_at > limit:
                        raise block.error(f"no bytes for {limit:g} s") from None
                    continue
                if error is not None:
                    raise error
                left.discard(block)
        finally:
            combination.give_up()  # threads that still wait for bytes must not touch the slot

    def _needed(self, inputs: BlockInputs, name: str, choice: Choice) -> list[BlockSource]:
        """Return the chosen blocks that have to be fetched; the block of a role without a
        contribution is all zeros and is left out."""
        blocks = []
        for number, source in choice.items():
            wanted = None
            if number < len(inputs.group):
                wanted = inputs.contributions.get(inputs.group[number], {}).get(name)
                if wanted is None:
                    continue
            if source is None:
                raise BlockError(number, None, "was contributed, but no node is known to hold it")
            blocks.append(self._block(number, source, name, wanted))
        return blocks

    def _block(
        self, number: int, source: Source, part: str, wanted: tuple[int, int] | None
    ) -> BlockSource:
        about = (self._store, self._generation, number, source, part, wanted)
        if self._record.restore.kind == "dump":
            return DumpedBlock(Path(self._record.restore.path), *about)
        return VaultBlock(self._record.epoch, *about)

    def _inputs_of(self, name: str, decoding: Decoding, choice: Choice) -> BlockInputs:
        """Return the list of contributions to the parity, from any of the chosen parity blocks."""
        failed = None
        for number, source in sorted(choice.items(), reverse=True):
            if number < len(decoding.group) or source is None:
                break
            try:
                return self._inputs_from(number, source, name, decoding)
            except BlockError as error:
                failed = failed or error
        assert failed is not None, "a parity block is always among them, and is never all zeros"
        raise failed

    def _inputs_from(
        self, number: int, source: Source, name: str, decoding: Decoding
    ) -> BlockInputs:
        inputs = self._inputs.get(source)
        if inputs is None:
            block = self._block(number, source, INPUTS, None)
            self._blocks = [block]
            try:
                inputs = BlockInputs.decode(block.read_small())
            except MALFORMED as error:
                reason = f"{INPUTS}: {error}"
                raise BlockError(number, source, reason, inputs=True, final=True) from error
            finally:
                block.cut()
                self._blocks = []
        facts = (inputs.group, inputs.parities, len(inputs.group) + inputs.number)
        if facts != (decoding.group, decoding.parities, number):
            raise BlockError(number, source, f"is block {facts[2]} of {facts[0]}", final=True)
        if name not in inputs.contributions.get(self._role, ()):
            raise BlockError(number, source, "was computed without the part", final=True)
        self._inputs[source] = inputs
        return inputs

    def _report(self, name: str, choice: Choice, nbytes: int, seconds: float) -> None:
        reports = self._store.reports
        reports.counters["parts decoded"] += 1
        reports.counters["bytes decoded"] += nbytes
        blocks = {str(n): source.to_list() for n, source in choice.items() if source}
        facts = {"part": name, "bytes": nbytes, "seconds": seconds, "blocks": blocks}
        reports.emit(Kind.DECODED, self._role, self._generation, facts)
