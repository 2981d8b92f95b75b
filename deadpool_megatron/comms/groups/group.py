"""The ProcessGroup that Megatron holds: the same object for the whole run.

torch accepts a Python subclass of ProcessGroup from a backend's creator and uses that very object
as the group. The group here forwards to an inner group that is exchanged when the membership
changes, so the dozens of references that a training framework captures never go stale.

:class:`Installation` makes c10d create such groups. It replaces only functions that stock code
calls, and can restore all of them. It replaces ``_new_group_with_tag`` rather than ``new_group``,
because all ways to a new group pass through it, even copies of ``new_group`` that other modules
imported earlier. The exception is ``split_group``, which is replaced by calls of ``new_group``.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch.distributed import ProcessGroup, device_mesh, distributed_c10d as c10d

from deadpool_megatron.comms.groups.detached import DetachedGroup
from deadpool_megatron.comms.inner import COMMUNICATION, GroupSpec, InnerGroup

if TYPE_CHECKING:
    from deadpool_megatron.comms.communicators import Communicators

#: C++ code reads this name, too. For example, DistributedDataParallel casts the backend of a group
#: called "gloo" to gloo's class without a check, to read the number of threads.
BACKEND_NAME = "deadpool"
#: a device without data to send
_NO_DATA = torch.device("meta")

_c10d: Any = c10d
_dist: Any = dist


def register_stand_in(group: ProcessGroup, rank: int, size: int) -> None:
    """Register a backend that C++ finds when it asks ``group`` for its default backend.

    Newer versions of torch ask every new group for its default backend. For C++ our group has none,
    and the inner backend must not be registered: C++ keeps the first backend of a type for ever,
    and a call through it would reach peers of an old epoch. So C++ finds a backend whose
    collectives raise. It is registered for a device without data, while C++ chooses the backend of
    an operation by the device of its tensors. So an operation that bypasses the methods of our
    group ends in torch's own "No backend type associated with device type cpu". The backend has no
    threads and no sockets: a process may still fork.
    """
    fake: Any = FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    cpp: Any = ProcessGroup
    kind = ProcessGroup.BackendType.CUSTOM
    cpp._register_backend(group, _NO_DATA, kind, fake._create_internal(rank, size, options))
    cpp._set_default_backend(group, kind)


class ReconfigurableGroup(ProcessGroup):
    """A process group whose communicator can be exchanged.

    ``transport``: the transport of its inner groups, see ``communicators.fabric_of``;
    ``requested``: the backend name that the user asked for. Methods that communicate are added
    below from the installed torch. A group starts detached.
    """

    def __init__(
        self, owner: Communicators, spec: GroupSpec, transport: str, requested: str
    ) -> None:
        super().__init__(spec.rank, spec.size)  # type: ignore[call-arg]
        register_stand_in(self, spec.rank, spec.size)
        self.transport = transport
        self.requested = requested
        self._owner = owner
        self._spec = spec
        self._bound_device: torch.device | None = None
        self.inner: InnerGroup = DetachedGroup(self.spec())

    def spec(self) -> GroupSpec:
        """Return the specification of an inner group, with the present description and device."""
        device = self._bound_device or self._spec.device
        return replace(self._spec, description=self.description, device=device)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks in group order."""
        return self._spec.ranks

    def renumber(self, ranks: tuple[int, ...], rank: int) -> None:
        """Become the same group of another role; only while detached or closed."""
        if len(ranks) != len(self.ranks):
            raise ValueError(f"{self.description}: {len(self.ranks)} ranks cannot become {ranks}")
        self._spec = replace(self._spec, ranks=ranks, rank=rank)
        if self.inner.detached:
            self.inner = DetachedGroup(self.spec())

    @property
    def description(self) -> str:
        """The group's description, or its name where it has none."""
        description = ProcessGroup.group_desc.fget(self)  # type: ignore[attr-defined]
        return self._spec.name if description in ("", "undefined") else str(description)

    # -- called by c10d and its users ---------------------------------------------------------

    def rank(self) -> int:
        return self._spec.rank

    def size(self) -> int:
        return self._spec.size

    # The same for callers in C++ (functional collectives).
    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def getGroupName(self) -> str:
        return self._spec.name

    def name(self) -> str:
        return self.requested

    # The base class reads the name from its backend in C++, here a stand-in without this name.
    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._spec.name

    def _set_group_name(self, name: str) -> None:
        self._spec = replace(self._spec, name=name)

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._spec.device.type)]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in {self._spec.device.type, "cpu"}:
            raise RuntimeError(f"no backend for device {device} in group {self.description}")
        return self.inner.backend()

    # The name from torch 2.15 on.
    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations, also of later inner groups."""
        self._spec = replace(self._spec, timeout=timeout)
        self.inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self.inner.monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner.call("_start_coalescing", device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.inner.call("_end_coalescing", device)

    def _get_sequence_number_for_group(self) -> int:
        return int(self.inner.call("_get_sequence_number_for_group"))

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: an inner group has its number from the start."""

    def abort(self) -> None:
        """Do nothing: epochs are closed as a whole, by Communicators.interrupt."""

    def shutdown(self) -> None:
        """Drop the group at destroy_process_group, also a detached group."""
        self._owner.forget(self)


