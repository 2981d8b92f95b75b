"""Covers a directory of this mount namespace with a file system that is gone.

``hidden.py DIRECTORY hang``: every use of it blocks until the process that tries is killed, as on a
hard NFS mount whose server does not answer. ``hidden.py DIRECTORY fail``: every use of it fails
with an I/O error, as on a soft mount. ``umount -l DIRECTORY`` restores it. Prints ``up``.

It is a FUSE mount without a server: with its descriptor open, requests wait for an answer; with it
closed, the kernel fails them. Files that are open already stay as they are.
"""

import ctypes
import os
import signal
import sys


def cover(directory: str) -> int:
    """Mount; answers the descriptor that holds it."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"gone", directory.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), directory)
    return device


def main() -> None:
    device = cover(sys.argv[1])
    if sys.argv[2] == "fail":
        os.close(device)
    print("up", flush=True)
    if sys.argv[2] == "hang":
        signal.pause()


if __name__ == "__main__":
    main()
