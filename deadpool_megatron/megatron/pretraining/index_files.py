"""Index files of data sets, made by any process that finds them missing.

Megatron-LM has rank 0 make these files while the other ranks wait in a barrier. A role that is
built without peers cannot wait: role 0 may come later, or the files may have been removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from deadpool_megatron import file_systems
from deadpool_megatron.megatron.replacement import replaced

# The time that another process may take to make the same files.
_LOCK_SECONDS = 600.0
_LISTS = ("data_args_path", "per_split_data_args_path")
_DATA = re.compile(r"((train|valid|test)_)?data_path|tokenizer_model|vocab_file|merge_file")


def written_whole() -> contextlib.AbstractContextManager[None]:
    """While the block runs, have numpy save each file whole or not at all under its name."""
    save = np.save

    def save_whole(file: Any, *args: Any, **options: Any) -> None:
        beside = Path(f"{file}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}")
        with beside.open("wb") as stream:
            save(stream, *args, **options)
        beside.replace(file)

    return replaced(np, save=save_whole)


def made_where_missing(make: Callable[[], Any]) -> Any:
    """Return the data sets of ``make()``. If an index file is missing, make the files as rank 0
    would; a single process of the run does that at a time."""
    try:
        return make()
    except FileNotFoundError as error:
        path = Path(str(error.filename))
        if path.suffix != ".npy":
            raise
    text = f"{path.name} is not in {path.parent}: this process makes the index files of the data"
    print(f"deadpool: {text}", file=sys.stderr, flush=True)
    name = Path(os.environ["DEADPOOL_RUN_DIR"]) / "index.lock"
    rank = dist.get_rank
    as_first = replaced(dist, get_rank=lambda group=None: 0 if group is None else rank(group))
    with name.open("w") as lock, as_first:
        with contextlib.suppress(BlockingIOError):  # to make the same files twice does no harm
            file_systems.lock(lock.fileno(), name, _LOCK_SECONDS)
        return make()


def data_files(arguments: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files of data and tokenizer that parsed arguments name."""
    found = [value for name, value in arguments.items() if value and _DATA.fullmatch(name)]
    names = [name for value in found for name in (value if isinstance(value, list) else [value])]
    for path in filter(None, map(arguments.get, _LISTS)):
        names += path, *re.findall(r"[^\s\",\[\]{}]+", Path(path).read_text())
    for name in names:
        yield from filter(Path.exists, (Path(f"{name}{ending}") for ending in ("", ".bin", ".idx")))
