"""A run continues with the program of its start, although files are edited meanwhile."""

import pytest

from tests.faults.harness import jobs

pytestmark = [pytest.mark.slow, pytest.mark.full]
ITERATIONS = 40


def test_argument_file_is_read_once(tmp_path):
    """The successor of a process clips by the value that the first process read."""
    file, nested = tmp_path / "model.args", tmp_path / "nested.args"
    nested.write_text("--clip-grad 0.5")
    file.write_text(f"# a model\n{jobs.MODEL} @{nested}\n")
    command = ("-m", "deadpool_megatron.trainer", f"@{file}", "--train-iters", str(ITERATIONS))
    program = jobs.Program(command, 2)
    wanted = jobs.undisturbed(program)

    def edit() -> None:
        nested.write_text("--clip-grad 0.01")
        file.write_text(file.read_text().replace("cosine", "linear"))
        jobs.end_members(tmp_path / "run", 1)

    outcome = jobs.run_program(tmp_path / "run", program, when_stepping=(5, edit))
    jobs.assert_unnoticed(outcome, wanted, [])
    assert len(outcome.final["recoveries"]) == 1
