"""Recoveries of pretrain_gpt.py: where its state comes from, and numbers that are not finite."""

import pytest

from tests.faults.harness import jobs
from tests.faults.harness.jobs import assert_unnoticed, restart_kinds, run_program, undisturbed
from tests.faults.harness.numbers import SHIFTED, assert_equal_ranks, shifted
from tests.megatron_lm.harness import runs
from tests.megatron_lm.harness.arguments import real_text
from tests.megatron_lm.harness.checkout import LOADS, needs_megatron_lm

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm]


def test_numbers_of_layers_shift_on_real_text(tmp_path, monkeypatch):
    """Four stages of one layer; the middle two are of the commonest class.

    Spares wait until role 0 has made the index of the data. The first is needed before that.
    Training waits for the spare before iteration 2: on a busy machine the run would be over first.
    """
    flags = {
        "bf16": True,
        "pipeline_model_parallel_size": 4,
        "use_distributed_optimizer": True,
        **real_text(tmp_path),
        "data_cache_path": "{run}/index",
        "split": "90,10,0",
        "eval_interval": 4,
        "eval_iters": 1,
        "train_iters": 14,
    }
    wanted = undisturbed(runs.gpt(**flags))
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"2={tmp_path}/run.faults.fired/spare-is-built")
    program = runs.gpt(within=runs.held_tree(tmp_path / "tree").parent, **flags)
    plan = [
        runs.dies("before-the-index", "recovery.rebuild", 3, when_epoch=1),
        jobs.fault("spare-is-built", "member.warm", when_node=5, action="mark"),
        runs.dies("same-class", "forward", 2, nth=2, after="spare-is-built"),
        runs.dies("other-class", "optimizer.updated", 0, nth=3, after="same-class"),
    ]
    outcome = runs.strike(tmp_path / "run", program, plan, wanted, spares=2)
    assert list((outcome.directory / "index").rglob("*GPTDataset*.npy"))
    assert "built for role 1, takes role 2 in place" in runs.output_of_members(outcome)
    assert "built for role 2, rebuilt for role 0" in runs.output_of_members(outcome)
    assert all("adopt" in entry["phases"] for entry in outcome.final["recoveries"][-2:])


@LOADS
def test_saved_beside_training_and_loaded_by_another_run(tmp_path):
    """Kills between the beginning of a save and its end; such a checkpoint is loaded."""
    # From 0.17 on Megatron's default is a package that is not installed.
    own = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": None}
    beside = runs.gpt(**runs.BASE, **own)
    plan = [
        runs.dies("begun", "save.written", 2, 6),
        runs.dies("under-way", "step.begin", 0, 10),
        runs.dies("last", "save.written", 3, 12),
    ]
    wanted = undisturbed(runs.gpt(**runs.BASE))
    saved = runs.strike(tmp_path / "run", beside, plan, wanted)
    assert restart_kinds(saved)[1:] == ["memory"] * 3
    saves = saved.directory / "saves"
    newest = saves / "latest_checkpointed_iteration.txt"
    assert newest.read_text() == "12"
    assert {event.iteration for event in saved.of_kind("durable")} == {3, 6, 9, 12}
    for iteration in (6, 12):
        assert (saves / f"iter_{iteration:07d}" / ".metadata").is_file()

    newest.write_text("6")
    plan = [runs.dies("first-step", "optimizer.inside", 2, 7)]
    loaded = runs.strike(
        tmp_path / "loaded", runs.gpt(**runs.BASE, load=saves), plan, wanted, after=6
    )
    assert [step["iteration"] for step in loaded.final["steps"]] == list(range(7, 13))


def test_run_falls_back_to_the_checkpoint_that_its_program_has_loaded(tmp_path):
    """Before its first save no copy is left of what a lost node had."""
    saves = tmp_path / "run" / "saves"
    first = run_program(tmp_path / "run", runs.gpt(**{**runs.BASE, "exit_interval": 3}))
    assert (saves / "iter_0000003" / ".metadata").is_file(), first.story()
    program = runs.gpt(**{**runs.BASE, "save": None, "load": saves})
    lost = [runs.dies("lost", "optimizer.inside", 2, 5)]
    local = {"settings": "--deadpool-protection local"}
    wanted = undisturbed(runs.gpt(**runs.BASE))
    loaded = runs.strike(tmp_path / "loaded", program, lost, wanted, after=3, **local)
    assert restart_kinds(loaded) == ["initial", "durable"]


