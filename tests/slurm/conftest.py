"""One cluster for all tests of a module; each begins with all nodes idle."""

import pytest

from tests.slurm.cluster import Cluster, missing_requirement
from tests.slurm.jobs import Jobs

NODES = 6


@pytest.fixture(scope="module", autouse=True)
def slurm():
    """Every test of this folder is skipped, with the reason, where there can be no cluster."""
    reason = missing_requirement()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def running_cluster(slurm):
    del slurm
    with Cluster(NODES) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster):
    """All nodes idle; at the end every job is gone and every node is mended."""
    yield running_cluster
    running_cluster.control("scancel", "--user=root")
    running_cluster.repair()


@pytest.fixture
def jobs(cluster, tmp_path):
    """Runs of the counting member on 4 nodes and 1 spare."""
    return Jobs(cluster, tmp_path / "runs")
