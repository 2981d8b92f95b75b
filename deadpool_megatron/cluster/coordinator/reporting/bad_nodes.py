"""Notes which hosts this run has put aside, beside the runs, and tells the site's command of each.

Like notices: nothing waits for it, and no decision of this run looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.run_directory.bad_nodes import (
    BadNode,
    add_bad_node,
    why_left_out,
)
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.notify import Outlet, call
from deadpool_megatron.ownership import OwnershipError

# What the command finds in its environment, beside the JSON on its standard input.
HOST_VARIABLE, KIND_VARIABLE = "DEADPOOL_BAD_NODE", "DEADPOOL_BAD_NODE_KIND"
TEXT_VARIABLE = "DEADPOOL_BAD_NODE_TEXT"
# Losses that say something about the host; a node that was put aside, as a slow one, does so, too,
# but for want of memory: the next run looks how much there is then. A
# connection that ends does not: that is also what a cancelled job looks like, and then every node
# of it would be left out of the next one.
_HOST_IS_TO_BLAME = (
    FailureKind.DEVICE_ERROR,
    FailureKind.LEFT_OUT,
    FailureKind.NODE_CUT,
    FailureKind.NODE_FROZEN,
    FailureKind.SILENT_CORRUPTION,
)


def is_bad(event: Event) -> bool:
    """Return whether the event says that its node should not be used by the next run."""
    if event.node is None:
        return False
    kind = event.data.get("kind")
    if event.kind is Kind.NODE_ASIDE:
        return kind != FailureKind.NO_ROOM
    return event.kind is Kind.NODE_LOST and kind in _HOST_IS_TO_BLAME


class BadNodes:
    """Takes the events of a run. ``command``: empty for none; ``warn`` takes a line for people, in
    any thread.
    """

    def __init__(
        self, run: RunDirectory, run_id: str, command: str, warn: Callable[[str], None]
    ) -> None:
        self._run, self._run_id, self._command = run, run_id, command
        self._file = Outlet("bad-nodes.json", self._add, warn)
        self._told = Outlet("--deadpool-bad-node-command", self._tell, warn)

    def note(self, event: Event) -> None:
        """Keep its node if the event says that it is bad. Does not block."""
        if is_bad(event):
            self._file.put({"text": str(event.data.get("cause")), "event": event.to_dict()})

    def flush(self, until: float) -> None:
        """Wait for what is left until then (monotonic seconds), then leave it."""
        self._file.flush(until)
        self._told.flush(until)

    def _add(self, notice: Mapping[str, Any]) -> None:
        event = notice["event"]
        try:
            # It is there from the node's start to its run's end, however the node was lost.
            host = read_json(self._run.node(event["node"]))["hostname"]
            kind, runs = event["data"].get("kind"), self._run.path.parent
            # Left out for what stands there: noted anew, that would never be too old.
            if kind == FailureKind.LEFT_OUT and why_left_out(
                runs, host, self._run_id, event["wall_seconds"]
            ):
                return
            there = [one["hostname"] for one in self._run.node_listings().values()]
            values = {"host": host, "run": self._run_id, "evidence": notice["text"]}
            values |= {"kind": kind, "wall_seconds": event["wall_seconds"]}
            bad = BadNode.from_dict({**values, "alone": there.count(host) < 2})
            is_new = add_bad_node(runs, bad)
        except (OwnershipError, KeyError, ValueError) as error:
            raise OSError(str(error)) from error
        if is_new and self._command:
            self._told.put({"text": notice["text"], **asdict(bad)})

    def _tell(self, notice: Mapping[str, Any]) -> None:
        host, kind, text = (str(notice[name]) for name in ("host", "kind", "text"))
        told = {HOST_VARIABLE: host, KIND_VARIABLE: kind, TEXT_VARIABLE: text}
        call(self._command, notice, told)