def test_start_from_a_checkpoint_is_no_failure(tmp_path):
    """Nothing fails: the epoch that has loaded is the only epoch, with a first seal as long as
    that of a large model."""
    saves = tmp_path / "run" / "saves"
    wanted = run_program(tmp_path / "run", runs.gpt(**{**runs.BASE, "exit_interval": 3}))
    assert (saves / "iter_0000003" / ".metadata").is_file(), wanted.story()
    stopped = {"signal": "STOP", "resume_after_seconds": 3}
    plan = [jobs.fault("late", "vault.seal", when_role=0, when_iteration=3, **stopped)]
    program = runs.gpt(**{**runs.BASE, "save": None, "load": saves})
    loaded = run_program(tmp_path / "loaded", program, plan)
    assert_unnoticed(loaded, undisturbed(runs.gpt(**runs.BASE)), plan, after=3)
    assert restart_kinds(loaded) == ["initial"]
    assert not loaded.of_kind("epoch-closed"), loaded.story()


def test_numbers_from_a_million_change_nothing(tmp_path):
    """With saves, exports, and the loss of a node in and after the update."""
    program = runs.gpt(**runs.BASE)
    plan = shifted(
        [runs.dies("inside", "optimizer.inside", 2, 5), runs.dies("end", "log.end", 0, 9)]
    )
    settings = f"{SHIFTED} --deadpool-persist-interval 4"
    found = run_program(tmp_path / "run", program, plan, spares=2, settings=settings)
    assert_equal_ranks(found, undisturbed(program), plan)
    assert restart_kinds(found)[1:] == ["memory"] * 2
    assert found.of_kind("durable"), found.story()


def test_no_spare_left_dumps_and_resumes(tmp_path):
    program = runs.gpt(**runs.BASE)
    plan = [runs.dies("only", "evaluation.end", 0, 4)]
    settings = "--deadpool-elastic off --deadpool-spare-timeout 1"
    dumped = run_program(tmp_path / "run", program, plan, settings=settings)
    assert dumped.status == 75, dumped.story()
    resume = ("--resume", str(tmp_path / "run"))
    other = runs.gpt(**{**runs.BASE, "num_layers_per_virtual_pipeline_stage": 1})
    wrong = run_program(tmp_path / "wrong", other, arguments=resume)
    assert (wrong.status, wrong.of_kind("step")) == (2, []), wrong.story()
    assert "virtual_stages is 1 there and 2 here" in wrong.final["reason"]
    resumed = run_program(tmp_path / "resumed", program, arguments=resume)
    assert_unnoticed(resumed, undisturbed(program), [])
    (saved,) = (tmp_path / "run" / "dump").iterdir()
    runs.assert_printed(resumed, undisturbed(program), after=int(saved.name.partition("-")[2]))
    assert resumed.final["steps"][0]["iteration"] > 1, "it did not start anew"


def test_every_sample_is_read_when_a_node_dies_at_the_end(tmp_path):
    """A blend has exactly the samples that training and evaluations take."""
    text = real_text(tmp_path)
    (tmp_path / "blend").write_text(f"{text['data_path']} {text['data_path']}")
    flags = {
        **text,
        "data_path": None,
        "data_args_path": tmp_path / "blend",
        "split": "80,10,10",
        "eval_iters": 1,
        "train_iters": 3,
    }
    plan = [
        runs.dies("last-step", "log.end", 1, 3),
        runs.dies("test", "evaluation.begin", 1, when_section="test"),
    ]
    outcome = runs.strike(tmp_path / "run", runs.gpt(nodes=2, **flags), plan, spares=2)
    assert set(restart_kinds(outcome)[1:]) == {"memory"}


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, "process-crash"),  # found before the update: it wants to save and leave
        ({"rerun_mode": "disabled"}, "process-crash"),
        ({"no_check_for_nan_in_loss_and_grad": True}, "nonfinite-loss"),
    ],
    ids=["checked", "checked-once", "unchecked"],
)
def test_gradients_that_are_nan_once_leave_no_trace(tmp_path, flags, kind):
    program = runs.gpt(**{**runs.PP2_DP2, "train_iters": 8, **flags})
    plan = [jobs.fault("nan", "forward", when_iteration=5, when_role=3, action="mark")]
    outcome = run_program(tmp_path / "run", program, plan, settings="--deadpool-nonfinite rollback")
    assert_unnoticed(outcome, undisturbed(program), plan)
    (recovery,) = outcome.final["recoveries"]
    assert (recovery["kind"], recovery["generation"]) == (kind, [1, 4])


def test_nan_that_megatron_finds_ends_the_run_with_its_message(tmp_path):
    # One update of this size leaves no finite parameter.
    program = runs.gpt(nodes=2, lr=1e30, train_iters=6, rerun_mode="disabled")
    outcome = run_program(tmp_path / "run", program)
    assert outcome.status == 1, outcome.story()
    assert outcome.final["kind"] == "bug"
    reason = outcome.final["reason"]
    assert "2 times the same failure" in reason
    assert "nan" in reason.lower()
    assert "logs/node" in reason
