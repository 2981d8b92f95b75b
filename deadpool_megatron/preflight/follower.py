"""A node that carries out what the conductor of the check orders, until it sends the verdict."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.preflight import stream
from deadpool_megatron.preflight.facts import NodeFacts, Wanted
from deadpool_megatron.preflight.machine import Instruments
from deadpool_megatron.preflight.server import connect
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError

REACH_THREADS = 64


class CheckError(Exception):
    """The check cannot be done the way it was started; one clear line."""


class ConductorLost(Exception):
    """The conductor ended, or says nothing any more: another one has to take over."""


class NotConducting(Exception):
    """The node is there, but takes nobody in (yet)."""


@dataclass(frozen=True)
class Identity:
    """This process in the check."""

    node: int
    instance: str
    host: str
    port: int
    facts: NodeFacts
    wanted: Wanted
    secret: bytes


def join(conductor: tuple[str, int], me: Identity) -> socket.socket:
    """The connection over which orders come.

    Raises CheckError when refused for good, NotConducting, OSError or WireError.
    """
    connection = connect(conductor, me.secret)
    try:
        framing.send(
            connection,
            {
                "t": "join",
                "node": me.node,
                "host": me.host,
                "port": me.port,
                "facts": me.facts.to_dict(),
                "wanted": vars(me.wanted),
            },
        )
        answer = framing.receive(connection)
        if answer.get("t") == "refused":
            raise CheckError(str(answer.get("why")))
        if answer.get("t") != "joined":
            raise NotConducting
    except BaseException:
        connection.close()
        raise
    return connection


def follow(
    connection: socket.socket, me: Identity, instruments: Instruments, silence_seconds: float
) -> bool:
    """Carry out orders; answers whether there are enough good nodes.

    Raises ConductorLost when the connection ends, or brings nothing for ``silence_seconds``.
    """
    try:
        with connection:
            connection.settimeout(silence_seconds)
            while True:
                order = framing.receive(connection)
                match order.get("t"):
                    case "tick":
                        continue
                    case "reach":
                        framing.send(connection, _reach(order, me))
                    case "measure":
                        framing.send(connection, _measure(order, me, instruments))
                    case "verdict":
                        return bool(order.get("ok"))
                    case other:
                        raise WireError(f"unknown order {other!r}")
    except TimeoutError as error:
        raise ConductorLost(f"says nothing for {silence_seconds:g} s") from error
    except (OSError, WireError, KeyError, TypeError, ValueError) as error:
        raise ConductorLost(reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, framing.ConnectionClosed):
        return "connection closed"
    return str(getattr(error, "strerror", None) or error)


def _reach(order: Mapping[str, Any], me: Identity) -> dict[str, Any]:
    peers = [peer for peer in order["peers"] if peer[0] != me.node]
    with ThreadPoolExecutor(max_workers=REACH_THREADS) as pool:
        found = pool.map(lambda peer: _unreached(peer, me.secret), peers)
        failed = {str(peer[0]): why for peer, why in zip(peers, found, strict=True) if why}
    return {"t": "reached", "unreached": failed}


def _unreached(peer: list[Any], secret: bytes) -> str:
    """Why no connection to the node can be made; empty when it answers."""
    node, host, port = peer
    try:
        with connect((host, port), secret) as connection:
            stream.echo(connection, node)
    except (OSError, WireError) as error:
        return reason_of(error)
    return ""


def _measure(order: Mapping[str, Any], me: Identity, instruments: Instruments) -> dict[str, Any]:
    failpoints.hit("check.measure", node=me.node)
    node, host, port = order["peer"]
    try:
        with connect((host, port), me.secret) as connection:
            trip, _ = stream.echo(connection, node)
            out, back = instruments.measure(connection)
    except (OSError, WireError) as error:
        return {"t": "failed", "why": reason_of(error)}
    return {"t": "measured", "out": out, "in": back, "round_trip": trip}
