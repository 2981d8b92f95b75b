"""What NVML says about the GPUs of this node: counters and states that tell of a broken device.

One table says what each of them costs the node. What a GPU or its driver does not answer costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deadpool_megatron.preflight.health import Answer, Health

_RECOVERY = "NVML_GPU_RECOVERY_ACTION_"
# The GPU itself goes on without them.
_MILD_RECOVERIES = ("DRAIN_P2P", "RECOVER_IMEX_DOMAIN")
_SLOWED_BY = ("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")


class NvmlUnavailable(Exception):
    """There is no NVML to ask; one clear line."""


class Library(Protocol):
    """What is used of ``pynvml``, or of a fake in its place, beside its functions and constants."""

    NVMLError: type[Exception]

    def __getattr__(self, name: str) -> Any:
        """A function or a constant, by NVML's name."""
        ...


@dataclass(frozen=True)
class GpuState:
    """What one GPU says of itself. ``lost``: it does not answer any more, or only after a reset;
    ``recovery``: what the driver says has to be done, empty for nothing.
    """

    name: str
    lost: bool = False
    uncorrected_ecc: int = 0
    remap_failed: bool = False
    remap_pending: bool = False
    recovery: str = ""
    nvlink_recoveries: int = 0
    slowed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Sign:
    """Something that a GPU may say, and what its node is good for then."""

    health: Health
    text: str
    is_shown: Callable[[GpuState], object]


def _wants_reset(gpu: GpuState) -> bool:
    return bool(gpu.recovery) and gpu.recovery not in _MILD_RECOVERIES


# What needs a reset or a repair costs the node its roles; what makes it slow, only its preference.
SIGNS = (
    _Sign(Health.OUT, "is lost, or wants a reset", lambda gpu: gpu.lost),
    _Sign(Health.OUT, "uncorrected ECC errors since its reset", lambda gpu: gpu.uncorrected_ecc),
    _Sign(Health.OUT, "could not remap a row", lambda gpu: gpu.remap_failed),
    _Sign(Health.OUT, "wants a reset to remap a row", lambda gpu: gpu.remap_pending),
    _Sign(Health.OUT, "wants a reset or a reboot, says the driver", _wants_reset),
    _Sign(
        Health.SPARE_ONLY,
        "wants a recovery, says the driver",
        lambda gpu: gpu.recovery in _MILD_RECOVERIES,
    ),
    _Sign(Health.SPARE_ONLY, "an NVLink had to recover", lambda gpu: gpu.nvlink_recoveries),
    _Sign(Health.SPARE_ONLY, "is slowed down by heat or power", lambda gpu: gpu.slowed_by),
)


def judge_gpus(gpus: Sequence[GpuState]) -> Answer:
    """Returns what these GPUs make of their node: the worst that any says, and all of it."""
    found = [(sign, gpu) for gpu in gpus for sign in SIGNS if sign.is_shown(gpu)]
    if not found:
        return Answer(Health.GOOD, f"nothing wrong by NVML with {len(gpus)} GPUs")
    text = "; ".join(f"GPU {gpu.name}: {sign.text}" for sign, gpu in found)
    return Answer(max(sign.health for sign, _ in found), text)


def load_library() -> Library:
    """Returns ``pynvml``. Raises NvmlUnavailable."""
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable(
            "NVML wants nvidia-ml-py: pip install 'deadpool-megatron[nvml]'"
        ) from None
    library: Library = pynvml
    return library


def read_gpus(library: Library, names: Sequence[str]) -> list[GpuState]:
    """Returns what the GPUs say that a process sees by these names, as :data:`gpus.VISIBLE` has
    them. Raises NvmlUnavailable.
    """
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not answer: {error}") from error
    try:
        return [_Reader(library, name).read() for name in names]
    finally:
        library.nvmlShutdown()


class _Lost(Exception):
    """The GPU does not answer any more."""


class _Reader:
    """Asks one GPU; what it does not know, as most know not all of this, is as if all were well."""

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name

    def read(self) -> GpuState:
        """Returns what it says."""
        library, name = self._library, self._name
        find = "nvmlDeviceGetHandleByIndex" if name.isdigit() else "nvmlDeviceGetHandleByUUID"
        try:
            gpu = self._ask(find, int(name) if name.isdigit() else name)
            if gpu is None:
                return GpuState(name)  # that there are too few is found elsewhere
            uncorrected = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
            _, _, pending, failed = self._ask("nvmlDeviceGetRemappedRows", gpu) or (0, 0, 0, 0)
            return GpuState(
                name,
                uncorrected_ecc=self._ask("nvmlDeviceGetTotalEccErrors", gpu, *uncorrected) or 0,
                remap_failed=bool(failed),
                remap_pending=bool(pending),
                recovery=self._recovery(gpu),
                nvlink_recoveries=self._nvlink_recoveries(gpu),
                slowed_by=tuple(self._slowed_by(gpu)),
            )
        except _Lost:
            return GpuState(name, lost=True)

    def _ask(self, function: str, *arguments: object) -> Any:
        """Returns the answer, None for none. Raises _Lost."""
        library = self._library
        try:
            return getattr(library, function)(*arguments)
        except AttributeError:
            return None  # an older library
        except library.NVMLError as error:
            gone = library.NVML_ERROR_GPU_IS_LOST, library.NVML_ERROR_RESET_REQUIRED
            if getattr(error, "value", None) in gone:
                raise _Lost from error
            return None

    def _recovery(self, gpu: object) -> str:
        library = self._library
        field = getattr(library, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        answer = None if field is None else self._ask("nvmlDeviceGetFieldValues", gpu, [field])
        if not answer or answer[0].nvmlReturn != library.NVML_SUCCESS:
            return ""
        asked = answer[0].value.uiVal
        names = (name for name in dir(library) if name.startswith(_RECOVERY))
        for name in names:
            if getattr(library, name) == asked:
                return "" if name == f"{_RECOVERY}NONE" else name.removeprefix(_RECOVERY)
        return f"action {asked}"

    def _nvlink_recoveries(self, gpu: object) -> int:
        counter = self._library.NVML_NVLINK_ERROR_DL_RECOVERY
        links = range(self._library.NVML_NVLINK_MAX_LINKS)
        asked = (self._ask("nvmlDeviceGetNvLinkErrorCounter", gpu, n, counter) for n in links)
        return sum(count or 0 for count in asked)

    def _slowed_by(self, gpu: object) -> Iterator[str]:
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", gpu) or 0
        for why in _SLOWED_BY:
            if reasons & getattr(self._library, f"nvmlClocksEventReason{why}"):
                yield why