def _forwarding(operation: str) -> Callable[..., Any]:
    def method(self: ReconfigurableGroup, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(operation, args, kwargs)

    method.__name__ = operation
    method.__qualname__ = f"ReconfigurableGroup.{operation}"
    method.__doc__ = f"ProcessGroup.{operation} on the present inner group."
    return method


for _operation in COMMUNICATION:
    setattr(ReconfigurableGroup, _operation, _forwarding(_operation))


@dataclass
class Entry:
    """A call of init_process_group or new_group. ``group`` is None if this rank is not in the
    group."""

    ranks: tuple[int, ...]
    requested: str
    description: str
    group: ReconfigurableGroup | None


class Installation:
    """The replaced functions of torch; ``remove`` restores them."""

    def __init__(self, owner: Communicators) -> None:
        self._owner = owner
        self._requested = ""
        self._undo = ExitStack()
        self._known: Iterator[Entry] | None = None
        self._excepthook = sys.excepthook

    def apply(self) -> None:
        """Register the backend and replace functions; not twice in a process."""
        if BACKEND_NAME in dist.Backend.backend_list:
            raise RuntimeError("the communication seam is installed already")
        dist.Backend.register_backend(
            BACKEND_NAME, self._create, extended_api=True, devices=["cpu", "cuda"]
        )
        self._undo.callback(_unregister_backend)
        init = self._wrap_init(_c10d.init_process_group)
        self._replace("init_process_group", init, _c10d, _dist)
        self._replace("_new_group_with_tag", self._wrap_new_group(_c10d._new_group_with_tag), _c10d)
        # DeviceMesh has a copy of its own.
        self._replace("split_group", _wrap_split(_c10d.split_group), _c10d, _dist, device_mesh)
        self._replace("batch_isend_irecv", _wrap_batch(_c10d.batch_isend_irecv), _c10d, _dist)
        self._replace("_set_pg_timeout", _wrap_set_timeout(_c10d._set_pg_timeout), _c10d)
        if not hasattr(torch._C, "_nccl_version"):
            # For a group named "nccl" c10d's error logger asks for NCCL's version, and a torch
            # without NCCL then replaces the error by an AttributeError.
            self._replace("version", lambda: (0, 0, 0), torch.cuda.nccl)
        for name, outcome in _DETACHED_OBJECTS.items():
            self._replace(name, _wrap_objects(getattr(_c10d, name), outcome), _c10d, _dist)

    def remove(self) -> None:
        """Restore all functions; existing groups stay usable."""
        self._undo.close()
        sys.excepthook = self._excepthook

    @contextmanager
    def reusing(self, known: list[Entry]) -> Iterator[None]:
        """Let new_group return the ``known`` groups, in order, instead of creating groups."""
        self._known = iter(known)
        try:
            yield
        finally:
            self._known = None

    def _known_group(self, ranks: tuple[int, ...], requested: str, description: str) -> Any:
        assert self._known is not None
        entry = next(self._known, None)
        wanted = (ranks, requested, description)
        if entry is None or (entry.ranks, entry.requested, entry.description) != wanted:
            raise RuntimeError(f"group {description or ranks} was not created before in this order")
        return _c10d.GroupMember.NON_GROUP_MEMBER if entry.group is None else entry.group

    def _replace(self, name: str, value: Any, *modules: Any) -> None:
        for module in modules:
            self._undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

    def _create(self, given: Any, options: Any) -> ReconfigurableGroup:
        """Create a group for c10d; ``global_ranks_in_group`` is empty for WORLD."""
        ranks = tuple(given.global_ranks_in_group) or tuple(range(given.group_size))
        return self._owner.make_group(
            ranks, given.group_rank, self._requested, given.timeout, options
        )

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            """Act as torch's function, but do not connect to peers: Communicators.attach does."""
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            values = given.arguments
            requested = values["backend"] or self._owner.default_backend
            _complete_timeout(values, str(requested))
            device = values["device_id"]
            rank, size = values["rank"], values["world_size"]
            values.update(
                backend=BACKEND_NAME,
                init_method=None,
                # No value is ever exchanged through this store.
                store=HashStore(),
                rank=int(os.environ["RANK"]) if rank < 0 else rank,
                world_size=int(os.environ["WORLD_SIZE"]) if size < 0 else size,
                device_id=None,
            )
            self._requested = str(requested)
            with _no_store_barrier():
                original(*given.args, **given.kwargs)
            world = _c10d._get_default_group()
            if device is not None:
                world.bound_device_id = torch.device(device)
            _restore_name(world, self._requested)
            self._owner.add_group(Entry(world.ranks, self._requested, "default_pg", world))

        return init_process_group

    def _wrap_new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def _new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
            world = _c10d._get_default_group()
            if not isinstance(world, ReconfigurableGroup):
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            values = given.arguments
            requested = str(values["backend"] or world.requested)
            ranks = values["ranks"]
            if ranks is None:
                members = world.ranks
            else:
                members = tuple(sorted(ranks) if values.get("sort_ranks", True) else ranks)
            if self._known is not None:
                return self._known_group(members, requested, values["group_desc"] or "")
            _complete_timeout(values, requested)
            values["backend"] = BACKEND_NAME
            values["device_id"] = None
            before = dict(_c10d._world.pg_map)
            self._requested = requested
            bound, world.bound_device_id = world.bound_device_id, None
            try:
                # With a bound device c10d would split the inner communicator of WORLD.
                with _no_store_barrier():
                    group = original(*given.args, **given.kwargs)
            finally:
                world.bound_device_id = bound
            if isinstance(group, ReconfigurableGroup):
                if group in before:  # an existing group with the same tag
                    return group
                group.bound_device_id = bound
                _restore_name(group, requested)
                made: ReconfigurableGroup | None = group
            else:
                made = None
            try:
                entry = Entry(members, requested, values["group_desc"] or "", made)
                self._owner.add_group(entry)
            except BaseException:
                # The caller gets no group, and its peers may never make this call: every later
                # epoch would wait for them in vain.
                if made is not None:
                    _c10d.destroy_process_group(made)
                raise
            return group

        return _new_group_with_tag


def _complete_timeout(values: dict[str, Any], requested: str) -> None:
    """Set NCCL's default timeout if NCCL is requested without a timeout. c10d would choose it by
    the name of the backend, but gets our name."""
    if values["timeout"] is None and "nccl" in requested.lower():
        # None in a torch without NCCL
        values["timeout"] = getattr(_c10d, "default_pg_nccl_timeout", None)


def _restore_name(group: ReconfigurableGroup, requested: str) -> None:
    """Let dist.get_backend return the requested name: much code tests that string."""
    _, store = _c10d._world.pg_map[group]
    _c10d._world.pg_map[group] = (dist.Backend(requested), store)


@contextmanager
def _no_store_barrier() -> Iterator[None]:
    """Switch off the barrier of c10d: our local stores have no peers."""
    old = os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    try:
        yield
    finally:
        if old is not None:
            os.environ["TORCH_DIST_INIT_BARRIER"] = old


def _wrap_split(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def split_group(*args: Any, **kwargs: Any) -> Any:
        """Act as torch's function, but call new_group for each part: a split of the parent's
        communicator would be lost when the parent's communicator is replaced."""
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        parent = values["parent_pg"] or _c10d._get_default_group()
        if not isinstance(parent, ReconfigurableGroup):
            return original(*args, **kwargs)
        if not values["split_ranks"]:
            raise ValueError("split_ranks cannot be None or empty")
        own = None
        for part in values["split_ranks"]:
            ranks = [parent.ranks[rank] for rank in part]
            group = _c10d.new_group(
                ranks,
                values["timeout"],
                values.get("backend") or parent.requested,
                values["pg_options"] or copy.deepcopy(parent.spec().options),
                # Only the ranks of the parent make this call, so the ranks name the group.
                use_local_synchronization=True,
                group_desc=values["group_desc"],
            )
            own = group if parent.rank() in part else own
        return own

    return split_group


def _wrap_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        """Act as torch's function, whose own test for coalescing (`type(group) is ProcessGroup`)
        fails for our groups.

        Without coalescing both neighbours of a pipeline send first, which deadlocks NCCL.
        """
        _c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or _c10d._get_default_group()
        if not isinstance(group, ReconfigurableGroup) or not group.inner.coalesces:
            answer: list[Any] = original(p2p_op_list)
            return answer
        device = p2p_op_list[0].tensor.device
        group._start_coalescing(device)
        try:
            for op in p2p_op_list:
                peer = "group_dst" if op.op is _c10d.isend else "group_src"
                op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer})
        finally:
            work = group._end_coalescing(device)
        return [work]

    return batch_isend_irecv


