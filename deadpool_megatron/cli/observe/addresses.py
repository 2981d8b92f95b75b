"""Addresses to listen on, as people write them and as browsers read them."""

from __future__ import annotations

from deadpool_megatron.cli.common import CommandError


def listen_address(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Return host and port of ``--listen ADDR:PORT``; raise CommandError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not least_port <= int(port) <= 65535:
        raise CommandError(f"--listen {text}: give ADDRESS:PORT, like 127.0.0.1:9478")
    return host.strip("[]") or "0.0.0.0", int(port)


def shown_host(host: str) -> str:
    """Return the host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
