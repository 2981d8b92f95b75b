"""Data loaders that leave torch's own generator alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def drawing_apart(build: Callable[..., Any]) -> Callable[..., Any]:
    """A function as ``build``, whose loaders draw from a generator of their own.

    A loader draws a seed for its workers whenever it is iterated: at once, or with
    ``--dataloader-type cyclic`` in the next iteration (training.py, ``cyclic_iter``). After a
    return that would be behind the random states that were put back. Where there is no GPU, dropout
    draws from the same generator, and a run that loads a checkpoint and then builds its loaders
    would go on with other numbers.
    """

    @functools.wraps(build)
    def apart(*args: Any, **options: Any) -> Any:
        loader = build(*args, **options)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator()
        return loader

    return apart
