"""Waiting for descriptors: with a deadline, and with numbers that select() refuses."""

from __future__ import annotations

import fcntl
import os
import resource
import select
from collections.abc import Iterator

import pytest

from deadpool_megatron.wire.readiness import readable, writable

HIGH = 1500


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], HIGH + 50), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_descriptors")
def test_a_high_number_is_a_descriptor_like_any_other() -> None:
    reader, writer = os.pipe()
    high_reader, high_writer = (fcntl.fcntl(one, fcntl.F_DUPFD, HIGH) for one in (reader, writer))
    with pytest.raises(ValueError, match="out of range"):
        select.select([high_reader], [], [], 0)
    assert not readable(high_reader, 0)
    assert not readable(high_reader, 0.0001), "a deadline below a millisecond is one"
    assert writable(high_writer, 5.0)
    os.write(high_writer, b"x")
    assert readable(high_reader, 5.0)
    os.read(high_reader, 1)
    os.close(writer)
    os.close(high_writer)
    assert readable(high_reader, 5.0), "the end of the other side is news"
    os.close(reader)
    os.close(high_reader)
