"""The communicators of one process through all that they meet, line by line: what they ask of torch
and of the store, what whoever calls them gets, and what they say of themselves.

Peers, NCCL and what of torch calls them are played. Expected are the files in lives/.
"""

import itertools
import json
import os  # noqa: F401 - in the files
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d  # noqa: F401 - in the files

from deadpool_megatron.comms import Communicators, EpochClosed, EpochStore, Limits
from deadpool_megatron.comms.gloo import GlooGroup
from deadpool_megatron.comms.in_flight.epoch import Epoch
from deadpool_megatron.comms.inner import GroupSpec
from deadpool_megatron.comms.nccl import NcclFabric
from tests.common import lives

ERRORS = [SimpleNamespace(name="SUCCESS"), SimpleNamespace(name="TIMEOUT")]
_WORDS = ("attach", "each", "groups", "reusing_groups", "about", "positions")
# What is asked for, and by whom; what fails or answers something, by the end of its name.
asked: list[str] = []
fails: dict[str, str] = {}
answers: dict[str, Any] = {}
left_open: list[bool] = []


def short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}s"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(short, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{short(k)}: {short(v)}' for k, v in value.items())}}}"
    known = isinstance(value, str | int | float | None | torch.device)
    return str(value) if known else type(value).__name__


class Torch:
    """An object of torch's that communicates: a group, a backend, or a Work."""

    def __init__(self, name: str, uid: int = 0) -> None:
        self._name = name
        self.uid = uid

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            name = f"{self._name}.{method}"
            asked.append(f"{name}{short([*args, *kwargs.values()])}")
            for end, text in fails.items():
                if name.endswith(end):
                    raise RuntimeError(text)
            found = [value for end, value in answers.items() if name.endswith(end)]
            return found[-1] if found else Torch(name)

        return call


class Fabric(NcclFabric):
    """Of groups that are called HOST the host waits for the operations, as over gloo."""

    def __init__(self, epoch: Epoch, _: str) -> None:
        super().__init__(epoch)

    def _clock(self) -> Any:
        """Each mark is a second after the one before."""
        forget: Any = lambda mark: asked.append(f"mark {mark} is forgotten")  # noqa: E731
        return SimpleNamespace(
            mark=itertools.count().__next__,
            is_recorded=lambda: False,
            is_passed=lambda _: answers["is_passed"],
            seconds=lambda earlier, later: later - earlier,
            forget=forget,
        )

    def _is_group_open(self) -> bool:
        return bool(left_open)

    def _recorded(self) -> bytes:
        numbers = {"last_enqueued_collective": 3, "last_started_collective": -1}
        status = {**numbers, "last_completed_collective": 3}
        return json.dumps({"pg_status": {"1": status}}).encode()

    def _build(self, spec: GroupSpec, store: dist.Store) -> tuple[Any, Any]:
        store.set("name", spec.name)
        colour = "" if spec.colour is None else f", colour {spec.colour}"
        asked.append(f"made {spec.place} for {spec.rank}{colour}")
        name = f"e{self._epoch.number} {spec.place}"
        return Torch(name), Torch(f"{name} backend", len(self._groups) + 1)

    def create(self, spec: GroupSpec, store: dist.Store) -> Any:
        if "HOST" in spec.description:
            return GlooGroup(spec, self._epoch, *self._build(spec, store))
        return super().create(spec, store)


