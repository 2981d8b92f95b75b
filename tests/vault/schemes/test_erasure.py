"""The code itself: any k of k+m blocks give back every other one, whatever order they came in."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest
import zfec
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.vault.schemes import parity_code as erasure
from deadpool_megatron.vault.schemes.parity_code import Coder


def encode(coder: Coder, blocks: list[bytes], chunk: int, chance: random.Random) -> list[bytearray]:
    """All parity blocks, from pieces of all data blocks, over whatever lay there before."""
    longest = max(map(len, blocks))
    made = [bytearray(chance.randbytes(longest)) for _ in range(coder.parities)]
    for number, block in enumerate(made, coder.data):
        for start in range(0, longest, chunk):
            pieces = {i: memoryview(one)[start : start + chunk] for i, one in enumerate(blocks)}
            coder.decode(pieces, number, memoryview(block)[start : start + chunk])
    return made


@settings(max_examples=60)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 80), st.integers(1, 33), st.integers(0, 99)
)
def test_any_k_blocks_give_back_every_other(
    data: int, parities: int, length: int, chunk: int, seed: int
) -> None:
    chance = random.Random(seed)
    coder = Coder(data, parities)
    blocks = [chance.randbytes(chance.randint(0, length)) for _ in range(data - 1)]
    blocks.append(chance.randbytes(length))
    made = encode(coder, blocks, chunk, chance)
    padded = [block.ljust(length, b"\0") for block in blocks]
    everything = [*blocks, *map(bytes, made)]
    lost = set(chance.sample(range(data + parities), chance.randint(1, parities)))
    kept = {n: memoryview(block) for n, block in enumerate(everything) if n not in lost}
    for wanted in lost:
        out = bytearray(chance.randbytes(length))
        for start in range(0, length, chunk):
            part = {n: view[start : start + chunk] for n, view in kept.items()}
            coder.decode(part, wanted, memoryview(out)[start : start + chunk])
        assert bytes(out) == [*padded, *map(bytes, made)][wanted]
    if parities > 1:
        numbers = list(range(data, data + parities))
        assert zfec.Encoder(data, data + parities).encode(padded, numbers) == made
    else:
        total = bytearray(length)
        for block in padded:
            total = bytearray(a ^ b for a, b in zip(total, block, strict=True))
        assert total == made[0]


def test_what_cannot_be_computed_is_refused() -> None:
    coder = Coder(3, 2)
    two = {0: memoryview(b"ab"), 3: memoryview(b"cd")}
    with pytest.raises(ValueError, match="3 blocks are needed"):
        coder.decode(two, 1, memoryview(bytearray(2)))
    with pytest.raises(ValueError, match="no code for 255 data and 2 parity"):
        Coder(255, 2)


def test_the_tables_of_bytes_and_of_pairs_agree() -> None:
    """Lengths that are no whole number of pairs, and more than what is looked up at once."""
    table = bytes(random.Random(5).sample(range(256), 256))
    for length in (0, 1, 2, 3, 1001, (1 << 17) + 1):
        chunk = random.Random(length).randbytes(length)
        for piece in (chunk, bytearray(chunk), memoryview(bytearray(chunk))):
            assert bytes(erasure._translated(table, piece)) == chunk.translate(table)


def test_others_work_while_a_block_is_computed() -> None:
    """The interpreter lock is not kept for as long as megabytes take."""
    coder, data = Coder(2, 2), memoryview(random.Random(6).randbytes(16 << 20))
    out = memoryview(bytearray(len(data)))
    coder.decode({0: data[:0], 1: data[:16]}, 3, out[:16])
    turns, over = 0, threading.Event()

    def compute() -> None:
        coder.decode({0: data[:0], 1: data}, 3, out)
        over.set()

    thread = threading.Thread(target=compute)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody is made to let go: only who does so by itself
    try:
        thread.start()
        while not over.wait(0):
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert turns > 50
