"""What the members of a run find in their environment, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deadpool_megatron.nccl_environment import VARIABLES
from tests.cluster.running import deadpool

pytestmark = pytest.mark.slow

#: Writes its environment down, and ends the run with an error as soon as all others have, too.
SHOW = """
import json, os, pathlib, sys, time
run = pathlib.Path(os.environ["DEADPOOL_RUN_DIR"])
who = os.environ["DEADPOOL_NODE"] + "-" + os.environ["DEADPOOL_SLOT"]
partial = run / ("partial-" + who)
partial.write_text(json.dumps(dict(os.environ)))
partial.rename(run / ("environment-" + who))
limit = time.monotonic() + 60
while len(list(run.glob("environment-*"))) < int(sys.argv[1]) and time.monotonic() < limit:
    time.sleep(0.02)
sys.exit(1)
"""
#: Imported by a parked process, before it knows which member it is.
EARLY = """
import json, os, pathlib, sys
pathlib.Path(os.environ["EARLY"], str(os.getpid())).write_text(json.dumps(dict(os.environ)))
"""


def environments(
    folder: Path, *options: str, nodes: int = 1, spares: int = 0, nproc: int = 1, **extra: str
) -> dict[str, dict[str, str]]:
    """Of each member of a run, by "node-slot"."""
    script, run = folder / "show.py", folder / "run"
    script.write_text(SHOW)
    size = ("--nodes", str(nodes), "--spares", str(spares), "--nproc-per-node", str(nproc))
    done = deadpool(
        *("run", *size, "--run-dir", str(run), "--preload", "", "--quiet", *options),
        *("--", str(script), str((nodes + spares) * nproc)),
        **extra,
    )
    found = {
        path.name.removeprefix("environment-"): json.loads(path.read_text())
        for path in run.glob("environment-*")
    }
    assert len(found) == (nodes + spares) * nproc, (done.stdout, done.stderr)
    return found


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_what_nccl_needs_is_there_and_what_the_user_has_set_stays(
    tmp_path: Path, method: str
) -> None:
    early = tmp_path / "early"
    early.mkdir()
    (tmp_path / "early_look.py").write_text(EARLY)
    options = ("--deadpool-start-method", method, "--preload", "early_look")
    where = {"PYTHONPATH": str(tmp_path), "EARLY": str(early)}
    [found] = environments(tmp_path, *options, NCCL_NVLS_ENABLE="1", **where).values()
    expected = {v.name: v.value for v in VARIABLES} | {"NCCL_NVLS_ENABLE": "1"}
    assert {name: found.get(name) for name in expected} == expected
    assert found["LOCAL_RANK"] == "0"
    if method == "exec":
        parked = [json.loads(path.read_text()) for path in early.iterdir()]
        assert expected.items() <= parked[0].items()


def test_gloo_needs_nothing(tmp_path: Path) -> None:
    [found] = environments(tmp_path, "--deadpool-communicator", "gloo").values()
    assert {variable.name for variable in VARIABLES}.isdisjoint(found)
