"""What a user gives at a shell and what comes of it, line by line; see calls/."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import cli, file_systems
from deadpool_megatron.cli.start import launch, preconditions
from deadpool_megatron.cluster.run_directory import directory as run_directory
from deadpool_megatron.hookpoints import SCRIPT_VARIABLE
from deadpool_megatron.preflight import host
from tests.cli.start.refused import RUN_ID
from tests.common import lives, statements

_VOLATILE = re.compile(
    rf"{RUN_ID}|(?<=runs/)[-\w.]+|(?<=0\.1:)\d+|(?<=s \[)\d+|(?<=in the memory of )\S+"
)


class User:
    """At a shell in a checkout of Megatron-LM on a host with GPUs; what is started does not run."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, gpus: int = 8) -> None:
        (directory / "megatron" / "training").mkdir(parents=True)
        (directory / "pretrain_gpt.py").write_text("pretrain(model)\n")
        patch.chdir(directory)
        patch.setattr(host, "listed_gpus", lambda: tuple(f"GPU-{n}" for n in range(gpus)))
        patch.delenv(host.GPU_VARIABLE, raising=False)
        for name in host.numeric_variables():  # other tests of this process have set them
            patch.delenv(name)
        preconditions.torch_problem.cache_clear()
        count = "import os; print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
        patch.setattr(preconditions, "_PROBE", count)
        patch.setattr(file_systems, "_mount_types", lambda: {Path("/"): "ext4"})
        (directory / "shm").mkdir()
        patch.setattr(run_directory, "SEGMENT_ROOT", directory / "shm")
        self.started = list[launch.Launcher]()
        patch.setattr(launch.Launcher, "run", lambda one: self.started.append(one) or 0)
        patch.setenv(SCRIPT_VARIABLE, "left over")

    def gives(self, line: str) -> int:
        return cli.main(shlex.split(line))

    def starts(self, line: str) -> tuple[Any, ...]:
        """The size and the command of what is started."""
        assert self.gives(f"run --quiet {line}") == 0
        info = self.started[-1].info
        return info.nodes, info.spares, info.nproc_per_node, " ".join(info.command)


def live(script: Sequence[str], options: dict[str, Any], directory: Path) -> list[str]:
    lines = statements.live(script, options, directory)
    return [line if line in script else _VOLATILE.sub("X", line) for line in lines]


def test_command_lines_are_answered_as_before(transcript, tmp_path):
    lives.compare(transcript, live, tmp_path)
