"""What NVML says of GPUs, by a fake that has the names and constants of the real library."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cli.prepare import gpu_health
from deadpool_megatron.preflight import nvml
from deadpool_megatron.preflight.gpus import VISIBLE
from deadpool_megatron.preflight.health import Health

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: an extra")

NO_SUPPORT, LOST, RESET = 3, 15, 16
# What a sound GPU of a node answers: some of it is not known to it.
SOUND: Mapping[str, Any] = {
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (7, 1, 0, 0),
    "nvmlDeviceGetNvLinkErrorCounter": pynvml.NVMLError(NO_SUPPORT),
    "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonGpuIdle,
    "nvmlDeviceGetFieldValues": pynvml.NVMLError(NO_SUPPORT),
}


def recovery(action: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=action))]


class FakeNvml:
    """Two GPUs; the second one answers what is given, the first one is sound."""

    def __init__(self, **second: Any) -> None:
        self._gpus = (SOUND, {**SOUND, **second})
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # an AttributeError for what the real one has not
        if name not in SOUND:
            return real

        def answer(gpu: Mapping[str, Any], *_: object) -> Any:
            assert self.is_open
            if isinstance(gpu[name], Exception):
                raise gpu[name]
            return gpu[name]

        return answer

    def __dir__(self) -> list[str]:
        return dir(pynvml)

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Mapping[str, Any]:
        if number >= len(self._gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._gpus[number]


@pytest.mark.parametrize(
    ("answers", "health", "said"),
    [
        ({}, Health.GOOD, "nothing wrong by NVML with 2 GPUs"),
        ({"nvmlDeviceGetTotalEccErrors": 1}, Health.OUT, "uncorrected ECC errors"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, Health.OUT, "wants a reset to remap a row"),
        ({"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}, Health.OUT, "could not remap a row"),
        ({"nvmlDeviceGetTotalEccErrors": pynvml.NVMLError(LOST)}, Health.OUT, "is lost"),
        ({"nvmlDeviceGetRemappedRows": pynvml.NVMLError(RESET)}, Health.OUT, "is lost"),
        ({"nvmlDeviceGetFieldValues": recovery(0)}, Health.GOOD, "nothing wrong"),
        ({"nvmlDeviceGetFieldValues": recovery(2)}, Health.OUT, "wants a reset or a reboot"),
        ({"nvmlDeviceGetFieldValues": recovery(3)}, Health.SPARE_ONLY, "wants a recovery"),
        ({"nvmlDeviceGetFieldValues": recovery(99)}, Health.OUT, "wants a reset or a reboot"),
        ({"nvmlDeviceGetNvLinkErrorCounter": 2}, Health.SPARE_ONLY, "an NVLink had to recover"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x40}, Health.SPARE_ONLY, "by heat or power"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x4}, Health.GOOD, "nothing wrong"),
    ],
)
def test_the_table(answers: dict[str, Any], health: Health, said: str) -> None:
    library: Any = FakeNvml(**answers)
    answer = nvml.judge_gpus(nvml.read_gpus(library, ("0", "1")))
    assert answer.health is health
    assert said in answer.text
    assert ("GPU 1: " in answer.text) == (health is not Health.GOOD)
    assert not library.is_open
    assert nvml.judge_gpus(nvml.read_gpus(library, ("0", "9"))).health is Health.GOOD


def test_the_command_answers_with_the_worst_of_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_health, "visible_gpus", lambda _: ("0", "1"))
    args = argparse.Namespace(hours=1.0)
    hot_and_sick = {
        "nvmlDeviceGetCurrentClocksEventReasons": 0x20,
        "nvmlDeviceGetTotalEccErrors": 4,
    }
    library: Any = FakeNvml(**hot_and_sick)
    assert gpu_health.run(args, lambda: library, list) == Health.OUT
    assert capsys.readouterr().out == (
        "GPU 1: uncorrected ECC errors since its reset; GPU 1: is slowed down by heat or power\n"
    )


def test_without_a_driver_the_node_is_good(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real library, on a host that has none."""
    monkeypatch.setenv(VISIBLE, "")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pynvml._nvmlCheckReturn(12))
    assert gpu_health.run(argparse.Namespace(hours=1.0), read_log=list) == Health.GOOD
    assert "not asked: NVML does not answer: " in capsys.readouterr().out
