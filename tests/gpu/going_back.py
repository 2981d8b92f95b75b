"""A loop that can be put back to its captured state, as a recovery does it."""

from collections.abc import Mapping
from typing import Any

from deadpool_megatron.megatron import dimensions, loop_extras as extras
from deadpool_megatron.megatron.interrupt_cleanup import InterruptCleanup
from deadpool_megatron.megatron.optimizer import ShardState
from deadpool_megatron.state.extras import decode, encode
from tests.gpu.digests import state_digests


class GoingBack:
    """Trains ``count`` iterations first."""

    def __init__(self, loop: Any, count: int) -> None:
        self.loop, self.parts = loop, ShardState(loop.optimizer).parts
        self._cleanup = InterruptCleanup(loop)
        self.train(count)
        self._pairs: list[Any] = []
        for part in self.parts:
            views = part.views(memoryview(bytearray(part.nbytes)))
            self._pairs += zip(views, part.tensors, strict=True)
        for view, tensor in self._pairs:
            view.copy_(tensor)
        self._extras = encode(extras.capture(loop))

    def train(self, count: int = 2) -> Mapping[str, str]:
        for _ in range(count):
            self.loop.train_step()
        self.loop.synchronize_parameters()
        return state_digests(self.loop)

    def back(self) -> Mapping[str, str]:
        self._cleanup.forget()
        for view, tensor in self._pairs:
            tensor.copy_(view)
        values = decode(self._extras)
        extras.restore(self.loop, values)
        dimensions.rebuild_from_peers(self.loop)
        self.loop.reset_after_interrupt()
        extras.restore_last(values)
        dimensions.verify(self.loop)
        return state_digests(self.loop)
