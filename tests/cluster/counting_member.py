"""A member that trains nothing: a role's state is a list of integers, changed once per iteration.

It uses agent and vault exactly as a real member does, and keeps step with the other roles
through counters in a file of the run directory (in place of collectives). No torch: it starts in a
fraction of a second, so whole runs with real kills fit in a test.

Arguments: --iterations N --step-seconds S [--misbehave NAME]. Without
--iterations it ends soon after a file ``finish`` appears in the run directory.
"""

import argparse
import hashlib
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.link.member_link import Handlers, MemberLink, PausePoint, StopOrder
from deadpool_megatron.cluster.link.rendezvous import StoreError
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout import records
from deadpool_megatron.layout.descriptions import group_name
from deadpool_megatron.vault.errors import Frozen, Interrupted, RestoreUnavailable
from deadpool_megatron.vault.vault_client import VaultClient
from deadpool_megatron.wire.framing import readable

VALUES = 512
_FORMAT = struct.Struct(f"<{VALUES}Q")
_COUNTER = struct.Struct("<QQ")


class EpochLeft(Exception):
    """The interrupt was seen."""


class Lockstep:
    """Counters (epoch, iteration) of all roles in one shared file: the stand-in for collectives."""

    def __init__(self, path: Path, world_size: int) -> None:
        with open(path, "a+b") as file:
            file.truncate(world_size * _COUNTER.size)
            self._map = mmap.mmap(file.fileno(), world_size * _COUNTER.size)
        self._world_size = world_size

    def put(self, role: int, epoch: int, iteration: int) -> None:
        _COUNTER.pack_into(self._map, role * _COUNTER.size, epoch, iteration)

    def reached(self, epoch: int, iteration: int) -> bool:
        found = (
            _COUNTER.unpack_from(self._map, r * _COUNTER.size) for r in range(self._world_size)
        )
        return all(e == epoch and i >= iteration for e, i in found)


