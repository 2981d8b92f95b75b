"""What each kind of failure means to the people of a run: how it was noticed, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.cluster.failures import FailureKind


@dataclass(frozen=True)
class Advice:
    """``noticed``: the evidence, as a sentence that goes on after "why". ``to_do``: empty where
    nothing is to be done."""

    noticed: str
    to_do: str = ""


_HOST = "find out what the host does; it may come back as a new node when it is sound"
_LOG = "if it repeats, read the end of the log of that process (logs/ in the run directory)"

ADVICE: dict[FailureKind, Advice] = {
    FailureKind.PROCESS_CRASH: Advice("its agent saw it end, and read its log", _LOG),
    FailureKind.DEVICE_ERROR: Advice(
        "its process ended with an error of the device",
        "look at the host: deadpool gpu-health, nvidia-smi -q, dmesg",
    ),
    FailureKind.NO_ROOM: Advice(
        "its process found no room for its slots and ended with status 2",
        "look what fills /dev/shm there (deadpool clean, ls -l /dev/shm), or enlarge it",
    ),
    FailureKind.COMMUNICATOR_ERROR: Advice(
        "an operation between roles failed, and nothing better was heard within half a second",
        "if it repeats between the same hosts, look at their network",
    ),
    FailureKind.NODE_LOST: Advice(
        "the connection to its agent ended",
        "look whether the host is up and why its agent ended; start another node as a spare",
    ),
    FailureKind.NODE_CUT: Advice(
        "its agent was silent, and its host did not receive what was sent",
        f"look at its network; {_HOST}",
    ),
    FailureKind.NODE_FROZEN: Advice(
        "its agent was silent, though its host received what was sent", _HOST
    ),
    FailureKind.LEFT_OUT: Advice(
        "what was found about the host is not fit for the run", "mend what the cause names"
    ),
    FailureKind.MEMBER_FROZEN: Advice(
        "it gave no sign of life, took no processor time and did not wait for any",
        "somebody stopped it, or its host hangs: look at storage and dmesg there",
    ),
    FailureKind.HANG: Advice(
        "all lived and nothing moved; the culprit is who had not entered what others were in",
        "look at the innermost frames of the stacks",
    ),
    FailureKind.NONFINITE_LOSS: Advice(
        "a role saw it and went no further", "look at the data and the learning rate"
    ),
    FailureKind.SLOW_NODE: Advice(
        "its own work took longer than that of its data-parallel peers",
        "look for throttling, other users and errors that the host corrects",
    ),
    FailureKind.SILENT_CORRUPTION: Advice(
        "an audit computed the same again on its peers, or compared what all of them hold",
        "test processor, memory and GPU of that host before it trains again",
    ),
    FailureKind.CORRUPT_STATE: Advice(
        "a checksum, or the comparison of peers, did not hold",
        "test the memory of the node that is named before it trains again",
    ),
    FailureKind.BUG: Advice(
        "the same failure came again at the same step",
        "mend the program: another node would fail in the same way",
    ),
    FailureKind.DRAINED: Advice("it was asked for"),
    FailureKind.COORDINATOR: Advice("the new one found the epoch closed"),
    FailureKind.RESTART: Advice("no process of the run was left"),
}


def advice_for(kind: str) -> Advice | None:
    """None for a kind of a newer version."""
    try:
        return ADVICE[FailureKind(kind)]
    except ValueError:
        return None
