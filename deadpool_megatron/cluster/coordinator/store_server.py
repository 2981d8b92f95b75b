"""``python -m deadpool_megatron.cluster.coordinator.store_server``: where communicators meet.

A process of its own that serves one torch ``TCPStore`` on a free port: never on a training rank and
never inside the coordinator, whose life must not depend on torch. It prints one line, ``PORT N``,
and ends when its standard input reaches end of file (the parent holds the other end of that pipe).

The one module of this package that imports torch, and only when run.
"""

from __future__ import annotations

import os
import signal
import sys

from deadpool_megatron.cluster.process import posix


def main() -> int:
    """Serve until the parent is gone; ``argv[1]`` is the host to bind the client side to."""
    posix.die_with_parent(os.getppid())
    posix.set_process_name("deadpool-store")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    print(f"PORT {store.port}", flush=True)
    while os.read(0, 4096):
        pass
    # The C++ server thread must not outlive the interpreter's teardown.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
