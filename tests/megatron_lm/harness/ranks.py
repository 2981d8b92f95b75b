"""Runs pretrain_gpt.py on several ranks without protection: forks of a process that has imported
Megatron-LM with the stand-ins for a GPU, and nothing else of this package.

``python -m tests.megatron_lm.harness.ranks CHECKOUT RESULT LOADING ARGUMENTS...`` is one rank.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.common import forks
from tests.common.ports import free_port
from tests.common.wait import wait_for
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.stock import TREE_VARIABLE

RUN_SECONDS = 90.0
_EXACT = "exact"


@dataclass
class Trained:
    """The results of a rank. Losses, norms and rates, if any, are ``float.hex()`` by iteration.

    ``state``: hash of parameters, optimizer and random generators when training ended.
    ``replicated``: hash by name of each parameter that tensor-parallel ranks hold in common.
    ``forks``: how many processes the rank forked.
    """

    losses: dict[str, str] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    rates: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    state: str = ""
    replicated: dict[str, str] = field(default_factory=dict)
    forks: int = 0


def train(
    checkout: Path, folder: Path, arguments: Sequence[str], *, exact: bool = True, ranks: int = 4
) -> list[Trained]:
    """Return the results of each rank of a run. ``folder``: made here; ``exact``: load checkpoints
    as a protected run does, else as Megatron-LM does.

    Raises AssertionError with the output of a rank that failed.
    """
    folder.mkdir()
    server = forks.server(["tests.megatron_lm.harness.stock"], {TREE_VARIABLE: str(checkout)})
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    place["GLOO_SOCKET_IFNAME"] = "lo"
    loading = _EXACT if exact else "its own"
    started, logs = [], [folder / f"{rank}.log" for rank in range(ranks)]
    for rank, log in enumerate(logs):
        with log.open("wb") as output, open(os.devnull, "rb") as nothing:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), TREE_VARIABLE: str(checkout)}
            given = (str(checkout), str(log.with_suffix(".result")), loading, *arguments)
            process = server.start(
                *("tests.megatron_lm.harness.ranks", *given),
                environment={**os.environ, **place, **own},
                handles={0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()},
            )
            started.append(process)

    def failed() -> list[str]:
        return [
            log.read_text()[-4000:] for rank, log in zip(started, logs, strict=True) if rank.poll()
        ]

    def ended() -> bool:
        return bool(failed()) or all(process.poll() is not None for process in started)

    try:
        wait_for("the end of all ranks", ended, RUN_SECONDS)
        assert not (problems := failed()), problems[0]
    finally:
        for process in started:
            process.kill()
            process.wait(10.0)
    return [Trained(**json.loads(log.with_suffix(".result").read_text())) for log in logs]


def three_runs(
    checkout: Path, folder: Path, flags: Mapping[str, object], legs: Sequence[tuple[int, int]]
) -> Iterator[tuple[list[Trained], Path]]:
    """Train without protection to the iteration of each leg (ranks, iteration), from the checkpoint
    of the leg before; yield the results of its ranks, and its folder of checkpoints."""
    before = None
    for number, (ranks, last) in enumerate(legs):
        saved = folder / f"leg{number}-saves"
        changes = {"load": before, "save": saved, "save_interval": 1000, "exit_interval": last}
        arguments = small(**{**flags, **changes})
        yield train(checkout, folder / f"leg{number}", arguments, ranks=ranks), saved
        before = saved


# --- in a rank --------------------------------------------------------------------------------


def _rank(checkout: Path, result: Path, loading: str, arguments: list[str]) -> None:
    seen = Trained()
    _record(seen, exact=loading == _EXACT)
    _train(checkout, arguments)
    result.write_text(json.dumps(asdict(seen)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
    from megatron.training import training

    from deadpool_megatron.megatron.exact_load import load_exactly

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
        rate = get_canonical_lr_for_logging(args[3].param_groups)
        seen.rates[iteration] = float(rate or 0.0).hex()
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
    from deadpool_megatron.megatron.optimizer import inner_optimizers

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
    _rank(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
