"""The limit of open files follows the size of the run, as far as the host allows."""

from __future__ import annotations

import resource

import pytest

from deadpool_megatron.cluster.process.descriptors import (
    needed_by_agent,
    needed_by_coordinator,
    raise_limit,
)

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 1 << 20, 12544),
        (1024, INFINITY, 12544),
        (1024, 4096, 4096),
        (20000, 1 << 20, 20000),
        (INFINITY, INFINITY, INFINITY),
    ],
)
def test_the_soft_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int
) -> None:
    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.__setitem__(0, pair[0]))
    said = raise_limit(needed_by_coordinator(nodes=4096))
    assert limits == [wanted, hard]
    assert bool(said) == (wanted == 4096)
    if said:
        assert "12544 open files" in said
        assert "LimitNOFILE=12544" in said


def test_a_small_run_needs_less_than_the_usual_limit() -> None:
    assert needed_by_coordinator(nodes=64) < 1024
    assert needed_by_agent(nodes=8, nproc=8) < 1024
