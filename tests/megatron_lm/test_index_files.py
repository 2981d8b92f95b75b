"""Index files of the data that are not there when a role is built by itself."""

import shutil
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from tests.faults.harness.jobs import Program, assert_unnoticed, fault, run_program, undisturbed
from tests.megatron_lm.harness.arguments import real_text
from tests.megatron_lm.harness.checkout import needs_megatron_lm
from tests.megatron_lm.harness.runs import dies, gpt, output_of_members

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm]
MAKES = "this process makes the index files of the data"


def on_text(folder: Path) -> Program:
    flags = {**real_text(folder), "data_cache_path": "{run}/index", "train_iters": 20}
    return gpt(nodes=2, pipeline_model_parallel_size=2, **flags)


@pytest.mark.parametrize("spares", [0, 1], ids=["role", "node"])
def test_removed_under_way(tmp_path, spares):
    """The process that follows, or a spare that is built for the other stage, makes them."""
    program, run = on_text(tmp_path), RunDirectory(tmp_path / "run")
    wanted = undisturbed(program)

    def strike() -> None:
        shutil.rmtree(run.path / "index")
        listing = run.node_listings()[1]
        for pid in listing["started"] if spares else listing["members"].values():
            posix.kill(int(pid))

    outcome = run_program(run.path, program, spares=spares, when_stepping=(5, strike))
    assert_unnoticed(outcome, wanted, [])
    if not spares:
        assert f"is not in {run.path / 'index'}: {MAKES}" in output_of_members(outcome)


def test_index_is_made_in_the_directory_of_a_continued_run(tmp_path):
    """Role 0 is late with them."""
    program = on_text(tmp_path)
    wanted = undisturbed(program)
    lost = dies("lost", "forward", 1, 5)
    settings = "--deadpool-elastic off --deadpool-spare-timeout-seconds 3"
    first = run_program(tmp_path / "first", program, [lost], settings=settings)
    assert first.status == 75, first.story()
    late = fault("late", "recovery.adopt", when_role=0, signal="STOP", resume_after_seconds=25.0)
    second = run_program(
        tmp_path / "second",
        program,
        [late],
        arguments=["--resume", str(first.directory)],
        settings="--deadpool-node-silence-seconds 90",
    )
    assert_unnoticed(second, wanted, [late])
    assert f"is not in {second.directory / 'index'}: {MAKES}" in output_of_members(second)
