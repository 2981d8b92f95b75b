"""Differences between a disturbed chain of runs and the undisturbed run."""

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

# Figures that depend on the clock, and reports of recoveries.
_CLOCK = re.compile(r"time|deadpool/|throughput|memory|vs steps|-per-sec")
_SHOWN = 4
Values = dict[str, set[str]]


def differences(
    wanted: Outcome, runs: Sequence[Outcome], loaded: int, saves_beside: bool
) -> Iterator[str]:
    """Yield a line for each kind of difference. ``runs``: a chain whose last run went to the end;
    ``loaded``: the iteration of the checkpoint that the last run loaded: it reports nothing from
    before, and its first line sums up another interval; ``saves_beside``: checkpoints are written
    while it trains.
    """
    last = runs[-1]
    if last.status != wanted.status:
        yield f"exit status {last.status}: {last.story()[-1500:]}"
        return
    found = read_result(last.directory)
    found = replace(found, resumed_after=max(loaded, found.resumed_after))
    comparison = compare_results(read_result(wanted.directory), found)
    yield from _some("compare", [str(difference) for difference in comparison.differences])
    with _as_line() as line:
        assert_restored_state_was_hashed(last)
    yield from line
    yield from _some("numbers", _unlike([_numbers(run) for run in runs], _numbers(wanted)))
    if not loaded:
        for kind, read in (("printed", printed), ("TensorBoard", _points)):
            found_values, wanted_values = [read(run) for run in runs], read(wanted)
            differing = _unlike(found_values, wanted_values)
            yield from _some(kind, [*differing, *_missing(found_values, wanted_values)])
    folders = [run.directory for run in runs]
    yield from _some("saves", _saves(wanted.directory, folders, saves_beside))


def _some(kind: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"{kind}: {len(lines)} differ: {'; '.join(lines[:_SHOWN])}"


@contextlib.contextmanager
def _as_line() -> Iterator[list[str]]:
    """An assertion that fails becomes a line."""
    lines: list[str] = []
    try:
        yield lines
    except AssertionError as error:
        lines.append(str(error)[:500])


def _unlike(found: Sequence[Values], wanted: Values) -> list[str]:
    """Return a line for each place with another value, or with several."""
    merged: Values = defaultdict(set)
    for run in found:
        for place, values in run.items():
            merged[place] |= values
    other = sorted(k for k, values in merged.items() if wanted.get(k) != values)
    return [f"{k}: {sorted(merged[k])}, wanted {sorted(wanted.get(k, ()))}" for k in other]


def _missing(found: Sequence[Values], wanted: Values) -> list[str]:
    return [f"{place}: missing" for place in sorted(wanted.keys() - set().union(*found))]


def _numbers(outcome: Outcome) -> Values:
    """Return every step, evaluation and hash of a run that reported its end. The state before the
    first step is hashed only if a recovery has restored it.
    """
    found: Values = {}
    for kind in ("steps", "evaluations"):
        for row in outcome.final.get(kind, ()):
            found[f"{kind} {row['iteration']}"] = {repr(sorted(_without_clock(row).items()))}
    for iteration, roles in outcome.final.get("hashes", {}).items():
        if int(iteration):
            found |= {f"hash {iteration} of role {role}": {each} for role, each in roles.items()}
    return found


def _without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if "seconds" not in key}


def _points(outcome: Outcome) -> Values:
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
    """Return differing checkpoints, or tensors in the last two checkpoints that both have. If a
    fault interrupts a save, the checkpoint is written a step later, under the name of that step.
    """
    expected = {path.name: path for path in wanted.glob("saves/iter_*")}
    written = {path.name: path for run in runs for path in run.glob("saves/iter_*")}
    gone, more = sorted(expected.keys() - written.keys()), sorted(written.keys() - expected.keys())
    if beside:
        gone, more = gone[len(more) :], []
    found = [f"{name} is missing" for name in gone]
    found += [f"{name} is one more" for name in (more if len(runs) == 1 else ())]
    for name in sorted(expected.keys() & written.keys())[-2:]:
        first, second = _tensors(expected[name]), _tensors(written[name])
        found += [
            f"{name}: {key}"
            for key in sorted(first.keys() | second.keys())
            if not _equal(first.get(key), second.get(key))
        ]
    return found


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's content by name, without arguments and values of single processes."""
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


def _equal(first: Any, second: Any) -> bool:
    """Bit by bit; numbers of Python and texts by their value."""
    import numpy as np
    import torch

    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (first, second)]
        return first.numel() == 0 or torch.equal(*flat)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return (first.dtype, first.tobytes()) == (second.dtype, second.tobytes())
    return type(first) is type(second) and bool(first == second)
