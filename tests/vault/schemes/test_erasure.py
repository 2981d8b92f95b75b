"""The code itself: any k of k+m blocks give back every other one, whatever order they came in."""

import random

import pytest
import zfec
from hypothesis import given, settings, strategies as st

from deadpool_megatron.vault.schemes.parity_code import Coder


def combined(
    coder: Coder, blocks: dict[int, bytes], wanted: int, length: int, chance: random.Random
) -> bytes:
    """A block from pieces of others, all in turn or one far ahead, over whatever lay there."""
    out = bytearray(chance.randbytes(length))
    combination = coder.begin(blocks, wanted, memoryview(out))
    left = dict.fromkeys(sorted(blocks)[: coder.data], 0)
    while left:
        number = chance.choice([*left])
        start, count = left[number], chance.randint(1, 33)
        assert combination.add(number, start, memoryview(blocks[number])[start : start + count])
        left[number] = start + count
        if start + count >= len(blocks[number]):
            del left[number]
    return bytes(out)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 80), st.integers(0, 99))
def test_any_k_blocks_give_back_every_other(data, parities, length, seed):
    chance = random.Random(seed)
    coder = Coder(data, parities)
    blocks = [chance.randbytes(chance.randint(0, length)) for _ in range(data - 1)]
    blocks.append(chance.randbytes(length))
    numbered = dict(enumerate(blocks))
    made = [combined(coder, numbered, data + n, length, chance) for n in range(parities)]
    padded = [block.ljust(length, b"\0") for block in blocks]
    everything = [*blocks, *made]
    lost = {*chance.sample(range(data + parities), chance.randint(1, parities))}
    kept = {n: block for n, block in enumerate(everything) if n not in lost}
    for wanted in lost:
        assert combined(coder, kept, wanted, length, chance) == [*padded, *made][wanted]
    if parities > 1:
        numbers = list(range(data, data + parities))
        assert zfec.Encoder(data, data + parities).encode(padded, numbers) == made
    else:
        total = bytearray(length)
        for block in padded:
            total = bytearray(a ^ b for a, b in zip(total, block, strict=True))
        assert total == made[0]


def test_coder_refuses_impossible_numbers():
    coder = Coder(3, 2)
    with pytest.raises(ValueError, match="3 blocks are needed"):
        coder.begin({0, 3}, 1, memoryview(bytearray(2)))
    with pytest.raises(ValueError, match="no code for 255 data and 2 parity"):
        Coder(255, 2)


def test_combination_does_not_write_after_its_end():
    out = bytearray(b"abcd")
    combination = Coder(2, 1).begin({0, 1}, 2, memoryview(out))
    combination.give_up()
    assert not combination.add(0, 0, memoryview(b"1234"))
    assert out == b"abcd"
