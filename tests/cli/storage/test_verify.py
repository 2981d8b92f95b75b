"""``deadpool verify``: finds damaged bytes, calls nothing bad that is only being written."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from deadpool_megatron.cli import main
from deadpool_megatron.cli.storage.verifying import verify_checkpoint
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.persist import frozen_file
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.shm import slot_check as verifying
from deadpool_megatron.vault.shm.segment import Segment, copy_name
from deadpool_megatron.vault.shm.slot_check import Verdict, verify_segment
from tests.cli.told import CarryOut
from tests.vault.harness import Member, cluster, make_layout
from tests.vault.protected import begin

G = Generation


Findings = Callable[[Path, int], list[dict[str, Any]]]


@pytest.fixture
def findings(carry_out: CarryOut) -> Findings:
    """Return what is found in a directory; the command ends with this status."""

    def verify(directory: Path, status: int) -> list[dict[str, Any]]:
        ended, out, _ = carry_out("verify", "--json", directory)
        answer = json.loads(out)
        assert (ended, answer["ok"]) == (status, status == 0)
        return list(answer["findings"])

    return verify


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))


def test_a_live_node_and_one_damaged_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], findings: Findings
) -> None:
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
        dumped = running.nodes[0].dump(tmp_path / "dump", G(1, 1), "step")
        assert {f["verdict"] for f in findings(tmp_path / "dump", 0)} == {"good"}
        flip(Path(dumped[0]), Path(dumped[0]).stat().st_size // 2)
        assert findings(tmp_path / "dump", 1)


def test_a_run_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
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


def test_a_slot_that_is_overwritten_while_it_is_hashed_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def checkpoint(directory: Path) -> Path:
    state = {"weight": torch.arange(5000.0), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    torch.save({"iteration": 7}, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return next(directory.glob("*.distcp"))


def test_a_checkpoint_with_every_kind_of_damage(tmp_path: Path, findings: Findings) -> None:
    data = checkpoint(tmp_path / "iter_1")
    whole = data.read_bytes()
    assert {f["verdict"] for f in findings(tmp_path / "iter_1", 0)} == {"good"}
    assert findings(tmp_path, 0), "a folder of checkpoints"

    flip(data, len(whole) // 2)
    (bad,) = [f for f in findings(tmp_path / "iter_1", 1) if f["verdict"] == "bad"]
    assert bad["path"] == str(data)
    data.write_bytes(whole[:-100])
    assert "an entry lies at" in str(findings(tmp_path / "iter_1", 1))
    data.unlink()
    assert "No such file" in str(findings(tmp_path / "iter_1", 1))
    (tmp_path / "iter_1" / ".metadata").write_bytes(b"\x80\x04K")
    assert findings(tmp_path / "iter_1", 1)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("__0_0.distcp", bytes(1 << 20), "is empty"),
        ("common.pt", None, "No such file"),
        ("common.pt", b"", "is empty"),
        ("common.pt", b"anything else", "is no archive of torch"),
        ("metadata.json", None, "No such file"),
        ("metadata.json", b"", "cannot be read"),
        ("metadata.json", b"{}", "does not say how it is to be read"),
    ],
)
def test_what_megatron_needs_beside_the_index(
    tmp_path: Path, findings: Findings, name: str, content: bytes | None, reason: str
) -> None:
    """As a power failure leaves files that nobody had synced: empty, or not there."""
    checkpoint(tmp_path / "iter_1")
    path = tmp_path / "iter_1" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    (bad,) = [f for f in findings(tmp_path / "iter_1", 1) if f["verdict"] == "bad"]
    assert bad["path"] == str(path)
    assert reason in bad["reason"]


def test_the_older_format_of_megatron(tmp_path: Path, findings: Findings) -> None:
    file = tmp_path / "iter_1" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"weight": torch.arange(5000.0)}, file)
    (good,) = findings(tmp_path, 0)
    assert (good["path"], good["verdict"]) == (str(file), "good")
    flip(file, file.stat().st_size // 2)
    assert findings(tmp_path / "iter_1", 1)


def test_common_values_in_the_index(tmp_path: Path, findings: Findings) -> None:
    """As Megatron-LM 0.19 saves them; a checkpoint of torch alone has none."""
    state = {"common_state/shard_0_1": torch.tensor(7)}
    dcp.save(state, checkpoint_id=str(tmp_path / "iter_1"), no_dist=True)
    (bad,) = [f for f in findings(tmp_path / "iter_1", 1) if f["verdict"] == "bad"]
    assert bad["path"].endswith("metadata.json")
    (tmp_path / "iter_1" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert findings(tmp_path / "iter_1", 0)
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path / "iter_2"), no_dist=True)
    assert findings(tmp_path / "iter_2", 0)


def test_what_an_index_holds_besides(tmp_path: Path, findings: Findings) -> None:
    """Another version of Megatron-LM may name anything."""
    path = checkpoint(tmp_path / "iter_1").parent / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"TensorProperties", b"OtherProperties0"))
    (unknown,) = findings(path.parent, 2)
    assert (unknown["path"], unknown["verdict"]) == (str(path), "not verified")


@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_checkpoint_that_a_run_prunes_meanwhile_is_not_bad(tmp_path: Path, moment: str) -> None:
    data = checkpoint(tmp_path / "iter_1")

    def prune(_: int) -> None:
        if data.parent.exists():
            data.parent.rename(tmp_path / ".export-0123abcd-iter_1")

    if moment == "before":
        prune(0)
    found = list(verify_checkpoint(data.parent, prune))
    assert Verdict.BAD not in {one.verdict for one in found}
    assert len(found) == (0 if moment == "before" else 2)


def test_frozen_weights_of_a_run(tmp_path: Path, findings: Findings) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings()))
    tensors = [("base", torch.arange(5000.0))]
    name = frozen_file.name_of(tensors, time.sleep)
    frozen_file.write(run.frozen, name, tensors, time.sleep)
    (good,) = findings(run.path, 0)
    assert (good["kind"], good["verdict"], good["bytes"]) == ("frozen", "good", 20000)
    flip(run.frozen / name, 19999)
    (bad,) = findings(run.path, 1)
    assert bad["path"] == str(run.frozen / name)
    run.frozen.chmod(0o700)
    (run.frozen / name).chmod(0o666)
    assert "can be written by others" in str(findings(run.path, 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": "durable", "path": "PLACE/none"}', "names PLACE/none, which is not there"),
        ("", "cannot be read"),
    ],
)
def test_what_another_run_would_go_on_from_is_not_there(
    tmp_path: Path, findings: Findings, text: str, reason: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings()))
    run.latest.write_text(text.replace("PLACE", str(tmp_path)))
    (bad,) = findings(run.path, 1)
    assert (bad["kind"], bad["path"]) == ("latest", str(run.latest))
    assert reason.replace("PLACE", str(tmp_path)) in bad["reason"]
    (tmp_path / "none").mkdir()
    run.latest.write_text(json.dumps({"kind": "dump", "path": str(tmp_path / "none")}))
    assert [found["verdict"] for found in findings(run.path, 0)] == ["good"]
