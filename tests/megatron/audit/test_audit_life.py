"""The life of an audit on ranks that train: the messages and waits of each role in each iteration.

In lives/audits.txt a line is an iteration with the faults in it: a role and the point where a bit
is wrong there. How the file is written again: tests/common/lives.py.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.megatron import optimizer as optimizers
from deadpool_megatron.megatron.audit import comparison
from deadpool_megatron.megatron.audit.audit import Audit
from deadpool_megatron.megatron.dimensions import rebuild_from_peers
from deadpool_megatron.megatron.loop import model_config
from deadpool_megatron.megatron.optimizer import complete_state
from deadpool_megatron.member.framework import StepCalls
from deadpool_megatron.state.optimizer_state import UnsupportedState
from tests.common import lives
from tests.state.loading import load
from tests.trainer.layouts import TINY, make_loop
from tests.trainer.ranks import run_ranks


class _Stands(Exception):
    """A role waits for the coordinator's decision."""


class _Reports:
    """In place of those of a role."""

    role = 0

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send_event(self, kind: str, iteration: int | None, facts: dict[str, Any]) -> None:
        self.send(kind, of=iteration, **{k: v for k, v in facts.items() if k != "seconds"})

    def send(self, kind: str, **facts: Any) -> None:
        self.lines.append(f"{kind} {json.dumps(facts)}")

    def block_until_decided(self, reason: str) -> NoReturn:
        self.lines.append(f"stands still: {reason}")
        raise _Stands


def live_on_rank(script: Sequence[str], options: dict[str, Any]) -> list[list[str]]:
    """Return the lines of this rank for each line of a life."""
    rank, reports, reported = dist.get_rank(), _Reports(), list[list[str]]()
    loop, _ = make_loop(f"{TINY} {options['flags']}")
    complete_state(loop.optimizer)
    shard, slots = optimizers.ShardState(loop.optimizer), dict[Any, memoryview]()
    if rank in options.get("other_hardware", ()):
        comparison.hardware_number = lambda device: 77
    model_config(loop).num_moe_experts = options.get("experts")

    def keep(generation: Generation) -> None:
        for part in shard.parts:
            held = slots[generation, part.name] = memoryview(bytearray(part.nbytes))
            for view, tensor in zip(part.views(held), part.tensors, strict=True):
                view.copy_(tensor)

    with contextlib.redirect_stdout(io.StringIO()) as printed, tempfile.TemporaryDirectory() as d:
        try:
            audit = Audit(
                loop,
                shard.parts,
                lambda generation, name: slots.get((generation, name)),
                options.get("interval", 1),
                lambda: reports.lines.append("waits until the generation before is committed"),
                reports,  # type: ignore[arg-type]
            )
        except UnsupportedState as error:
            return [[str(error)]]
        hooks = [audit.before_update], [audit.after_update]
        calls = StepCalls(lambda: None, *hooks, lambda norm: None)
        optimizers.install_step_hooks(loop.optimizer, calls)
        model_config(loop).num_moe_experts = None
        keep(before := Generation(1, 0))
        for number, line in enumerate(script):
            faults = [word.split(":") for word in line.split()[1:]]
            points = [point for role, point in faults if int(role) == rank]
            made = [
                {"id": f"{number}-{n}", "point": f"audit.{point}", "action": "mark"}
                for n, point in enumerate(points)
            ]
            Path(d, "plan").write_text(json.dumps(made))
            failpoints.load(Path(d, "plan"))
            iteration = loop.counters["iteration"] + 1
            audit.announce(iteration, before, options.get("every", 1))
            try:
                loop.train_step()
                keep(before := Generation(1, iteration))
            except _Stands:
                for part in shard.parts:
                    load(part, slots[before, part.name])
                rebuild_from_peers(loop)
                loop.reset_after_interrupt()
            reported.append([*printed.getvalue().splitlines(), *reports.lines])
            reports.lines.clear()
            printed.truncate(printed.seek(0))
    return reported


def live(script: Sequence[str], options: dict[str, Any], _: Path) -> list[str]:
    ranks = run_ranks(options["ranks"], live_on_rank, script, options)
    lines = []
    for number, line in enumerate(script[: len(ranks[0])]):
        lines.append(line)
        for role, reported in enumerate(ranks):
            lines += [f"    {role}: {line_of_role}" for line_of_role in reported[number]]
    return lines


@pytest.mark.slow
def test_a_life_is_as_it_was_before(tmp_path):
    lives.compare(Path(__file__).parent / "lives" / "audits.txt", live, tmp_path)
