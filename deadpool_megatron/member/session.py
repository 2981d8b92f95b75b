"""One process of a protected run: takes roles, trains, leaves closed epochs, takes roles again.

A training program calls ``Session.join().run(program)`` and never sees a failure. The same process
may wait as a spare, adopt a role, lose its peers many times and finish. Each epoch is::

    record of epoch e -> seated?  no:  build in a provisional role, detached, and wait
                                  yes: adopt, rebuild, restore, sync, verify -> train -> done
    epoch closed      -> leave: drain, forget operations in flight, report it, wait for a record

These exceptions end an epoch for this process:

* EpochClosed: a peer failed. The close is known already, or will be known soon.
* A failed communication, vault or restore is reported; the coordinator closes the epoch.
* Any other exception is reported at once. After a close, or half a second before a close, it counts
  as a consequence of the close: a peer died in the middle of an operation, or an aborted operation
  left junk. Without a close it is a failure of the program, and ends the process with its
  traceback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.link.member_link import Handlers, MemberLink, PausePoint, StopOrder
from deadpool_megatron.cluster.process.program import LOADED_PROGRAM
from deadpool_megatron.comms import CommunicatorFault, Communicators, EpochClosed, Limits
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.failures import GRACE_SECONDS, ExitStatus, FailureKind, kind_of_end
from deadpool_megatron.layout.ranks import first_role, rank_of
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.member.entry import EpochEntry, OtherModel, RestoreFailed
from deadpool_megatron.member.epoch_runner import EpochRunner
from deadpool_megatron.member.hang_probe import HangProbe
from deadpool_megatron.member.loop import Program
from deadpool_megatron.member.member_device import select_device
from deadpool_megatron.member.own_time import DeviceMeter, HostMeter
from deadpool_megatron.member.peer_comparison import PeerMismatch
from deadpool_megatron.member.protection import ExtrasOutgrown
from deadpool_megatron.member.role_reports import RoleReports
from deadpool_megatron.settings import Settings
from deadpool_megatron.state.extras import ExtrasError
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.state.template import TemplateError
from deadpool_megatron.vault.errors import CutRefused, OutOfSpace, VaultError
from deadpool_megatron.wire.framing import readable

_POLL_SECONDS = 0.05
# The share of close_seconds that is spent on communication, and then on the device, in leaving an
# epoch with NCCL. The report still has to reach the agent in time.
_NCCL_SHARE = 0.45


class Session:
    """See the module text. All methods but the link's handlers run on the main thread."""

    def __init__(self, link: MemberLink, run_directory: Path) -> None:
        settings = link.settings
        self._link, self._settings = link, settings
        self._run_directory = run_directory
        self._provisional_role = link.place.provisional_role
        kind = select_device(settings.communicator, link.seat.local_rank)
        self._drain_seconds = drain_seconds(kind, settings)
        print(
            f"deadpool: {kind}: {settings.close_seconds:g} s to leave a closed epoch, of them"
            f" {self._drain_seconds:g} s for communication and then for the device;"
            f" {settings.rebuild_seconds:g} s to connect",
            file=sys.stderr,
            flush=True,
        )
        self._communicators = Communicators(
            kind,
            Limits(
                operation_timeout_seconds=settings.operation_timeout_seconds,
                close_wait_seconds=settings.close_seconds,
                drain_seconds=self._drain_seconds,
                long_operation_seconds=settings.first_step_seconds,
            ),
            self._on_fault,
            settings.interface,
            settings.rebuild,
        )
        self._reports = RoleReports(link, self._check)
        self._entry: EpochEntry | None = None
        # Guards which thread answers a close: the watcher for a member outside of an epoch, else
        # the main thread. It is held during an answer, so that no answer overtakes an older answer.
        self._engagement = threading.Lock()
        self._engaged_epoch = 0
        self._drained_epoch = 0
        self._pause = PausePoint()
        self._own_time = (
            HostMeter(self._waited_seconds)
            if kind == "gloo"
            else DeviceMeter(self._communicators.stream_waits, self._stalled_seconds)
        )
        self._hang_probe = HangProbe()

    @staticmethod
    def join() -> Session:
        """Return the session of this process, from the environment that its agent has set.

        Raises RuntimeError outside of ``deadpool run`` or ``deadpool agent``.
        """
        return Session(MemberLink.from_environment(), Path(os.environ["DEADPOOL_RUN_DIR"]))

    def run(self, program: Program) -> None:
        """Train in the role that each record gives this process, until the run is over.

        Ends the process, with one line and status 2, where the program cannot be protected.
        """
        failpoints.load()
        seat = self._link.seat
        failpoints.set_context(
            run_dir=str(self._run_directory), node=seat.node, slot=seat.local_rank
        )
        self._communicators.install()
        self._entry = EpochEntry(program, self._link, self._communicators, self._reports)
        handlers = Handlers(self._on_close, self._on_pause, self._status, self._on_durable)
        self._link.start(handlers)
        try:
            self._follow_records()
        except StopOrder:
            pass
        except (TemplateError, UnsupportedState, ExtrasError) as error:
            # The program cannot be protected: a traceback would not help.
            print(f"deadpool: {error}", file=sys.stderr, flush=True)
            sys.exit(ExitStatus.BAD_INPUT)
        finally:
            self._entry.close()
            self._link.close()

    # The main thread, epoch by epoch.

    @property
    def _live_entry(self) -> EpochEntry:
        assert self._entry is not None
        return self._entry

    def _follow_records(self) -> None:
        # Waits for records have no deadline here: the coordinator decides how long a job may wait
        # for a spare or for other nodes, and the end of the agent ends this process.
        record = self._link.wait_record(0)
        while True:
            role = next((r for r, seat in record.seats.items() if seat == self._link.seat), None)
            if role is None:
                self._wait_as_spare(record)
            else:
                try:
                    self._take_seat(record, role)
                except SystemExit as stop:
                    if rank_of(role) and stop.code in (None, 0):
                        # All roles end in this way. The reason is in the log of role 0, which must
                        # be the first to end.
                        self._ends_within(record.epoch, self._settings.close_seconds)
                    raise
            record = self._link.wait_record(record.epoch)

    def _wait_as_spare(self, record: EpochRecord) -> None:
        """Build in a provisional role without peers, and wait for a role.

        The model is built once and kept over all epochs with the same number of model replicas, so
        that it is ready when it is needed.
        """
        reports, entry = self._reports, self._live_entry
        reports.record = None
        first = first_role(min(record.seats))
        if not entry.is_built or first_role(entry.role) != first:
            if not self._await_turn(record):
                return
            reports.section = "build"
            world_size = len(record.seats)
            rank = rank_of(self._provisional_role) % world_size
            if not self._is_restarted_in(record):
                rank = entry.program.provisional_role(rank, world_size)
            entry.build_detached(first + rank, world_size)
            self._compare_program(record)
            entry.warm_up()
            self._communicators.warm()
        reports.section = "parked"
        self._link.send({"t": "warm"})
        failpoints.hit("member.warm")

    def _is_restarted_in(self, record: EpochRecord) -> bool:
        """Return whether this process replaces a process with a role, and will get that role."""
        place = self._link.seat.node, self._link.seat.local_rank
        return any((seat.node, seat.local_rank) == place for seat in record.seats.values())

    def _await_turn(self, record: EpochRecord) -> bool:
        """Wait until the program lets spares build; False if the epoch ends before that."""
        self._reports.section = "parked"
        while not self._live_entry.program.spares_may_build():
            if self._ends_within(record.epoch, _POLL_SECONDS):
                if self._link.stopped:
                    raise StopOrder("the run is over")
                return False
        return True

    def _take_seat(self, record: EpochRecord, role: int) -> None:
        """Train in ``role`` until the epoch is closed, unless it is closed already."""
        reports = self._reports
        reports.record, reports.role = record, role
        # While a new process builds, the watcher answers a close: there is nothing to leave yet.
        self._stage("adopt", self._live_entry.adopt, record, role)
        if not self._engage(record.epoch):
            reports.section = "parked"
            return
        try:
            self._run_epoch(record, role)
        except (EpochClosed, Exception) as error:
            if isinstance(error, StopOrder):
                raise
            self._await_close(record.epoch, error)
            failure: BaseException = error
        self._leave(record.epoch, failure)

    def _stage(
        self, phase: str, run: Callable[[EpochRecord, int], None], record: EpochRecord, role: int
    ) -> None:
        """Run one stage of a recovery, and report its time. An exception skips the later stages:
        EpochClosed when the epoch is closed meanwhile, or a failure whose report leads to a
        close."""
        self._reports.section = phase
        failpoints.set_context(epoch=record.epoch, role=role, section=phase)
        failpoints.hit(f"recovery.{phase}")
        started = time.monotonic()
        run(record, role)
        self._report_phase(phase, started)

    def _report_phase(self, phase: str, started: float) -> None:
        self._reports.send("phase", phase=phase, seconds=time.monotonic() - started)

    def _ends_within(self, epoch: int, seconds: float) -> bool:
        """Return whether ``epoch`` is closed, or the run over, within ``seconds``."""
        limit = time.monotonic() + seconds
        while not (self._link.stopped or self._link.closed_epoch >= epoch):
            if time.monotonic() >= limit:
                return False
            readable(self._link.interrupt_fd, _POLL_SECONDS)
        return True

    def _engage(self, epoch: int) -> bool:
        with self._engagement:
            if self._link.closed_epoch >= epoch:
                return False
            self._engaged_epoch = epoch
            # Spares receive pauses, too; an order of an older epoch must not stop this epoch.
            self._pause.reset()
            return True

    def _run_epoch(self, record: EpochRecord, role: int) -> NoReturn:
        """Enter the epoch in ``role`` and train in it; ends by an exception."""
        entry = self._live_entry
        for phase, stage in (
            ("rebuild", entry.rebuild),
            ("restore", entry.restore),
            ("sync", entry.synchronise),
            ("verify", entry.verify),
        ):
            if phase == "verify":  # before any role trains
                self._compare_program(record)
            self._stage(phase, stage, record, role)
        self._reports.send("restored", generation=entry.generation.to_list())
        checkpoints = self._run_directory / "checkpoints"
        runner = EpochRunner(record, entry, self._pause, self._own_time, checkpoints)
        runner.hash_restored()
        entry.loop.train(runner)
        self._reports.section = "finish"
        entry.protection.end()
        self._finish(record, role)

    def _compare_program(self, record: EpochRecord) -> None:
        """Raise OtherProgram, which ends this process, unless all members run the same program."""
        try:
            text = LOADED_PROGRAM.agree(self._run_directory, record.history.start)
        except (OSError, ValueError) as error:
            text = f"its program was not compared with that of the run: {error}"
        if text:
            place = record.epoch, self._link.seat.node
            data = {"level": "warning", "text": text}
            self._link.send_event(Event(Kind.LOG, *place, data=data))

    def _await_close(self, epoch: int, error: BaseException) -> None:
        """Report ``error`` and return when ``epoch`` is closed; see the module text.

        Raises ``error`` if it is the program's own, and StopOrder at the end of the run.
        """
        if self._link.closed_epoch < epoch and not self._link.stopped:
            if isinstance(error, RestoreFailed | PeerMismatch):
                part, other = getattr(error, "part", ""), isinstance(error, OtherModel)
                self._reports.send(
                    "restore-failed", part=part, text=str(error), other_program=other
                )
            elif isinstance(error, CutRefused):  # this process stays: it may train at another size
                self._reports.send("size-failed", text=str(error))
            elif isinstance(error, CommunicatorFault):
                self._on_fault(error.group, error.operation, error.cause)
            elif isinstance(error, OutOfSpace | ExtrasOutgrown):
                # Another process would fail in the same way.
                print(error, file=sys.stderr, flush=True)
                bad = isinstance(error, OutOfSpace)
                sys.exit(ExitStatus.BAD_INPUT if bad else ExitStatus.EXTRAS_OUTGROWN)
            elif isinstance(error, TemplateError | UnsupportedState):
                raise error  # the program cannot be protected, which is no consequence of a close
            elif isinstance(error, VaultError):
                self._on_fault("vault", self._reports.section, str(error))
            elif isinstance(error, EpochClosed):
                self._on_fault("member", error.operation, "interrupted without a close")
            elif _is_of_peers(error):
                self._on_fault("member", self._reports.section, _error_text(error))
            else:
                self._reports.send("raised", text=_error_text(error).partition("\n")[0])
                if not self._ends_within(epoch, GRACE_SECONDS):
                    raise error  # with a close, the error was the first sign of a peer's death
        with contextlib.suppress(EpochClosed):
            self._wait_closed(epoch)
        if not isinstance(error, EpochClosed):
            # For readers of the log; nothing of the interrupted step is used.
            print(f"epoch {epoch} ends here with {_error_text(error)}", file=sys.stderr, flush=True)

    def _finish(self, record: EpochRecord, role: int) -> NoReturn:
        """Report the end and wait: a late failure may need this role again."""
        loop = self._live_entry.loop
        failpoints.hit("finish")
        state_hash = loop.state_hash()
        self._check(record.epoch)
        self._reports.send(
            "done",
            role=role,
            state_hash=state_hash,
            samples=loop.counters.get("consumed_train_samples", 0),
            early=loop.early,
            unsaved=loop.unsaved,
            extra={
                "stall_seconds": self._live_entry.protection.stall_seconds,
                "entries": self._live_entry.built.framework.entry_digests(),
            },
        )
        self._reports.section = "done"
        self._wait_closed(record.epoch)

    def _leave(self, epoch: int, failure: BaseException) -> None:
        """After a close, wait until no operation reads or writes the state of this process, and
        report that. End a process that cannot be drained."""
        started = time.monotonic()
        self._reports.section = "drain"
        failpoints.set_context(section="drain")
        failpoints.hit("recovery.drain")
        # The watcher may not have interrupted yet; a drain of an open epoch would do nothing.
        self._communicators.interrupt(epoch)
        clean = self._communicators.drain()
        if reason := self._communicators.unusable_reason:
            print(f"this process has to be replaced: {reason}", file=sys.stderr, flush=True)
        # The device comes last: it cannot finish while an operation waits for a dead peer.
        clean = self._live_entry.quiesce(self._drain_seconds) and clean
        if clean:
            forget_frames(failure)
        self._report_phase("drain", started)
        with self._engagement:
            if clean:  # otherwise this process ends, and must not be reported as clean meanwhile
                self._engaged_epoch = 0
            self._report_drained(max(epoch, self._link.closed_epoch), clean)
        if not clean:
            self._link.flush(self._settings.drain_seconds)
            os._exit(ExitStatus.UNCLEAN)
        self._reports.section = "parked"

    def _report_drained(self, epoch: int, clean: bool) -> None:
        """Report the drain of ``epoch`` once: the main thread may have left before the watcher
        handles the close. The engagement lock is held."""
        if epoch > self._drained_epoch:
            self._drained_epoch = epoch
            self._link.send({"t": "drained", "epoch": epoch, "clean": clean})

    def _wait_closed(self, epoch: int) -> NoReturn:
        """Wait for the close of ``epoch`` (EpochClosed) or the end of the run (StopOrder)."""
        while True:
            self._check(epoch)
            # The coordinator has the deadline; the agent's death ends this process.
            readable(self._link.interrupt_fd, self._settings.close_seconds)

    def _check(self, epoch: int) -> None:
        if self._link.stopped:
            raise StopOrder("the run is over")
        if self._link.closed_epoch >= epoch:
            raise EpochClosed(epoch, f"section {self._reports.section}")

    # Called on other threads than the main thread.

    def _on_close(self, epoch: int, cause: str) -> None:
        with self._engagement:
            engaged = 0 < self._engaged_epoch <= epoch
            if not engaged:
                self._report_drained(epoch, clean=True)
        if engaged:
            # In a thread of its own: an abort of NCCL may take long, and a member without
            # heartbeats is taken for frozen.
            interrupt = functools.partial(self._communicators.interrupt, epoch)
            threading.Thread(target=interrupt, name="deadpool-interrupt", daemon=True).start()

    def _on_pause(self, iteration: int) -> None:
        started = self._pause.order(iteration)
        if started is not None:
            epoch = self._engaged_epoch
            self._link.send({"t": "pause-refused", "epoch": epoch, "iteration": started})

    def _on_durable(self, iteration: int) -> None:
        self._reports.durable_iteration = iteration

    def _on_fault(self, group: str, operation: str, text: str) -> None:
        message = {"t": "fault", "group": group, "operation": operation, "text": text}
        self._link.send({**message, "epoch": self._engaged_epoch})

    def _waited_seconds(self) -> float:
        return self._communicators.waited_seconds() + self._stalled_seconds()

    def _stalled_seconds(self) -> float:
        return 0.0 if self._entry is None else self._entry.protection.stall_seconds

    def _status(self) -> Mapping[str, Any]:
        waiting = self._communicators.waiting_for()
        return {
            "section": self._reports.section,
            "iteration": self._reports.iteration,
            "waiting": list(waiting) if waiting else None,
            "progress": self._communicators.progress(),
            "own": list(self._own_time.sample),
            **self._hang_probe.evidence(self._communicators),
        }


