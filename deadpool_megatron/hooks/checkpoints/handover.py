"""A role's skeleton goes from the training process to the exporters."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.persist.skeleton import (
    Skeleton,
    SkeletonError,
    share_skeleton,
    write_skeleton,
)
from deadpool_megatron.settings import Settings


def leave_skeleton(skeleton: Skeleton, settings: Settings) -> None:
    """Give it to the exporters: of this node, and where the run's end may call for an export also
    of others, by way of the run directory. Nobody waits for that one: a thread writes it.

    Raises SkeletonError where exports were asked for and cannot be, OSError.
    """
    if skeleton.refusal and settings.persist_interval:
        raise SkeletonError(f"--deadpool-persist-interval: {skeleton.refusal}")
    directory = Path(os.environ["DEADPOOL_SEGMENT_DIR"])
    write_skeleton(directory, skeleton)
    if settings.exports:
        shared = RunDirectory(Path(os.environ["DEADPOOL_RUN_DIR"])).skeletons
        place = (directory, skeleton.role, shared)
        threading.Thread(target=_share, args=place, name="skeleton", daemon=True).start()


def _share(directory: Path, role: int, shared: Path) -> None:
    try:
        share_skeleton(directory, role, shared)
    except OSError as error:
        text = f"role {role} could not be exported if its node were lost: {error}"
        print(text, file=sys.stderr, flush=True)
