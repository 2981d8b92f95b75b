"""The coordinator service: the pure state machine, connected to agents, journal, files and users.

Inputs go through one queue, so that the machine is never entered twice; actions are carried out in
order. This process writes the events of its term (alone), the journal, ``final.json`` and
``latest.json``. When it is killed, training continues; the next coordinator claims a term and takes
the state from the newest record, and the agents connect to it. A coordinator that finds a newer
term than its own steps down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.absent_agents import probe_absent
from deadpool_megatron.cluster.coordinator.checkpoints import Checkpoints
from deadpool_megatron.cluster.coordinator.commands import Commands, describe
from deadpool_megatron.cluster.coordinator.context import Context
from deadpool_megatron.cluster.coordinator.files import RunFiles
from deadpool_megatron.cluster.coordinator.garbage import GarbageSearch
from deadpool_megatron.cluster.coordinator.orders import Orders
from deadpool_megatron.cluster.coordinator.progress import ReportedProgress, divergence_is_fatal
from deadpool_megatron.cluster.coordinator.run_end import RunEnd
from deadpool_megatron.cluster.coordinator.stepper import Stepper, end_process
from deadpool_megatron.cluster.coordinator.succession import (
    CoordinatorOptions,
    begin,
    valid_checkpoints,
)
from deadpool_megatron.cluster.coordinator.watchdog import Watchdog
from deadpool_megatron.cluster.journal import journal
from deadpool_megatron.cluster.journal.terms import HeartbeatTiming, SignOfLife
from deadpool_megatron.cluster.link import protocol
from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.cluster.link.rendezvous import CoordinatorStore
from deadpool_megatron.cluster.machine import actions, inputs
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state import INITIAL, Config
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.events import SCHEMA_VERSION, Event, Kind
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.file_systems import run_to_end
from deadpool_megatron.layout.planner import is_kept, is_rolled_back
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore
from deadpool_megatron.process_names import set_process_name, show_thread_names
from deadpool_megatron.wire import auth
from deadpool_megatron.wire.listener import Listener

# The loop releases the interpreter lock for each frame that it reads, checks or sends, and another
# thread returns the lock after this time. With Python's 5 ms, beats are answered seconds late.
_SWITCH_SECONDS = 0.0005
# A decision waits no longer than this for the check whether checkpoints exist.
_LOOK_SECONDS = 2.0


class Coordinator:
    """See the module text; :meth:`run` is its whole life."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self.options, self._run = options, options.run
        self._settings, term = options.info.settings, options.term.number
        self._journal = options.journal
        now = time.monotonic()
        machine = Machine(_machine_config(options), now)
        self._note_troubles: list[str] = []
        begin(machine, self._journal, options.recovered, self._note_troubles.append)
        # The machine owns this state, and changes it with each input.
        self.state = state = machine.state
        self._requests = state.requests
        self._progress = ReportedProgress(divergence_is_fatal(self._settings), state.lineage.newest)
        self.files = RunFiles(options.run, options.info, term, self._progress)
        self.peers = Peers(self._settings, self, term)
        self.sign = SignOfLife(
            self._journal,
            term,
            HeartbeatTiming.of(self._settings),
            is_reachable=self._is_reachable,
            on_gap=self.peers.reset_timers,
            on_newer=self.superseded,
            on_trouble=self.warn,
        )
        self._garbage = GarbageSearch(now)
        self.exit_status: int | None = None
        self.over = asyncio.Event()
        self.tasks: set[asyncio.Task[object]] = set()
        self._stepper = Stepper(machine, self.peers, self._carry_out_all, self.spawn)
        self.feed = self._stepper.feed
        self.orders = Orders(options, self.peers)
        self._watchdog = Watchdog(self._settings, self.peers)
        self._store = CoordinatorStore(
            self.orders.send_frame, epoch=lambda: self.state.reporting_epoch or 0
        )
        parts = (options, state, self.peers, self.files, self.feed, self.spawn, self.warn)
        context = Context(*parts, self.superseded)
        self.checkpoints = Checkpoints(context)
        self.run_end = RunEnd(context, self.checkpoints, self.sign.look, self.end)
        self._commands = Commands(context, self.describe)
        self.command = self._commands.answer

    def describe(self) -> dict[str, Any]:
        """Return the status of the run, for people."""
        state = self.state
        return {
            **describe(state, self.peers, self._progress),
            **self._watchdog.describe(state),
            "export": self.checkpoints.status(),
            **self.files.describe(),
        }

    async def run(self) -> int:
        """Serve until the run is over; return its exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            stop = inputs.UserStop(keeps=number == signal.SIGINT)
            loop.add_signal_handler(number, self.feed, stop)
        sign_task = asyncio.create_task(self.sign.run())
        options, settings = self.options, self._settings
        listener = Listener(
            options.listener,
            options.secret,
            options.info.run_id,
            settings.connect_seconds,
            self.peers,
        )
        port = options.listener.getsockname()[1]
        if (record := self.state.record) is not None:
            await asyncio.to_thread(self.orders.prepare, record)
        self.spawn(listener.run())
        self.spawn(probe_absent(self.state, self.feed, self._settings.beat_interval_seconds / 2))
        pid = os.getpid()
        process = {"pid": pid, "hostname": socket.gethostname()}
        started = {str(pid): posix.start_time(pid)}
        address = {"host": options.host, "port": port, **process, "started": started}
        self.spawn(self.files.show_address(address))
        self.spawn(self.files.keep_name(partial(self._write_again, address)))
        if record is None:
            info = options.info
            facts = {"roles": info.world_size, "nodes": info.nodes, "spares": info.spares}
            more = {"command": list(info.command), "schema": SCHEMA_VERSION}
            self.files.write(Event(Kind.RUN_STARTED, data={**facts, **more}))
        term = options.term
        where = {"term": term.number, "host": term.host, "hostname": term.hostname}
        self.files.write(Event(Kind.COORDINATOR, self._epoch, term.node, data=where))
        for trouble in self._note_troubles:
            self.warn(trouble)
        self.spawn(self._commands.requests.begin())
        if not options.recovered.is_durable_read:
            self.spawn(self._look_for_durable())
        tick_task = asyncio.create_task(self._tick())
        over_task = asyncio.create_task(self.over.wait())
        try:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait({tick_task, over_task, sign_task}, return_when=first)
            for task in done:
                task.result()
        finally:
            tick_task.cancel()
            over_task.cancel()
            sign_task.cancel()
            self.sign.close()
            for spawned in self.tasks:
                spawned.cancel()
            listener.close()
            self.files.close(self._settings.close_seconds)
        assert self.exit_status is not None
        return self.exit_status

    def _write_again(self, address: Mapping[str, Any]) -> None:
        """Restore the files of a removed run directory that a successor, a user or another start
        needs. Raises OSError or JournalError."""
        run, options, state = self._run, self.options, self.state
        auth.create_secret(run.path, options.secret)
        self._journal.write("term", options.term.number, options.term.to_dict())
        if (record := state.record) is not None:
            self._journal.write("epoch", record.epoch, record.to_dict())
        if state.lineage.valid and not run.latest.exists():
            run_files.write_latest(run.latest, state.lineage.valid)
        run_files.write_json(run.coordinator, address)

    # The machine.

    def _carry_out_all(self, ordered: list[actions.Action]) -> None:
        for action in ordered:
            self._carry_out(action)
        if self.state.requests is not self._requests:
            self._requests = self.state.requests
            self._commands.requests.note()

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.EmitEvent():
                self.files.write(action.to_event())
            case actions.Announce(_, forgotten_from=iteration) if iteration is not None:
                self._progress.forget(iteration)
                self.orders.give(action)
            case actions.WriteRecord(record):
                self.spawn(self._write_record(record))
            case actions.Note(kind, number, entry):
                self.spawn(asyncio.to_thread(journal.note, self._journal, kind, number, entry))
            case actions.Welcome(node, record):
                self.orders.welcome(node, record, self.state)
            case actions.ExportDump() | actions.BeginExport() | actions.EndRun():
                self.checkpoints.carry_out(action)
            case actions.InspectCheckpoints(valid):
                self.spawn(self._look_at(valid))
            case actions.Finish():
                self.run_end.finish(action)
            case actions.ExpediteExit():
                self.run_end.expedite()
            case actions.Exit():
                self.run_end.exit()
            case _:
                self.orders.give(action)

    async def _look_at(self, valid: tuple[Restore, ...]) -> None:
        """Check whether the checkpoints exist; do not wait long for a file system that hangs."""
        missing = frozenset[str]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                missing = await asyncio.to_thread(run_files.missing_paths, valid)
        self.feed(inputs.CheckpointsFound(missing))

    async def _write_record(self, record: EpochRecord) -> None:
        failpoints.hit("coordinator.journal", epoch=record.epoch)
        limit = self._settings.spare_timeout_seconds
        try:
            await journal.write_with_retries(
                self._journal,
                ("epoch", record.epoch),
                await asyncio.to_thread(record.to_dict),
                limit,
                on_trouble=lambda text: self.warn(f"{text}; tried again for {limit:g} s"),
            )
        except journal.LostRace as error:
            self.superseded(str(error))
        except journal.JournalError as error:
            self.feed(inputs.JournalFailed(record.epoch, str(error)))
        else:
            await asyncio.to_thread(self.orders.prepare, record)
            self.feed(inputs.JournalWritten(record.epoch))

    # Connections (see PeerEvents).

    def agent_joined(self, peer: AgentPeer, message: Mapping[str, Any], again: bool) -> None:
        """Feed the join of a node, unless its agent only uses another connection (``again``)."""
        joined = protocol.join(message)
        peer.sent_epoch = int(message.get("told", 0))
        if not again:
            self.feed(joined)
        elif peer.welcomed:  # otherwise the machine has yet to answer the first join
            self.orders.welcome(peer.node, self.state.record, self.state)

    def agent_reported(self, peer: AgentPeer, message: Mapping[str, Any]) -> None:
        """Take a report. From a dropped node take only the numbers of the kept lineage."""
        if peer.dropped and message["t"] not in ("event", "progress"):
            return
        item = protocol.from_agent(peer.node, message, self.state.memory.layouts)
        match message["t"]:
            case "export":
                self.checkpoints.take_report(peer.node, message)
            case "store":
                self._store.receive(peer.node, message)
            case "event":
                self.files.write(Event.from_dict(message["event"]))
            case "progress":
                self._progressed(Event.from_dict(message["event"]))
            case "member":
                self._member_reported(peer.node, message)
        if item is not None:
            self.feed(item)

    def _member_reported(self, node: int, message: Mapping[str, Any]) -> None:
        m, role = message["m"], self.state.role_at(*protocol.seat_of(node, message))
        if m["t"] == "durable-request":
            self.spawn(self.checkpoints.save(m), self.peers.current_agent)
        event = protocol.event_of_member(m, node, role)
        if event is None or (event.kind is Kind.MEMBER_DONE and self._is_stale(event)):
            return
        if event.kind is Kind.MEMBER_DONE and event.role is not None:
            self._progress.done(event.role, event.data)
        self.files.write(event)

    def agent_left(self, peer: AgentPeer, cause: str) -> None:
        """Report the node as lost: its members die with its agent."""
        if not peer.dropped:
            self.feed(inputs.NodeLost(peer.node, cause))

    def refused(self, sender: str, reason: str, **more: bool) -> None:
        """Report a refusal, once this coordinator has given a sign of life again: after a pause of
        this process there may be a successor, and the message may have been meant for it.
        """
        data = {"who": sender, "why": reason, **more}
        self.spawn(self._report_when_fresh(Event(Kind.REFUSED, self._epoch, data=data)))

    async def _report_when_fresh(self, event: Event) -> None:
        while not self.sign.is_fresh(time.monotonic()):
            await asyncio.sleep(self._settings.beat_interval_seconds)
        self.files.write(event)

    # Reports.

    @property
    def _epoch(self) -> int:
        return 0 if self.state.record is None else self.state.record.epoch

    def _progressed(self, report: Event) -> None:
        """Write progress of a role, and feed it to the machine. Numbers of a closed epoch count if
        their iteration belongs to a kept lineage, however late they arrive.
        """
        is_late = report.kind in protocol.NUMBERS and report.epoch < self._epoch
        generation = Generation(report.epoch, report.iteration or 0)
        if is_late and not is_kept(self.state.lineage.kept, generation) and self._is_stale(report):
            return
        event, item = self._progress.take(report)
        if event is not None:
            self.files.write(event)
            if not is_late:
                self._watchdog.note(event, time.monotonic())
        # A late non-finite number counts too, as all that was computed after it is bad.
        if item is not None and (not is_late or isinstance(item, inputs.NotFinite)):
            self.feed(item)

    def _is_stale(self, event: Event) -> bool:
        """Return whether the event is of a closed epoch; if so, refuse it."""
        if is_stale := event.epoch < self._epoch:
            reason = f"{event.kind} of epoch {event.epoch}, now closed"
            self.refused(f"node {event.node}", reason, late=True)
        return is_stale

    # Time and ends.

    async def _tick(self) -> None:
        interval = self._settings.beat_interval_seconds
        last = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - last > 3 * interval:
                self.peers.reset_timers(now)
            last = now
            quiet = self.peers.silent(self._settings.node_silence_seconds / 2, now)
            # Without a fresh sign of life, nodes continue without this coordinator, and their
            # silence proves nothing.
            if quiet and self.sign.is_fresh(now):
                for lost in self._watchdog.at_silence(quiet, now):
                    self.feed(lost)
            if self._watchdog.is_due(now):
                self._watch()
            self.feed(inputs.Tick())
            if self.checkpoints.is_used:
                self.checkpoints.tick()
            self._garbage.tick(now)

    def _watch(self) -> None:
        """Check the progress of all roles, once."""
        try:
            events, items = self._watchdog.at_progress(self.state, self._epoch, time.monotonic())
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self.peers.refuse_broken("members", "their beats", error)
            return
        for event in events:
            self.files.write(event)
        for item in (*items, *self._watchdog.at_protection(self.state)):
            self.feed(item)

    # The end of this coordinator.

    def _is_reachable(self) -> bool:
        limit = HeartbeatTiming.of(self._settings).alone
        return self.peers.reaches_majority(limit, time.monotonic(), self.options.term.node)

    def superseded(self, reason: str) -> None:
        """Step down and send no more messages: another coordinator has a newer term, according to
        the journal or to an agent that is connected to it."""
        if self.exit_status is None:
            text = f"coordinator of term {self.options.term.number} steps down: {reason}"
            print(text, file=sys.stderr, flush=True)
            self.files.take_digests()  # collected events are dropped
            self.end(ExitStatus.SUPERSEDED)

    def end(self, exit_status: int) -> None:
        self.exit_status = exit_status
        self._stepper.end()
        self.over.set()

    def warn(self, text: str) -> None:
        self.files.write(Event(Kind.LOG, self._epoch, data={"level": "warning", "text": text}))

    async def _look_for_durable(self) -> None:
        """Read the checkpoints that could not be read before this coordinator took over."""
        while True:
            try:
                checkpoints = await asyncio.to_thread(valid_checkpoints, self._run)
                break
            except OSError:
                await asyncio.sleep(self._settings.takeover_seconds)
            except ValueError as error:
                self.warn(str(error))
                return
        lineage, nonfinite = self.state.lineage, self.state.blame.nonfinite
        for restore in checkpoints:
            is_known = restore.path in {other.path for other in lineage.valid} | lineage.invalidated
            is_bad = is_rolled_back(restore.generation, nonfinite)
            if restore.kind == "durable" and not is_known and not is_bad:
                facts = (restore.path, restore.boundary, restore.identity)
                self.feed(inputs.DurableValid(restore.generation.iteration, *facts))

    def spawn(self, coroutine: Coroutine[Any, Any, object], peer: str = "") -> None:
        """Run a coroutine as a task. If it fails, this process ends, unless ``peer`` requested the
        work: then the request is refused."""

        def finished(task: asyncio.Task[object]) -> None:
            self.tasks.discard(task)
            if task.cancelled() or (error := task.exception()) is None:
                return
            if not peer:
                end_process(error)
            self.peers.refuse_broken(peer, "what it asked for", error)

        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(finished)


def _machine_config(options: CoordinatorOptions) -> Config:
    """Return the facts that the state machine needs."""
    info = options.info
    start, *older = info.restore or (INITIAL,)
    return Config(
        nodes=info.nodes,
        spares=info.spares,
        nproc=info.nproc_per_node,
        settings=info.settings,
        dump_directory=str(options.run.dump),
        start=start,
        older=tuple(older),
        restarted=options.restarted,
        has_new_command=options.has_new_command,
        check_only=info.check_only,
        finished=info.finished,
        from_scratch=info.from_scratch,
    )


def run_coordinator(options: CoordinatorOptions) -> int:
    """Run a coordinator in this process; return the exit status of the run."""
    set_process_name("dp-coordinator")
    show_thread_names()
    failpoints.load()
    failpoints.set_context(run_dir=str(options.run.path), process="coordinator")
    needed = posix.needed_by_coordinator(options.info.nodes + options.info.spares)
    if problem := posix.raise_limit(needed):
        print(f"deadpool: {problem}", file=sys.stderr, flush=True)
    sys.setswitchinterval(_SWITCH_SECONDS)
    return run_to_end(Coordinator(options).run(), options.info.settings.persist_seconds)
