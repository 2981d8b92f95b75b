"""A slow wire between two TAP devices of its network namespace: ``wire.py ONE OTHER SECONDS``.

Every frame read from one device is written to the other so much later, in order. Runs until it is
killed; prints ``up`` when it carries frames.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_FRAME_BYTES = 65536


def attach(name: str) -> int:
    """Return the file descriptor of a TAP device, which reads and writes single frames."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def carry(first: int, second: int, seconds: float) -> None:
    """Move frames for ever."""
    towards = {first: second, second: first}
    travelling: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, travelling[0][0] - time.monotonic()) if travelling else None
        ready, _, _ = select.select([first, second], [], [], wait)
        now = time.monotonic()
        for device in ready:
            frame = os.read(device, _FRAME_BYTES)
            travelling.append((now + seconds, towards[device], frame))
        while travelling and travelling[0][0] <= time.monotonic():
            _, device, frame = travelling.popleft()
            try:
                os.write(device, frame)
            except BlockingIOError:
                continue  # a full queue drops frames, as a real one does


def main() -> None:
    first, second = attach(sys.argv[1]), attach(sys.argv[2])
    print("up", flush=True)
    carry(first, second, float(sys.argv[3]))


if __name__ == "__main__":
    main()
