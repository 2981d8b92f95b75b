"""Importing what all training processes need, once, in the process they are forked from."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from collections.abc import Sequence

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.starter import choose_method
from deadpool_megatron.settings import Settings

DEFAULT_PRELOAD = (
    "deadpool_megatron.platform.preload,deadpool_megatron.trainer.loop,deadpool_megatron.hooks"
)


def keep_single_threaded() -> None:
    """To be called before anything may import numpy: its OpenBLAS would start a thread for each
    core at import, and a fork needs there be none.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def preload_modules(settings: Settings, modules: Sequence[str]) -> None:
    """Import what all members need, once, before they are forked.

    Raises CommandError when a module is broken or starts threads. Does nothing for ``exec``.
    """
    if choose_method(settings.start_method) != "fork":
        return
    keep_single_threaded()
    for name in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except ImportError as error:
            raise CommandError(f"Python module {name!r} cannot be imported: {error}") from error
        if posix.thread_count() != 1:
            raise CommandError(
                f"importing {name!r} starts threads, a fork is not safe then: use"
                " --deadpool-start-method exec"
            )
    # Shared pages stay shared: the collector would write into each object.
    gc.collect()
    gc.freeze()
