"""Shard maps, and what is cut by them: each byte is what it would be had the part been made so."""

from collections.abc import Sequence
from zlib import crc32

from hypothesis import given, strategies as st

from deadpool_megatron.layout import shard_map
from deadpool_megatron.layout.shard_map import Run, ShardMap

Flat = tuple[bytes, tuple[Run, ...]]
STATES = {"": 4, "exp_avg": 2, "exp_avg_sq": 4}


def cut(wanted: Flat, held: Sequence[Flat]) -> bytes:
    """The bytes of a part as it is cut from old ones."""
    content, runs = wanted
    found = shard_map.spans(runs, {(i, "shard"): old for i, (_, old) in enumerate(held)})
    target = bytearray(b"?" * len(content))
    for (role, _), chosen in found.items():
        for start in range(0, len(held[role][0]), 100):  # as pieces come from the network
            piece = memoryview(held[role][0])[start : start + 100]
            shard_map.copy_into(memoryview(target), chosen, start, piece)
    every = [piece for chosen in found.values() for piece in chosen]
    for start, end in shard_map.gaps(every, len(content)):
        target[start:end] = bytes(end - start)
    return bytes(target)


def parts(sizes: Sequence[Sequence[int]], replicas: int) -> list[Flat]:
    """The parts of all replicas: buckets of parameters, padded, each with its share of each."""
    found = []
    for rank in range(replicas):
        content, runs, number = bytearray(), [], 0
        for bucket in sizes:
            padded = -(-(-(-sum(bucket) // 128) * 128) // replicas) * replicas
            first, last, at = rank * padded // replicas, (rank + 1) * padded // replicas, 0
            for size in bucket:
                start, end = max(first, at), min(last, at + size)
                key, number = f"weight{number}", number + 1
                if start < end:
                    places = {}
                    for state, width in STATES.items():
                        places[state] = len(content), width, width
                        for element in range(start - at, end - at):
                            text = f"{key}{state}{element}".encode()
                            content += crc32(text).to_bytes(4, "big")[:width]
                        content += bytes(-len(content) % 64)
                    places["step"] = len(content), 4, 0
                    content += (key[-1] * 4).encode() + bytes(60)
                    runs.append(Run(key, start - at, end - start, places))
                at += size
        found.append((bytes(content), tuple(runs)))
    return found


@given(
    st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_parts_of_another_size_are_those_that_it_would_have_made(sizes, before, after):
    old, new = parts(sizes, before), parts(sizes, after)
    found = [cut(wanted, old) for wanted in new]
    assert found == [content for content, _ in new]
    back = [(content, runs) for content, (_, runs) in zip(found, new, strict=True)]
    assert [cut(wanted, back) for wanted in old] == [content for content, _ in old]
    of_instances = [
        *old,
        *reversed(old),
    ]  # two hold each element: each byte comes once all the same
    assert [cut(wanted, of_instances) for wanted in new] == found
    read = ShardMap.from_dict(ShardMap.of({"shard": new[0][1]}).to_dict())
    assert read.runs["shard"] == new[0][1]
