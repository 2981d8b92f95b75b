"""What megatron-core 0.16.1 takes for granted of a GPU, answered on a machine that has none.

Megatron runs its real components here (parallel state, model, DDP, distributed optimizer,
schedules); nothing of it is edited. Each stand-in names the places that reach it. All of them
replace calls that would raise without a GPU, with three exceptions. Two change a working answer and
are therefore limited to callers inside Megatron: ``Tensor.type()`` and ``torch.compile``. The third
gives the same answer without corrupting memory: coalesced all-gathers (:mod:`.gathers`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deadpool_megatron.platform import gathers, unasked_imports

_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange", "rand")
_installed = False


def install() -> None:
    """Install all stand-ins and import megatron.core under them. Idempotent; survives fork().

    Does nothing on a machine with a GPU. Raises RuntimeError when megatron.core was imported
    before, since it has then already bound the calls that must be replaced.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("the CPU stand-ins must be installed before megatron.core is imported")
    _replace_device()
    _replace_factories()
    _replace_tensor_methods()
    _replace_streams()
    _replace_generators()
    # Parameters are gathered in coalesced calls (param_and_grad_buffer.py:274), on gloo here.
    gathers.mend_plain_groups()
    with _eager_compile(), unasked_imports.answered():
        importlib.import_module("megatron.core.transformer.transformer_layer")
        importlib.import_module("megatron.core.transformer.moe.moe_layer")
    _finish_after_import()
    _installed = True


def _replace_device() -> None:
    # Megatron passes the current device on as device=...: param_and_grad_buffer.py:800,
    # rotary_pos_embedding.py:78, p2p_communication.py:313, layers.py:261, router.py:90.
    torch.cuda.current_device = _the_cpu  # type: ignore[assignment]
    # After every receive (p2p_communication.py:398) and before a checkpoint is written.
    torch.cuda.synchronize = _nothing


def _the_cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*_args: object, **_options: object) -> None:
    return None


def _replace_factories() -> None:
    # device='cuda' in optimizer.py:473, clip_grads.py:103, grad_scaler.py:15, schedules.py:2138,
    # exchange_utils.py:104, and in megatron.training all over, as in initialize.py:474.
    for name in _FACTORIES:
        setattr(torch, name, _factory_on_cpu(getattr(torch, name)))


def _factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = "cpu"
        return factory(*args, **options)

    return wrapper


def _replace_tensor_methods() -> None:
    real_type = torch.Tensor.type

    # Optimizers compare param.type() with 'torch.cuda.FloatTensor' and so on: optimizer.py:671,
    # distrib_optimizer.py:361, clip_grads.py:167. Other callers keep the true answer.
    def type_of(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        answer = real_type(self, *args, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if args or options or not caller.startswith("megatron."):
            return answer
        return str(answer).replace("torch.", "torch.cuda.", 1)

    # The shared embedding (language_module.py:244) and the loss scale (grad_scaler.py:141).
    def cuda(self: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
        return self

    torch.Tensor.type = type_of  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]


class _NoStream:
    """A stream or an event on a device that finishes everything at once."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def record_event(self, *_args: object) -> _NoStream:
        return self

    def record(self, *_args: object) -> None:
        return None

    def wait(self, *_args: object) -> None:
        return None

    def wait_event(self, *_args: object) -> None:
        return None

    def wait_stream(self, *_args: object) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


def _replace_streams() -> None:
    # MoE token dispatcher (token_dispatcher.py:445, 871-895), and gradient reduction with several
    # optimizer instances (distributed_data_parallel.py, param_and_grad_buffer.py:417).
    only = _NoStream()
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _NoStream)
    for name in ("current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, lambda *_args, **_options: only)


def _replace_generators() -> None:
    # tensor_parallel/random.py keeps named states of "the CUDA generator". What dropout draws from
    # on the CPU is the default generator, so that is the one to switch between those states.
    # _lazy_call must be there before the import: random.py:12 binds it by name.
    def call_now(action: Callable[[], object], **_options: object) -> None:
        action()

    def get_state(device: object = "cuda") -> torch.Tensor:  # noqa: ARG001
        return torch.default_generator.get_state()

    def set_state(state: torch.Tensor, device: object = "cuda") -> None:  # noqa: ARG001
        torch.default_generator.set_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    class OneGenerator(tuple[torch.Generator]):
        """Megatron indexes the generators by the current device, which is not a number here."""

        def __getitem__(self, _device: object) -> torch.Generator:  # type: ignore[override]
            return torch.default_generator

    torch.cuda._lazy_call = call_now  # type: ignore[assignment]
    torch.cuda.default_generators = OneGenerator((torch.default_generator,))
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = get_state  # type: ignore[attr-defined]
        module.set_rng_state = set_state  # type: ignore[attr-defined]
        module.manual_seed = manual_seed  # type: ignore[attr-defined]


@contextlib.contextmanager
def _eager_compile() -> Iterator[None]:
    # jit.py takes torch.compile as its fuser when it is imported; on the CPU that would start a
    # C++ compiler in every rank at the first call of each fused function.
    real_compile = torch.compile
    torch.compile = lambda function, *_args, **_options: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real_compile


def _finish_after_import() -> None:
    # The "CUDA" generator is the CPU generator here, so fork() finds it changed after each dropout.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)

    # moe_utils.py:1192 tests a name that exists only with Transformer Engine.
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.te_general_gemm = getattr(  # type: ignore[attr-defined]
        moe_utils, "te_general_gemm", None
    )

    # moe_utils.py:1078 turns split sizes into numbers only for CUDA tensors; all_to_all_single
    # takes numbers.
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for module in (moe_utils, dispatcher):
        module.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]
