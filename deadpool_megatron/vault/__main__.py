"""``python -m deadpool_megatron.vault``: the vault process, started by the agent of its node.

As in every process of the run, the secret, identifier, settings and fault plan come from the run
directory and the environment. The agent passes on two sockets, which listen already.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

from deadpool_megatron import failpoints
from deadpool_megatron.process_names import set_process_name, show_thread_names
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import agent_orders, errors, transport as transports
from deadpool_megatron.wire import auth


def _die(details: threading.ExceptHookArgs) -> None:
    """End the process after an unhandled exception of a thread: the thread would be missed only at
    the next failure. The agent starts a new vault on the same slots."""
    traceback.print_exception(details.exc_type, details.exc_value, details.exc_traceback)
    sys.stderr.flush()
    os._exit(70)


def main() -> int:
    """Run until the order to stop. Exit status 0; 2 for a failed start; 70 for a bug."""
    parser = argparse.ArgumentParser(prog="python -m deadpool_megatron.vault")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--segment-dir", type=Path, required=True)
    parser.add_argument("--unix-fd", type=int, required=True, help="listening vault.sock")
    parser.add_argument("--tcp-fd", type=int, required=True, nargs="+", help="listening sockets")
    given = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(threadName)s %(levelname)s %(message)s"
    )
    set_process_name(f"dp-vault{given.node}")
    show_thread_names()
    threading.excepthook = _die
    failpoints.load()
    failpoints.set_context(node=given.node, process="vault", run_dir=str(given.run_dir))
    try:
        secret = auth.load_secret(given.run_dir)
        settings = Settings.from_environment(os.environ)
        run_id = os.environ["DEADPOOL_RUN_ID"]
        os.nice(settings.vault_nice)
    except (auth.AuthenticationError, ValueError, KeyError) as error:
        print(f"vault of node {given.node}: {error}", file=sys.stderr)
        return 2
    # A link that breaks is given up before the other nodes could give up this node.
    silence = settings.node_silence_seconds / 2 if len(given.tcp_fd) > 1 else 0.0
    about = secret, run_id, given.node, settings.connect_seconds, silence
    listeners = [socket.socket(fileno=number) for number in given.tcp_fd]
    lanes = [transports.Transport(listener, *about) for listener in listeners]
    local = socket.socket(fileno=given.unix_fd)
    vault = agent_orders.Vault(given.node, given.segment_dir, settings, local, *lanes)

    def end(*_: object) -> None:
        vault.ended_by_signal = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        vault.start()
    except errors.SegmentError as error:
        print(f"vault of node {given.node}: {error}", file=sys.stderr)
        return 2
    vault.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
