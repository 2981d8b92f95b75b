"""Environments for what the bench ``peers`` compares with: made on demand, never by a measurement.

Each peer has one of its own. It sees the packages of the environment that runs the bench, so that
torch and Megatron are the same on all sides, and holds only what the peer adds to them.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from common.machine import ROOT

from other_systems.outcomes import last_line

#: peer -> (what pip installs, what must be importable)
PACKAGES = {
    "nvidia-resiliency-ext": ("nvidia-resiliency-ext==0.4.1", "nvidia_resiliency_ext.inprocess"),
    "lm-resiliency": ("lm-resiliency==0.2.0", "lm_resiliency.integrations.megatron"),
}
_INSTALL_SECONDS = 900.0
_IMPORT_SECONDS = 120.0


class PeerUnavailableError(Exception):
    """A peer cannot be run; the message is one line that says why."""


def python_of(directory: Path, peer: str) -> Path:
    """The interpreter of a peer's environment, whether it exists or not."""
    return directory / peer / "bin" / "python"


def install(directory: Path, peer: str) -> None:
    """Make the environment of ``peer``; one that is there is brought up to date.

    Raises PeerUnavailableError with pip's last line when that fails.
    """
    requirement, _ = PACKAGES[peer]
    _run([sys.executable, "-m", "venv", str(directory / peer)], _INSTALL_SECONDS, peer)
    _link_of(directory, peer).write_text(_LINK)
    _run(
        [
            *(str(python_of(directory, peer)), "-m", "pip", "install", "--quiet"),
            *("-c", str(ROOT / "constraints.txt"), requirement),
        ],
        _INSTALL_SECONDS,
        peer,
    )


def check(directory: Path, peer: str) -> None:
    """That ``peer`` can be imported. Raises PeerUnavailableError saying why it cannot."""
    requirement, module = PACKAGES[peer]
    python, link = python_of(directory, peer), _link_of(directory, peer)
    if not python.exists():
        raise PeerUnavailableError(f"{requirement} is not installed: use --install")
    if not link.exists() or link.read_text() != _LINK:
        raise PeerUnavailableError(f"{requirement} was installed for another Python: use --install")
    # As in a rank: the stand-ins for what only GPU builds have come first.
    program = f"from deadpool_megatron.platform import preload; import {module}"
    _run([str(python), "-c", program], _IMPORT_SECONDS, peer)


# Not a plain path: only of a site directory are the .pth files read, those of editable installs.
_LINK = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"


def _link_of(directory: Path, peer: str) -> Path:
    """What makes the packages of the running environment visible in the one of ``peer``."""
    place = {"base": str(directory / peer), "platbase": str(directory / peer)}
    return Path(sysconfig.get_path("purelib", "venv", place)) / "deadpool_bench.pth"


def _run(command: list[str], limit_seconds: float, peer: str) -> None:
    """Run a command. Raises PeerUnavailableError when it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        name = " ".join(command[1:4])
        raise PeerUnavailableError(f"{peer}: {name} took over {limit_seconds:.0f} s") from None
    if done.returncode != 0:
        raise PeerUnavailableError(f"{peer}: {last_line(done.stderr)}")
