"""Runs pretrain_gpt.py on several ranks: Megatron-LM is imported once, and the ranks are forks.

The parent of the ranks is a process of its own, because other tests of the same session import
megatron.core from site-packages. ``python -m tests.megatron_lm.harness.ranks CHECKOUT`` is that
parent: it takes one request per line and answers each with one line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.common.ports import free_port

IMPORT_SECONDS = 90.0
RUN_SECONDS = 90.0
_REPOSITORY = Path(__file__).parents[3]


@dataclass
class Trained:
    """What one rank saw. Losses and norms are ``float.hex()`` by iteration; most ranks see none.

    ``state``: hash of parameters, optimizer and random generators when training ended.
    ``replicated``: hash by name of each parameter that tensor-parallel ranks hold in common.
    ``forks``: how many processes the rank forked.
    """

    losses: dict[str, str] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    state: str = ""
    replicated: dict[str, str] = field(default_factory=dict)
    forks: int = 0
    output: str = ""


class RankParent:
    """The parent process of the ranks, as the tests see it."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.megatron_lm.harness.ranks", str(checkout)],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # numpy's OpenBLAS would start threads, and a fork needs there be none.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )
        self.facts = self._answer(IMPORT_SECONDS)

    def train(
        self, world_size: int, arguments: Sequence[str], *, exact: bool = True
    ) -> list[Trained]:
        """One run; answers what each rank saw. ``exact``: checkpoints are loaded as a protected run
        does it; else nothing of Megatron-LM's own loading is changed.

        Raises AssertionError with the output of the first rank that failed.
        """
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        request = {
            "world_size": world_size,
            "arguments": list(arguments),
            "exact": exact,
            "folder": str(folder),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        problem = self._answer(RUN_SECONDS + 10.0)["problem"]
        assert not problem, problem
        return [
            Trained(**json.loads((folder / f"{rank}.result").read_text()))
            for rank in range(world_size)
        ]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10.0)
        self._process.stdout.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        assert ready, "the parent of the ranks does not answer"
        line = self._process.stdout.readline()
        assert line, "the parent of the ranks has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


# --- in the parent ----------------------------------------------------------------------------


def _serve(checkout: Path) -> None:
    warnings.simplefilter("ignore")
    from deadpool_megatron.platform import stand_ins

    stand_ins.install_megatron_lm(checkout)
    import megatron.core
    import megatron.training
    import torch

    torch.set_num_threads(1)
    facts = {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "core": str(megatron.core.__file__),
        "training": str(megatron.training.__file__),
        "cuda here": torch.cuda.is_available(),
    }
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        problem = _run(checkout, request)
        print(json.dumps({"problem": problem}), flush=True)


def _run(checkout: Path, request: dict[str, Any]) -> str:
    """Fork the ranks and wait for them; answers what went wrong, or nothing."""
    folder = Path(request["folder"])
    port = free_port()
    pids = {}
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _rank(checkout, request, rank, port)
        pids[pid] = rank
    deadline = time.monotonic() + RUN_SECONDS
    failed: list[int] = []
    while pids and time.monotonic() < deadline:
        for pid, rank in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[pid]
            if done and status:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + 1.0)
        time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not failed and not pids:
        return ""
    first = failed[0] if failed else min(pids.values())
    verdict = "failed" if failed else "did not finish in time"
    return f"rank {first} {verdict}:\n{(folder / f'{first}.log').read_text()[-4000:]}"


def _rank(checkout: Path, request: dict[str, Any], rank: int, port: int) -> None:
    status = 1
    folder = Path(request["folder"])
    log = folder / f"{rank}.log"
    try:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(request["world_size"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )
        seen = Trained()
        _record(seen, exact=request["exact"])
        _train(checkout, request["arguments"])
        sys.stdout.flush()
        seen.output = log.read_text()
        (folder / f"{rank}.result").write_text(json.dumps(asdict(seen)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train(checkout: Path, arguments: list[str]) -> None:
    import runpy

    sys.argv = [str(checkout / "pretrain_gpt.py"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        # So ends --exit-interval.
        if leaving.code:
            raise


def _record(seen: Trained, *, exact: bool) -> None:
    """Have this rank note what it trains, and load checkpoints exactly, if wanted."""
    from megatron.training import training

    from deadpool_megatron.hooks.checkpoints.loading import load_exactly

    step, train, load = training.train_step, training.train, training.load_checkpoint
    fork = os.fork

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        answer = step(*args, **kwargs)
        losses, skipped, norm = answer[0], answer[1], answer[5]
        iteration = str(training.get_args().curr_iteration + 1)
        if losses:
            seen.losses[iteration] = float(losses["lm loss"]).hex()
        if skipped:
            seen.skipped.append(iteration)
        if norm is not None:
            seen.norms[iteration] = float(norm).hex()
        return answer

    def recorded_train(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        finally:
            _, models, optimizer, *_ = args
            seen.state, seen.replicated = _hashes(models, optimizer)

    def recorded_fork() -> int:
        seen.forks += 1
        return fork()

    os.fork = recorded_fork
    training.train_step = recorded_step
    training.train = recorded_train
    if exact:
        training.load_checkpoint = lambda *args, **kwargs: load_exactly(load, *args, **kwargs)


def _hashes(models: list[Any], optimizer: Any) -> tuple[str, dict[str, str]]:
    import hashlib

    import torch

    replicated = {
        f"{index}.{name}": hashlib.sha256(_bytes(parameter)).hexdigest()
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    }
    digest = hashlib.sha256()
    for tensor in _state(models, optimizer):
        digest.update(_bytes(tensor))
    digest.update(_bytes(torch.get_rng_state()))
    return digest.hexdigest(), replicated


def _state(models: list[Any], optimizer: Any) -> Iterator[Any]:
    from deadpool_megatron.hooks.capture.optimizer import inner_optimizers

    for model in models:
        yield from model.parameters()
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                state = inner.optimizer.state[parameter]
                yield from (state[name] for name in sorted(state))


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
