"""What ``--from-slurm`` makes of Slurm's variables, the wrong ones included."""

from __future__ import annotations

import socket

import pytest

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.slurm_environment import (
    SlurmNode,
    host_address,
    interface_address,
    local_address,
    slurm_environment,
)

# Taken from a task of Slurm 22.05.
TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_TASKS_PER_NODE": "1(x6)",
    "SLURMD_NODENAME": "node4",
    "SLURM_TOPOLOGY_ADDR": "core.rack1.node4",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


def test_a_task_of_one_per_node() -> None:
    found = slurm_environment(TASK)
    assert found == SlurmNode("17", 3, 6, "node4", "rack1")


def test_the_task_number_counts_not_the_node_number() -> None:
    """They differ with --distribution=arbitrary."""
    assert slurm_environment({**TASK, "SLURM_NODEID": "0"}).node_id == 3


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("node4", "node", ""),
        ("", "", ""),
        ("block7.node4", "block.node", "block7"),
        ("s0.s1.host.of.site", "switch.switch.node", "s1"),
    ],
)
def test_domain(address: str, pattern: str, domain: str) -> None:
    names = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert slurm_environment({**TASK, **names}).domain == domain


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"SLURM_JOB_ID": None}, "no Slurm job"),
        ({"SLURM_STEP_ID": None}, "put 'srun --ntasks-per-node=1' before it"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x5)"}, "several tasks on a node (2(x5))"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3),2"}, "several tasks on a node (1(x3),2)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "is 'many'"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
    ],
)
def test_one_line_for_each_way_to_be_wrong(change: dict[str, str | None], told: str) -> None:
    changed = {k: v for k, v in {**TASK, **change}.items() if v is not None}
    with pytest.raises(CommandError, match="--from-slurm") as raised:
        slurm_environment(changed)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_address_of_an_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(CommandError, match=r"'nosuch0' has no IPv4 address .*there are: .*lo"):
        interface_address("nosuch0")


def test_an_interface_is_named_or_its_address_given() -> None:
    assert local_address("lo") == "127.0.0.1"
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("localhost") == "localhost"
    with pytest.raises(CommandError, match=r"'eth 7' is neither .* there are: .*lo"):
        local_address("eth 7")


def test_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"node4": "10.0.0.4", "debian": "127.0.1.1"}

    def resolve(host: str, *_: object) -> list[object]:
        if host not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert host_address("node4") == "10.0.0.4"
    with pytest.raises(CommandError, match="which other nodes cannot reach: give --host"):
        host_address("debian")
    with pytest.raises(CommandError, match="is not known"):
        host_address("nowhere")
    monkeypatch.undo()
    with pytest.raises(CommandError, match=r"address of 'two\.\.dots' is not known"):
        host_address("two..dots")
