"""Xid numbers in the kernel log: a device's fault takes its node out, a program's does not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from deadpool_megatron.cli.prepare import gpu_health as command
from deadpool_megatron.preflight import xids
from deadpool_megatron.preflight.xids import LogLine

_PROGRAM = "NVRM: Xid (PCI:0000:65:00): 31, pid=812, name=python, Ch 00000008, intr 10000000"
_DEVICE = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', GPU has fallen off the bus."


@pytest.mark.parametrize("number", [13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 999])
def test_only_a_fault_of_the_device_takes_its_node_out(number: int) -> None:
    found = xids.newest_bad([LogLine(1.0, f"NVRM: Xid (0000:03:00): {number}, it says")], 0.0)
    assert (found is not None) == (number in {48, 63, 64, 74, 79, 94, 95})


def test_the_command_answers_as_a_health_command_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xids, "boot_seconds", lambda: 10_000.0)
    log = [LogLine(9_000.0, _DEVICE), LogLine(9_990.0, _PROGRAM), LogLine(9_999.0, "Xid 79")]
    assert command.run(argparse.Namespace(hours=1.0), lambda: log) == 2
    assert capsys.readouterr().out == "Xid 79 of GPU 0000:c1:00, 1000 s ago\n"
    assert command.run(argparse.Namespace(hours=0.1), lambda: log) == 0

    def closed() -> Iterator[LogLine]:
        raise PermissionError("Operation not permitted")
        yield

    assert command.run(argparse.Namespace(hours=1.0), closed) == 0
    assert "kernel log not asked: Operation" in capsys.readouterr().out


def test_records_are_read_to_their_end_and_lost_ones_are_passed_over() -> None:
    told: list[bytes | OSError] = [
        f"4,7,9000000,-;{_DEVICE}\n SUBSYSTEM=pci\n".encode(),
        BrokenPipeError(),
        b"no record",
        f"4,9,9500000,-;{_PROGRAM}\n".encode(),
        BlockingIOError(),
    ]

    def read() -> bytes:
        if isinstance(one := told.pop(0), OSError):
            raise one
        return one

    assert list(xids._lines(read)) == [LogLine(9.0, _DEVICE), LogLine(9.5, _PROGRAM)]
