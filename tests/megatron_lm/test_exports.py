"""Checkpoints of pretrain_gpt.py: exports as its own saves, and a --save directory that fails."""

from pathlib import Path

import pytest

from deadpool_megatron.cli.storage.verify import verify_checkpoint
from deadpool_megatron.events import Kind
from deadpool_megatron.vault.shm.slot_check import Verdict
from tests.faults.harness.jobs import Outcome, Program, assert_unnoticed, run_program, undisturbed
from tests.megatron_lm.harness import runs
from tests.megatron_lm.harness.arguments import MOE, small
from tests.megatron_lm.harness.checkout import LOADS, TAG
from tests.megatron_lm.harness.ranks import train
from tests.megatron_lm.harness.runs import PP2_DP2, assert_printed, gpt, held_tree, tree
from tests.persist.harness.checkpoints import differences

pytestmark = [pytest.mark.slow, pytest.mark.full(every_time=True), pytest.mark.megatron_lm]
EXPORTED_SEGMENTS: dict[str, object] = {"split": "90,5,5", "eval_interval": 4, "eval_iters": 1}
# Megatron turns the bias of a router to fp32 when it is first asked for its state.
BIASED: dict[str, object] = {
    **PP2_DP2,
    **MOE,
    "disable_bias_linear": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
PLAIN: dict[str, object] = {"bf16": True, "pipeline_model_parallel_size": 2}
TRACKER = "latest_checkpointed_iteration.txt"
FLAGS: dict[str, object] = {**PP2_DP2, "save": "{run}.saves", "save_interval": 1, "train_iters": 8}
# By iteration: the obstacle of its save, and the role that meets it.
OBSTACLES = {
    1: "",  # a file in the place of the directory: before anything is written
    2: "common.pt",  # role 0, half way
    3: "__3_0.distcp",  # role 3 alone; the others learn it in a collective
    4: ".metadata",  # role 0, when all have written
    5: "metadata.json",  # role 0, at the end
}
# In the older format: all, the second stage alone, the first alone.
OLDER = {1: "", 3: "mp_rank_00_001/model_optim_rng.pt", 5: "mp_rank_00_000/distrib_optim.pt"}


def saved_and_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, object]
) -> Outcome:
    """A run whose iteration 4 is saved by itself and exported; after an evaluation."""
    run = folder / "run"
    exported = run / "exports" / "iter_0000004"
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"7={exported}")
    flags = small(**layout, **EXPORTED_SEGMENTS, save_interval=4, save="{run}/saves", train_iters=8)
    script = held_tree(folder / "tree")
    outcome = run_program(
        run,
        Program((str(script), *flags, "--deadpool"), 2, 2),
        settings="--deadpool-persist-interval 4",
    )
    assert outcome.status == 0, outcome.story()
    assert differences(run / "saves" / "iter_0000004", exported) == []
    return outcome


@pytest.mark.parametrize("layout", [PP2_DP2, BIASED], ids=["dense", "biased"])
def test_export_equals_a_save_of_megatron(tmp_path, monkeypatch, layout):
    saved_and_exported(tmp_path, monkeypatch, layout)


@LOADS
def test_stock_megatron_goes_on_from_an_export(tmp_path, monkeypatch):
    """The unpatched checkout, without --deadpool: of this package there are the stand-ins for a GPU
    and nothing else. With a distributed optimizer and PyTorch's own Adam Megatron cannot load what
    it has saved itself (megatron/exact_load.py); so there is none.
    """
    outcome = saved_and_exported(tmp_path, monkeypatch, PLAIN)
    went_on = []
    for folder in ("saves", "exports"):
        saves = outcome.directory / folder
        (saves / "latest_checkpointed_iteration.txt").write_text("4")
        flags = small(**PLAIN, **EXPORTED_SEGMENTS, load=saves, train_iters=8)
        ranks = train(tree(), tmp_path / f"ranks-{folder}", flags, exact=False)
        went_on.append([(r.losses, r.norms, r.skipped, r.state) for r in ranks])
    assert went_on[0] == went_on[1], "from its own save and from the export"
    steps = {str(step["iteration"]): step["loss"] for step in outcome.final["steps"]}
    assert went_on[1][-1][0] == {number: steps[number] for number in ("5", "6", "7", "8")}


