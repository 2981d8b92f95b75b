"""Options that a coordinator is started with."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.coordinator.succession.first_state import Estate
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import Term
from deadpool_megatron.cluster.machine.inputs import Input
from deadpool_megatron.cluster.machine.state.state import INITIAL, Config, State
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, valid_in
from deadpool_megatron.events import Event


@dataclass(frozen=True)
class CoordinatorOptions:
    """``listener`` is a bound and listening TCP socket; ``host`` the address agents reach it by;
    ``term`` was claimed by the caller, who gives up its journal to the coordinator.
    ``estate``: what was read before that. ``restarted``: all processes of the run had ended before;
    ``begins_anew``: with the command and settings of a new start, in which nothing has been decided
    yet.
    """

    run: RunDirectory
    info: RunInfo
    secret: bytes
    host: str
    listener: socket.socket
    term: Term
    journal: Journal
    estate: Estate
    restarted: bool = False
    begins_anew: bool = False


@dataclass(frozen=True)
class Desk:
    """Things that the parts of a coordinator share, for its loop only: its options, the machine's
    present ``state()``, ``feed`` for its inputs, ``emit`` for events, ``warn`` for a line to
    people, ``spawn`` for what runs beside the rest, and ``step_down(why)`` when another coordinator
    has taken over.
    """

    options: CoordinatorOptions
    state: Callable[[], State]
    feed: Callable[[Input], None]
    emit: Callable[[Event], None]
    warn: Callable[[str], None]
    spawn: Callable[[Coroutine[Any, Any, object]], None]
    step_down: Callable[[str], None]


def machine_config(options: CoordinatorOptions) -> Config:
    """The facts that the state machine needs."""
    info = options.info
    start, *older = valid_in(info.restore) or [INITIAL]
    return Config(
        nodes=info.nodes,
        spares=info.spares,
        nproc=info.nproc_per_node,
        settings=info.settings,
        dump_directory=str(options.run.dump),
        start=start,
        older=tuple(older),
        restarted=options.restarted,
        begins_anew=options.begins_anew,
        check_only=info.check_only,
        finished=info.finished,
        from_scratch=info.from_scratch,
    )
