"""Megatron's rerun machine looks at every result of a pass; a pass of an audit is none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core import rerun_state_machine


@contextlib.contextmanager
def not_looking() -> Iterator[None]:
    """Results are not judged (but for NaN, where the machine is off), and the machine has the same
    counts, largest values and wishes to run again afterwards as before."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None:
        yield
        return
    kept = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in vars(machine).items()
    }
    # As in its very first run, in which it judges nothing.
    machine.state = rerun_state_machine.RerunState.INITIAL_RUN
    machine.first_iteration_complete = False
    machine.rerun_requested = False
    try:
        yield
    finally:
        vars(machine).update(kept)
