"""Commands that are refused, and the runs that they meet."""

import os
import secrets
from pathlib import Path

from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import auth

SCRIPT = str(Path(__file__).parents[2] / "cluster" / "counting_member.py")
# Its slots may lie in /dev/shm, where those of a second session of tests are as well.
RUN_ID = secrets.token_hex(4)


def old_run(path: Path, world_size: int = 2) -> RunDirectory:
    run = RunDirectory(path)
    brief = Settings(close_seconds=0.2)
    info = RunInfo(RUN_ID, world_size, world_size, 0, 1, ("x.py",), brief)
    run.create(info)
    auth.create_secret(path)
    return run


def left(path: Path) -> Path:
    """A slot in memory of a run in ``path`` whose processes have all died."""
    run = old_run(path)
    os.close(cleanup.claim_segments(run, RUN_ID))
    slot = run.segments(RUN_ID, 0) / "own-0.0.0.0.seg"
    slot.parent.mkdir()
    slot.touch()
    return slot
