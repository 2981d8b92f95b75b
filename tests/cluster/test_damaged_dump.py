"""A whole run of which the sole copy of a role is damaged when it is dumped."""

from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState
from tests.cluster.counting_member import expected_sha256
from tests.cluster.runs import Run, deadpool
from tests.common.limits import setting_flags

pytestmark = [pytest.mark.slow, pytest.mark.full]
STOPPED = 6
OPTIONS = setting_flags(
    freeze_seconds=20,
    node_silence_seconds=30,
    rejoin_seconds=30,
    fence_seconds=3.2,
    takeover_seconds=2,
    spare_timeout_seconds=4,
)


def sealed(path: Path) -> dict[Generation, int]:
    """Generations of which a segment has all shard parts -> their slots."""
    if not path.exists():
        return {}
    segment = Segment.open(path, writable=False)
    return {
        segment.generation(slot): slot
        for slot in range(segment.slots)
        if segment.state(slot) is SlotState.SEALED
        and all(
            segment.entry(slot, name).state is PartState.SEALED
            for name in (*segment.layout.shard_parts, "extras@step")
        )
    }


def test_run_continues_from_the_generation_before_a_damaged_copy(tmp_path):
    first = tmp_path / "first"
    # All roles, so that none is a generation ahead and has overwritten the older generation.
    stops = [
        {
            "id": f"stop{role}",
            "point": "member.step",
            "match": {"role": role, "iteration": STOPPED},
            "signal": "STOP",
        }
        for role in range(2)
    ]
    with Run(first, "--iterations", "20", spares=0, faults=stops, options=OPTIONS) as run:
        run.wait_iteration(STOPPED - 1)
        memory = next(segment_root(run.run.read_run().run_id).glob("node0"))
        copy = memory / "copy-1.seg"

        def is_shipped() -> bool:
            held = sorted(generation.iteration for generation in sealed(copy))
            return held[-2:] == [STOPPED - 2, STOPPED - 1]

        run.wait_for("two generations of role 1 on node 0", is_shipped)
        assert deadpool("kill", str(first), "--node", "1").returncode == 0
        run.wait_event(Kind.WAITING_FOR_SPARE)
        struck = max(sealed(copy))
        segment = Segment.open(copy)
        segment.data(sealed(copy)[struck], segment.layout.shard_parts[0])[0] ^= 1
        del segment
        final = run.wait_end(75)
    older = struck.iteration - 1
    assert f"state dumped to {first / 'dump'}/1-{older}: continue with" in final["reason"]
    assert read_json(RunDirectory(first).latest)["valid"][0]["generation"] == [1, older]
    (dumped,) = run.events(Kind.DUMPED)
    assert dumped.data["generation"] == [1, older]
    again = ("--resume", str(first))
    with Run(tmp_path / "second", "--iterations", "12", spares=0, options=again) as run:
        final = run.wait_end()
        output = run.output.read_text()
    assert f"dump/1-{older} of iteration {older}" in output
    assert f"generation 1:{struck.iteration} lacks part" in output
    assert final["roles"]["1"]["sha256"] == expected_sha256(1, 12)
