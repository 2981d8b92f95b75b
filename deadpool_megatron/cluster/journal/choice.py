"""Which journal a run has, by ``--deadpool-journal``."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from deadpool_megatron.cluster.journal.entries import (
    DirectoryJournal,
    Journal,
    JournalError,
)
from deadpool_megatron.cluster.journal.etcd_client import EtcdClient, EtcdError, credentials_from
from deadpool_megatron.cluster.journal.etcd_journal import EtcdJournal
from deadpool_megatron.settings import Settings


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


def _endpoint(text: str) -> tuple[str, int]:
    found = urlsplit(f"//{text}")
    assert found.hostname is not None
    assert found.port is not None
    return found.hostname, found.port
