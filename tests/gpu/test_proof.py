"""The proof kit of scripts/gpu, packed and rehearsed: from a tree without history, under a Python
that has torch and numpy alone, without a network."""

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KIT = ROOT / "scripts" / "gpu"
PARTS = ["smoke", "seam", "trainer", "rebuild", "copies", "overhead", "kernels", "losses", "rows"]
#: torch, numpy, and what they need themselves
NEEDED = ["torch", "numpy", "typing_extensions", "sympy", "mpmath", "networkx", "Jinja2"]
NEEDED += ["MarkupSafe", "fsspec", "filelock", "setuptools"]
#: without a network, with shared memory of its own, and killed as a whole with its first process
ALONE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"]
ALONE += ["-c", 'mount -t tmpfs -o size=4g shm /dev/shm && ip link set lo up && exec "$@"', "sh"]


def works(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def this_python(folder: Path) -> Path:
    """Return a Python with torch, numpy and their requirements alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name in NEEDED:
        tops = {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}
        for top in tops:
            (site / top).symlink_to(Path(sysconfig.get_path("platlib"), top))
    return folder / "bin" / "python"


class Kit:
    """The kit, unpacked; isolated where there are namespaces."""

    def __init__(self, folder: Path) -> None:
        # PYTHON312: one with torch and numpy and nothing else, as on the machines it is made for.
        python = os.environ.get("PYTHON312") or this_python(folder / "bare")
        asked = (python, "-c", "import sys; print(*sys.version_info[:2], sep='.', end='')")
        version = subprocess.check_output(asked, text=True)
        self.environment = os.environ | {"PYTHON": str(python), "https_proxy": "http://127.0.0.1:9"}
        packed = folder / "packed.tgz"
        compiled = os.environ | {"PROOF_PYTHON": str(python)}
        subprocess.run([KIT / "pack.sh", packed, version], env=compiled, check=True)
        shutil.unpack_archive(packed, folder, filter="data")
        self.prove = folder / "deadpool-proof" / "scripts" / "gpu" / "prove.sh"
        self.alone = ALONE if works(*ALONE, "true") else []

    def start(self, out: Path, minutes: float) -> subprocess.Popen[str]:
        command = [*self.alone, self.prove, "--device", "cpu", "--minutes", str(minutes)]
        return subprocess.Popen(
            [*command, "--out", out], env=self.environment, stdout=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return Kit(tmp_path_factory.mktemp("kit"))


def results(out: Path) -> dict[str, Any]:
    """Return the results in the archive, which is alone in its folder."""
    [archive] = [path for path in out.iterdir() if path.suffix != ".part"]
    assert archive.stat().st_size < 16 << 20
    shutil.unpack_archive(archive, out, filter="data")
    return {path.stem: json.loads(path.read_text()) for path in out.glob("proof/*.json")}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(660)  # one to two minutes on two idle cores
def test_kit_passes_its_rehearsal_within_eight_minutes(kit, tmp_path):
    started = kit.start(tmp_path, 8)
    output, _ = started.communicate()
    found = results(tmp_path)
    assert started.returncode == 0, output
    assert found["summary"]["finished"] == PARTS, output
    facts = {part: found[part]["facts"] for part in PARTS}
    assert len(facts["seam"]["one-by-one"]["recoveries"]) == 1
    assert list(facts["rebuild"]) == ["split", "side-by-side"]
    # Of a rank that was lost while communicators were made, too, and after a stopped one has woken.
    causes = [recovery["cause"] for recovery in facts["losses"]["losses"]["recoveries"]]
    # A busy machine may in addition not end a killed process in time.
    assert [cause.count("; then process") for cause in causes] == [0, 0, 1, 0, 0]
    assert "silent" in causes[3]
    assert len(facts["trainer"]["pipeline"]["recoveries"]) == 1
    assert facts["trainer"]["bit-identical to the undisturbed run"]
    assert facts["overhead"]["protected"]["shipped_bytes"] > 0
    assert facts["rows"]["fine-grained-activation-offloading"] == "same bits"


@pytest.mark.slow
@pytest.mark.full(every_time=True)
def test_part_at_its_limit_is_unfinished_and_not_failed(kit, tmp_path):
    started = kit.start(tmp_path, 0.2)
    output, _ = started.communicate()
    summary = results(tmp_path)["summary"]
    assert started.returncode == 0, output
    assert summary["unfinished"] == PARTS, output
    assert {part["state"] for part in summary["parts"].values()} == {"unfinished"}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "seed"), [("TERM", 1), ("KILL", 2), ("TERM", 3), ("KILL", 4)])
def test_archive_survives_end_at_any_moment(kit, tmp_path, name, seed):
    if not kit.alone:
        pytest.skip("no namespaces here, so nothing ends all processes at once")
    started = kit.start(tmp_path, 8)
    assert started.stdout is not None
    started.stdout.readline()
    started.stdout.readline()  # the first part has begun
    time.sleep(random.Random(seed).uniform(0, 20))
    inside = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    subprocess.run(["kill", f"-{name}", *inside], check=True)
    started.communicate(timeout=60)
    summary = results(tmp_path)["summary"]
    assert summary["finished"] + summary["unfinished"] + summary["not started"] == PARTS
    assert summary["ended"] == ("by a signal" if name == "TERM" else "not yet")


@pytest.mark.slow
def test_kit_names_missing_requirements_before_it_runs(kit, tmp_path):
    command = [KIT / "prove.sh", "--device", "cpu", "--megatron-lm", "/nowhere", "--out", tmp_path]
    done = subprocess.run(command, env=kit.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for name in ("xxhash", "megatron.core", "a checkout of Megatron-LM"):
        assert f"missing: {name}" in done.stderr
    assert not list(tmp_path.iterdir())
