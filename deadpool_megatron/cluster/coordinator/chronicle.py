"""The files in which a run tells what happened: events, ``final.json`` and ``latest.json``.

Belongs to the coordinator. Each term has an event file of its own: an old coordinator that wakes up
once more cannot write into what the new one has read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deadpool_megatron.cluster.coordinator.results import Results, divergence_is_fatal
from deadpool_megatron.cluster.machine.actions import Finish
from deadpool_megatron.cluster.process.starter import NVIDIA_CONTROL_DEVICE
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunInfo,
    read_json,
    write_json,
)
from deadpool_megatron.events import Event, EventLog, read_events, term_file
from deadpool_megatron.layout.records import Restore


class Chronicle:
    """Takes up where an earlier coordinator of the run was killed, if there was one."""

    def __init__(self, run: RunDirectory, info: RunInfo, term: int) -> None:
        self._run = run
        self._info = info
        fatal = divergence_is_fatal(info.settings, NVIDIA_CONTROL_DEVICE.exists())
        self.divergence_is_fatal = fatal
        self.results = Results(fatal)
        for event in read_events(run.events):
            self.results.add(event)
        self._log = EventLog(term_file(run.events, term))

    def write(self, event: Event) -> list[Event]:
        """Write an event, unless it repeats a known one; answers what was written."""
        accepted = self.results.add(event)
        for one in accepted:
            self._log.write(one)
        return accepted

    def sync(self) -> None:
        """Make the events durable, for a host that dies with what it has not sent to the server of
        a network file system. Blocks; may be called from another thread. Raises OSError.
        """
        self._log.sync()

    def newest_durable(self) -> Restore | None:
        """The checkpoint that was made valid last in this run."""
        if not self._run.latest.exists():
            return None
        found = Restore.from_dict(read_json(self._run.latest))
        # A run that ended before its first iteration says so; that is nothing to fall back to.
        return None if found.kind == "initial" else found

    def finish(self, end: Finish, recoveries: Iterable[dict[str, Any]]) -> str:
        """Write the last files; answers the reason as written. ``recoveries``: of the present
        coordinator, with phases that were reported after their event was written.
        """
        head = {"run_id": self._info.run_id, "world_size": self._info.world_size}
        final = self.results.final(head, end.reason, end.exit_status)
        final["kind"] = end.kind
        final["slots_kept"] = end.keeps_slots
        reports = list(recoveries)
        known = {report["epoch"] for report in reports}
        earlier = [entry for entry in final["recoveries"] if entry["epoch"] not in known]
        final["recoveries"] = [*earlier, *reports]
        if end.resume is not None:
            write_json(self._run.latest, end.resume.to_dict(), lasting=True)
        write_json(self._run.final, final)
        return str(final["reason"])

    def close(self) -> None:
        """Close the event file."""
        self._log.close()
