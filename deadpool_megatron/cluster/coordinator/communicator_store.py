"""The coordinator's part of the store in which communicators meet.

Held in memory, for the newest epoch only: the agents say everything again to a successor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.link.store_hub import StoreHub
from deadpool_megatron.wire import store
from deadpool_megatron.wire.framing import encode


class CoordinatorStore:
    """Used from the coordinator's loop. ``send_frame`` sends an encoded message to a node;
    ``epoch`` returns the epoch that is being opened or open, 0 when there is none.
    """

    def __init__(
        self,
        send_frame: Callable[[int, bytes], None],
        epoch: Callable[[], int],
    ) -> None:
        self._send_frame = send_frame
        self._epoch = epoch
        self._hub: StoreHub[int] = StoreHub()
        self._is_due = False

    def heard(self, node: int, message: Mapping[str, Any]) -> None:
        """Take what an agent says; of another epoch than the open one it is dropped.

        Raises ValueError for what no honest agent says.
        """
        said = store.unpack(message)
        self._hub.enter(self._epoch())
        if said.epoch != self._hub.epoch or not said.epoch:
            return
        failpoints.hit("coordinator.store", epoch=said.epoch)
        self._hub.put(said.values)
        for folder in said.want:
            self._hub.want(node, folder)
        if not self._is_due:
            self._is_due = True
            # When the loop has heard everybody who speaks in this turn: they share messages.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        for nodes, piece in self._hub.deliveries():
            frame = encode(store.pack(self._hub.epoch, piece))
            for node in nodes:
                self._send_frame(node, frame)
