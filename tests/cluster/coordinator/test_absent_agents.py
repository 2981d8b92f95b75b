"""A refused connection is the only proof that an agent has ended; and only of that agent."""

import asyncio
import socket

import pytest

from deadpool_megatron.cluster.coordinator.absent_agents import probe_absent
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.layout.records import NodeAddress
from tests.cluster.machine.bootstrapping.test_takeover import rejoin
from tests.cluster.machine.rig import Phase, Rig

LIMIT_SECONDS = 0.2


@pytest.fixture
def addresses():
    """By what happens to a connection there."""
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=size) for size in (9, 9, 0)]
    ended, served, full = (each.getsockname()[1] for each in sockets)
    sockets[0].close()
    # The queue of the last is full: it does not answer.
    waiting = [socket.create_connection(("127.0.0.1", full)) for _ in range(1)]
    ports = {"refused": ended, "accepted": served, "timed out": full}
    found = {name: NodeAddress("127.0.0.1", port, "d") for name, port in ports.items()}
    yield found | {"unreachable": NodeAddress("255.255.255.255", 1, "d")}
    for each in (*sockets, *waiting):
        each.close()


@pytest.mark.parametrize("outcome", ["refused", "accepted", "timed out", "unreachable"])
def test_only_a_refusal_proves_the_end_of_an_agent(outcome, addresses):
    old = Rig(nodes=2, spares=1).run()
    rig = old.successor()
    record = rig.state.record
    record.nodes.update({0: addresses["refused"], 1: addresses[outcome], 2: addresses["accepted"]})
    rejoin(rig, old, 0)
    reported = []

    def feed(item):
        reported.append(item)
        rig.feed(item)
        rejoin(rig, old, 2)

    async def probe():
        await asyncio.wait_for(probe_absent(rig.state, feed, LIMIT_SECONDS), 1.0)

    if outcome == "refused":
        asyncio.run(probe())
        assert reported == [ev.AgentEnded(1)]
        assert rig.state.phase is Phase.CLOSING
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(probe())
        assert reported == []


def test_no_node_is_probed_where_none_is_awaited():
    asyncio.run(asyncio.wait_for(probe_absent(Rig().run().state, pytest.fail, 0.0), 1.0))
