"""The communicators of one process through all that they meet, line by line: what they ask of torch
and of the store, what whoever calls them gets, and what they say of themselves.

Peers, NCCL and what of torch calls them are played. Expected are the files in lives/.
"""

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deadpool_megatron.comms import Communicators, EpochClosed, EpochStore, Limits
from deadpool_megatron.comms.gloo import GlooGroup
from deadpool_megatron.comms.in_flight.attached_epoch import Epoch
from deadpool_megatron.comms.inner import GroupSpec
from deadpool_megatron.comms.nccl import NcclFabric
from tests.common import lives

LIVES = Path(__file__).parent / "lives"
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

    def _is_left_open(self) -> bool:
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
    """``lines``: what was done, and what came of it."""

    def __init__(self, **options: Any) -> None:
        for one in (asked, fails, left_open):
            one.clear()
        answers.update({"get_error": SimpleNamespace(name="SUCCESS"), ".exception": None})
        answers.update({".is_completed": True, ".is_success": True, "_for_group": 7})
        answers["agreed"] = b"1"
        limits = Limits(9.0, 0.0, 20.0, 0.0, options.pop("longest", 0.0))
        played = f"{__name__}:Fabric"
        fault: Any = lambda *what: asked.append(f"fault {short(what)}")  # noqa: E731
        self.comms = Communicators(played, limits, fault, **options)
        self.lines: list[str] = []
        self.newest = ""
        self.epochs = 1

    def do(self, what: str, act: Callable[[], Any]) -> Any:
        """Do something; write down what was asked for, what came of it, and how things are now."""
        asked.clear()
        found = None
        with warnings.catch_warnings(record=True) as said:
            try:
                found = act()
                came = short(found)
            except (EpochClosed, Exception) as error:
                came = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        # Old epochs are freed, and a fabric aborts its groups, in threads of their own.
        seen = [line for line in asked if not line.endswith(("get_error[]", ".abort[]"))]
        newest = f"e{self.comms._current.number if self.comms._current else 0} "
        seen += sorted(x for x in asked if x.startswith(newest) and x.endswith(".abort[]"))
        self.lines += [what, *(f"    {line}" for line in seen)]
        self.lines += [f"    warning: {one.message}" for one in said]
        self.lines.append(f"    -> {came}")
        if (now := self.now()) != self.newest:
            self.lines.append(f"    {now}")
        self.newest = now
        return found

    def now(self) -> str:
        groups = self.comms._roster.groups()
        kinds = [f"{one.spec().place} {type(one.inner).__name__}" for one in groups]
        words = [f"now: {short(kinds)}", f"ruin: {self.comms.ruin}" if self.comms.ruin else ""]
        if (epoch := self.comms._current) is not None:
            flying = [work.operation for work in epoch.in_flight.values()]  # type: ignore[attr-defined]
            begun = list(map(vars, self.comms.begun().values()))
            words.append(
                f"epoch {epoch.number} closed {epoch.closed} drained {self.comms._drained}"
                f" patient {epoch.is_patient} in first step {epoch.in_first_step}"
                f" in flight {flying} abandoned {len(epoch.abandoned)}"
                f" begun {short(begun)} finished {self.comms.progress()}"
            )
        return "; ".join(filter(None, words))

    def attach(self, epoch: int, rank: int = 1) -> None:
        self.store = EpochStore(Meeting(), epoch, 1.0)
        self.do(
            f"attach in epoch {epoch} as {rank}",
            lambda: self.comms.attach(epoch, self.store, rank, 60.0),
        )

    def try_each(self, what: str, ends: Iterable[str], act: Callable[[], Any]) -> None:
        """Do something well, then with each of the calls to torch failing, each in a new epoch."""
        self.do(what, act)
        for end, text in itertools.product(ends, ("a wrong shape", "[/gloo/x.cc] peer")):
            self.epochs += 1
            self.store = EpochStore(Meeting(), self.epochs, 1.0)
            self.comms.attach(self.epochs, self.store, 1, 60.0)
            fails[end], answers[".exception"] = text, RuntimeError(text)
            self.do(f"{what}: {end[1:]} {text}", act)
            fails.clear()
            answers[".exception"] = None
            self.do("again", act)


@pytest.fixture
def live() -> Iterator[Callable[..., Life]]:
    found: list[Life] = []

    def begin(**options: Any) -> Life:
        found.append(Life(**options))
        found[0].comms.install()
        return found[0]

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()
    found[0].comms.uninstall()


