"""Index files of data sets: whichever process finds them missing makes them.

Megatron-LM has rank 0 make them while the other ranks wait in a barrier. A role that is built
without peers waits for nobody: role 0 may be later, or the files were removed since.
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

# So long another process may take that makes the same files.
_LOCK_SECONDS = 600.0
_LISTS = ("data_args_path", "per_split_data_args_path")
_DATA = re.compile(r"((train|valid|test)_)?data_path|tokenizer_model|vocab_file|merge_file")


@contextlib.contextmanager
def written_whole() -> Iterator[None]:
    """While the block runs, files that numpy saves by their names appear whole or not at all."""
    save = np.save

    def save_whole(file: Any, *args: Any, **options: Any) -> None:
        beside = Path(f"{file}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}")
        with beside.open("wb") as stream:
            save(stream, *args, **options)
        beside.replace(file)

    with replaced(np, "save", save_whole):
        yield


def made_where_missing(make: Callable[[], Any]) -> Any:
    """Return the data sets that ``make()`` answers, with their index files made if one is not
    there: as rank 0, one process of the run after the other."""
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
    as_first = replaced(dist, "get_rank", lambda group=None: 0 if group is None else rank(group))
    with name.open("w") as lock, as_first:
        with contextlib.suppress(BlockingIOError):  # twice the same files do no harm
            file_systems.lock(lock.fileno(), name, _LOCK_SECONDS)
        return make()


def data_files(arguments: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that parsed arguments have data and tokenizer in."""
    named = [value for name, value in arguments.items() if value and _DATA.fullmatch(name)]
    words = [word for value in named for word in (value if isinstance(value, list) else [value])]
    for path in filter(None, map(arguments.get, _LISTS)):
        words += path, *re.findall(r"[^\s\",\[\]{}]+", Path(path).read_text())
    for word in words:
        yield from filter(Path.exists, (Path(f"{word}{ending}") for ending in ("", ".bin", ".idx")))
