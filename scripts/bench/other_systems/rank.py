"""One rank of the bench's training without deadpool's protection, for torchrun and the like.

    torchrun -m other_systems.rank --reports FILE --facts FILE [--keeper NAME ...] ARGUMENTS

ARGUMENTS are the trainer's. Reports each step that ends as a line of JSON; fault points work as in
the embedded trainer, with the rank as role.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.megatron import stand_ins

stand_ins.install()  # before anything imports Megatron

# ruff: noqa: E402
from deadpool_megatron.trainer.config import TrainerConfig, build_parser, config_from
from deadpool_megatron.trainer.gpt_loop import TrainingLoop
from other_systems.keepers import CheckpointKeeper, Keeper, ReshardingKeeper

KEEPERS = ("none", "dcp", "dcp-async", "torch-dist", "lm-resiliency", "nvrx-local")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, TrainerConfig]:
    """Parse own flags and those of the trainer."""
    parser = build_parser("rank.py")
    parser.add_argument("--keeper", choices=KEEPERS, default="none", help="what keeps the state")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="steps between keeping")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where it is kept")
    parser.add_argument("--reports", type=Path, required=True, metavar="FILE", help="of steps")
    parser.add_argument("--facts", type=Path, required=True, metavar="FILE", help="of the end")
    namespace = parser.parse_args(argv)
    return namespace, config_from(namespace)


def make_keeper(namespace: argparse.Namespace, loop: TrainingLoop) -> Keeper:
    """Return the keeper that ``--keeper`` names. Collective."""
    if namespace.keeper == "none":
        return Keeper()
    if namespace.keeper == "lm-resiliency":
        from other_systems.lm_resiliency import ReplicaKeeper

        return ReplicaKeeper(loop, namespace.folder, namespace.every)
    if namespace.keeper == "nvrx-local":
        from other_systems.nvrx_local import LocalKeeper

        return LocalKeeper(namespace.folder, namespace.every)
    kind = ReshardingKeeper if namespace.keeper == "torch-dist" else CheckpointKeeper
    return kind(namespace.folder, namespace.every, namespace.keeper == "dcp-async")


def reporter(path: Path) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a receiver of the training loop's events that appends steps to ``path``."""

    def emit(kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "step":
            entry = {"iteration": facts["iteration"], "loss": facts["loss"]}
            line = json.dumps({**entry, "wall_seconds": time.time()})
            with open(path, "a") as file:
                file.write(line + "\n")

    return emit


def notify_node(directory: Path, rank: int, helpers: Iterable[int]) -> None:
    """List the processes that die with this process's node, as the fault points read them."""
    failpoints.set_context(run_dir=str(directory))
    listing = directory / "nodes" / f"{rank}.json"
    listing.parent.mkdir(exist_ok=True)
    agent, *others = helpers
    members = {str(number): pid for number, pid in enumerate(others)}
    listing.write_text(json.dumps({"agent": agent, "vault": os.getpid(), "members": members}))


def _launcher_and_its_others() -> list[int]:
    parent = os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *(int(pid) for pid in children if int(pid) != os.getpid())]


def train(namespace: argparse.Namespace, config: TrainerConfig) -> None:
    """Train from the newest kept state to the end, in the current world. Collective."""
    failpoints.set_context(role=dist.get_rank(), node=dist.get_rank())
    loop = TrainingLoop(config, reporter(namespace.reports))
    keeper = make_keeper(namespace, loop)
    keeper.restore(loop)
    while not loop.done:
        loop.train_step()
        keeper.keep(loop)
    keeper.finish()
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, loop.state_hash())
    if dist.get_rank() == 0:
        namespace.facts.write_text(json.dumps({"hashes": hashes}))


def main(argv: Sequence[str]) -> int:
    """Run from the command line; returns the exit status."""
    namespace, config = parse(argv)
    config.check_world_size(int(os.environ["WORLD_SIZE"]))
    failpoints.load()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    notify_node(namespace.facts.parent, dist.get_rank(), _launcher_and_its_others())
    train(namespace, config)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
