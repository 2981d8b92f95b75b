"""Environments for the systems of the case ``peers``: made on demand, never by a measurement.

Each peer has an environment of its own. It sees the packages of the bench's environment, so that
torch and Megatron are the same on all sides, and contains only the peer's additions.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from common.frame import BenchError
from common.outcomes import cause_in


@dataclass(frozen=True)
class Package:
    """A requirement for pip, and the module that it provides. ``wheel_of``: the Python of the
    newest wheel, whose parts in C, for GPUs only, the bench does not load.
    """

    requirement: str
    module: str
    wheel_of: str = ""


PACKAGES = {
    "nvidia-resiliency-ext": Package(
        "nvidia-resiliency-ext==0.7.0", "nvidia_resiliency_ext.inprocess", wheel_of="3.12"
    ),
    "lm-resiliency": Package("lm-resiliency==0.2.0", "lm_resiliency.integrations.megatron"),
}
_PLACE = Path.home() / ".cache" / "deadpool-megatron" / "peers"
_LIMIT_SECONDS = 900.0
_NEEDS = "from importlib.metadata import requires; print(*requires({!r}), sep='\\n')"
# Not a plain path: .pth files, as of editable installs, are read in site directories only.
_LINK = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment, which need not exist."""
    return _PLACE / peer / "bin" / "python"


def install(peer: str) -> None:
    """Make the environment of ``peer``, or update it. Raises BenchError with pip's last line when
    that fails."""
    package, python = PACKAGES[peer], str(python_of(peer))
    pip = (python, "-m", "pip", "install", "--quiet")
    _run(peer, sys.executable, "-m", "venv", str(_PLACE / peer))
    place = {"base": str(_PLACE / peer), "platbase": str(_PLACE / peer)}
    packages = Path(sysconfig.get_path("purelib", "venv", place))
    (packages / "deadpool_bench.pth").write_text(_LINK)
    wanted = [package.requirement]
    if package.wheel_of:
        wheel = ("--target", str(packages), "--python-version", package.wheel_of)
        wheel += ("--platform", "manylinux_2_39_x86_64", "--only-binary=:all:", "--no-deps")
        _run(peer, *pip, "--upgrade", *wheel, package.requirement)
        needs = _run(peer, python, "-c", _NEEDS.format(package.requirement.partition("==")[0]))
        wanted = [line for line in needs.splitlines() if "extra ==" not in line]
    _run(peer, *pip, *wanted)


def check(peer: str) -> None:
    """Check that ``peer`` can be imported. Raises BenchError with the reason if not."""
    package, python = PACKAGES[peer], python_of(peer)
    if not python.exists():
        raise BenchError(f"{package.requirement} is not installed: use --install")
    # As in a rank: the stand-ins for modules of GPU builds come first.
    stand_ins = "from deadpool_megatron.megatron import stand_ins; stand_ins.install()"
    program = f"{stand_ins}; import {package.module}"
    _run(peer, str(python), "-c", program)


def _run(peer: str, *command: str) -> str:
    """Return the output of a command. Raises BenchError when it fails or is too slow."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{peer}: {' '.join(command[1:4])} was too slow") from None
    if done.returncode != 0:
        raise BenchError(f"{peer}: {cause_in(done.stderr)}")
    return done.stdout
