"""Messages of agents and members become inputs of the state machine."""

import pytest

from deadpool_megatron.cluster.link import protocol
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind

JOIN = {
    "t": "join",
    "host": "h",
    "vault_port": 9,
    "domain": "d",
    "members": {},
    "incarnations": {},
    "restored": {},
}


def test_the_fault_of_a_member_names_its_operation_and_group():
    fault = {"t": "fault", "epoch": 3, "group": "dp", "operation": "all_reduce", "text": "reset"}
    message = {"t": "member", "slot": 1, "incarnation": 2, "m": fault}
    expected = inputs.MemberFault(7, 1, 2, 3, "all_reduce in group dp: reset")
    assert protocol.from_agent(7, message) == expected


def test_the_seconds_without_a_copy_are_those_of_a_phase():
    exposed = Event(Kind.EXPOSED, 2, data={"seconds": 0.5})
    expected = inputs.PhaseReported(2, "reprotect", 0.5, exposed=0.5)
    assert protocol.report_of(exposed)["t"] == "progress"
    assert protocol.from_progress(exposed) == expected


@pytest.mark.parametrize("node", [-1, 100_000_000, 1 << 64])
def test_a_node_whose_loss_could_not_be_noted_does_not_join(node):
    """The journal has names of eight digits, and is unreadable with one of another form."""
    with pytest.raises(ValueError, match="between 0 and 99999999"):
        protocol.join({**JOIN, "node": node})
    assert protocol.join({**JOIN, "node": 99_999_999}).node == 99_999_999, "as a replacement may"
