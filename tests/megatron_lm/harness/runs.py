"""Whole runs of pretrain_gpt.py with planned faults, on the harness of tests/faults.

A run is compared with an undisturbed run: the state of all roles after every iteration, losses,
norms and learning rates (``assert_unnoticed``), and the lines that Megatron prints for its users.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.harness import jobs
from tests.faults.harness.jobs import dies as dies
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import checkout
from tests.megatron_lm.harness.ranks import Trained, train

#: a checkpoint, an evaluation and a test on the way, each in the directory of its own run
SEGMENTS: dict[str, object] = {
    "split": "90,5,5",
    "eval_interval": 4,
    "eval_iters": 1,
    "save": "{run}/saves",
    "save_interval": 3,
}
PP2_DP2: dict[str, object] = {
    "bf16": True,
    "pipeline_model_parallel_size": 2,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}

#: the training of most tests: 12 iterations in 4 roles
BASE = {**PP2_DP2, **SEGMENTS, "train_iters": 12, "tensorboard_dir": "{run}/tensorboard"}

_ROOT = Path(__file__).parents[3]
_LINE = re.compile(r" (iteration +\d+/ +\d+ \|.*|validation loss at iteration .*)")
# Text that depends on the clock.
_TIMES = re.compile(r"elapsed time per iteration \(ms\): [\d.]+ \| ")


def tree() -> Path:
    """The checkout; where there is none the tests are skipped."""
    found = checkout()
    assert found is not None
    return found


def copy_tree(copy: Path) -> None:
    """Copy what training needs of the checkout."""
    copy.mkdir()
    shutil.copytree(tree() / "megatron", copy / "megatron")
    for script in tree().glob("*.py"):
        shutil.copy(script, copy)


def held_tree(directory: Path) -> Path:
    """The checkout, with a script that waits where ``DEADPOOL_TEST_HOLD`` has it wait
    (tests/persist/harness/hold.py)."""
    directory.mkdir()
    for path in tree().iterdir():
        if path.name == "megatron" or path.suffix == ".py":
            (directory / path.name).symlink_to(path)
    script = directory / "pretrain_gpt.py"
    text = script.read_text()
    script.unlink()
    held = "tests.persist.harness.held_pretrain"
    head = f"import sys\nsys.path.append({str(_ROOT)!r})\nimport {held}\n"
    script.write_text(head + text)
    return script


def gpt(
    nodes: int = 4, within: Path | None = None, script: str = "pretrain_gpt.py", **flags: object
) -> jobs.Program:
    """A script of a tree, by default the checkout, with the small model's flags changed."""
    path = (within or tree()) / script
    return jobs.Program((str(path), *small(**flags), "--deadpool"), nodes)


def stock(folder: Path, within: Path, **more: object) -> list[Trained]:
    """Train :data:`BASE` on the stock communicators, without --deadpool."""
    flags = {**BASE, **more, "save": None, "tensorboard_dir": None}
    return train(within, folder, small(**flags))


def strike(
    directory: Path,
    program: jobs.Program,
    plan: Sequence[Mapping[str, Any]],
    wanted: jobs.Outcome | None = None,
    after: int = 0,
    **options: Any,
) -> jobs.Outcome:
    """Run with these faults; it has to end as ``wanted``, by default the same without faults.

    ``after``: the iteration of the checkpoint that it loads at its start.
    """
    wanted = wanted or jobs.undisturbed(program)
    options = {"spares": 2, "refill": len(plan), **options}
    outcome = jobs.run_program(directory, program, plan, **options)
    jobs.assert_unnoticed(outcome, wanted, plan, after)
    if not after:
        # The first line of a run leaves Megatron's sums alone, so the second differs.
        assert_printed(outcome, wanted)
    return outcome


def assert_printed(outcome: jobs.Outcome, wanted: jobs.Outcome, after: int = 0) -> None:
    """Assert that the lines about steps and evaluations of the run are as wanted.

    ``after``: the iteration from which it continued; its lines may be in the output of the run
    before.
    """
    found, expected = printed(outcome), printed(wanted)
    assert expected, "nothing was printed"
    first = max(after + 1, min(step["iteration"] for step in outcome.final["steps"]))
    missing = {subject for subject in expected if _number(subject) >= first} - found.keys()
    assert not missing, f"not printed: {sorted(missing)}"
    other = {k: (text, expected.get(k)) for k, text in found.items() if text != expected.get(k)}
    assert not other, f"printed, and wanted: {other}"


def printed(outcome: jobs.Outcome) -> dict[str, set[str]]:
    """Return the lines about steps and evaluations in the logs of all processes, by subject.

    A line that another process has printed again has to be the same line.
    """
    found = defaultdict(set)
    for log in sorted((outcome.directory / "logs").glob("node*-rank*.log")):
        for line in _LINE.findall(log.read_text()):
            subject, _, facts = _TIMES.sub("", line).partition(" | ")
            found[subject].add(facts)
    return dict(found)


def _number(subject: str) -> int:
    """The iteration of a line."""
    found = re.search(r"\d+", subject)
    assert found is not None
    return int(found[0])


def output_of_members(outcome: jobs.Outcome) -> str:
    """Return the output of all training processes."""
    return "\n".join(p.read_text() for p in sorted(outcome.directory.glob("logs/node*-rank*.log")))


def scalars(outcome: jobs.Outcome) -> dict[str, list[tuple[int, float]]]:
    """Return all points of a run with :data:`BASE` by tag, sorted, as TensorBoard reads them.
    Points about recoveries are left out: the curve of epochs has each iteration once, and its steps
    have the cost of a recovery.
    """
    from tensorboard.backend.event_processing import event_accumulator

    folder = str(outcome.directory / "tensorboard")
    found = event_accumulator.EventAccumulator(folder, size_guidance={"scalars": 0})
    found.Reload()
    points = {
        tag: sorted((point.step, point.value) for point in found.Scalars(tag))
        for tag in found.Tags()["scalars"]
    }
    epochs = points.pop("deadpool/epoch")
    assert [step for step, _ in epochs] == [step for step, _ in points["lm loss"]]
    seen = [int(epoch) for _, epoch in epochs]
    opened = {event.epoch for event in outcome.of_kind("epoch-opened")}
    assert seen == sorted(seen)
    assert set(seen) <= opened
    steps_up = [
        step for (step, epoch), before in zip(epochs[1:], seen, strict=False) if epoch > before
    ]
    for tag in ("deadpool/recovery_seconds", "deadpool/iterations_recomputed"):
        costs = points.pop(tag, [])
        assert [step for step, _ in costs] == steps_up
        assert all(cost >= 0 for _, cost in costs)
    return points
