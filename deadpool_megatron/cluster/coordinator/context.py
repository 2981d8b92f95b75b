"""The facts and services that the parts of a coordinator share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.coordinator.files import RunFiles
from deadpool_megatron.cluster.coordinator.succession import CoordinatorOptions
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine.inputs import Input
from deadpool_megatron.cluster.machine.state import State


@dataclass(frozen=True)
class Context:
    """The facts, the machine's state, the agents and the files of a coordinator.

    ``feed(input)`` gives the machine an input; ``spawn(coroutine)`` runs a coroutine in the
    coordinator's loop; ``warn(text)`` writes an event; ``superseded(reason)`` ends this
    coordinator, because another has taken over.
    """

    options: CoordinatorOptions
    state: State
    peers: Peers
    files: RunFiles
    feed: Callable[[Input], None]
    spawn: Callable[[Coroutine[Any, Any, object]], None]
    warn: Callable[[str], None]
    superseded: Callable[[str], None]
