"""Whole runs that export during training, with and without failures."""

from pathlib import Path

import pytest

from tests.common.programs import check_output
from tests.faults.harness.jobs import MODEL, Outcome, Program, fault, run_program
from tests.trainer.layouts import BF16, PP2, train
from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.slow
HELD_TRAINER = str(Path(__file__).parent / "harness" / "held_trainer.py")


def program(flags: str, iterations: int, held: dict[int | str, str]) -> Program:
    """Two nodes of two members; held before iterations until something is there (hold.py)."""
    waits = ",".join(f"{iteration}={pattern}" for iteration, pattern in held.items())
    command = (HELD_TRAINER, waits, *MODEL.split(), *PP2.split(), *BF16.split())
    length = ("--train-iters", str(iterations))
    return Program((*command, *length, *flags.split()), 2, 2)


def warnings(outcome: Outcome) -> list[str]:
    """Return the run's warnings about failed exports."""
    texts = [str(event.data["text"]) for event in outcome.of_kind("log")]
    return [text for text in texts if "in the background" in text]


@pytest.mark.full
def test_failures_end_exports_and_nothing_else(text, tmp_path):
    """The first export loses a node, the second finds no room; then two come through, the second
    because somebody asks. Training takes no notice of any of them."""
    run, asked, ordered = tmp_path / "run", tmp_path / "asked", tmp_path / "ordered"
    killed = fault("killed", "persist.write", when_node=1, target="node")
    # Node 0 seats two roles: its first export asks twice.
    full = fault("full", "persist.reserve", when_node=0, nth=3, action="mark")
    fired = f"{run.with_suffix('.faults')}.fired"
    exported = f"{run}/exports/iter_*"
    held = {7: f"{fired}/killed", 21: f"{fired}/full", 31: exported, 32: str(ordered)}
    job = program(text, 65, {**held, "33-60": f"{asked}/iter_*", 62: f"{asked}/iter_*"})

    def ask() -> None:
        output = check_output("-m", "deadpool_megatron", "persist", run, asked)
        assert output.startswith(f"a checkpoint will be written to {asked}")
        ordered.touch()

    outcome = run_program(
        run,
        job,
        [killed, full],
        spares=1,
        settings="--deadpool-persist-interval 4 --deadpool-persist-keep 1",
        when_stepping=(30, ask),
    )
    assert outcome.status == 0, outcome.story()
    assert outcome.fired == {"killed", "full"}, outcome.story()
    assert len(outcome.final["recoveries"]) == 1
    warned = warnings(outcome)
    assert any("node 1 was lost" in line for line in warned), warned
    assert any("no room to" in line for line in warned), warned
    assert len(list(asked.glob("iter_*"))) == 1
    left = [path.name for path in (run / "exports").iterdir() if path.name.startswith(".")]
    assert left == [], "of exports that failed nothing is left"
    # The requested export loads like any checkpoint of Megatron, and leads to the same end.
    loaded = f"{MODEL} {PP2} {BF16} {text} --train-iters 65 --load {asked}"
    hashes = run_ranks(4, train, loaded)[0]["hashes"]
    assert hashes == [outcome.final["roles"][str(role)]["sha256"] for role in range(4)]


@pytest.mark.full
def test_a_run_that_has_to_end_exports_once_more(text, tmp_path):
    """Before a time limit, during training; the resumed run loses a node and has no spare: it makes
    a checkpoint of its dump. Both load like any checkpoint, and lead to the same end."""
    run, exports, ordered = tmp_path / "run", tmp_path / "exports", tmp_path / "ordered"
    where = f"--deadpool-persist-directory {exports}"
    job = program(text, 24, {5: str(ordered), 15: f"{exports}/iter_*"})

    def order() -> None:
        check_output("-m", "deadpool_megatron", "stop", "--dump", "--within", "100", run)
        ordered.touch()

    outcome = run_program(run, job, settings=where, when_stepping=(4, order))
    assert outcome.status == 75, outcome.story()
    (first,) = exports.glob("iter_*")
    assert "state dumped to" in outcome.final["reason"]
    assert len(list((run / "dump").iterdir())) == 1, "what came after it is saved, too"

    lost = fault("lost", "optimizer.inside", when_role=1, when_iteration=20, target="node")
    resumed = run_program(
        tmp_path / "resumed",
        program(text, 24, {}),
        [lost],
        settings=f"{where} --deadpool-elastic off --deadpool-spare-timeout 0.5",
        arguments=("--resume", str(run)),
    )
    assert resumed.status == 75, resumed.story()
    (second,) = set(exports.glob("iter_*")) - {first}
    assert resumed.final["reason"].endswith(f"Megatron's --load in {second}"), resumed.story()
    loaded = f"{MODEL} {PP2} {BF16} {text} --train-iters 24 --load {exports}"
    tracker = exports / "latest_checkpointed_iteration.txt"
    ends = []
    for export in (first, second):
        tracker.write_text(str(int(export.name.removeprefix("iter_"))))
        ends.append(run_ranks(4, train, loaded)[0]["hashes"])
    assert ends[0] == ends[1]


def test_a_run_that_cannot_export_is_refused_at_its_start(text, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys\n"
        "from deadpool_megatron.trainer.__main__ import main\n"
        "from deadpool_megatron.trainer.gpt_loop import TrainingLoop\n"
        "del TrainingLoop.checkpoint_state\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = (str(script), *MODEL.split(), *text.split(), "--train-iters", "3")
    job = Program(command, 2)
    outcome = run_program(tmp_path / "run", job, settings="--deadpool-persist-interval 4")
    assert outcome.status == 2, outcome.story()
    reason = "--deadpool-persist-interval: the program does not say what its checkpoints hold"
    assert reason in outcome.final["reason"]
