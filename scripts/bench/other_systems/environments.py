"""Environments for the systems of the bench ``peers``: made on demand, never by a measurement.

Each peer has an environment of its own. It sees the packages of the bench's environment, so that
torch and Megatron are the same on all sides, and contains only the peer's additions.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from other_systems.outcomes import last_line


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
_INSTALL_SECONDS = 900.0
_IMPORT_SECONDS = 120.0


class PeerUnavailableError(Exception):
    """A peer cannot be run; the message is one line with the reason."""


def python_of(directory: Path, peer: str) -> Path:
    """Return the interpreter of a peer's environment, which need not exist."""
    return directory / peer / "bin" / "python"


def install(directory: Path, peer: str) -> None:
    """Make the environment of ``peer``, or update it.

    Raises PeerUnavailableError with pip's last line when that fails.
    """
    package = PACKAGES[peer]
    _run([sys.executable, "-m", "venv", str(directory / peer)], _INSTALL_SECONDS, peer)
    _link_of(directory, peer).write_text(_LINK)
    wanted = [package.requirement]
    if package.wheel_of:
        _take_wheel(directory, peer, package)
        wanted = _needs_of(directory, peer, package)
    _pip(directory, peer, *wanted)


def _take_wheel(directory: Path, peer: str, package: Package) -> None:
    _pip(
        *(directory, peer, "--no-deps", "--upgrade", "--only-binary=:all:"),
        *("--target", str(_packages_of(directory, peer)), "--python-version", package.wheel_of),
        *("--platform", "manylinux_2_39_x86_64", package.requirement),
    )


def _needs_of(directory: Path, peer: str, package: Package) -> list[str]:
    name = package.requirement.partition("==")[0]
    program = f"from importlib.metadata import requires; print(*requires({name!r}), sep='\\n')"
    lines = _run([str(python_of(directory, peer)), "-c", program], _IMPORT_SECONDS, peer)
    return [line for line in lines.splitlines() if "extra ==" not in line]


def _pip(directory: Path, peer: str, *arguments: str) -> None:
    command = [str(python_of(directory, peer)), "-m", "pip", "install", "--quiet", *arguments]
    _run(command, _INSTALL_SECONDS, peer)


def check(directory: Path, peer: str) -> None:
    """Check that ``peer`` can be imported. Raises PeerUnavailableError with the reason if not."""
    package = PACKAGES[peer]
    python, link = python_of(directory, peer), _link_of(directory, peer)
    if not python.exists():
        raise PeerUnavailableError(f"{package.requirement} is not installed: use --install")
    if not link.exists() or link.read_text() != _LINK:
        raise PeerUnavailableError(
            f"{package.requirement} was installed for another Python: use --install"
        )
    # As in a rank: the stand-ins for modules of GPU builds come first.
    program = f"from deadpool_megatron.platform import preload; import {package.module}"
    _run([str(python), "-c", program], _IMPORT_SECONDS, peer)


# Not a plain path: .pth files, as of editable installs, are read in site directories only.
_LINK = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"


def _link_of(directory: Path, peer: str) -> Path:
    """Return the file that shows the packages of the running environment to that of ``peer``."""
    return _packages_of(directory, peer) / "deadpool_bench.pth"


def _packages_of(directory: Path, peer: str) -> Path:
    place = {"base": str(directory / peer), "platbase": str(directory / peer)}
    return Path(sysconfig.get_path("purelib", "venv", place))


def _run(command: list[str], limit_seconds: float, peer: str) -> str:
    """Return the output of a command. Raises PeerUnavailableError when it fails or is too slow."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        name = " ".join(command[1:4])
        raise PeerUnavailableError(f"{peer}: {name} took over {limit_seconds:.0f} s") from None
    if done.returncode != 0:
        raise PeerUnavailableError(f"{peer}: {last_line(done.stderr)}")
    return done.stdout
