"""Checks before a run: its requirements, without an import of torch or a call to a GPU."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module, util
from pathlib import Path

from proof.device import Device

# Light packages are imported: an installed package may be compiled for another Python.
_LIGHT, _HEAVY = ("numpy", "xxhash"), ("torch", "megatron.core")
_SHARED_BYTES = {Device.CUDA: 6 << 30, Device.CPU: 256 << 20}


def missing(device: Device, out: Path, checkout: Path | None) -> Iterator[str]:
    """Yield a line for each missing requirement."""
    for name in (*_LIGHT, *_HEAVY):
        found = None
        with suppress(ImportError):
            found = import_module(name) if name in _LIGHT else util.find_spec(name)
        if found is None:
            source = "" if name in {"torch", "numpy"} else " (pack.sh brings it)"
            yield f"{name} for {sys.executable}, Python {sys.version.split()[0]}{source}"
    if device is Device.CUDA:
        spec = util.find_spec("torch")
        built = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
        if built and not re.search(r"^cuda\b.*= *['\"]\d", built.read_text(), re.MULTILINE):
            yield f"a torch with CUDA: that of {sys.executable} is for the CPU"
        if not list(Path("/dev").glob("nvidia[0-9]*")):
            yield "a GPU: there is no /dev/nvidia0 (--device cpu rehearses without)"
    free = shutil.disk_usage("/dev/shm").free
    if free < _SHARED_BYTES[device]:
        yield f"shared memory: /dev/shm has {free >> 20} MiB of {_SHARED_BYTES[device] >> 20}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "proof.part").touch()
        (out / "proof.part").unlink()
    except OSError as error:
        yield f"a folder for the results: {error}"
    if checkout is not None and not (checkout / "pretrain_gpt.py").exists():
        yield f"a checkout of Megatron-LM: {checkout} has no pretrain_gpt.py"
