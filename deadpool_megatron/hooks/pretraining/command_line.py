"""The arguments of a script that parses them itself, as all do from Megatron-LM 0.18 on.

It does so once, before pretrain(), when this process has no role yet; they are parsed again for
every role that it gets. Before 0.18 initialize_megatron() parses them, and nothing here does
anything.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from deadpool_megatron.hooks.pretraining.scene import replaced


class CommandLine:
    """Of one process. ``_parse``: Megatron's function with what the script gave it."""

    def __init__(self) -> None:
        self._parse: Callable[[], Any] | None = None

    def parse_without_role(self, parse: Callable[[], Any]) -> Any:
        """Returns the arguments for the script to make its config of. Says nothing, and opens no
        writers: a role does that."""
        self._parse = parse
        os.environ["WORLD_SIZE"] = os.environ["DEADPOOL_WORLD_SIZE"]
        with no_writers(), contextlib.redirect_stdout(io.StringIO()):
            return parse()

    def parse_for_role(self) -> None:
        """Where the script has parsed them: parse them again, for RANK as it is now."""
        if self._parse is not None:
            forget_globals()
            self._parse()


@contextlib.contextmanager
def no_writers() -> Iterator[None]:
    """Nobody opens TensorBoard's or W&B's files while the block runs."""
    from megatron.training import global_vars

    with (
        replaced(global_vars, "_set_tensorboard_writer", lambda args: None),
        replaced(global_vars, "_set_wandb_writer", lambda args: None),
    ):
        yield


def forget_globals() -> None:
    """What parsing and initialize_megatron() set, so that they can be called again. The groups
    stay."""
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    global_vars.unset_global_variables()
    destroy_rerun_state_machine()
