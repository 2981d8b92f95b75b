"""Files of pretrain_gpt.py are edited or replaced while it trains: no process takes other files."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import jobs
from tests.megatron_lm.harness.arguments import real_text
from tests.megatron_lm.harness.checkout import needs_megatron_lm
from tests.megatron_lm.harness.runs import copy_tree, gpt

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm]
ROOT = Path(__file__).parents[2]
HELD = f"import sys\nsys.path.append({str(ROOT)!r})\nimport tests.persist.harness.held_pretrain\n"
LOSS = "loss = torch.sum(losses * loss_mask)"


@pytest.fixture(autouse=True)
def held_by_nothing(monkeypatch):
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", "")


def copied(folder: Path, **flags: object) -> jobs.Program:
    """Two stages on two nodes, with a script and modules that a test may edit."""
    copy_tree(folder / "tree")
    script = folder / "tree" / "pretrain_gpt.py"
    script.write_text(f"{HELD}{script.read_text()}")
    flags = {"pipeline_model_parallel_size": 2, "train_iters": 12, **flags}
    return gpt(nodes=2, within=folder / "tree", **flags)


def edit_loss(script: Path) -> None:
    text = script.read_text()
    assert LOSS in text
    script.write_text(text.replace(LOSS, f"0.5 * {LOSS}".replace("0.5 * loss = ", "loss = 0.5 * ")))


def struck(
    tmp_path: Path, program: jobs.Program, change: Callable[[], None], node: int = 1, **options: Any
) -> jobs.Outcome:
    """Change something between two iterations, once the spare is warm, and end the process of a
    node then."""
    directory, changed = tmp_path / "run", tmp_path / "changed"

    def strike() -> None:
        if options.get("spares"):
            jobs.await_event(directory, lambda event: event.kind == "member-warm")
        change()
        changed.touch()
        jobs.end_members(directory, node)

    with pytest.MonkeyPatch.context() as patch:
        # It waits for so long before each of them.
        patch.setenv("DEADPOOL_TEST_HOLD", ",".join(f"{k}={changed}" for k in range(4, 9)))
        return jobs.run_program(directory, program, when_stepping=(3, strike), **options)


def causes(outcome: jobs.Outcome) -> str:
    return " ".join(str(event.data["cause"]) for event in outcome.of_kind("node-quarantined"))


def test_process_that_follows_reads_an_edited_script(tmp_path):
    """Its node gets no role any more; a spare has the script as it was."""
    program = copied(tmp_path)
    wanted, script = jobs.undisturbed(program), tmp_path / "tree" / "pretrain_gpt.py"
    outcome = struck(tmp_path, program, lambda: edit_loss(script), spares=1)
    jobs.assert_unnoticed(outcome, wanted, [])
    assert f"{script}: sha256=" in causes(outcome), outcome.story()


def test_without_a_spare_the_run_waits_and_another_run_may_have_the_edited_script(tmp_path):
    program = copied(tmp_path)
    wanted, script = jobs.undisturbed(program), tmp_path / "tree" / "pretrain_gpt.py"

    def edit() -> None:
        script.write_text(f"{script.read_text()}\n# edited\n")

    settings = "--deadpool-elastic off --deadpool-spare-timeout-seconds 3"
    outcome = struck(tmp_path, program, edit, settings=settings)
    assert outcome.status == 75, outcome.story()
    assert f"{script}: sha256=" in causes(outcome), outcome.story()
    assert not (tmp_path / "bad-nodes.json").exists()
    resumed = jobs.run_program(
        tmp_path / "resumed", program, arguments=["--resume", str(outcome.directory)]
    )
    jobs.assert_unnoticed(resumed, wanted, [])
    assert f"changed since the start before (1): {script}: sha256=" in resumed.output


def test_node_that_comes_with_an_edited_module_is_excluded(tmp_path):
    """Those that have the module as it was continue, and replace each other."""
    program = copied(tmp_path)
    wanted, directory = jobs.undisturbed(program), tmp_path / "run"
    module = tmp_path / "tree" / "megatron" / "training" / "training.py"
    statuses: list[int] = []

    def attach() -> None:
        module.write_text(f"{module.read_text()}\n# edited\n")
        command = [sys.executable, "-m", "deadpool_megatron", "agent", "--attach"]
        agent = subprocess.run([*command, "--run-dir", str(directory)], timeout=200)
        statuses.append(agent.returncode)

    outcome = struck(tmp_path, program, attach, spares=1)
    jobs.assert_unnoticed(outcome, wanted, [])
    assert statuses == [69], outcome.story()
    lost = " ".join(str(event.data["cause"]) for event in outcome.of_kind("node-lost"))
    assert f"{module}: sha256=" in lost, outcome.story()


def test_process_that_follows_finds_other_data(tmp_path):
    text = real_text(tmp_path / "data")
    program = copied(tmp_path, **text)
    wanted, data = jobs.undisturbed(program), Path(f"{text['data_path']}.bin")

    def replace() -> None:
        shutil.copy(data, tmp_path / "other")
        with (tmp_path / "other").open("r+b") as other:
            other.write(os.urandom(4000))
        (tmp_path / "other").replace(data)

    # The spare is built for this role, and has opened the data.
    outcome = struck(tmp_path, program, replace, node=0, spares=1)
    jobs.assert_unnoticed(outcome, wanted, [])
    assert f"file {data} on " in causes(outcome), outcome.story()
