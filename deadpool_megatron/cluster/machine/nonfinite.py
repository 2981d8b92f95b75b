"""A loss that is NaN or infinite: stop, or throw the iteration away and compute it once more.

Pure functions on a Turn. The role that saw the loss stands still meanwhile, so nobody can finish
the next update: the generation before the iteration is still whole in memory.
"""

from __future__ import annotations

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import EmitEvent
from deadpool_megatron.cluster.machine.last_words import LastWords
from deadpool_megatron.cluster.machine.moves import close, save_and_end
from deadpool_megatron.cluster.machine.state import Failure, Turn
from deadpool_megatron.events import Kind

EXIT_NONFINITE = 4


def loss_not_finite(turn: Turn, event: ev.LossNotFinite) -> None:
    """Act on it as the setting ``nonfinite`` says, which is stop or rollback."""
    state, k = turn.state, event.iteration
    again = k in state.nonfinite
    policy = "rollback" if turn.config.settings.nonfinite == "rollback" and not again else "stop"
    facts = {"loss": event.loss, "policy": policy}
    turn.act(EmitEvent(Kind.NONFINITE, event.epoch, event.node, event.role, k, facts))
    cause = f"the loss of iteration {k} is {event.loss} (role {event.role}, node {event.node})"
    if policy == "stop":
        once_more = ", and was not finite either when it was computed before" if again else ""
        # What is saved is the state before the iteration.
        turn.set(poisoned_from=k)
        kind = FailureKind.NONFINITE_LOSS
        save_and_end(turn, LastWords(EXIT_NONFINITE, cause + once_more, kind))
        return
    turn.set(nonfinite=state.nonfinite | {k}, poisoned_from=k)
    signature = ("nonfinite", str(k))
    close(turn, Failure(cause, FailureKind.NONFINITE_LOSS, signature, node=event.node))