def _wrap_set_timeout(original: Callable[..., Any]) -> Callable[..., Any]:
    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        target = group or _c10d._get_default_group()
        if isinstance(target, ReconfigurableGroup):
            _c10d._check_valid_timeout(timeout)
            target.set_timeout(timeout)
        else:
            original(timeout, group)

    return _set_pg_timeout


def _receive_own(values: dict[str, Any]) -> None:
    """Put this rank's object into the output of scatter_object_list, if this rank sends."""
    sent = values["scatter_object_input_list"]
    if sent:
        values["scatter_object_output_list"][0] = sent[values["group"].rank()]


#: object collectives, each with the function that replaces it on a detached group: torch's own
#: function would unpickle a buffer into which no bytes were received
_DETACHED_OBJECTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "broadcast_object_list": lambda _: None,
    "recv_object_list": lambda _: None,
    "scatter_object_list": _receive_own,
}


def _wrap_objects(
    original: Callable[..., Any], outcome: Callable[[dict[str, Any]], None]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def object_collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        group = given.arguments.get("group") or _c10d._get_default_group()
        if isinstance(group, ReconfigurableGroup) and group.inner.detached:
            given.arguments["group"] = group
            return outcome(given.arguments)
        return original(*args, **kwargs)

    object_collective.__name__ = original.__name__
    object_collective.__doc__ = original.__doc__
    return object_collective


def _unregister_backend() -> None:
    backend: Any = dist.Backend
    backend.backend_list.remove(BACKEND_NAME)
    backend._plugins.pop(BACKEND_NAME.upper(), None)
    backend.backend_type_map.pop(BACKEND_NAME, None)
    backend.backend_capability.pop(BACKEND_NAME, None)
    if hasattr(backend, BACKEND_NAME.upper()):
        delattr(backend, BACKEND_NAME.upper())
