"""What Megatron-LM's training script takes for granted of a GPU, answered where there is none.

With :func:`install` the unedited ``pretrain_gpt.py`` trains on CPU and gloo. The stand-ins of
megatron-core are in :mod:`.standins`; here is what ``megatron.training`` adds. Each names the place
that reaches it, in core_v0.16.1, and none is there on a machine with a GPU.

What the command line of such a run must say in addition: ``--distributed-backend gloo
--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion``; with
rotary embeddings ``--no-rope-fusion``, with experts ``--no-bias-gelu-fusion`` (or
``--no-bias-swiglu-fusion``), and with experts on a tensor-parallel model ``--disable-bias-linear``.
Without stand-ins, and so not to be had: context parallelism, FP8, CUDA graphs,
``--use-persistent-ckpt-worker``, ``--profile``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything is replaced: it takes an inventory of torch's functions. torch.optim imports it.
import torch._dynamo

from deadpool_megatron.platform import lm_imports, saving, standins
from deadpool_megatron.platform.loaders import drawing_apart

_installed = False


def install(checkout: Path) -> None:
    """Import Megatron-LM from ``checkout``, on stand-ins. Idempotent; survives fork().

    Does nothing on a machine with a GPU. Raises lm_imports.NotACheckoutError, or RuntimeError when
    megatron.core was imported before or a package is missing that Megatron-LM imports.
    """
    global _installed
    if torch.cuda.is_available():
        return
    lm_imports.put_first(checkout.resolve())
    if _installed:
        return
    standins.install()
    _answer_for_a_device()
    lm_imports.import_all()
    _replace_kernels()
    _accept_norms()
    _keep_generator_from_loaders()
    saving.install()
    _installed = True


def _answer_for_a_device() -> None:
    # "Megatron requires CUDA" (initialize.py:62), and without a device it creates no groups
    # (initialize.py:319) and seeds nothing (:422). Nobody else hears of it.
    _only_for("megatron.training.initialize", "is_available", True)
    _only_for("megatron.training.initialize", "device_count", 1)
    # initialize.py:331.
    torch.cuda.set_device = lambda device: None
    # arguments.py:928 asks for the generation; from the tenth on, CUDA_DEVICE_MAX_CONNECTIONS is
    # left alone.
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(  # type: ignore[assignment,return-value]
        name="CPU", major=10, minor=0
    )
    # utils.py:289, for --log-device-memory-used; the other statistics answer zero by themselves.
    torch.cuda.device_memory_used = lambda device=None: 0


def _only_for(module: str, function: str, answer: object) -> None:
    """Have ``torch.cuda.<function>`` answer this to one module, and the truth to all others."""
    real: Callable[[], object] = getattr(torch.cuda, function)

    @functools.wraps(real)
    def wrapper() -> object:
        if sys._getframe(1).f_globals.get("__name__") == module:
            return answer
        return real()

    setattr(torch.cuda, function, wrapper)


def _replace_kernels() -> None:
    # 0.16 compiles them with nvcc even when all that use them are switched off (initialize.py:224);
    # 0.17 has none.
    with contextlib.suppress(ModuleNotFoundError):
        kernels = importlib.import_module("megatron.legacy.fused_kernels")
        kernels.load = lambda args: None  # type: ignore[attr-defined]


def _accept_norms() -> None:
    """Let PyTorch's norms take the place of Apex's under sequence parallelism.

    torch_norm.py:30 refuses that and persist_layer_norm, the default. The second only chooses a
    kernel; for the first the norm lacks the mark by which finalize_model_grads.py:354 sums its
    gradients over the tensor-parallel ranks.
    """
    wrapped = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    real_new: Callable[..., torch.nn.Module] = wrapped.__new__

    def new(cls: type, config: Any, hidden_size: int, **options: Any) -> torch.nn.Module:
        acceptable = copy.copy(config)
        acceptable.persist_layer_norm = acceptable.sequence_parallel = False
        norm = real_new(cls, acceptable, hidden_size, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    wrapped.__new__ = new


def _keep_generator_from_loaders() -> None:
    """Also in a run without our hooks, against which others are held."""
    training = importlib.import_module("megatron.training.training")
    apart = drawing_apart(training.build_pretraining_data_loader)
    training.build_pretraining_data_loader = apart  # type: ignore[attr-defined]
