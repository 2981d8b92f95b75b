"""The halves of masters: every value comes back, whatever its bits."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.layout.bases import Masters
from deadpool_megatron.vault.compaction import (
    Splitter,
    Words,
    join,
    join_in_place,
    low_places,
    most_exceptions,
    split,
)
from tests.vault.halving import rounded

# Ties that go up and down, infinities, both NaNs and signs, denormals, the end of an exponent, the
# largest number (its rounding is infinite).
SPECIAL = [
    *(0x3F81_8000, 0x3F82_8000, 0x3F82_7FFF, 0x3F82_8001, 0x0000_8000, 0x0001_8000),
    *(0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x7FC0_0000, 0x7FC0_8000, 0xFFFF_FFFF, 0x7FFF_8000),
    *(0x0000_0000, 0x8000_0000, 0x0000_0001, 0x807F_FFFF, 0x3F7F_FFFF, 0x3F7F_8000, 0x7F7F_FFFF),
    *(0x7F7F_8000, 0xFF7F_8000, 0x7F7E_8000),
]
words = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1).map(lambda high: high << 16 | 0x8000),
)
arrays = st.lists(words, max_size=60).map(lambda values: np.array(values, np.uint32))


def check(masters: Words) -> int:
    """That all come back; answers the number of exceptions."""
    low, places = split(masters)
    found = join(low, rounded(masters))
    wrong = np.flatnonzero(found != masters)
    assert np.isin(wrong, places).all()
    found[places] = masters[places]
    assert np.array_equal(found, masters)
    return places.size


@settings(deadline=None)
@given(arrays)
def test_every_value_comes_back(masters: Words) -> None:
    check(masters)


def test_of_the_ties_only_those_that_went_down_are_exceptions() -> None:
    ties = np.arange(0, 1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)
    finite = ties[(ties & np.uint32(0x7F80_0000)) != 0x7F80_0000]
    assert check(finite) == finite.size // 2


@settings(deadline=None)
@given(arrays)
def test_rounded_is_what_torch_casts_to(masters: Words) -> None:
    """But for NaNs, which every backend casts its own way, and which are exceptions."""
    values = masters[~np.isnan(masters.view(np.float32))]
    cast = torch.from_numpy(values.view(np.float32)).to(torch.bfloat16).view(torch.int16)
    assert np.array_equal(cast.numpy().view(np.uint16), rounded(values))


@pytest.mark.parametrize("first", [0x3F80, 0x7F7F, 0x8000, 0xFF7F])
def test_all_low_halves_of_some_high_ones(first: int) -> None:
    check(_patterns(first, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 1 << 16, 1 << 12))
def test_all_patterns(first: int) -> None:
    high = np.arange(first, first + (1 << 12))
    found = sum(check(_patterns(int(one), 64)) for one in high[::64])
    endless = (high & 0x7F80) == 0x7F80
    nans = int((0xFFFF + ((high[endless] & 0x7F) != 0)).sum())
    assert found == nans + int((high[~endless] % 2 == 0).sum())


def _patterns(first: int, count: int) -> Words:
    high = np.arange(first, first + count, dtype=np.uint32) << np.uint32(16)
    return (high[:, None] | np.arange(1 << 16, dtype=np.uint32)[None, :]).ravel()


layouts = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=5)


@settings(deadline=None)
@given(layouts, st.integers(0, 3), st.randoms(use_true_random=False), st.data())
def test_a_part_comes_back_in_place(
    layout: list[tuple[int, int]], tail: int, random: Random, data: st.DataObject
) -> None:
    """Whatever lies between the masters, and in whatever order their weights lie in the base."""
    starts = list(itertools.accumulate(4 * (gap + count) for gap, count in layout))
    runs, at = [], 0
    order = data.draw(st.permutations(range(len(layout))))
    bases = {}
    for number in order:
        bases[number] = at
        at += 2 * layout[number][1]
    for number, ((_, count), end) in enumerate(zip(layout, starts, strict=True)):
        runs.append((end - 4 * count, count, bases[number]))
    masters = Masters(tuple(runs))
    part = bytearray(random.randbytes(starts[-1] + tail))
    masters.check(len(part))
    for offset, count, _ in runs:
        for place in range(offset, offset + 4 * count, 4):
            if random.random() < 0.3:
                part[place : place + 4] = random.choice(SPECIAL).to_bytes(4, "little")
    base = bytearray(at)
    for offset, count, start in runs:
        values = np.frombuffer(part, np.uint32, count, offset)
        base[start : start + 2 * count] = rounded(values).tobytes()

    splitter = Splitter(memoryview(part), masters)
    low = b"".join(splitter.pieces())
    assert len(part) - masters.saved_bytes == len(low) + sum(
        end - begin for begin, end in masters.gaps(len(part))
    )
    exceptions = splitter.exceptions
    if exceptions is None:
        return
    arrived = bytearray(len(part))
    for begin, end in masters.gaps(len(part)):
        arrived[begin:end] = part[begin:end]
    for begin, end in low_places(masters):
        arrived[begin:end], low = low[: end - begin], low[end - begin :]
    join_in_place(memoryview(arrived), masters, memoryview(base), exceptions)
    assert arrived == part


def test_more_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is worked on in blocks, from its end where it is put together."""
    from deadpool_megatron.vault import compaction

    monkeypatch.setattr(compaction, "_BLOCK", 64)
    values = np.random.default_rng(5).integers(0, 2**32, 1000, dtype=np.uint32)
    values[::100] = 0x3F82_8000
    part, masters = bytearray(values.tobytes()), Masters(((0, 1000, 0),))
    splitter = Splitter(memoryview(part), masters)
    low = b"".join(splitter.pieces())
    arrived = bytearray(low + bytes(2000))
    exceptions = splitter.exceptions
    assert exceptions is not None
    assert set(range(0, 1000, 100)) <= set(exceptions.places.tolist())
    base = memoryview(bytearray(rounded(values).tobytes()))
    join_in_place(memoryview(arrived), masters, base, exceptions)
    assert arrived == part


def test_a_part_of_nans_has_too_many_exceptions() -> None:
    part = bytearray(np.full(1000, 0x7FC0_0001, np.uint32).tobytes())
    splitter = Splitter(memoryview(part), Masters(((0, 1000, 0),)))
    assert len(b"".join(splitter.pieces())) == 2000
    assert splitter.exceptions is None
    assert most_exceptions(1000) < 1000


@pytest.mark.parametrize(
    "runs",
    [((2, 1, 0),), ((0, 2, 0), (4, 1, 4)), ((0, 0, 0),), ((0, 5, 0),), ((0, 1, -2),), ((0, 1, 1),)],
)
def test_impossible_masters_are_refused(runs: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ValueError, match="masters"):
        Masters(runs).check(16)
