"""Which journal a run has, by ``--deadpool-journal``; and writing to one that may be away."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deadpool_megatron.cluster.journal.entries import (
    DirectoryJournal,
    Journal,
    JournalError,
    LostRace,
)
from deadpool_megatron.cluster.journal.etcd_client import EtcdClient, EtcdError, credentials_from
from deadpool_megatron.cluster.journal.etcd_journal import EtcdJournal
from deadpool_megatron.settings import Settings

_PAUSE_SECONDS = 0.1


def open_journal(settings: Settings, run_id: str, directory: Path) -> Journal:
    """The journal that the settings name; ``directory`` is where one of files lies.

    Nothing is asked of etcd yet. A call of its journal ends within half of ``connect_seconds``.
    Raises JournalError when the directory cannot be made or etcd's certificates cannot be loaded.
    """
    if settings.journal == "directory":
        try:
            return DirectoryJournal(directory)
        except OSError as error:
            raise JournalError(f"cannot make {directory}: {error.strerror}") from error
    # Settings has checked the form.
    scheme, _, rest = settings.journal.partition("://")
    hosts, _, prefix = rest.partition("/")
    try:
        credentials = credentials_from(os.environ, secure=scheme == "etcds")
    except EtcdError as error:
        raise JournalError(str(error)) from error
    endpoints = [_endpoint(text) for text in hosts.split(",")]
    client = EtcdClient(endpoints, credentials, settings.connect_seconds / 2)
    return EtcdJournal(client, f"/{prefix.strip('/')}/{run_id}")


async def write_patiently(
    journal: Journal,
    name: tuple[str, int],
    entry: Mapping[str, Any],
    patience_seconds: float,
    on_trouble: Callable[[str], None],
) -> None:
    """Write an entry, again and again while the journal cannot be reached, in another thread.

    ``on_trouble(text)``: once for each text. Raises LostRace, and JournalError in the end.
    """
    loop = asyncio.get_running_loop()
    limit = time.monotonic() + patience_seconds
    known = ""
    while True:
        try:
            await loop.run_in_executor(None, journal.write, *name, entry)
        except LostRace:
            raise
        except JournalError as error:
            if time.monotonic() > limit:
                raise
            if str(error) != known:
                known = str(error)
                on_trouble(known)
        else:
            return
        await asyncio.sleep(_PAUSE_SECONDS)


def _endpoint(text: str) -> tuple[str, int]:
    found = urlsplit(f"//{text}")
    assert found.hostname is not None
    assert found.port is not None
    return found.hostname, found.port