class Meeting:
    """The place where peers have left what this rank leaves."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, epoch: int, key: str, value: bytes) -> None:
        asked.append(f"store {epoch}: {key} = {value.decode() if len(value) < 30 else '...'}")
        self.values[key] = value

    def has(self, epoch: int, keys: Any) -> bool:
        return True

    wait: Any = has

    def get(self, epoch: int, key: str, _: float) -> bytes:
        if key.endswith("groups"):
            return answers["agreed"]
        return self.values.get(key, b"1")


class Life:
    """``lines``: what was done, and what came of it. Each line is an expression; ``x`` and ``y``
    are tensors, and the groups go by their names."""

    def __init__(self, script: Sequence[str], options: dict[str, Any], _: Path) -> None:
        for one in (asked, fails, left_open):
            one.clear()
        answers.update({"get_error": ERRORS[0], ".exception": None, "is_passed": True})
        answers.update({".is_completed": True, ".is_success": True, "_for_group": 7})
        answers["agreed"] = b"1"
        limits = Limits(9.0, 0.0, 20.0, 0.0, options.pop("longest", 0.0))
        fault: Any = lambda *what: asked.append(f"fault {short(what)}")  # noqa: E731
        self.comms = Communicators(f"{__name__}:Fabric", limits, fault, **options)
        self.lines: list[str] = []
        self.newest, self.epochs = "", 1
        self.names = {**globals(), "comms": self.comms, "x": torch.ones(2), "y": torch.zeros(2)}
        self.names.update({name: getattr(self, name) for name in _WORDS})
        self.comms.install()
        try:
            for line in script:
                self.do(line, lambda line=line: eval(line, self.names))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            self.comms.uninstall()

    def do(self, what: str, act: Callable[[], Any]) -> None:
        """Do something; write down what was asked for, what came of it, and how things are now."""
        asked.clear()
        at = len(self.lines)
        with warnings.catch_warnings(record=True) as said:
            try:
                came = short(act())
            except (EpochClosed, Exception) as error:
                came = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        # Old epochs are freed, and a fabric aborts its groups, in threads of their own.
        seen = [line for line in asked if not line.endswith(("get_error[]", ".abort[]"))]
        seen += [
            f"warning: {warning.message}" for warning in said if warning.category is UserWarning
        ] + [f"-> {came}"]
        if (now := self.now()) != self.newest:
            seen.append(now)
        self.newest = now
        self.lines[at:at] = [what, *(f"    {line}" for line in seen)]

    def now(self) -> str:
        groups = self.comms._roster.groups()
        kinds = [f"{group.spec().place} {type(group.inner).__name__}" for group in groups]
        words = [
            f"now: {short(kinds)}",
            f"unusable_reason: {self.comms.unusable_reason}" if self.comms.unusable_reason else "",
        ]
        if (epoch := self.comms._current) is not None:
            flying = [work.operation for work in epoch.in_flight.values()]  # type: ignore[attr-defined]
            begun = list(map(vars, self.comms.operation_counts().values()))
            words.append(
                f"epoch {epoch.number} closed {epoch.closed} drained {self.comms._drained}"
                f" patient {epoch.allows_long_waits} in first step {epoch.in_first_step}"
                f" in flight {flying} abandoned {len(epoch.abandoned)}"
                f" begun {short(begun)} finished {self.comms.progress()}"
            )
        return "; ".join(filter(None, words))

    def attach(self, epoch: int, rank: int = 1) -> None:
        self.epochs, self.store = epoch, EpochStore(Meeting(), epoch, 1.0)
        self.comms.attach(epoch, self.store, rank, 60.0)

    def each(self, act: Callable[[], Any], *ends: str) -> None:
        """Do something well, then with each of the calls to torch failing, each in a new epoch."""
        self.do("    well", act)
        for end, text in itertools.product(ends, ("a wrong shape", "[/gloo/x.cc] peer")):
            self.attach(self.epochs + 1)
            fails[end], answers[".exception"] = text, RuntimeError(text)
            self.do(f"    {end}: {text}", act)
            fails.clear()
            answers[".exception"] = None
            self.do("    again", act)
        asked.clear()

    def groups(self) -> None:
        pipeline = "PIPELINE_MODEL_PARALLEL_GROUP"
        for ranks, words in (
            *(([0, 1], "ROW"), ([1, 3], pipeline), ([2, 3], "ROW")),
            *(([0, 1], "HOST"), ([0, 2], pipeline), ([2, 3], "HOST")),
        ):
            group = dist.new_group(ranks, backend="nccl", group_desc=words)
            if 1 in ranks:
                assert self.names.setdefault(words, group) is group

    def reusing_groups(self) -> None:
        with self.comms.reusing_groups():
            self.groups()
            dist.new_group([0, 3], group_desc="NEW")

    def about(self, group: Any) -> list[Any]:
        asks = ("name", "getBackendName", "getRank", "getSize", "rank", "size")
        known = [group.description, group._device_types, group.bound_device_id]
        backend = group.get_backend(torch.device("cpu")).name()
        ranks = dist.get_process_group_ranks(group)
        return [
            *(getattr(group, n)() for n in asks),
            *known,
            backend,
            dist.get_backend(group),
            ranks,
        ]

    def positions(self) -> Any:
        return {place: vars(position) for place, position in (self.comms.positions() or {}).items()}


def test_a_life_is_as_it_was_before(tmp_path):
    live: Any = lambda *life: Life(*life).lines  # noqa: E731
    lives.compare(Path(__file__).parent / "lives" / "one_process.txt", live, tmp_path)
