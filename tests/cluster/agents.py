"""Real runs in the form a cluster has: one ``deadpool agent`` per node, no launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import Term, newest_term
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import read_json, segment_root
from deadpool_megatron.events import Kind
from tests.cluster.running import MEMBER, Told, start
from tests.common import forks
from tests.common.limits import FAST, given
from tests.common.waiting import PATIENCE_SECONDS, wait_for

# Here a busy machine must not look like a cut network, and a takeover takes some time anyway.
_LIMITS = given(node_silence_seconds=5, fence_seconds=4)


class Agents(Told):
    """Agents of one run. A context manager: its end checks that nothing is left behind."""

    def __init__(
        self,
        directory: Path,
        *member: str,
        nodes: int = 2,
        spares: int = 1,
        options: Sequence[str] = (),
        faults: Sequence[dict[str, Any]] = (),
        outputs: Path | None = None,
    ) -> None:
        super().__init__(directory, nodes, faults)
        self._outputs = outputs or directory.with_name(directory.name + "-outputs")
        self._outputs.mkdir()
        size = ("--nodes", str(nodes), "--spares", str(spares), "--nproc-per-node", "1")
        self._size = (*size, *FAST, *_LIMITS, *options)
        self._member = (MEMBER, *member)
        self.agents: dict[str, forks.Forked] = {}
        for node in range(nodes + spares):
            self.start(str(node), "--node-id", str(node))

    def start(self, name: str, *which: str) -> forks.Forked:
        """One more agent; ``which``: its ``--node-id`` or ``--attach``, and more options."""
        self.agents[name] = start(
            self._outputs / f"{name}.out",
            *("agent", "--preload", "", "--run-dir", str(self.run.path)),
            *(*self._size, *which, "--", *self._member),
            **self.extra,
        )
        return self.agents[name]

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        run_id = self.run.read_run().run_id if (self.run.path / "run.json").exists() else ""
        if kind is None:
            self._check_clean(run_id)
            return
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        self.tell(self._outputs.iterdir())
        if run_id:
            cleanup.clean_run(self.run, run_id)

    def _check_clean(self, run_id: str) -> None:
        for agent in self.agents.values():
            agent.wait(PATIENCE_SECONDS)
        wait_for("its processes to go", lambda: not cleanup.run_processes(self.run, run_id))
        # A killed agent cannot clear up; on a real cluster its memory dies with its host.
        cleanup.clean_run(self.run, run_id)
        assert not segment_root(run_id).exists()

    def wait_more(self, iterations: int) -> None:
        """Until training has gone on by so many steps from now."""
        self.wait_iteration(self.newest_iteration() + iterations)

    def journal(self) -> Journal:
        """The run's, wherever it is."""
        return Journal(self.run.journal)

    def term(self) -> Term:
        """The newest term, once there is one."""
        journal = self.journal()
        found = wait_for("a coordinator", lambda: newest_term(journal))
        assert found is not None
        return found

    def wait_term(self, number: int) -> Term:
        """Until another coordinator has taken over and says where it is."""

        def there() -> bool:
            kind = Kind.COORDINATOR
            return any(e.data["term"] >= number for e in self.events(kind))

        wait_for(f"term {number}", there)
        return self.term()

    def epochs(self) -> list[int]:
        """Numbers of all records."""
        return list(self.journal().entries("epoch"))

    def power_off(self, node: int) -> None:
        """SIGKILL everything on a node: agent first, which takes members and standby along."""
        listing = read_json(self.run.node(node))
        for pid in (listing["agent"], listing["vault"], *listing["members"].values()):
            if posix.is_alive(pid):
                os.kill(pid, signal.SIGKILL)
