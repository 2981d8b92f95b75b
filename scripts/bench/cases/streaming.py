"""Does training go first on a link that protection shares?

Two hosts made of namespaces (root is needed), each with a link of limited rate (tbf), train one
model data-parallel, in turns: without protection (plain: stock gloo), with copies that go into the
gaps of training's traffic (gaps), with copies that always go at their share (share: link-gaps=off),
and without copies (local), which shows the part of the link. Computing is a sleep, so that the link
is the bottleneck; either before the traffic of a step or after it, when parameters are gathered and
gradients reduced just as copies could leave. With the queue ``fifo`` the link has no classes; with
``bands`` it has those that Linux gives every device by default (pfifo_fast), in which copies come
last. The first steps of a run are not measured; all others count.

In step_over_plain, only what the copies cost on the link shows: processor time does not, as the
processors idle. ship_seconds, window_seconds and commit_seconds are those that the run reports.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.frame import BenchError, Facts, UsageError, in_turns
from common.slow_steps import PLACE, PLACES, VARIABLE
from common.termination import MARK
from common.trainings import WARM_UP, Measured, Watch, read_run, row_of

from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import EventTail, Kind
from tests.netns.lab.cluster import Cluster, Job
from tests.netns.lab.hosts import Host, Hosts, missing

MINUTES = 30
ROUNDS, STEPS = 2, 30
QUICK = (
    *("--rounds", "1", "--steps", "2", "--queue", "fifo", "--compute-at", "begin"),
    *("--compute-seconds", "0.1", "--side", "gaps"),
)
NODES = 2
# Longer than the pace needs to know the window, see vault/shared_nic.py, with those of all cases.
_SETTLE = 5
_PORT = 29400
_MODEL = (
    "--num-layers 2 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 4 --lr 1e-3 --lr-warmup-iters 1 --log-interval 1 --bf16"
    " --use-distributed-optimizer"
)
# With these, traffic overlaps the forward and backward pass.
_OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
QUEUES = ("fifo", "bands")
Variables = dict[str, str]
REPORTED = ("ship_seconds", "window_seconds", "commit_seconds")
SIDES = {
    "gaps": (),
    "share": ("--deadpool-set", "link-gaps=off"),
    "local": ("--deadpool-protection", "local"),
}
_SLOW_STEPS = Path(__file__).parents[1] / "common" / "slow_steps.py"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    number = {"type": float, "metavar": "N"}
    parser.add_argument("--rate-mbit", default=200.0, help="of a link (default: 200)", **number)
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="of the model")
    parser.add_argument("--compute-seconds", default=0.8, help="slept in each step", **number)
    parser.add_argument(
        *("--compute-at",),
        choices=PLACES,
        nargs="*",
        default=PLACES,
        help="traffic after or before",
    )
    parser.add_argument("--queue", choices=QUEUES, nargs="*", default=QUEUES)
    parser.add_argument("--side", choices=SIDES, nargs="*", default=list(SIDES))
    parser.add_argument(
        "--options", default="", metavar="TEXT", help="--deadpool-* of the protected runs"
    )


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all sides in turns on each kind of link."""
    if reason := missing():
        raise UsageError(f"no hosts can be made here: {reason}")
    rows = []
    for place, queue in itertools.product(args.compute_at, args.queue):
        link = Link(args, place, queue)
        takes = {"plain": partial(link.take, base, None)} | {
            side: partial(link.take, base, (*args.options.split(), *SIDES[side]))
            for side in args.side
        }
        where = f"{queue}, computing at the {place}"
        runs = in_turns(where, args.rounds, takes)
        rows.append(row_of(f"{where}: plain", plain := runs.pop("plain")))
        for side, found in runs.items():
            commits = [event.data for run in found for event in link.commits[id(run)]]
            reported = {
                name: [s for data in commits if (s := data.get(name)) is not None]
                for name in REPORTED
            }
            rows.append(row_of(f"{where}: {side}", found, plain, **reported))
    return {"rate_mbit": args.rate_mbit, "hidden_size": args.hidden_size, "rows": rows}