class Counting:
    """The process. ``role`` is None while it is a spare."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.link = MemberLink.from_environment()
        self.run_dir = Path(os.environ["DEADPOOL_RUN_DIR"])
        self.world_size = self.link.place.world_size
        self.lockstep = Lockstep(self.run_dir / "lockstep", self.world_size)
        self.vault = VaultClient(
            self.link.place.vault_socket,
            self.link.place.segments,
            self.link.seat,
            connect_seconds=self.link.settings.connect_seconds,
        )
        self.role: int | None = None
        self.epoch = 0
        self.iteration = 0
        self.values = [0] * VALUES
        self.pauses = PausePoint()
        self.section = "parked"
        self.waiting: list[Any] | None = None
        self.begun: list[list[Any]] = []
        self.progress = 0

    # Link.

    def status(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "iteration": self.iteration,
            "waiting": self.waiting,
            "begun": self.begun,
            "progress": self.progress,
        }

    def send(self, kind: str, **facts: object) -> None:
        """Send a message of the current epoch."""
        self.link.send({"t": kind, "epoch": self.epoch, **facts})

    def on_pause(self, iteration: int) -> None:
        started = self.pauses.order(iteration)
        if started is not None:
            self.send("pause-refused", iteration=started)

    def ignore(self, *_: object) -> None:
        pass

    def main(self) -> int:
        handlers = Handlers(self.ignore, self.on_pause, self.status)
        self.link.start(handlers)
        try:
            while True:
                self.take_record(self.link.wait_record(self.epoch))
        except StopOrder as order:
            print(f"stop: {order}")
            return 0

    def take_record(self, record: records.EpochRecord) -> None:
        self.epoch = record.epoch
        self.pauses.reset()
        roles = [role for role, seat in record.seats.items() if seat == self.link.seat]
        if not roles:
            self.section = "parked"
            self.link.send({"t": "warm"})
            return
        self.role = roles[0]
        failpoints.set_context(role=self.role, epoch=record.epoch)
        try:
            self.enter(record)
            self.train()
        except (EpochLeft, Frozen, Interrupted):
            pass
        self.section = "drain"
        self.send("drained", clean=True)

    # Recovery.

    def layout(self) -> records.RoleLayout:
        assert self.role is not None
        parts = [records.PartInfo("values", _FORMAT.size, (self.role,))]
        parts += [
            records.PartInfo(records.extras_part(name), 64, (self.role,))
            for name in records.BOUNDARIES
        ]
        peers = tuple(range(self.world_size))
        return records.RoleLayout(self.role, tuple(parts), peers, 2, f"counting-{VALUES}")

    def enter(self, record: records.EpochRecord) -> None:
        assert self.role is not None
        self.section = "load"
        failpoints.hit("member.restore")
        self.meet(record)
        layout = self.layout()
        self.vault.register(layout, record.epoch)
        self.link.send({"t": "registered", "layout": layout.to_dict()})
        restore = record.restore
        self.iteration = restore.generation.iteration
        started = time.monotonic()
        if restore.kind in ("memory", "dump"):
            try:
                parts = self.vault.restore(
                    layout,
                    record.epoch,
                    restore.generation,
                    restore.boundary,
                    deadline_seconds=self.link.settings.restore_seconds,
                    interrupted=self.link.interrupt_fd,
                )
            except RestoreUnavailable as error:
                self.send("restore-failed", part=error.part, text=str(error))
                self.wait(lambda: False)
            self.values = list(_FORMAT.unpack(bytes(parts.part("values"))))
            assert bytes(parts.part("extras@step")) == str(self.iteration).encode()
            parts.close()
        else:
            self.values = [self.role] * VALUES
            self.seal()
        self.send("phase", phase="restore", seconds=time.monotonic() - started)
        self.send("restored", generation=restore.generation.to_list())
        if self.role == 0 and record.emitted_up_to < self.iteration:
            self.report_step(self.iteration)
        if self.role == 0 and self.args.misbehave == "diverge" and self.epoch > 1:
            # Reported for certain before this iteration was sealed, and with other numbers.
            self.report_step(self.iteration - 1)
        self.lockstep.put(self.role, self.epoch, self.iteration)

    def meet(self, record: records.EpochRecord) -> None:
        """Exchange addresses through the store, as communicators do."""
        keys = [f"world/{role}" for role in record.seats]
        try:
            self.link.store.set(self.epoch, f"world/{self.role}", b"address")
            self.link.store.wait(self.epoch, keys, self.link.settings.rebuild_seconds)
        except StoreError:
            if self.link.closed_epoch < self.epoch:
                raise
            raise EpochLeft from None

    def seal(self) -> None:
        """Write the present state as a generation and pass the commit gate."""
        failpoints.hit("member.seal", iteration=self.iteration)
        generation = records.Generation(self.epoch, self.iteration)
        writer = self.vault.begin(generation, self.epoch)
        _FORMAT.pack_into(writer.part("values"), 0, *self.values)
        extras = str(self.iteration).encode()
        writer.part("extras@step")[: len(extras)] = extras
        writer.fill({"values": _FORMAT.size, "extras@step": len(extras)})
        self.section = "gate"
        is_committed = self.vault.wait_committed(
            generation,
            "step",
            interrupted=self.link.interrupt_fd,
            on_wait=lambda seconds: print(f"gate: {seconds:.1f} s"),
            report_every_seconds=5.0,
        )
        if not is_committed:
            raise EpochLeft

    # Training.

    def train(self) -> None:
        assert self.role is not None
        if self.args.misbehave == "raise":
            raise RuntimeError("the user's command is broken")
        while self.iteration < self.last_iteration():
            self.section = "train"
            self.barrier(self.iteration)
            iteration = self.iteration + 1
            if not self.pauses.may_start(iteration):
                self.pause(iteration)
            failpoints.set_context(iteration=iteration)
            failpoints.hit("member.step")
            self.sleep(self.args.step_seconds)
            self.hang_if_asked(iteration)
            self.values = [(31 * v + iteration) % (1 << 61) for v in self.values]
            self.iteration = iteration
            self.seal()
            self.progress += 1
            self.lockstep.put(self.role, self.epoch, iteration)
            if self.role == 0:
                self.report_step(iteration)
        self.barrier(self.iteration)
        self.section = "done"
        state_hash = hashlib.sha256(_FORMAT.pack(*self.values)).hexdigest()
        self.send("done", role=self.role, state_hash=state_hash, samples=self.iteration)
        self.wait(lambda: False)

    def last_iteration(self) -> int:
        """Return --iterations, or after a request to finish a mark that no role can have passed."""
        mark = self.run_dir / "finish-after"
        if self.role == 0 and not mark.exists() and (self.run_dir / "finish").exists():
            unfinished = self.run_dir / ".finish-after"
            unfinished.write_text(str(self.iteration + 3))
            unfinished.rename(mark)
        return int(mark.read_text()) if mark.exists() else int(self.args.iterations)

    def report_step(self, iteration: int) -> None:
        data = {
            "loss": float(self.values[0] % 1000).hex(),
            "grad_norm": (1.0).hex(),
            "learning_rate": (0.5).hex(),
            "skipped": False,
            "samples": iteration,
        }
        step = Event(Kind.STEP, self.epoch, role=self.role, iteration=iteration, data=data)
        self.link.send_event(step)

    def pause(self, iteration: int) -> None:
        """Stand still before ``iteration``, until a later pause is ordered or the epoch is over."""
        self.section = "paused"
        self.send("paused", iteration=self.iteration)
        self.wait(lambda: self.pauses.may_start(iteration))
        self.section = "train"

    def hang_if_asked(self, iteration: int) -> None:
        if self.args.misbehave == "fail" and iteration == 8 and self.role == 1:
            raise RuntimeError("bad sample")
        if self.args.misbehave == "device" and (self.role, self.epoch, iteration) == (1, 1, 8):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        if self.args.misbehave == "hang" and iteration == 5 and self.role == 1 and self.epoch == 1:
            self.section = "train"
            self.wait(lambda: False)

    def barrier(self, iteration: int) -> None:
        world = group_name("world", range(self.world_size))
        self.begun = [[world, iteration, 0]]
        self.waiting = [world, "barrier", iteration]
        self.wait(lambda: self.lockstep.reached(self.epoch, iteration))
        self.waiting = None

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end)

    def wait(self, ready: Any) -> None:
        """Until ready; EpochLeft when interrupted."""
        while not ready():
            if readable(self.link.interrupt_fd, 0.001):
                self.waiting = None
                raise EpochLeft


def expected_sha256(role: int, iterations: int) -> str:
    """Return the hash of a role's state after its iterations, however often it was moved."""
    value = role
    for iteration in range(1, iterations + 1):
        value = (31 * value + iteration) % (1 << 61)
    return hashlib.sha256(_FORMAT.pack(*[value] * VALUES)).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=10**6)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    ways = ("", "raise", "hang", "diverge", "fail", "device")
    parser.add_argument("--misbehave", default="", choices=ways)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failpoints.hit("member.start")
    return Counting(args).main()


if __name__ == "__main__":
    sys.exit(main())
