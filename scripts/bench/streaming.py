#!/usr/bin/env python
"""Whether training goes first on a link that protection shares: step time with and without it.

    sudo .venv/bin/python scripts/bench/streaming.py [--rounds N] [--steps N] [--out FILE]

Two hosts made of namespaces (root is needed), each with a link of limited rate (tbf), train one
model data-parallel, in turns: without protection (stock gloo), with copies that go into the gaps of
training's traffic, with copies that always go at their share (link-gaps=off), and
without copies (``--deadpool-protection local``), which shows the part of the link. Computing is a
sleep, so that the link is the bottleneck; either before the traffic of a step or after it, when
parameters are gathered and gradients reduced just as copies could leave. With the queue ``fifo``
the link has no classes; with ``bands`` it has those that Linux gives every device by default
(pfifo_fast), in which copies come last. The first steps of a run are not measured; all others
count.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.command import in_turns, parser_of, run_bench
from common.machine import ROOT
from common.slow_steps import PLACE, PLACES, VARIABLE
from common.termination import orderly_termination
from common.trainings import BenchError

from deadpool_megatron.cli.run_result import read_story
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import EventTail, Kind
from deadpool_megatron.observe.steps import summary

sys.path.insert(0, str(ROOT))  # the hosts are those of the tests
from tests.netns.lab.cluster import Cluster, Job
from tests.netns.lab.hosts import Host, Hosts, missing

NODES = 2
# Longer than the pace needs to know the window, see vault/shared_nic.py.
_WARM_UP = 8
_POLL_SECONDS = 0.005
_SILENCE_SECONDS = 120.0
_PORT = 29400
_MODEL = (
    "--num-layers 2 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 4 --lr 1e-3 --lr-warmup-iters 1 --log-interval 1 --bf16"
    " --use-distributed-optimizer"
)
# With these, traffic overlaps the forward and backward pass.
_OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
QUEUES = ("fifo", "bands")
# In events, as the longest or the shortest of all roles in some seconds.
REPORTED = ("ship_seconds", "window_seconds", "commit_seconds")
# The sides with copies, named after the rules of their pace.
PACES = ("gaps", "share")
_SLOW_STEPS = Path(__file__).with_name("common") / "slow_steps.py"


@dataclass
class Measured:
    """One run: seconds of each measured step, and if it is protected, figures of its copies."""

    step_seconds: list[float] = field(default_factory=list)
    gate_waits: list[tuple[int, float]] = field(default_factory=list)  # iteration, seconds
    reported: dict[str, list[float]] = field(default_factory=dict)  # by name in REPORTED
    shipped_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Link:
    """The settings of all runs. ``compute_at``: the place of the computation in a step."""

    rate_mbit: float
    hidden_size: int
    compute_at: str
    compute_seconds: float
    steps: int
    flags: tuple[str, ...]

    def lay(self, host: Host, queue: str) -> None:
        """Limit the sending rate of a host."""
        rate = f"{self.rate_mbit:g}mbit"
        limit = f"tc qdisc replace dev eth0 root handle 1: tbf rate {rate} burst 64kb latency 200ms"
        commands = [limit]
        if queue == "bands":
            commands.append("tc qdisc add dev eth0 parent 1: handle 10: pfifo_fast")
        for command in commands:
            done = host.run(*command.split())
            if done.returncode != 0:
                raise BenchError(f"{command}: {done.stderr.strip()}")

    @property
    def training(self) -> list[str]:
        """Flags of the trainer."""
        overlap = _OVERLAP if self.compute_at == "end" else ()
        size = ("--hidden-size", str(self.hidden_size))
        steps = ("--train-iters", str(_WARM_UP + 1 + self.steps))
        return [*_MODEL.split(), *overlap, *size, *steps]

    @property
    def environment(self) -> dict[str, str]:
        """For every process of a run."""
        slept = {VARIABLE: str(self.compute_seconds), PLACE: self.compute_at}
        return {**slept, "OMP_NUM_THREADS": "1"}


def run_plain(link: Link, hosts: Hosts, base: Path) -> Measured:
    """Run stock gloo on the same hosts."""
    command = [sys.executable, str(_SLOW_STEPS), "plain", *link.training]
    shared = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DEADPOOL_")},
        **link.environment,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(_PORT),
        "WORLD_SIZE": str(NODES),
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONUNBUFFERED": "1",
    }
    logs = [base / f"{uuid.uuid4().hex}-{rank}.log" for rank in range(NODES)]
    ranks = [
        hosts[rank].start(command, logs[rank], {**shared, "RANK": str(rank)})
        for rank in range(NODES)
    ]
    seen = [0] * NODES

    def new_steps() -> int:
        texts = [log.read_text(errors="replace") for log in logs]
        lines = [sum(" | loss " in line for line in text.split("\n")[:-1]) for text in texts]
        new = sum(lines) - sum(seen)
        seen[:] = lines
        return new

    def output() -> str:
        return "".join(log.read_text(errors="replace")[-2000:] for log in logs)

    try:
        return Measured(_watch(link, new_steps, lambda: _over(ranks), output))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run_protected(link: Link, hosts: Hosts, base: Path) -> Measured:
    """Run under agents of deadpool, whose events report each step."""
    directory = base / uuid.uuid4().hex
    command = (str(_SLOW_STEPS), "protected", *link.training)
    job = Job(command, NODES, 0, link.flags)
    tail = EventTail(RunDirectory(directory).events)

    def new_steps() -> int:
        return sum(event.kind is Kind.STEP for event in tail.poll())

    with Cluster(hosts, directory, job, (), link.environment) as cluster:

        def output() -> str:
            return "".join(cluster.output(node)[-2000:] for node in range(NODES))

        def over() -> bool:
            return _over(list(cluster.agents.values()))

        measured = Measured(_watch(link, new_steps, over, output))
        cluster.wait_end()
        commits = [e for e in cluster.events(Kind.COMMITTED) if (e.iteration or 0) > _WARM_UP]
    waits = read_story(directory).gate_waits
    measured.gate_waits = [(iteration or 0, s) for (_, iteration), s in waits.items()]
    measured.shipped_bytes = [event.data["bytes"] for event in commits]
    measured.reported = {
        name: [s for event in commits if (s := event.data[name]) is not None] for name in REPORTED
    }
    return measured


def _over(processes: list[subprocess.Popen[bytes]]) -> bool:
    return None not in [process.poll() for process in processes]


def _watch(
    link: Link, new_steps: Callable[[], int], over: Callable[[], bool], output: Callable[[], str]
) -> list[float]:
    """Return the seconds of each measured step, as this process sees them reported."""
    times: list[float] = []
    expected = _WARM_UP + 1 + link.steps
    seen_at = time.perf_counter()
    while len(times) < expected:
        ended = over()  # before the poll: the last reports before the end are then seen
        for _ in range(new_steps()):
            seen_at = time.perf_counter()
            times.append(seen_at)
        if len(times) < expected and (ended or time.perf_counter() - seen_at > _SILENCE_SECONDS):
            raise BenchError(f"saw {len(times)} steps of {expected}:\n{output()}")
        time.sleep(_POLL_SECONDS)
    return [after - before for before, after in itertools.pairwise(times[_WARM_UP:])]


def measure(link: Link, queue: str, rounds: int, base: Path) -> dict[str, Any]:
    """Run all sides in turns on one kind of link."""
    even = replace(link, flags=(*link.flags, "--deadpool-set", "link-gaps=off"))
    local = replace(link, flags=(*link.flags, "--deadpool-protection", "local"))
    runs: dict[str, Callable[[Hosts, Path], Measured]] = {
        "plain": partial(run_plain, link),
        "gaps": partial(run_protected, link),
        "share": partial(run_protected, even),
        "local": partial(run_protected, local),
    }

    def take(name: str, number: int) -> Measured:
        place = base / f"{link.compute_at}-{queue}-{name}-{number}"
        place.mkdir()
        with Hosts(NODES, place) as hosts:
            for host in hosts:
                link.lay(host, queue)
            return runs[name](hosts, place)

    sides = in_turns(queue, rounds, {name: partial(take, name) for name in runs})
    times = {
        name: summary([s for run in runs for s in run.step_seconds]) for name, runs in sides.items()
    }
    found: dict[str, Any] = {
        "queue": queue,
        "rate_mbit": link.rate_mbit,
        "hidden_size": link.hidden_size,
        "compute_at": link.compute_at,
        "step_seconds": times,
        "runs": {name: [run.step_seconds for run in runs] for name, runs in sides.items()},
    }
    for name in PACES:
        found[name] = {
            "ratio": _ratios(times[name], times["plain"]),
            "ratio_to_shipping_nothing": _ratios(times[name], times["local"]),
            "ratio_of_each_pair": [
                summary(b.step_seconds)["mean"] / summary(a.step_seconds)["mean"]
                for a, b in zip(sides["plain"], sides[name], strict=True)
            ],
            "gate_waits": [run.gate_waits for run in sides[name]],
            "gate_seconds": sum(
                s for run in sides[name] for i, s in run.gate_waits if i > _WARM_UP
            ),
            **{
                key: summary([s for run in sides[name] for s in run.reported[key]])
                for key in REPORTED
            },
            "shipped_bytes": summary([float(n) for run in sides[name] for n in run.shipped_bytes]),
        }
    return found


def _ratios(above: Mapping[str, float], below: Mapping[str, float]) -> dict[str, float]:
    return {key: above[key] / below[key] for key in ("mean", "p50")}


@orderly_termination()
def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 2, "pairs of runs", 30)
    parser.add_argument("--rate-mbit", type=float, default=200.0, metavar="MBIT", help="of a link")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="of the model")
    parser.add_argument(
        "--compute-seconds", type=float, default=0.8, metavar="S", help="slept in each step"
    )
    parser.add_argument(
        "--compute-at",
        choices=PLACES,
        nargs="*",
        default=list(PLACES),
        help="before the traffic of a step, or after it",
    )
    parser.add_argument("--queue", choices=QUEUES, nargs="*", default=list(QUEUES))
    args, flags = parser.parse_known_args()
    if not all(flag.startswith("--deadpool-") for flag in flags[::2]):
        parser.error(f"unknown arguments {' '.join(flags)}; --deadpool-* go to the protected runs")
    if reason := missing():
        parser.error(f"no hosts can be made here: {reason}")

    def measured(base: Path) -> dict[str, Any]:
        cases = []
        for place, queue in itertools.product(args.compute_at, args.queue):
            sizes = (args.rate_mbit, args.hidden_size, place, args.compute_seconds, args.steps)
            cases.append(measure(Link(*sizes, tuple(flags)), queue, args.rounds, base))
            show(cases[-1])
        return {
            "compute_seconds": args.compute_seconds,
            "flags": flags,
            "warm_up_steps": _WARM_UP,
            "cases": cases,
            "load_after": os.getloadavg()[0],
        }

    return run_bench("streaming", args.out, measured)


def show(case: Mapping[str, Any]) -> None:
    """Print a line for each rule of pace to standard error."""
    for name in PACES:
        where = f"{case['queue']}, computing at the {case['compute_at']}, {name}"
        ratio = case[name]["ratio"]["mean"]
        print(f"{where}: step over unprotected {ratio:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
