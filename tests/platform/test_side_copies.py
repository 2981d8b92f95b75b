"""Copies during training on the CPU: complete, bounded in time, with their errors."""

import multiprocessing as mp
import os
import threading
from typing import Any

import pytest
import torch

from deadpool_megatron.platform import CopyFailedError, cuda
from deadpool_megatron.platform.cuda import CudaPlatform
from deadpool_megatron.platform.devices import CHUNK_BYTES, CpuPlatform, in_pieces
from tests.common import gpus


@pytest.fixture
def platform():
    return CpuPlatform()


def test_copies_all_types_and_sizes(platform):
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(CHUNK_BYTES // 2, generator=generator)
    weight = torch.nn.Parameter(torch.randn(3, 5, generator=generator))
    src = [big, weight, torch.tensor(7.0), weight.detach().bfloat16(), torch.empty(0)]
    dst = [torch.empty_like(tensor, requires_grad=False) for tensor in src]
    handle = platform.side_copy(dst, src)
    assert handle.wait(10.0)
    assert handle.done()
    for into, source in zip(dst, src, strict=True):
        assert torch.equal(into, source)


def test_large_copies_are_cut_into_pieces_of_the_same_memory():
    """A device's copy engine gets no more than a piece at a time, and all bytes once."""
    src = [torch.arange(25.0).view(5, 5), torch.tensor(7.0), torch.empty(0), torch.ones(6)[::2]]
    dst = [torch.zeros_like(tensor) for tensor in src]
    into, out_of = in_pieces(dst, src, 40)
    assert [tensor.numel() for tensor in out_of] == [10, 10, 5, 1, 0, 3]
    torch._foreach_copy_(into, out_of)
    for target, source in zip(dst, src, strict=True):
        assert torch.equal(target, source)
    strided = torch.ones(60)[::2]
    assert in_pieces([torch.zeros(30)], [strided], 40)[1][0] is strided, "no view can cut it"
    assert len(in_pieces([torch.zeros(2)], [torch.ones(2)], 3)[0]) == 2, "one element at least"


def test_error_is_reported_and_the_thread_survives(platform):
    # A view of expanded memory cannot be written to.
    bad = platform.side_copy([torch.zeros(1).expand(4)], [torch.ones(4)])
    with pytest.raises(CopyFailedError):
        bad.wait(10.0)
    good = torch.zeros(4)
    assert platform.side_copy([good], [torch.ones(4)]).wait(10.0)
    assert good.sum() == 4


def test_a_forked_child_copies_too(platform):
    assert platform.side_copy([torch.zeros(1)], [torch.ones(1)]).wait(10.0)
    pid = os.fork()
    if pid == 0:
        into = torch.zeros(1)
        done = platform.side_copy([into], [torch.ones(1)]).wait(10.0)
        os._exit(0 if done and into.item() == 1.0 else 1)
    assert os.waitpid(pid, 0)[1] == 0


# Calls to a device, without a device.


class Driver:
    """Answers the call that makes a stream."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked: list[tuple[int, int]] = []

    def cuStreamCreateWithPriority(self, handle: Any, flags: int, priority: int) -> int:
        self.asked.append((flags, priority))
        handle._obj.value = 4711
        return self.code


def test_copies_have_a_stream_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: ("of the pool", priority))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    driver = Driver(code=0)
    monkeypatch.setattr(cuda, "_driver_library", lambda: driver)
    stream = CudaPlatform()._stream
    assert stream() == (4711, 3)
    assert stream() is stream()
    assert driver.asked == [(1, 0)], "it waits for no default stream, and goes last"
    assert not capsys.readouterr().err
    # If the driver makes no stream, a stream of torch serves, with a warning.
    driver.code = 2
    assert CudaPlatform()._stream() == ("of the pool", 0)
    assert "error 2" in capsys.readouterr().err


def test_a_device_is_waited_for_as_a_whole_and_not_for_ever(monkeypatch):
    waited, over = [], threading.Event()

    def synchronize(device: int) -> None:
        waited.append(device)
        if len(waited) == 1:
            over.wait(10.0)
        if len(waited) == 3:
            raise RuntimeError("device-side assert")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    platform = CudaPlatform()
    with pytest.raises(TimeoutError, match="device 3"):
        platform.synchronize(0.01)
    over.set()
    platform.synchronize(10.0)
    with pytest.raises(RuntimeError, match="device-side assert"):
        platform.synchronize(10.0)
    assert waited == [3, 3, 3]


@pytest.mark.gpu
def test_cuda_copies_into_registered_memory():
    child = mp.get_context("spawn").Process(target=_copy_into_registered_memory)
    child.start()
    child.join(60.0)
    child.kill()
    child.join()
    assert child.exitcode == 0


def _copy_into_registered_memory() -> None:
    gpus.show()
    platform = CudaPlatform()
    memory = torch.zeros(1 << 20)
    platform.register_host_memory(memory)
    source = torch.randn(1 << 20, device="cuda")
    assert platform.side_copy([memory], [source]).wait(10.0)
    platform.synchronize(10.0)
    assert torch.equal(memory, source.cpu())
    platform.unregister_host_memory(memory)