def _error_text(error: BaseException) -> str:
    """Return the last lines of the traceback of ``error``."""
    return "".join(traceback.format_exception_only(error)).strip()


def _is_of_peers(error: BaseException | None) -> bool:
    """Return whether ``error``, or its cause, is a failure of communication: a peer has died, and
    this process is intact."""
    return error is not None and (
        isinstance(error, EpochClosed | CommunicatorFault)
        or kind_of_end(_error_text(error)) is FailureKind.COMMUNICATOR_ERROR
        or _is_of_peers(error.__cause__ or error.__context__)
    )


def forget_frames(error: BaseException) -> None:
    """Drop the frames of an exception and of its causes: they hold tensors and sockets.

    Call this when no operation can write into that memory any more. Running frames, such as the
    caller's, stay.
    """
    cleared: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        failure = pending.pop()
        if failure is None or id(failure) in cleared:
            continue
        cleared.add(id(failure))
        # A cause need not be the context: code may have kept an older exception.
        pending += [failure.__cause__, failure.__context__]
        if isinstance(failure, BaseExceptionGroup):
            pending += failure.exceptions
        traceback.clear_frames(failure.__traceback__)
        failure.__traceback__ = None


def drain_seconds(kind: str, settings: Settings) -> float:
    """Return the limit in seconds for the end of abandoned communication, and again for the device.

    gloo ends at once or not at all. With NCCL both limits together are nearly all of the time for
    which the agent waits for this process.
    """
    return settings.drain_seconds if kind == "gloo" else _NCCL_SHARE * settings.close_seconds
