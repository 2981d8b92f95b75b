"""One node's part in exports: orders a snapshot from its vault, and runs the exporter.

The exporter is a separate process of the lowest priority that dies with this agent; training
processes have no part in it. A failure here is reported and ends this export only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.process.children import ChildWatch, ProcessEnd, start_child
from deadpool_megatron.cluster.process.logs import LocalLogs, last_line
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot, drop_snapshots
from deadpool_megatron.vault.errors import Code, VaultError

_END_SECONDS = 5.0
_PAUSE_SECONDS = 0.02


class NodeExports:
    """The exports of one node, one at a time: a new order ends an older export. ``take``: see
    :meth:`.vault_process.VaultSupervisor.take`. For the agent's loop.
    """

    def __init__(
        self,
        options: AgentOptions,
        take: Callable[[str, int, float], Awaitable[list[Snapshot]]],
        logs: LocalLogs,
        send: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._options, self._segments = options, options.segments
        self._take_snapshots = take
        self._log = logs.log(f"node{options.node}-persist")
        self._send = send
        self._name = ""
        self._snapshots: list[Snapshot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: ChildWatch | None = None
        self._removals: list[threading.Thread] = []
        # A killed agent may have left snapshots, whose memory no other process would free.
        drop_snapshots(self._segments)

    def order(self, message: Mapping[str, Any]) -> None:
        """Carry out an order of the coordinator: ``export-take`` and then ``export-write``,
        ``export-dump`` for a generation that was dumped to a disk, or ``export-drop``."""
        name = str(message["name"])
        try:
            run_files.export_name(name)
            if "directory" in message:
                unfinished = run_files.unfinished_export(Path("/"), self._options.info.run_id, name)
                run_files.export_directory(str(message["directory"]), unfinished.name)
        except run_files.OutsideError as error:
            self._report(name, "failed", text=f"the order was refused: {error}")
            return
        kind = message["t"]
        if kind in ("export-take", "export-dump"):
            self.drop()
            self._name = name
        if name != self._name:
            return  # an order for an export that is over here
        if kind == "export-take":
            task = asyncio.create_task(self._take(name, message["iteration"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif kind == "export-drop":
            self.drop()
        else:
            self._start_writing(message)

    def drop(self) -> None:
        """End the current export and free its memory."""
        self._name = ""
        if self._writer is not None:
            self._writer.kill()
        self._snapshots = []
        # A vault that is still taking a snapshot gives up when its file is missing.
        drop_snapshots(self._segments)

    async def close(self) -> None:
        """End the export and wait for its processes and threads, when the agent ends."""
        writer = self._writer
        self.drop()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):  # the exporter dies with this process
            async with asyncio.timeout(_END_SECONDS):
                if writer is not None:
                    await writer.ended.wait()
                while any(thread.is_alive() for thread in self._removals):
                    await asyncio.sleep(_PAUSE_SECONDS)

    async def _take(self, name: str, iteration: int) -> None:
        limit = self._options.info.settings.persist_seconds
        failure, code, snapshots = "", Code.FAILED, list[Snapshot]()
        try:
            snapshots = await self._take_snapshots(name, iteration, limit)
        except (VaultError, OSError, TimeoutError) as error:
            failure = str(error) or type(error).__name__
            code = error.code if isinstance(error, VaultError) else code
        if failure or name != self._name:
            drop_snapshots(self._segments, name)
        if name != self._name:
            return  # the export was dropped in the meantime
        if failure:
            self._report(name, "failed", text=failure, code=code)
            return
        self._snapshots = snapshots
        places = {str(s.role): [s.generation.to_list(), s.boundary] for s in snapshots}
        self._report(name, "taken", roles=places)

    def _start_writing(self, message: Mapping[str, Any]) -> None:
        name = self._name
        job = self._segments / "export.json"
        dump = message.get("dump")
        # For roles that were lost with their nodes only the shared disk has the state templates.
        templates = self._segments if dump is None else self._options.run.templates
        facts = {
            "node": self._options.node,
            "run_dir": str(self._options.run.path),
            "directory": message["directory"],
            "iteration": message["iteration"],
            "skeletons": str(templates),
            "taken": [snapshot.to_dict() for snapshot in self._snapshots],
            "dump": dump,
            "roles": message["roles"],
            "deadline_seconds": self._options.info.settings.persist_seconds,
        }
        try:
            job.write_text(json.dumps(facts))
            self._writer = start_child(
                ["-m", "deadpool_megatron.persist", str(job), "--parent", str(os.getpid())],
                lambda ending: self._ended(name, Path(message["directory"]), ending),
                log=self._log,
                # The exporter computes nothing on devices, and must not take memory there.
                environment={"CUDA_VISIBLE_DEVICES": ""},
            )
        except OSError as error:  # a full disk, a log that cannot be opened, no more processes
            self._report(name, "failed", text=f"the exporter was not started: {error}")
            self.drop()

    def _ended(self, name: str, directory: Path, ending: ProcessEnd) -> None:
        """Report the end of an exporter, or remove the files of an export that was dropped."""
        if name != self._name:  # dropped; a new export may be under way
            # The coordinator removes the directory too, but perhaps before the exporter has ended.
            thread = threading.Thread(target=shutil.rmtree, args=(directory, True), daemon=True)
            thread.start()
            self._removals.append(thread)
            return
        self._writer = None
        if ending.exit_code == 0:
            self._report(name, "written")
        else:
            text = f"the exporter {ending}: {last_line(self._log)}"
            self._report(name, "failed", text=text.rstrip(": "))
        self._snapshots = []
        drop_snapshots(self._segments)

    def _report(self, name: str, step: str, **facts: Any) -> None:
        self._send({"t": "export", "name": name, "step": step, **facts})
