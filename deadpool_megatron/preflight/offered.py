"""What the platform offers to any run: asked before anything starts, named where it is missing."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

_FIRST_USER = 1000
_REMOVES = re.compile(r"^\s*RemoveIPC\s*=\s*(\w+)", re.MULTILINE)


def missing() -> str:
    """Why no run can be on this host; empty where one can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return (
            f"pidfd_open is not offered here ({error.strerror}), by which a node hears of the end"
            " of its processes: it takes a kernel from 5.3 on and, in a container, a seccomp"
            " profile that lets it pass"
        )
    return ""


def memory_may_go(user: int, root: Path = Path("/")) -> str:
    """Why what this user has in shared memory may be removed under a run; empty where nothing says
    so. As logind judges: below the users of the system nobody, and nobody who lingers."""
    if user < _FIRST_USER or not (root / "run/systemd/system").is_dir():
        return ""
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    if (root / "var/lib/systemd/linger" / name).exists():
        return ""
    removes = "yes"
    etc = root / "etc/systemd"
    settings = [etc / "logind.conf", *sorted(etc.glob("logind.conf.d/*.conf"))]
    for path in filter(Path.is_file, settings):
        removes = (_REMOVES.findall(path.read_text(errors="replace")) or [removes])[-1]
    if removes.lower() not in ("yes", "true", "on", "1"):
        return ""
    return (
        f"systemd-logind has RemoveIPC={removes}: it removes what user {name} has in /dev/shm when"
        f" the last login of {name} on this host ends: 'loginctl enable-linger {name}' keeps it"
    )
