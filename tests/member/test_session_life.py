"""The whole life of a member's session, line by line: its messages, and its calls.

Expected is lives/session.txt. A change that is meant changes it as well: with
``DEADPOOL_TEST_WRITE=1`` in the environment this test writes it again, and the difference is read
like that of any other file.
"""

import re
import threading
from pathlib import Path

from deadpool_megatron.comms import CommunicatorFault
from deadpool_megatron.layout.records import Generation
from tests.common import lives
from tests.member.session_rig import ELSEWHERE, SECONDS

EXPECTED = Path(__file__).parent / "lives" / "session.txt"
# Values that differ between runs.
_VOLATILE = re.compile(r"seconds|^(pid|t|n|host|started)$")


def test_a_life_is_as_it_was_before(rig, tmp_path):
    """A spare; then it takes a role, is interrupted in a step, has three more epochs, and ends."""
    lines: list[str] = []

    def show(title: str) -> None:
        lines.append(f"{title}:")
        for message in rig.received:
            text = lives.text(message, _VOLATILE).replace(str(tmp_path), "DIR")
            lines.append(f"    {message['t']} {text}")
        lines.extend(f"    did {done}" for done in rig.entry.calls)
        rig.received.clear()
        rig.entry.calls.clear()

    rig.record(1, ELSEWHERE)
    rig.expect("warm")
    rig.drain(1)
    show("a spare is warm, and the epoch ends")
    is_inside = threading.Event()

    def waits() -> None:
        is_inside.set()
        rig.communicators.collective()

    rig.entry.loop.acts[3] = waits
    rig.record(2, generation=Generation(1, 1), emitted_up_to=1)
    assert is_inside.wait(SECONDS)
    rig.drain(2)
    show("it takes a role, and is interrupted in its third iteration")
    del rig.entry.loop.acts[3]
    rig.record(3, generation=Generation(2, 2), emitted_up_to=3)
    rig.expect("done")
    rig.drain(3)
    show("it trains on to the end, and is wanted again")
    rig.record(4, generation=Generation(3, 2), boundary="evaluation", emitted_up_to=4)
    rig.expect("done")
    rig.drain(4)
    show("after an evaluation that was over")

    def fails() -> None:
        raise CommunicatorFault("dp", "allreduce", "peer closed")

    rig.entry.acts["sync"] = fails
    rig.record(5, generation=Generation(3, 4))
    rig.expect("fault")
    rig.drain(5)
    show("a peer is gone in a recovery")
    del rig.entry.acts["sync"]
    rig.record(6, ELSEWHERE)
    rig.expect("warm")
    assert rig.end() is None
    show("it is a spare again, and the run is over")
    lines.append(f"interrupted: {sorted(set(rig.communicators.interrupted))}")
    lines.append(f"segments: {rig.entry.loop.segments}")
    lines.append(f"warmed {rig.communicators.times_warmed} times")
    lives.hold(EXPECTED, lines)
