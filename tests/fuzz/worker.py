"""Tries one draw on one tag of Megatron-LM, in a process that has nothing else of it:
``python -m tests.fuzz.worker ORDER``, an Order as JSON. Prints lines of JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.common import forks
from tests.fuzz.cleanup import end_all
from tests.fuzz.draws import FEATURES, Draw, draw, without
from tests.fuzz.minimal import smallest

_ROOT = Path(__file__).parents[2]
# Megatron saves the gaps between parameters of a bucket as uninitialized memory: with
# these of glibc such memory is the same in each process, and what is read from it is never zero.
_SAME_MEMORY = {"MALLOC_PERTURB_": "85", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
_FOLDERS = (_ROOT, _ROOT / "tests" / "megatron_lm" / "harness" / "emerging")


@dataclass(frozen=True)
class Order:
    """``only``: the features that keep what was drawn (None: all)."""

    seed: int
    tag: str
    directory: str
    only: Sequence[str] | None = None
    shrinks: bool = True

    @property
    def drawn(self) -> Draw:
        """The draw to try. Raises ValueError for features that need others."""
        whole = draw(self.seed, self.tag)
        return whole if self.only is None else without(whole, _others(self.only))


def _others(kept: Sequence[str]) -> list[str]:
    return [name for name in FEATURES if name not in kept and name != "tag"]


def work(order: Order) -> Iterator[dict[str, Any]]:
    """Run the worker; yield its messages: ``status`` lines, and a ``row`` at the end."""
    from tests.megatron_lm.harness.checkout import checkout

    paths = (*map(str, (*_FOLDERS, checkout(order.tag))), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"MEGATRON_LM_TAG": order.tag, "OMP_NUM_THREADS": "1"}
    environment |= _SAME_MEMORY
    environment.pop("MEGATRON_LM_DIR", None)
    command = [sys.executable, "-W", "ignore", "-m", __name__, json.dumps(asdict(order))]
    log = Path(f"{order.directory}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=environment, cwd=_ROOT, text=True, stdout=subprocess.PIPE, stderr=errors
        ) as worker,
    ):
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        except BaseException:  # also after a signal to end
            worker.kill()
            raise
        finally:
            for directory in (order.directory, f"{order.directory}.smaller"):
                end_all(Path(directory))
    if worker.returncode:
        raise RuntimeError(f"the trial itself failed: see {log}\n{log.read_text()[-2000:]}")


def _send(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _main(order: Order) -> None:
    from deadpool_megatron.megatron import stand_ins
    from tests.fuzz.trial import Found, trial
    from tests.megatron_lm.harness.arguments import real_text
    from tests.megatron_lm.harness.runs import tree
    from tests.reach.trial import Result

    stand_ins.install_megatron_lm(tree())
    directory, drawn = Path(order.directory), order.drawn
    data = directory.with_suffix(".data")
    for name in ("long", "short"):
        real_text(data / name)
        for path in (data / name).glob("text.*"):
            path.rename(data / f"{name}{path.suffix}")
    _send(status="trains, undisturbed and struck")
    found = trial(directory, data, drawn)
    kept = list(FEATURES) if order.only is None else list(order.only)
    if order.shrinks and found.result is Result.DIFFERENT:
        tries = 0

        def fails(features: Sequence[str]) -> bool:
            nonlocal tries
            tries += 1
            _send(status=f"try {tries}: with {len(features)} features")
            try:
                less = without(drawn, _others(features))
            except ValueError:
                return False
            again: Found = trial(directory.with_suffix(".smaller"), data, less)
            return again.result is Result.DIFFERENT

        kept = smallest([name for name in kept if name != "tag"], fails)
    _send(row={**asdict(found), "kept": kept})


if __name__ == "__main__":
    try:
        _main(Order(**json.loads(sys.argv[1])))
    finally:
        forks.stop()
