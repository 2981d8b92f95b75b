"""Which device a member takes, when, and what keeps it from using NCCL."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.member.member_device import select_device
from deadpool_megatron.support import environment as nccl_environment
from deadpool_megatron.support.environment import VARIABLES
from tests.member import session_rig

Machine = Callable[..., list[int]]


@pytest.fixture
def machine(monkeypatch):
    """Replace torch's calls about GPUs; return the list of devices that are set."""
    environment: dict[str, str] = {}
    nccl_environment.complete(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for former in (v.former_name for v in VARIABLES if v.former_name):
        monkeypatch.delenv(former, raising=False)

    def made(gpus: int, nccl: tuple[int | str, ...] = (2, 28, 9)) -> list[int]:
        taken: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        monkeypatch.setattr(torch.cuda, "init", lambda: None if gpus else no_gpu())
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
        return taken

    return made


def no_gpu() -> None:
    raise RuntimeError("No CUDA GPUs\nare available")


def refusal(
    capfd: pytest.CaptureFixture[str],
    status: int = ExitStatus.BAD_INPUT,
    communicator: str = "nccl",
) -> str:
    with pytest.raises(SystemExit) as ended:
        select_device(communicator, 0)
    assert ended.value.code == status
    [line] = capfd.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("gpus", "communicator", "slot", "kind", "taken"),
    [
        (1, "nccl", 5, "nccl", [0]),
        (1, "nccl", 0, "nccl", [0]),
        (1, "gloo", 3, "gloo", [0]),
        (2, "gloo", 3, "gloo", [1]),
        (0, "auto", 3, "gloo", []),
        (1, "auto", 3, "gloo", [0]),  # decided where no GPU was seen: alike in all members
        (0, "gloo", 3, "gloo", []),
    ],
)
def test_a_member_takes_the_gpu_that_it_is_shown(machine, gpus, communicator, slot, kind, taken):
    found = machine(gpus)
    assert select_device(communicator, slot) == kind
    assert found == taken


def test_nvlink_sharp_is_warned_of(machine, capfd, monkeypatch):
    machine(1)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    select_device("nccl", 0)
    warning, facts = capfd.readouterr().err.splitlines()
    assert "NCCL_NVLS_ENABLE=1 is taken as set, and recoveries may fail" in warning
    assert "NCCL_NVLS_ENABLE=1" in facts


def test_a_contrary_variable_is_refused_before_a_device_is_touched(machine, capfd, monkeypatch):
    taken = machine(2)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL cannot be protected" in refusal(capfd)
    assert taken == []
    assert select_device("gloo", 0) == "gloo"


def test_fake_nccl_needs_a_fault_plan(machine, capfd, monkeypatch):
    machine(0)
    assert "only with a fault plan" in refusal(capfd, communicator="a.module:factory")
    monkeypatch.setenv("DEADPOOL_FAULTS", "plan.json")
    assert select_device("a.module:factory", 3) == "a.module:factory"


@pytest.mark.parametrize("loaded", [None, (2, 28, 3)])
def test_a_version_of_nccl_is_refused(machine, capfd, monkeypatch, loaded):
    """By the library that is loaded, whatever torch was built with."""
    machine(2, (2, 28, 9) if loaded else (2, 28, 3))
    if loaded:
        backend = SimpleNamespace(get_runtime_nccl_version=lambda: loaded)
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", backend, raising=False)
    assert "NCCL 2.28.3 cannot be protected" in refusal(capfd)


def test_a_member_that_cannot_have_its_gpu_ends_as_one_of_a_broken_host(
    machine, capfd, monkeypatch
):
    """Not on its CPU, where its peers would wait for it in NCCL; in torch's own words."""
    machine(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f")
    line = refusal(capfd, ExitStatus.NO_DEVICE)
    assert line.endswith("(CUDA_VISIBLE_DEVICES=GPU-8f): RuntimeError: No CUDA GPUs are available")
    monkeypatch.undo()  # the installed torch was built without CUDA
    monkeypatch.setattr(nccl_environment, "error_message", lambda _: "")
    assert "AssertionError: Torch not compiled with CUDA" in refusal(capfd, ExitStatus.NO_DEVICE)


def test_device_is_set_before_its_first_use(machine, monkeypatch, tmp_path):
    """An entry uses the device as it is made, groups use it later."""
    taken, seen = machine(1), list[list[int]]()
    made = session_rig.Rig._make_entry

    def make(rig: session_rig.Rig, *given: object) -> session_rig.FakeEntry:
        seen.append(list(taken))
        return made(rig, *given)

    monkeypatch.setattr(session_rig.Rig, "_make_entry", make)
    with session_rig.session(monkeypatch, tmp_path) as rig:
        rig.record(1)
        rig.ends_well()
    assert seen == [[0]]