def groups() -> dict[str, Any]:
    made = {
        "ROW": dist.new_group([0, 1], group_desc="ROW"),
        "PIPELINE": dist.new_group([1, 3], group_desc="PIPELINE_MODEL_PARALLEL_GROUP"),
        "OTHERS": dist.new_group([2, 3], group_desc="ROW"),
        "HOST": dist.new_group([0, 1], backend="nccl", group_desc="HOST"),
    }
    made["THEIRS"] = dist.new_group([0, 2], group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
    made["THEIR HOST"] = dist.new_group([2, 3], backend="nccl", group_desc="HOST")
    return made


def test_a_life_is_as_it_was_before(live: Callable[..., Life]) -> None:
    life = live(rebuild="one-by-one", longest=30.0)
    do, comms = life.do, life.comms
    do("attach before there is a group", lambda: comms.attach(1, dist.HashStore(), 1, 1.0))
    do("init", lambda: dist.init_process_group(rank=1, world_size=4))
    made = groups()
    do("groups", lambda: made)
    world, row, host = c10d._get_default_group(), made["ROW"], made["HOST"]
    for group in (world, row, host):
        answered_by(life, group)
    do("another seam", comms.install)
    objects = [1, 2]
    do("objects", lambda: [dist.broadcast_object_list(objects, 0), objects])
    do("scattered", lambda: [dist.scatter_object_list(objects, list("abcd"), 1), objects])
    do("received", lambda: [dist.recv_object_list(objects, 0), objects])
    do("another role", lambda: comms.renumber(2))
    do("of another shape", lambda: comms.renumber(0))
    do("as before", lambda: comms.renumber(1))

    def again() -> Any:
        with comms.found_again():
            found = groups()
            do("one more", lambda: dist.new_group([0, 3], group_desc="NEW"))
        return [found[name] is made[name] for name in made]

    do("found again", again)
    do("be patient", lambda: comms.be_patient(True))
    do("interrupt nothing", lambda: comms.interrupt(0))
    do("drain nothing", comms.drain)
    do("too late", lambda: comms.attach(0, dist.HashStore(), 1, 1.0))
    life.attach(1)
    for name in ("ROW", "HOST"):
        operations(life, name, made[name])
    measured(life)
    life.attach(101, 2)
    life.attach(102)
    do("be patient no more", lambda: comms.be_patient(False))
    do("a time-out", lambda: row.set_timeout(timedelta(seconds=3)))
    do("another", lambda: c10d._set_pg_timeout(timedelta(seconds=4), host))
    do("a new group", lambda: dist.new_group([1, 2], group_desc="NEW"))
    do("one of others", lambda: dist.new_group([2, 3], group_desc="NEW"))
    do("destroyed", lambda: dist.destroy_process_group(row))
    fails["eager_connect_single_device"] = "nobody /gloo/ came"
    do("a group that fails", lambda: dist.new_group([0, 1, 2], group_desc="FAILS"))
    fails.clear()
    x = torch.ones(1)
    do("a send that is dropped", lambda: dist.isend(x, 0, group=host) and None)
    do("its end", comms.finish_iteration)
    do("one more send", lambda: dist.isend(x, 0, group=host) and None)
    life.attach(103)
    do("a receive", lambda: dist.irecv(x, 0, group=host) and None)
    do("an interrupt of an older epoch", lambda: comms.interrupt(102))
    do("one of this", lambda: comms.interrupt(103))
    do("closed", lambda: dist.all_reduce(x))
    do("nor new groups", lambda: dist.new_group([1], group_desc="LATE"))
    do("nor iterations", comms.finish_iteration)
    life.attach(104)
    do("drain", comms.drain)
    do("still closed", lambda: dist.all_reduce(x))
    do("its backend", lambda: world.get_backend(torch.device("cpu")))
    do("its blocks", lambda: world._start_coalescing(torch.device("cpu")))
    do("its barrier", lambda: world.monitored_barrier())
    life.attach(104)
    do("too late again", lambda: comms.attach(103, dist.HashStore(), 1, 1.0))
    do("drain", comms.drain)
    do("detach", comms.detach)
    do("alone", lambda: [dist.all_reduce(x), x])
    life.attach(105)
    fails["abort"] = "it is broken"
    do("interrupt of all", lambda: comms.interrupt(109))
    do("drain", comms.drain)
    do("gone", dist.destroy_process_group)
    lives.hold(LIVES / "one_process.txt", life.lines)


def test_groups_that_are_split_from_world(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a group of NCCL that was left open costs."""
    life = live(rebuild="split")
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    dist.init_process_group(rank=1, world_size=4, device_id=torch.device("cpu:0"))
    made = groups()
    life.do("it stays", lambda: os.environ["TORCH_DIST_INIT_BARRIER"])
    answered_by(life, made["ROW"])
    life.attach(1)
    operations(life, "ROW", made["ROW"], ["barrier"])
    left_open.append(True)
    answers["agreed"] = b"2"
    life.attach(102)
    life.do("drain", life.comms.drain)
    lives.hold(LIVES / "split.txt", life.lines)


def answered_by(life: Life, group: Any) -> None:
    """Whatever is asked of a group."""
    asks = ("name", "getBackendName", "getRank", "getSize", "rank", "size")
    life.do("a group", lambda: [getattr(group, name)() for name in asks])
    life.do("its words", lambda: [group.description, group._device_types, group.bound_device_id])
    life.do("its backend", lambda: group.get_backend(torch.device("cpu")).name())
    life.do("no backend", lambda: group.get_backend(torch.device("cuda")))
    life.do("by torch", lambda: [dist.get_backend(group), dist.get_process_group_ranks(group)])


def operations(life: Life, name: str, group: Any, kinds: Sequence[str] = ()) -> None:
    """Each kind once well, once with an error of the caller's, once with one of a peer, when it
    begins and when it is waited for."""
    do, x, y = life.do, torch.ones(2), torch.zeros(2)
    known: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: dist.all_reduce(x, group=group),
        "broadcast": lambda: dist.broadcast(x, 1, group=group, async_op=True).wait(),
        "reduce_scatter": lambda: dist.reduce_scatter(y, [x, x], group=group),
        "send": lambda: dist.send(x, 0, group=group),
        "recv": lambda: dist.irecv(y, 0, group=group).wait(timedelta(seconds=2)),
        "barrier": lambda: dist.barrier(group=group),
    }
    for kind in kinds or known:
        life.try_each(f"{kind} of {name}", (f".{kind}", ".wait"), known[kind])
    work = dist.all_reduce(x, group=group, async_op=True)
    for what in ("is_completed", "is_success", "synchronize", "block_current_stream", "result"):
        do(f"a work of {name}: {what}", getattr(work, what))
    do("its wait", lambda: [work.wait(), work.wait(), work.is_completed()])
    do("its words", lambda: [work.place, work.operation, work.sequence])
    do("sequence", group._get_sequence_number_for_group)
    ops = [dist.P2POp(op, x, 0, group) for op in (dist.isend, dist.irecv)]
    ends = (".send", ".recv", "._start_coalescing", "._end_coalescing")
    life.try_each("a batch", ends, lambda: [one.wait() for one in dist.batch_isend_irecv(ops)])
    life.try_each("monitored", (".monitored_barrier",), lambda: group.monitored_barrier(None))


def measured(life: Life) -> None:
    """What streams wait, and how far the device is."""
    do, comms, x = life.do, life.comms, torch.ones(1)
    waits = comms.stream_waits
    do("measure", waits.begin)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    do("read too early", waits.read)
    do("its end", waits.end)
    answers["is_passed"] = False
    do("not passed", waits.read)
    do("not anew", waits.begin)
    answers["is_passed"] = True
    do("read", lambda: [waits.count, waits.read(), waits.read(), waits.begin(), waits.count])
    do("dropped", lambda: [waits.drop(), dist.all_reduce(x), waits.count, waits.read()])
    do("measure again", waits.begin)
    do(
        "dropped",
        lambda: [waits.drop(), dist.all_reduce(x), waits.count, waits.end(), waits.read()],
    )
    do("waiting", comms.waiting_for)

    def positions() -> Any:
        return {place: vars(one) for place, one in (comms.positions() or {}).items()}

    do("positions", positions)
    answers["get_error"] = SimpleNamespace(name="TIMEOUT")
    do("look", comms.look)
    do("positions", positions)
    do("send", lambda: dist.send(x, 0))
    answers["get_error"] = SimpleNamespace(name="SUCCESS")
