"""The 65B job under a real Slurm, on as many nodes as it asks for: the arguments of each node.

tests/launch/test_pretrain_65b.py has Megatron validate them.
"""

import pytest

from tests.common.programs import stand_in
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SCRIPTS

pytestmark = pytest.mark.slurm

_DEADPOOL = """\
[ "$1" = agent ] || exit 3
printf '%s\\0' "$@" >{output}/$SLURM_PROCID.arguments
env -0 >{output}/$SLURM_PROCID.environment
"""


_NODES = 66


@pytest.fixture
def large():
    """64 nodes and two spares, each a host of namespaces with a slurmd of its own."""
    with Cluster(_NODES) as cluster:
        yield cluster


def test_nodes_get_equal_arguments_and_the_variables_of_megatron(large, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    programs = stand_in(tmp_path / "bin", deadpool=_DEADPOOL.format(output=output))
    variables = {
        "CHECKOUT": str(SCRIPTS.parents[1]),
        "RUNS": str(tmp_path / "runs"),
        "MEGATRON": "/Megatron-LM",
        "PATH": f"{programs}:{large.environment()['PATH']}",
    }
    # From a directory without an environment of its own, which the script would take first.
    submit = ("env", "-C", str(tmp_path), "sbatch", "--parsable")
    log = f"--output={large.directory}/job-%j.out"
    number = int(large.control(*submit, log, str(SCRIPTS / "pretrain_65b.sbatch"), **variables))
    large.wait_job(number)
    arguments = {path.read_text() for path in output.glob("*.arguments")}
    assert len(list(output.glob("*.arguments"))) == _NODES, large.output(number)
    (line,) = arguments
    found = line.split("\0")[:-1]
    assert found[found.index("--nproc-per-node") + 1] == "8"
    assert found[found.index("--") + 1] == "/Megatron-LM/pretrain_gpt.py"
    for path in output.glob("*.environment"):
        seen = dict(pair.split("=", 1) for pair in path.read_text().split("\0")[:-1] if "=" in pair)
        assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert seen["SLURM_STEP_NUM_NODES"] == str(_NODES)
