"""Everything in which a disturbed chain of runs differs from the undisturbed one."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import read_result
from tests.faults.harness.jobs import Outcome, assert_restored_state_was_hashed
from tests.megatron_lm.harness.runs import printed

# What depends on the clock, or tells of recoveries.
_CLOCK = re.compile(r"time|deadpool/|throughput|memory|vs steps|-per-sec")
_SHOWN = 4
Told = dict[str, set[str]]


def differences(
    wanted: Outcome, runs: Sequence[Outcome], loaded: int, saves_beside: bool
) -> Iterator[str]:
    """One line for each kind of difference. ``runs``: a chain, the last one went to the end;
    ``loaded``: the iteration of the checkpoint that the last one was given, which tells nothing of
    what was before, and whose first line sums up another interval; ``saves_beside``: checkpoints
    are written while it trains.
    """
    last = runs[-1]
    if last.status != wanted.status:
        yield f"exit status {last.status}: {last.story()[-1500:]}"
        return
    found = read_result(last.directory)
    found = replace(found, resumed_after=max(loaded, found.resumed_after))
    comparison = compare_results(read_result(wanted.directory), found)
    yield from _some("compare", [str(one) for one in comparison.differences])
    with _as_line() as line:
        assert_restored_state_was_hashed(last)
    yield from line
    yield from _some("told", _unlike([_numbers(run) for run in runs], _numbers(wanted)))
    if not loaded:
        for what, told in (("printed", printed), ("TensorBoard", _points)):
            ours, theirs = [told(run) for run in runs], told(wanted)
            yield from _some(what, [*_unlike(ours, theirs), *_missing(ours, theirs)])
    folders = [run.directory for run in runs]
    yield from _some("saves", _saves(wanted.directory, folders, saves_beside))


def _some(what: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"{what}: {len(lines)} differ: {'; '.join(lines[:_SHOWN])}"


@contextlib.contextmanager
def _as_line() -> Iterator[list[str]]:
    """An assertion that fails becomes a line."""
    lines: list[str] = []
    try:
        yield lines
    except AssertionError as error:
        lines.append(str(error)[:500])


def _unlike(ours: Sequence[Told], theirs: Told) -> list[str]:
    """Each place has one value, the same."""
    merged: Told = defaultdict(set)
    for one in ours:
        for place, values in one.items():
            merged[place] |= values
    other = sorted(k for k, values in merged.items() if theirs.get(k) != values)
    return [f"{k}: {sorted(merged[k])}, wanted {sorted(theirs.get(k, ()))}" for k in other]


def _missing(ours: Sequence[Told], theirs: Told) -> list[str]:
    return [f"{place}: missing" for place in sorted(theirs.keys() - set().union(*ours))]


def _numbers(outcome: Outcome) -> Told:
    """Every step, evaluation and hash of a run that told its end. The state before the first step
    is hashed only where a recovery has restored it.
    """
    found: Told = {}
    for kind in ("steps", "evaluations"):
        for row in outcome.final.get(kind, ()):
            found[f"{kind} {row['iteration']}"] = {repr(sorted(_without_clock(row).items()))}
    for iteration, roles in outcome.final.get("hashes", {}).items():
        if int(iteration):
            found |= {f"hash {iteration} of role {role}": {each} for role, each in roles.items()}
    return found


def _without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if "seconds" not in key}


def _points(outcome: Outcome) -> Told:
    """TensorBoard's, by tag and step."""
    folder, found = outcome.directory / "tensorboard", defaultdict(set)
    if folder.is_dir():
        from tensorboard.backend.event_processing import event_accumulator

        read = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
        read.Reload()
        for tag in read.Tags()["scalars"]:
            for point in read.Scalars(tag) if not _CLOCK.search(tag) else ():
                found[f"{tag} @{point.step}"].add(repr(point.value))
    return found


def _saves(wanted: Path, runs: Sequence[Path], beside: bool) -> list[str]:
    """Other checkpoints, or other tensors in the last two that both have. One that was still being
    written when a fault struck is written again a step later, under the name of that one.
    """
    theirs = {path.name: path for path in wanted.glob("saves/iter_*")}
    ours = {path.name: path for run in runs for path in run.glob("saves/iter_*")}
    gone, more = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    if beside:
        gone, more = gone[len(more) :], []
    found = [f"{name} is missing" for name in gone]
    found += [f"{name} is one more" for name in (more if len(runs) == 1 else ())]
    for name in sorted(theirs.keys() & ours.keys())[-2:]:
        one, other = _tensors(theirs[name]), _tensors(ours[name])
        found += [
            f"{name}: {key}"
            for key in sorted(one.keys() | other.keys())
            if not _equal(one.get(key), other.get(key))
        ]
    return found


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds, by name, less arguments and what is new for each process."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    whole: dict[str, Any] = {}
    if (checkpoint / ".metadata").exists():
        reader = FileSystemReader(str(checkpoint))
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(whole, storage_reader=reader, planner=planner, no_dist=True)
    for path in sorted(checkpoint.rglob("*.pt")):
        whole[str(path.relative_to(checkpoint))] = torch.load(path, weights_only=False)
    return dict(_leaves("", whole))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name.endswith("/args") or "rerun_state" in name or "content_metadata" in name:
        return
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _leaves(f"{name}/{key}", each)
    elif hasattr(value, "dtype") or isinstance(value, int | float | str):
        yield name, value


def _equal(one: Any, other: Any) -> bool:
    """Bit by bit; numbers of Python and texts by their value."""
    import numpy as np
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return one.numel() == 0 or torch.equal(*flat)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    return type(one) is type(other) and bool(one == other)
