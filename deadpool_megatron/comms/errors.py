"""What a communication call raises when peers fail."""

from __future__ import annotations


class EpochClosed(BaseException):
    """The epoch in which a communication call was made is closed; nothing of it may be used.

    Derives from BaseException so that a training script's ``except Exception`` does not swallow it.
    """

    def __init__(self, epoch: int, operation: str) -> None:
        super().__init__(f"epoch {epoch} was closed (in {operation})")
        self.epoch = epoch
        self.operation = operation


class CommunicatorFault(RuntimeError):
    """A peer, connection or timeout fault, and nobody closed the epoch within the deadline."""

    def __init__(self, group: str, operation: str, cause: str) -> None:
        super().__init__(f"communicator of group {group!r} failed in {operation}: {cause}")
        self.group = group
        self.operation = operation
        self.cause = cause
