"""The communicators of one process, exchangeable as a whole."""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from deadpool_megatron.comms import inner
from deadpool_megatron.comms.gloo import GlooFabric
from deadpool_megatron.comms.groups.detached import ClosedGroup, DetachedGroup
from deadpool_megatron.comms.groups.group import Entry, Installation, ReconfigurableGroup
from deadpool_megatron.comms.groups.roster import Roster
from deadpool_megatron.comms.in_flight import waiters
from deadpool_megatron.comms.in_flight.epoch import Activity, Epoch, FaultCallback, Limits
from deadpool_megatron.comms.in_flight.observation import Observation
from deadpool_megatron.comms.in_flight.reaper import Reaper, trim_heap
from deadpool_megatron.comms.store import EpochStore, meet
from deadpool_megatron.platform import select_platform
from deadpool_megatron.settings import is_stand_in

_c10d: Any = c10d

_DRAIN_STEP_SECONDS = 0.002
#: one hanging rebuild may be bad luck; each holds sockets, threads and unfinished communicators
_MAX_HANGING_REBUILDS = 1
_fabric_lock = threading.Lock()
# Groups, each with its communicator in an epoch.
Connections = dict[ReconfigurableGroup, inner.InnerGroup]


class Communicators(Observation):
    """Makes torch.distributed groups whose communicators can be closed and replaced.

    ``kind`` is the library of groups that ask for NCCL (or for no backend): "gloo", "nccl", or the
    factory of a fabric (:func:`fabric_of`). ``on_fault(group, operation, text)`` is called at a
    fault, once per epoch, on the thread that communicates or calls :meth:`report_faults`.
    ``rebuild`` is the way in which the communicators of an epoch are made, as in the settings:
    "auto" means side by side, but one by one over NCCL. No other way has been tried on a device.

    Only :meth:`interrupt`, the methods of Observation and the properties are for any thread; all
    others are for the main thread.
    """

    def __init__(
        self,
        kind: str = "gloo",
        limits: Limits | None = None,
        on_fault: FaultCallback | None = None,
        address: str = "127.0.0.1",
        rebuild: str = "auto",
    ) -> None:
        if kind not in ("gloo", "nccl") and not is_stand_in(kind):
            raise ValueError(f"no kind of communicators: {kind!r}")
        super().__init__()
        self._kind = kind
        #: the backend of a group that asks for none
        self.default_backend = "gloo" if kind == "gloo" else "nccl"
        self._limits = limits or Limits()
        self._on_fault = on_fault
        self._address = address
        self.rebuild = rebuild
        self._roster = Roster()
        # The colours of groups whose communicators are split from WORLD's communicator.
        self._colours: dict[ReconfigurableGroup, int] = {}
        self._pool = waiters.WaiterPool()
        self._reaper = Reaper()
        self._installation: Installation | None = None
        self._lock = threading.Lock()
        self._closed_up_to = -1
        self._store: Store | None = None
        self._given_store: Store | None = None
        self._drained = False
        # Rebuilds of closed epochs whose threads hang in the making of communicators.
        self._hanging_builds: list[tuple[waiters.Builders | waiters.Waiter, ...]] = []
        #: the reason why this process must not enter another epoch; empty while it may
        self.unusable_reason = ""

    # -- installation --------------------------------------------------------------------------

    def install(self) -> None:
        """Make c10d create our groups from now on. Starts nothing, opens nothing.

        Warns of a version of torch that no test has run on; raises RuntimeError for a version that
        cannot work.
        """
        if text := inner.torch_warning(torch.__version__):
            warnings.warn(text, stacklevel=2)
        installation = Installation(self)
        installation.apply()
        self._installation = installation

    def uninstall(self) -> None:
        """Restore torch.distributed; for tests."""
        if self._installation is not None:
            self._installation.remove()
            self._installation = None
        self.detach()
        self._pool.shut_down()

    # -- called by the installed functions  ------------------------------------------------------

    def make_group(
        self, ranks: tuple[int, ...], rank: int, requested: str, timeout: timedelta, options: Any
    ) -> ReconfigurableGroup:
        """Return a new, detached group; called by c10d in the middle of new_group."""
        transport = "gloo" if requested.lower() == "gloo" else self._kind
        if "," in requested and self._kind != "gloo":
            raise ValueError(
                f"backend {requested!r} is several in one, and a protected group has one"
                " communicator: ask for 'nccl', and make another group with backend 'gloo' for"
                " tensors on the CPU"
            )
        device = torch.device("cuda" if transport == "nccl" else "cpu")
        if transport == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        spec = inner.GroupSpec("", "unnamed", ranks, rank, device, None, timeout, options)
        return ReconfigurableGroup(self, spec, transport, requested)

    def add_group(self, entry: Entry) -> None:
        """Add the group; connect it at once while attached (collective over its ranks)."""
        self._roster.add(entry)
        group, epoch = entry.group, self._current
        if group is None or epoch is None:
            return
        if epoch.closed or self._store is None:
            raise inner.EpochClosed(epoch.number, "new_group")
        epoch.check("new_group")
        limits, made = self._limits, Connections()
        usual, longest = limits.operation_timeout_seconds, limits.long_operation_seconds
        limit_seconds = longest if epoch.allows_long_waits else usual
        builders = waiters.Builders([self._job(epoch, group, self._store, made)], 1)
        activity = Activity(group.spec().place, "new_group")
        self._build(epoch, builders, builders.run, activity, limit_seconds)
        group.inner = made[group]
        group.inner.allow_long_waits(epoch.allows_long_waits)

    def forget(self, group: ReconfigurableGroup) -> None:
        """Drop a group on which destroy_process_group was called."""
        if group is self._roster.world():
            self.detach()
        self._roster.remove(group)
        old, group.inner = group.inner, DetachedGroup(group.spec())
        epoch = self._current
        if epoch is not None and old in epoch.groups:
            epoch.groups.remove(old)
            old.close()

    def warm(self) -> None:
        """While detached, have NCCL load its kernels, so that the first attach need not wait for
        it. Warns where NCCL refuses."""
        if self._kind != "nccl":
            return
        from deadpool_megatron.comms import nccl

        try:
            nccl.warm(torch.device("cuda", torch.cuda.current_device()))
        except RuntimeError as error:
            warnings.warn(f"NCCL could not be warmed up: {error}", stacklevel=2)

    # -- epochs ----------------------------------------------------------------------------------

    def attach(self, epoch: int, store: Store, rank: int, deadline_seconds: float) -> None:
        """Connect all groups to their peers; returns after a barrier over WORLD.

        ``rank`` is the role; groups that were built for another role are renumbered if both have
        groups of the same shape. ``store`` is kept for groups made later, and not touched
        otherwise.

        Raises EpochClosed if the epoch was or gets closed, CommunicatorFault naming the missing
        group after ``deadline_seconds``, ValueError if renumbering is impossible.
        """
        old = self._current
        self._roster.renumber(rank)
        if old is not None and not old.closed:
            old.finish_in_flight()
            old.retire()
        elif old is not None and not self._drained:
            raise RuntimeError("an interrupted epoch must be drained before the next attach")
        new = Epoch(epoch, self._limits, self._pool, self._progress, self._on_fault)
        with self._lock:
            self._attaching = new
            too_late = epoch <= self._closed_up_to
        try:
            if too_late:
                raise inner.EpochClosed(epoch, "attach")
            made = self._connect_all(new, store, deadline_seconds)
        except BaseException:
            new.close()
            self._become(new, {}, drained=True)
            self._release(new)
            raise
        finally:
            if old is not None:
                self._release(old)
        self._become(new, made, drained=False)
        self.allow_long_waits(self._limits.long_operation_seconds > 0)
        trim_heap()

    def allow_long_waits(self, allows_long_waits: bool) -> None:
        """Give operations time for the long work of a peer (build, load, save, evaluate), or only
        the usual time. From attach on they have time for long work."""
        epoch = self._current
        if epoch is not None:
            epoch.in_first_step = epoch.in_first_step and allows_long_waits
        if epoch is not None and epoch.allows_long_waits != allows_long_waits:
            epoch.allows_long_waits = allows_long_waits
            for group in epoch.groups:
                group.allow_long_waits(allows_long_waits)

    def renumber(self, rank: int) -> None:
        """Let the groups become those of ``rank``, object by object; only while detached.

        Then a framework's initialisation may be called again within :meth:`reusing_groups`. Raises
        ValueError, and changes nothing, if that rank has groups of another shape.
        """
        self._roster.renumber(rank)

    def reusing_groups(self) -> AbstractContextManager[None]:
        """In the block, new_group creates no group: the earlier calls, repeated in the same order,
        return the earlier groups. Raises RuntimeError for any other call."""
        assert self._installation is not None
        return self._installation.reusing(self._roster.entries())

    def detach(self) -> None:
        """Let all groups complete their operations locally; see detached.py."""
        old = self._current
        with self._lock:
            self._current = None
        self._set_all(lambda group: DetachedGroup(group.spec()))
        self._store = self._given_store = None
        self._drained = False
        if old is not None:
            if not old.closed:
                old.retire()
            self._release(old)

    def interrupt(self, epoch: int) -> None:
        """Close ``epoch`` and all older epochs: each thread in an operation gets EpochClosed.

        Any thread. Does nothing to a younger epoch; if ``epoch`` is not attached yet, its attach
        will raise. Returns when all waits have been woken; for NCCL when its aborts have ended, or
        at their deadline.
        """
        with self._lock:
            self._closed_up_to = max(self._closed_up_to, epoch)
            targets = [self._current, self._attaching]
        for target in targets:
            if target is not None and target.number <= epoch:
                target.close()

    def drain(self) -> bool:
        """Release the closed epoch, after the unwinding. True: memory is safe to restore into.

        Waits at most ``drain_seconds`` until no operation of the epoch can write into its outputs
        any more. False: an operation still can write, or a thread cannot communicate again, and the
        process must be replaced; the reason is in :attr:`unusable_reason`. On CUDA the caller also
        has to synchronise the device. Does nothing unless the epoch is closed.
        """
        epoch = self._current
        if epoch is not None and epoch.closed and not self._drained:
            self._drain(epoch)
        self._hanging_builds = [
            build for build in self._hanging_builds if not all(part.finished for part in build)
        ]
        # Hanging rebuilds of gloo end with the timeout of an operation.
        if self._kind != "gloo" and len(self._hanging_builds) > _MAX_HANGING_REBUILDS:
            self.unusable_reason = (
                f"{len(self._hanging_builds)} rebuilds hang in the making of communicators"
            )
        return not self.unusable_reason

    def _drain(self, epoch: Epoch) -> None:
        self._set_all(lambda group: ClosedGroup(epoch.number))
        # An exception inside c10d's coalescing manager does not drop its list, and collectives on
        # the group would then be collected for ever instead of run.
        for group in self._roster.groups():
            _c10d._world.pg_coalesce_state.pop(group, None)
        until = time.monotonic() + self._limits.drain_seconds
        while not epoch.unusable_reason() and epoch.may_write():
            if time.monotonic() >= until:
                self.unusable_reason = "an operation of the closed epoch may still write"
                break
            epoch.abort()
            time.sleep(_DRAIN_STEP_SECONDS)
        self.unusable_reason = epoch.unusable_reason() or self.unusable_reason
        self._release(epoch)
        self._drained = True

    def finish_iteration(self) -> None:
        """Wait for operations whose Work the caller dropped: Megatron's interleaved schedule
        drops the handle of its last send. Raises as any wait does."""
        epoch = self._current
        if epoch is not None:
            epoch.check("finish_iteration")
            epoch.finish_in_flight()

    # -- state -------------------------------------------------------------------------------------

    @property
    def reaping(self) -> int:
        """The number of old epochs whose sockets and threads are not freed yet."""
        return self._reaper.pending

    # -- internals -------------------------------------------------------------------------------

    def _become(self, epoch: Epoch, made: Connections, drained: bool) -> None:
        for group in self._roster.groups():
            group.inner = made.get(group) or ClosedGroup(epoch.number)
        with self._lock:
            self._attaching, self._current = None, epoch
        self._drained = drained

    def _set_all(self, make: Callable[[ReconfigurableGroup], inner.InnerGroup]) -> None:
        for group in self._roster.groups():
            group.inner = make(group)

    def _release(self, epoch: Epoch) -> None:
        self._reaper.take(epoch.detach_resources())

    def _connect_all(self, epoch: Epoch, store: Store, deadline_seconds: float) -> Connections:
        self._roster.start_epoch()
        prefixed = self._store = PrefixStore(f"e{epoch.number}", store)
        # torch calls a store that is written in Python through the prefix, but does not keep it
        # alive.
        self._given_store = store
        if is_stand_in(self._kind):
            # The stand-in watches the thread that creates it, so the main thread creates it.
            fabric_of(epoch, self._kind, self._address)
        made: Connections = {}
        self._colours.clear()
        groups = self._roster.in_attach_order()
        jobs = {group: self._job(epoch, group, prefixed, made) for group in groups}
        world = self._roster.world()
        first = [jobs.pop(world)]
        way = "one-by-one" if (self._kind, self.rebuild) == ("nccl", "auto") else self.rebuild
        is_split = way == "split" and world.transport != "gloo"
        started = first if is_split else [*first, *jobs.values()]
        # A client of TCPStore holds its lock while it waits, so that no other thread could write.
        is_threaded = way in ("auto", "side-by-side") and isinstance(store, EpochStore)
        builders = waiters.Builders(started, waiters.MAX_BUILDERS if is_threaded else 1)

        def build() -> None:
            if is_split:
                builders.add(self._splits(epoch, prefixed, jobs))
            builders.run()
            epoch.check("attach")
            if (work := made[world].forward("barrier", (), {})) is not None:
                work.wait()

        self._build(epoch, builders, build, waiters.Connecting(builders), deadline_seconds)
        return made

    def _splits(
        self, epoch: Epoch, store: Store, jobs: dict[ReconfigurableGroup, waiters.BuildJob]
    ) -> list[waiters.BuildJob]:
        """Return jobs that split WORLD's communicator, each with all ranks of WORLD; return
        ``jobs`` unchanged if the ranks do not all know the same groups."""
        world = self._roster.world()
        digest, rounds = self._roster.splits()
        fabric = fabric_of(epoch, world.transport, self._address)
        found: list[waiters.BuildJob] = []
        if not meet(store, "groups", world.rank(), world.size(), digest):
            warnings.warn("the roles know different groups: none is split from WORLD", stacklevel=2)
            rounds = []
        for groups in rounds:
            own = next((group for group in groups if group is not None), None)
            if own is None:
                found.append(waiters.BuildJob("WORLD (split)", fabric.skip_split))
            else:
                self._colours[own] = groups.index(own)
                found.append(jobs.pop(own))
        return [*found, *jobs.values()]

    def _build(
        self,
        epoch: Epoch,
        builders: waiters.Builders,
        build: Callable[[], None],
        activity: Activity | waiters.Connecting,
        deadline_seconds: float,
    ) -> None:
        """Run ``build``, which runs the builders and blocks on peers, in a thread that can be
        abandoned."""
        problem: str | None = None
        late = False
        enter = None if self._kind == "gloo" else select_platform().thread_entry()

        def enter_and_build() -> None:
            if enter is not None:
                enter()
            build()

        epoch.waits[get_ident()] = activity
        try:
            self._pool.call(enter_and_build, epoch, deadline_seconds)
        except waiters.Abandoned as abandoned:
            # The builders may hang for ever, and so may the thread that waits for them.
            self._hanging_builds.append((builders, abandoned.waiter))
            late = abandoned.deadline
            if late:
                problem = f"not all peers came within {deadline_seconds:g} s"
        except BaseException as error:
            # The first error has ended the wait for the builders, and others may hang for ever.
            self._hanging_builds.append((builders,))
            if isinstance(error, inner.CommunicatorFault) or not isinstance(error, RuntimeError):
                raise  # a CommunicatorFault was reported already, and the close was waited for
            problem = str(error)
        finally:
            epoch.waits.pop(get_ident(), None)
            builders.stop()
        if problem is not None:
            wait_seconds = 0.0 if late else self._limits.close_wait_seconds
            epoch.fault(activity.place, activity.operation, problem, wait_seconds)
        epoch.check(activity.operation)

    def _job(
        self, epoch: Epoch, group: ReconfigurableGroup, store: Store, made: Connections
    ) -> waiters.BuildJob:
        """Return the job that connects the group. Its key in the store is numbered now, in the
        order of these calls."""
        prefixed = PrefixStore(self._roster.next_key(group), store)

        def connect() -> None:
            epoch.check("attach")
            spec = replace(group.spec(), colour=self._colours.get(group))
            connected = fabric_of(epoch, group.transport, self._address).create(spec, prefixed)
            epoch.groups.append(connected)
            made[group] = connected

        return waiters.BuildJob(group.spec().place, connect)


def fabric_of(epoch: Epoch, transport: str, address: str) -> inner.Fabric:
    """Return the epoch's fabric of a transport, made at the first call. Any thread.

    The transport is "gloo", "nccl", or MODULE:FACTORY in tests, where ``FACTORY(epoch, address)``
    makes a stand-in for NCCL.
    """
    with _fabric_lock:
        if transport in epoch.fabrics:
            return epoch.fabrics[transport]
        fabric: inner.Fabric
        if transport == "gloo":
            fabric = GlooFabric(epoch, address)
        elif transport == "nccl":
            from deadpool_megatron.comms.nccl import NcclFabric

            fabric = NcclFabric(epoch)
        else:
            module, _, factory = transport.partition(":")
            fabric = getattr(importlib.import_module(module), factory)(epoch, address)
        epoch.fabrics[transport] = fabric
    return fabric
