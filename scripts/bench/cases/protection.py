"""How much does each scheme of protection cost, and how fast does it recover a lost node?

Four roles (PP2 x DP2, distributed optimizer) on four nodes and a spare, at three sizes. In each
round every scheme takes its turn, and the same training without protection (stock gloo) before
them. The first steps warm up; all others before the fault count. Then one node is killed (``local``
and ``local-twice``, which survive no lost node: one process), and the run continues for some steps.

Per scheme: processor time of our threads, step time over that without protection, bytes stored in
the members' own slots and for others, seconds of the recovery and of its phase ``restore``. Exit
status 1 if a struck run has not computed the same as an undisturbed run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from common.frame import Facts, in_turns
from common.struck import NODES, SIZES, TOKENS, run_struck, sizes_of, training_arguments
from common.trainings import WARM_UP, Measured, is_identical, parameters, row_of, run_plain

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root

MINUTES = 45
ROUNDS, STEPS = 2, 12
QUICK = ("--rounds", "1", "--steps", "2", "--size", "tiny", "--scheme", "parity")
SCHEMES: dict[str, list[str]] = {
    "buddy": ["--deadpool-protection", "buddy"],
    "parity": ["--deadpool-protection", "parity", "--deadpool-parity-group", "2"],
    "parity of 3": ["--deadpool-protection", "parity", "--deadpool-parity-group", "3"],
    "local": ["--deadpool-protection", "local"],
    "local-twice": ["--deadpool-protection", "local-twice"],
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    parser.add_argument("--size", choices=SIZES, nargs="*", default=["5M", "20M", "50M"])
    parser.add_argument("--scheme", choices=SCHEMES, nargs="*", default=list(SCHEMES))


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all schemes of each size in turns."""
    facts: Facts = {"nodes": NODES, "tokens_per_step": TOKENS, "at": "parameters", "rows": []}
    facts["wrong"] = []
    for name in args.size:
        count = parameters(sizes_of(name))
        stored: dict[str, list[Counter[str]]] = {scheme: [] for scheme in args.scheme}

        def struck(scheme: str, _: int, name: str = name, stored: Facts = stored) -> Measured:
            found: Counter[str] = Counter()

            def look(directory: Path, reported: Sequence[int]) -> None:
                if not found and any(iteration > WARM_UP for iteration in reported):
                    found.update(segment_bytes(directory))

            victim = "self" if scheme.startswith("local") else "node"
            stored[scheme].append(found)
            return run_struck(name, SCHEMES[scheme], args.steps, base, victim, look=look)

        training = training_arguments(name, WARM_UP + 1 + args.steps)
        sides = {"plain": lambda _, t=training: run_plain(t, NODES, args.steps, base)}
        sides |= {scheme: partial(struck, scheme) for scheme in args.scheme}
        undisturbed = run_struck(name, SCHEMES["buddy"], args.steps, base)
        runs = in_turns(name, args.rounds, sides)
        facts["rows"].append(row_of("plain", plain := runs.pop("plain"), at=count))
        for scheme, found in runs.items():
            recoveries = [run.result.recoveries[0] for run in found if run.result]
            more = {
                f"{part}_bytes_per_parameter": [each[part] / count for each in stored[scheme]]
                for part in ("own", "kept")
            }
            more["recovery_seconds"] = [each.seconds or 0.0 for each in recoveries]
            more["restore_seconds"] = [each.phases.get("restore", 0.0) for each in recoveries]
            more["steps_recomputed"] = [float(each.steps_recomputed) for each in recoveries]
            facts["rows"].append(row_of(scheme, found, plain, count, **more))
            if not all(is_identical(undisturbed, run) for run in found):
                facts["wrong"].append(f"{name}, {scheme}: not bit-identical to the undisturbed run")
    return facts


def segment_bytes(directory: Path) -> Counter[str]:
    """Return the memory of all nodes' segments: ``own`` slots of members, and ``kept``."""
    found: Counter[str] = Counter()
    for path in segment_root(RunDirectory(directory).read_run().run_id).glob("*/*.seg"):
        with suppress(FileNotFoundError):
            part = "own" if path.name.startswith("own-") else "kept"
            found[part] += path.stat().st_blocks * 512
    return found
