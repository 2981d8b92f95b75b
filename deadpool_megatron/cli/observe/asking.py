"""Asking a run's coordinator again and again what the run does, by whoever only looks."""

from __future__ import annotations

import sys
from typing import Any

from deadpool_megatron.cli.common import LOOK_SECONDS, CommandError, ask
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunDirectoryError
from deadpool_megatron.ownership import OwnershipError
from deadpool_megatron.wire.framing import WireError
from deadpool_megatron.wire.tls import TlsError


class Asker:
    """Not thread-safe."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._said = ""

    def status(self) -> dict[str, Any] | None:
        """What ``deadpool status --json`` says; None where nobody answers, and once the run has its
        result. Why the coordinator cannot be asked at all is said once, on standard error.
        """
        if self._run.final.exists():
            return None
        try:
            status: dict[str, Any] = ask(self._run, {"command": "status"}, LOOK_SECONDS)["status"]
        except CommandError:
            return None
        except (RunDirectoryError, OwnershipError, WireError, TlsError) as error:
            if str(error) != self._said:
                self._said = str(error)
                print(f"the coordinator cannot be asked: {error}", file=sys.stderr, flush=True)
            return None
        return status if "roles" in status else None