if TAG == "core_v0.19.0":
    del OBSTACLES[2]  # part of another file


def folder(saves: Path, iteration: int) -> Path:
    return saves / f"iter_{iteration:07d}"


def obstruct(saves: Path, obstacles: dict[int, str]) -> None:
    for iteration, name in obstacles.items():
        if name:
            (folder(saves, iteration) / name).mkdir(parents=True)
            (folder(saves, iteration) / name / "full").touch()
        else:
            saves.mkdir(parents=True)
            folder(saves, iteration).touch()


def lost(outcome: Outcome) -> list[str]:
    """Return the names of checkpoints that do not count, as the run reports."""
    texts = [str(event.data["text"]) for event in outcome.of_kind(Kind.LOG)]
    return [
        text.split()[2].rpartition("/")[2] for text in texts if text.startswith("the checkpoint ")
    ]


def durable(outcome: Outcome) -> list[str]:
    """Names of checkpoints that count, in the order in which they came to."""
    return [Path(str(event.data["path"])).name for event in outcome.of_kind(Kind.DURABLE)]


def trained(directory: Path, obstacles: dict[int, str], **flags: object) -> Outcome:
    """A run past the obstacles; nothing but a checkpoint is other than without them."""
    program = gpt(**{**FLAGS, **flags})
    obstruct(directory / "run.saves", obstacles)
    outcome = run_program(directory / "run", program)
    wanted = undisturbed(program)
    assert_unnoticed(outcome, wanted, [])
    assert_printed(outcome, wanted)
    assert outcome.final["recoveries"] == []
    assert (directory / "run.saves" / TRACKER).read_text() == str(last_iteration(outcome))
    output = runs.output_of_members(outcome)
    for iteration in obstacles:
        assert f"checkpoint from iteration {iteration:7d} to" not in output
    return outcome


def last_iteration(outcome: Outcome) -> int:
    """The last iteration of a run."""
    return int(max(step["iteration"] for step in outcome.final["steps"]))


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_each_costs_a_checkpoint_and_nothing_else(tmp_path, ckpt_format):
    obstacles = OLDER if ckpt_format == "torch" else OBSTACLES
    outcome = trained(tmp_path, obstacles, ckpt_format=ckpt_format)
    assert lost(outcome) == [folder(tmp_path, iteration).name for iteration in obstacles]
    whole = [iteration for iteration in range(1, 9) if iteration not in obstacles]
    assert durable(outcome) == [folder(tmp_path, iteration).name for iteration in whole]
    last = folder(tmp_path / "run.saves", whole[-1])
    assert {found.verdict for found in verify_checkpoint(last, lambda _: None)} == {Verdict.GOOD}


def test_fault_beside_training_costs_those_that_were_under_way(tmp_path):
    """How many are under way at once is a matter of speed."""
    flags = {"async_save": True, "use_persistent_ckpt_worker": True, "train_iters": 16}
    outcome = trained(tmp_path, OBSTACLES, **flags)
    obstructed = {folder(tmp_path, iteration).name for iteration in OBSTACLES}
    assert obstructed.intersection(lost(outcome))
    assert not obstructed.intersection(durable(outcome))
    assert durable(outcome)[-1] == folder(tmp_path, 16).name


def test_chain_goes_on_where_a_run_ended_early_and_where_its_last_save_failed(tmp_path):
    saves, before = tmp_path / "saves", list[str]()
    flags = {"save": str(saves), "save_interval": 4, "exit_interval": 4}
    program = gpt(**{**FLAGS, **flags})
    in_the_way = folder(saves, 8)
    saves.mkdir()
    in_the_way.touch()

    def job(name: str) -> Outcome:
        outcome = run_program(tmp_path / name, program, arguments=before)
        before[:] = ["--resume", str(tmp_path / name)]
        return outcome

    first, second = job("first"), job("second")
    early = f"ended early at 4 of 8 iterations, continues from {folder(saves, 4)}"
    assert (first.status, first.final["reason"]) == (75, early)
    assert second.status == 75
    unsaved = f"training is complete, its checkpoint was not written: {in_the_way}: FileExistsError"
    assert second.final["reason"].startswith(unsaved)
    in_the_way.unlink()
    third = job("third")
    assert (third.status, durable(third)) == (0, [in_the_way.name])
