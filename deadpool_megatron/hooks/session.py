"""One process of a protected run: takes roles, trains, leaves closed epochs, takes roles again.

A training program calls ``Session.join().run(program)`` and never sees a failure. The same process
may wait as a spare, adopt a role, lose its peers many times and finish; there is one path for all::

    record of epoch e -> seated?  no:  build in a provisional role, detached, and wait
                                  yes: adopt, rebuild, restore, sync, verify -> train -> done
    epoch closed      -> leave: drain, forget what was in flight, say so, wait for the next record
"""

from __future__ import annotations

import os
import select
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.member_link import Handlers, MemberLink, StopOrder
from deadpool_megatron.comms import CommunicatorFault, Communicators, EpochClosed
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.hooks.dimension import PeerMismatch
from deadpool_megatron.hooks.entry import EpochEntry
from deadpool_megatron.hooks.loop import Program
from deadpool_megatron.layout.records import BOUNDARIES, EpochRecord, Generation
from deadpool_megatron.platform import select_platform
from deadpool_megatron.recovery.sequence import enter_epoch
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import RestoreUnavailable, VaultError

# The process cannot prove that no abandoned operation still writes into its memory: it is replaced.
EXIT_UNCLEAN = 71


class Session:
    """See the module text. All methods but the link's handlers run on the main thread."""

    def __init__(self, link: MemberLink, settings: Settings, run_directory: Path) -> None:
        self._link = link
        self._settings = settings
        self._run_directory = run_directory
        self._world_size = int(os.environ["DEADPOOL_WORLD_SIZE"])
        self._communicators = Communicators(
            kind=_communicator_kind(settings),
            operation_timeout_seconds=settings.operation_timeout_seconds,
            close_wait_seconds=settings.close_seconds,
            drain_seconds=settings.drain_seconds,
            on_fault=self._on_fault,
        )
        self._entry: EpochEntry | None = None
        self._record: EpochRecord | None = None
        # Guards who answers a close: the watcher for a parked process, the main thread otherwise.
        self._engagement = threading.Lock()
        self._engaged_epoch = 0
        self._section = "build"
        self._iteration = 0
        self._pause_at: int | None = None
        self._durable_done = threading.Event()

    @staticmethod
    def join() -> Session:
        """The session of this process, from the environment that its agent made.

        Raises RuntimeError outside of ``deadpool run`` or ``deadpool agent``.
        """
        link = MemberLink.from_environment()
        return Session(link, link.settings, Path(os.environ["DEADPOOL_RUN_DIR"]))

    def run(self, program: Program) -> None:
        """Play whatever role the records give this process, until the run is over."""
        failpoints.load()
        failpoints.set_context(run_dir=str(self._run_directory), node=self._link.seat.node)
        failpoints.set_context(slot=self._link.seat.slot)
        select_platform().install()
        self._communicators.install()
        self._entry = EpochEntry(
            program=program,
            link=self._link,
            settings=self._settings,
            communicators=self._communicators,
            emit=self._emit,
            report_wait=self._report_wait,
        )
        self._link.start(
            Handlers(
                on_close=self._on_close,
                on_record=lambda record: None,
                on_stop=lambda reason: None,
                on_pause=self._on_pause,
                status=self._status,
                on_durable=lambda iteration: self._durable_done.set(),
            )
        )
        try:
            self._follow_records()
        except StopOrder:
            pass
        finally:
            self._entry.close()
            self._link.close()

    # The main thread's way through epochs.

    def _follow_records(self) -> None:
        record = self._link.wait_record(0, self._settings.start_seconds)
        while True:
            role = next((r for r, seat in record.seats.items() if seat == self._link.seat), None)
            if role is None:
                self._stand_by(record)
                record = self._link.wait_record(record.epoch)
                continue
            if not self._engage(record.epoch):
                record = self._link.wait_record(record.epoch, self._settings.start_seconds)
                continue
            try:
                self._play(record, role)
            except EpochClosed as closed:
                _forget_frames(closed)
            self._leave(record.epoch)
            record = self._link.wait_record(record.epoch)

    def _stand_by(self, record: EpochRecord) -> None:
        """Be warm: build in a provisional role, with no peers; then only wait."""
        assert self._entry is not None
        self._section = "build"
        started = time.monotonic()
        self._entry.build_detached(self._link.seat.slot % self._world_size, self._world_size)
        self._entry.warm_up()
        self._entry.connect_store(record)
        self._section = "parked"
        self._link.send(
            {
                "t": "warm",
                "stage_class": self._entry.loop.stage_class(),
                "provisional_role": self._entry.role,
                "seconds": time.monotonic() - started,
            }
        )

    def _engage(self, epoch: int) -> bool:
        with self._engagement:
            if self._link.closed_epoch >= epoch:
                return False
            self._engaged_epoch = epoch
            return True

    def _play(self, record: EpochRecord, role: int) -> None:
        """Enter the epoch in ``role`` and train in it; returns only by an exception."""
        assert self._entry is not None
        self._record = record
        try:
            enter_epoch(self._entry, record, role, self._report_phase)
            self._link.send(
                {
                    "t": "restored",
                    "epoch": record.epoch,
                    "generation": self._entry.generation.to_list(),
                    "hash": "",
                }
            )
            self._train(record)
            self._finish(record, role)
        except (RestoreUnavailable, PeerMismatch, VaultError) as error:
            self._give_up_epoch("restore-failed", str(error))
        except CommunicatorFault as fault:
            self._give_up_epoch("restore-failed", f"{fault.group} {fault.operation}: {fault.cause}")

    def _train(self, record: EpochRecord) -> None:
        assert self._entry is not None
        loop, protection = self._entry.loop, self._entry.protection
        generation, boundary = self._entry.generation, self._entry.boundary
        due = loop.segments_after(generation.iteration) if generation.iteration else ()
        done = BOUNDARIES[: BOUNDARIES.index(boundary) + 1]
        self._run_segments(record, generation, [name for name in due if name not in done])
        while not loop.done:
            generation = Generation(record.epoch, loop.counters["iteration"] + 1)
            self._iteration = generation.iteration
            self._section = "first-step" if self._first_step(record) else "step"
            failpoints.set_context(iteration=generation.iteration)
            protection.announce(generation)
            loop.train_step()
            self._communicators.finish_iteration()
            self._check(record.epoch)
            protection.complete(self._entry.capture_extras())
            self._hash_state(record.epoch, generation)
            self._run_segments(record, generation, list(loop.segments_after(generation.iteration)))
            self._pause_if_asked(record, generation)
        self._section = "finish"
        protection.settle()

    def _run_segments(self, record: EpochRecord, generation: Generation, names: list[str]) -> None:
        assert self._entry is not None
        for name in names:
            self._section = name
            failpoints.set_context(iteration=generation.iteration, section=name)
            if name == "save":
                self._save_durable(record, generation)
            else:
                self._entry.loop.run_segment(name)
            self._communicators.finish_iteration()
            self._check(record.epoch)
            self._entry.protection.append(generation, name, self._entry.capture_extras())

    def _save_durable(self, record: EpochRecord, generation: Generation) -> None:
        """All roles write; the coordinator alone makes the result valid, if the epoch is open."""
        assert self._entry is not None
        base = self._entry.program.checkpoint_directory() or self._run_directory / "checkpoints"
        final = base / f"iter_{generation.iteration:07d}"
        temporary = base / f".{final.name}.epoch{record.epoch}"
        failpoints.hit("save.begin")
        temporary.mkdir(parents=True, exist_ok=True)
        self._entry.loop.save_checkpoint(temporary)
        dist.barrier()
        failpoints.hit("save.written")
        if dist.get_rank() != 0:
            return
        self._check(record.epoch)
        self._durable_done.clear()
        self._link.send(
            {
                "t": "durable-request",
                "epoch": record.epoch,
                "iteration": generation.iteration,
                "temporary": str(temporary),
                "final": str(final),
            }
        )
        limit = time.monotonic() + self._settings.restore_seconds
        while not self._durable_done.wait(0.02):
            self._check(record.epoch)
            if time.monotonic() > limit:
                raise CommunicatorFault(
                    "coordinator", "durable-request", "no answer: the checkpoint is not valid"
                )

    def _finish(self, record: EpochRecord, role: int) -> None:
        """Report the end and stay available: a late failure may need this role again."""
        assert self._entry is not None
        loop = self._entry.loop
        failpoints.hit("finish")
        state_hash = loop.state_hash()
        self._check(record.epoch)
        self._link.send(
            {
                "t": "done",
                "epoch": record.epoch,
                "role": role,
                "state_hash": state_hash,
                "samples": loop.counters.get("consumed_train_samples", 0),
                "extra": {"stall_seconds": self._entry.protection.stall_seconds},
            }
        )
        self._section = "done"
        self._wait_closed(record.epoch)

    def _leave(self, epoch: int) -> None:
        """After a close: nothing may still read or write this process's state; then say so."""
        assert self._entry is not None
        self._section = "drain"
        started = time.monotonic()
        failpoints.set_context(section="drain")
        failpoints.hit("recovery.drain")
        self._pause_at = None
        quiet = self._entry.quiesce(self._settings.drain_seconds)
        clean = self._communicators.drain() and quiet
        self._report_phase("drain", time.monotonic() - started)
        with self._engagement:
            self._engaged_epoch = 0
        self._link.send({"t": "drained", "epoch": epoch, "clean": clean})
        if not clean:
            self._link.flush(self._settings.drain_seconds)
            os._exit(EXIT_UNCLEAN)
        self._section = "parked"

    def _give_up_epoch(self, kind: str, text: str) -> None:
        """Report that this role cannot go on in the epoch, and wait for its close."""
        assert self._record is not None
        part, _, _ = text.partition(":")
        self._link.send({"t": kind, "epoch": self._record.epoch, "part": part, "text": text})
        self._wait_closed(self._record.epoch)

    def _wait_closed(self, epoch: int) -> None:
        """Wait for the close of ``epoch`` (EpochClosed) or the end of the run (StopOrder)."""
        while True:
            if self._link.stopped:
                raise StopOrder("the run is over")
            self._check(epoch)
            # The coordinator has the deadline; the agent's death ends this process.
            select.select([self._link.interrupt_fd], [], [], self._settings.close_seconds)

    def _check(self, epoch: int) -> None:
        if self._link.stopped:
            raise StopOrder("the run is over")
        if self._link.closed_epoch >= epoch:
            raise EpochClosed(epoch, f"section {self._section}")

    def _pause_if_asked(self, record: EpochRecord, generation: Generation) -> None:
        """A planned swap: stop at the announced boundary, protected, and wait for the close."""
        wanted = self._pause_at
        if wanted is None or generation.iteration < wanted:
            return
        self._pause_at = None
        assert self._entry is not None
        if generation.iteration > wanted:
            self._link.send({"t": "pause-refused", "iteration": generation.iteration})
            return
        self._entry.protection.settle()
        self._link.send({"t": "paused", "epoch": record.epoch, "iteration": generation.iteration})
        self._section = "paused"
        self._wait_closed(record.epoch)

    def _hash_state(self, epoch: int, generation: Generation) -> None:
        interval = self._settings.hash_interval
        if interval == 0 or generation.iteration % interval:
            return
        assert self._entry is not None
        value = self._entry.loop.state_hash()
        self._check(epoch)
        self._send_event(Kind.STATE_HASH, generation.iteration, {"sha256": value})

    def _first_step(self, record: EpochRecord) -> bool:
        return self._iteration == record.restore.generation.iteration + 1

    # Reports.

    def _emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """What the loop reports; nothing computed after an interrupt is passed on (rule 11)."""
        if self._record is None:
            return  # a spare that warms up
        self._check(self._record.epoch)
        values = dict(data)
        iteration = values.pop("iteration", None)
        self._send_event(Kind(kind), iteration, values)
        if kind == Kind.LOG and self._iteration > self._record.emitted_up_to:
            print(values["text"], flush=True)

    def _send_event(
        self, kind: Kind, iteration: int | None, data: Mapping[str, Any], phase: str | None = None
    ) -> None:
        assert self._record is not None
        assert self._entry is not None
        self._link.send_event(
            Event(
                kind,
                epoch=self._record.epoch,
                node=self._link.seat.node,
                role=self._entry.role,
                iteration=iteration,
                phase=phase,
                data=data,
            )
        )

    def _report_phase(self, phase: str, seconds: float) -> None:
        assert self._record is not None
        epoch = self._record.epoch
        self._link.send({"t": "phase", "epoch": epoch, "phase": phase, "seconds": seconds})
        self._section = phase

    def _report_wait(self, generation: Generation, seconds: float, over: bool) -> None:
        values = {"seconds": seconds, "over": over, "lineage": generation.lineage}
        self._send_event(Kind.GATE_WAIT, generation.iteration, values)

    # Handlers, on the watcher thread.

    def _on_close(self, epoch: int, cause: str) -> None:
        with self._engagement:
            engaged = self._engaged_epoch == epoch
        if engaged:
            self._communicators.interrupt(epoch)
        else:
            self._link.send({"t": "drained", "epoch": epoch, "clean": True})

    def _on_pause(self, iteration: int) -> None:
        self._pause_at = iteration

    def _on_fault(self, group: str, operation: str, text: str) -> None:
        message = {"t": "fault", "group": group, "operation": operation, "text": text}
        self._link.send({**message, "epoch": self._engaged_epoch})

    def _status(self) -> Mapping[str, Any]:
        waiting = self._communicators.waiting_for()
        return {
            "section": self._section,
            "iteration": self._iteration,
            "waiting": list(waiting) if waiting else None,
            "progress": self._communicators.progress(),
        }


def _communicator_kind(settings: Settings) -> str:
    if settings.communicator != "auto":
        return settings.communicator
    return "nccl" if torch.cuda.is_available() else "gloo"


def _forget_frames(error: BaseException) -> None:
    """Drop the interrupted step's frames: they hold its activations."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__context__
