"""A disk that all hosts share and that can stand still: every write to it, to files that are open
as well, waits for it; reads are answered.

An ext4 file system in a file, stopped by the kernel's own freeze (fsfreeze). A process that writes
meanwhile cannot even be killed, so whatever happens it is let go before anything is torn down.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BYTES = 256 << 20
_TOOLS = ("fsfreeze", "mkfs.ext4", "mount", "umount")


class Disk:
    """``path``: where it is mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """No write returns in this block."""
        _done("fsfreeze", "--freeze", str(self.path))
        try:
            yield
        finally:
            _done("fsfreeze", "--unfreeze", str(self.path))


def missing() -> str:
    """Why there can be no such disk here; empty if there can."""
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    return "" if Path("/dev/loop-control").exists() else "needs loop devices"


@contextmanager
def mounted(directory: Path) -> Iterator[Disk]:
    """A new disk at ``directory``/disk, there until the end of the block."""
    image, path = directory / "disk.img", directory / "disk"
    with open(image, "wb") as file:
        file.truncate(_BYTES)
    path.mkdir()
    _done("mkfs.ext4", "-q", str(image))
    _done("mount", "-o", "loop", str(image), str(path))
    try:
        yield Disk(path)
    finally:
        # Hosts that are just ending may still have it mounted: it goes with the last of them.
        _done("umount", "--lazy", str(path))
        image.unlink()


def _done(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)
