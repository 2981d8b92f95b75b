"""``deadpool verify``: finds damaged bytes, calls nothing bad that is only being written."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli import main
from deadpool_megatron.cli.storage.verify import verify_checkpoint
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.shm import slot_check as verifying
from deadpool_megatron.vault.shm.segment import Segment, copy_name
from deadpool_megatron.vault.shm.slot_check import Verdict, verify_segment
from tests.cli.storage.damage import checkpoint, flip
from tests.common import lives, statements
from tests.vault.harness import Member, cluster, make_layout
from tests.vault.protected import begin

G = Generation


Findings = Callable[[Path, int], list[dict[str, Any]]]


@pytest.fixture
def findings(carry_out):
    """Return what is found in a directory; the command ends with this status."""

    def verify(directory: Path, status: int) -> list[dict[str, Any]]:
        ended, out, _ = carry_out("verify", "--json", directory)
        answer = json.loads(out)
        assert (ended, answer["ok"]) == (status, status == 0)
        return list(answer["findings"])

    return verify


def test_verify_finds_a_damaged_byte_of_a_live_node(tmp_path, capsys, findings):
    with cluster(tmp_path, 2) as running:
        begin(running, {role: make_layout(role, peers=(0, 1)) for role in range(2)}, last=2)
        good = findings(running.shm, 0)
        assert {f["verdict"] for f in good} == {"good"}
        assert {tuple(f["generation"]) for f in good} == {(1, 1), (1, 2)}
        assert {f["role"] for f in good} == {0, 1}

        path = running.nodes[0].directory / copy_name(1)
        segment = Segment.open(path, writable=False)
        slot = next(s for s in range(2) if segment.generation(s) == G(1, 2))
        flip(path, segment.offset(slot, "shard") + 4711)
        (bad,) = [f for f in findings(running.shm, 1) if f["verdict"] == "bad"]
        assert (bad["path"], bad["what"]) == (str(path), "shard")
        assert main(["verify", str(running.nodes[0].directory)]) == 1
        output = capsys.readouterr().out
        assert f"BAD {path}: shard of 1:2: checksum" in output
        dumped = running.nodes[0].dump(tmp_path / "dump", G(1, 1), "step")["files"]
        assert {f["verdict"] for f in findings(tmp_path / "dump", 0)} == {"good"}
        flip(Path(dumped[0]), Path(dumped[0]).stat().st_size // 2)
        assert findings(tmp_path / "dump", 1)


def test_verify_does_not_disturb_a_live_run(tmp_path):
    with cluster(tmp_path, 2) as running:
        running.open(running.record(1))
        layout = make_layout(0, nbytes=1 << 20, peers=(0, 1))
        member = Member(running.nodes[0], layout)
        member.client.register(layout, 1)
        over = threading.Event()

        def train() -> None:
            for k in range(40):
                member.step(G(1, k))
            over.set()

        training = threading.Thread(target=train)
        training.start()
        seen = []
        while not over.is_set():
            for node in running.nodes:
                for path in verifying.segment_files(node.directory):
                    seen += [f.verdict for f in verify_segment(path, lambda _: None)]
        training.join()
        assert Verdict.GOOD in seen
        assert Verdict.BAD not in seen


def test_verify_calls_an_overwritten_slot_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(verifying, "_PIECE_BYTES", 4096)
    layout = make_layout(3)
    segment = Segment.create(tmp_path / copy_name(3), layout, None, ["shard"])
    segment.open_slot(0, G(1, 1), 1)
    view = segment.data(0, "shard")
    segment.seal_part(0, "shard", len(view), verifying.xxhash.xxh3_64_intdigest(view), 1)
    hashed: list[int] = []

    def overwrite(nbytes: int) -> None:
        hashed.append(nbytes)
        if len(hashed) == 3:
            segment.open_slot(0, G(1, 3), 1)
            view[:] = b"\x07" * len(view)

    (finding,) = verify_segment(segment.path, overwrite)
    assert (finding.verdict, finding.reason) == (Verdict.BUSY, "was overwritten meanwhile")
    segment.mark_writing(0)
    (finding,) = verify_segment(segment.path, lambda _: None)
    assert finding.verdict is Verdict.BUSY


@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_checkpoint_that_a_run_prunes_meanwhile_is_not_bad(tmp_path, moment):
    data = checkpoint(tmp_path / "iter_1")

    def prune(_: int) -> None:
        if data.parent.exists():
            data.parent.rename(tmp_path / ".export-0123abcd-iter_1")

    if moment == "before":
        prune(0)
    found = list(verify_checkpoint(data.parent, prune))
    assert Verdict.BAD not in {one.verdict for one in found}
    assert len(found) == (0 if moment == "before" else 2)


def test_damage_is_found_and_named_as_before(tmp_path):
    lives.compare(Path(__file__).parent / "calls" / "verify.txt", statements.live, tmp_path)