class Link:
    """A kind of link, and the training on it. ``commits``: events, by the identity of a run."""

    def __init__(self, args: argparse.Namespace, place: str, queue: str) -> None:
        self._args, self._queue, self._steps = args, queue, args.steps + _SETTLE
        self.commits: dict[int, list[Any]] = {}
        overlap = _OVERLAP if place == "end" else ()
        steps = ("--train-iters", str(WARM_UP + 1 + self._steps))
        self._training = [
            *(*_MODEL.split(), *overlap, "--hidden-size", str(args.hidden_size), *steps)
        ]
        slept = {VARIABLE: str(args.compute_seconds), PLACE: place}
        self._environment = {**slept, "OMP_NUM_THREADS": "1"}

    def take(self, base: Path, flags: tuple[str, ...] | None, _: int) -> Measured:
        """Run once, without protection if there are no flags."""
        folder = base / uuid.uuid4().hex
        folder.mkdir()
        with Hosts(NODES, folder) as hosts:
            for host in hosts:
                self._lay(host)
            watch = Watch(self._steps, mark := uuid.uuid4().hex)
            run = self._plain if flags is None else partial(self._protected, flags)
            found = run(hosts, folder, watch, {**self._environment, MARK: mark})
        del found.step_seconds[:_SETTLE]
        return found

    def _lay(self, host: Host) -> None:
        """Limit the sending rate of a host."""
        rate = f"rate {self._args.rate_mbit:g}mbit burst 64kb latency 200ms"
        commands = [f"tc qdisc replace dev eth0 root handle 1: tbf {rate}"]
        if self._queue == "bands":
            commands.append("tc qdisc add dev eth0 parent 1: handle 10: pfifo_fast")
        for command in commands:
            done = host.run(*command.split())
            if done.returncode != 0:
                raise BenchError(f"{command}: {done.stderr.strip()}")

    def _plain(self, hosts: Hosts, folder: Path, watch: Watch, variables: Variables) -> Measured:
        """Run stock gloo."""
        shared = {
            **{k: v for k, v in os.environ.items() if not k.startswith("DEADPOOL_")},
            **variables,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(_PORT),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(NODES),
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, str(_SLOW_STEPS), "plain", *self._training]
        logs = [folder / f"rank{rank}.log" for rank in range(NODES)]
        ranks = [
            hosts[rank].start(command, log, {**shared, "RANK": str(rank)})
            for rank, log in enumerate(logs)
        ]
        seen = [0]

        def new_steps() -> int:
            text = "".join(log.read_text(errors="replace") for log in logs)
            before, seen[0] = seen[0], text.count(" | loss ")
            return seen[0] - before

        return watch.follow(
            *(new_steps, lambda: None not in [rank.poll() for rank in ranks]),
            lambda: "".join(log.read_text(errors="replace")[-2000:] for log in logs),
        )

    def _protected(
        self, flags: Sequence[str], hosts: Hosts, folder: Path, watch: Watch, variables: Variables
    ) -> Measured:
        """Run under agents of deadpool, whose events report each step."""
        directory = folder / "run"
        job = Job((str(_SLOW_STEPS), "protected", *self._training), NODES, 0, tuple(flags))
        tail = EventTail(RunDirectory(directory).events)
        with Cluster(hosts, directory, job, (), variables) as cluster:
            agents = cluster.agents.values()
            found = watch.follow(
                lambda: sum(event.kind is Kind.STEP for event in tail.poll()),
                lambda: None not in [agent.poll() for agent in agents],
                lambda: "".join(cluster.output(node)[-2000:] for node in range(NODES)),
            )
            commits = cluster.events(Kind.COMMITTED)
        read_run(found, directory, self._steps)
        self.commits[id(found)] = [e for e in commits if (e.iteration or 0) > WARM_UP + _SETTLE]
        return found
