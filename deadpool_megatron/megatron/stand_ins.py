"""Stand-ins, on a machine without a GPU, for the calls with which Megatron uses a GPU.

Megatron runs its real components here (parallel state, model, DDP, distributed optimizer,
schedules); none of them is edited. Each stand-in names the places in 0.16.1 that reach it. All
stand-ins replace calls that would raise without a GPU, with three exceptions. ``Tensor.type()`` and
``torch.compile`` would work, so only callers inside Megatron get another answer. Coalesced
all-gathers give the same answer without corrupting memory (:mod:`deadpool_megatron.comms.gathers`).

:func:`install` is for megatron-core. With :func:`install_megatron_lm` the unedited
``pretrain_gpt.py`` trains on CPU and gloo; no file is written into its checkout. The command line
of such a run must also have ``--distributed-backend gloo --transformer-impl local
--no-gradient-accumulation-fusion --no-masked-softmax-fusion``; with rotary embeddings
``--no-rope-fusion``, with experts ``--no-bias-gelu-fusion`` (or ``--no-bias-swiglu-fusion``), and
with experts on a tensor-parallel model ``--disable-bias-linear``. There are no stand-ins for
context parallelism, FP8, CUDA graphs, ``--use-persistent-ckpt-worker`` and ``--profile``, so these
cannot be used.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typing_extensions

from deadpool_megatron.comms import gathers
from deadpool_megatron.megatron import in_process_writer
from deadpool_megatron.megatron.replacement import replaced

_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange", "rand")
_HELPERS = "megatron.core.datasets.helpers_cpp"
# Modules to import once, before there is a process per rank. pretrain_gpt is imported for the
# modules that it imports; afterwards it is run as a script. Megatron itself would import the other
# modules later; some moved with 0.17.
_MODULES = (
    "pretrain_gpt",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.training.common_config",
    "megatron.training.resilience_config",
    "megatron.training.training_config",
    "megatron.training.config.common_config",
    "megatron.training.config.resilience_config",
    "megatron.training.config.training_config",
)
# Modules that import Triton although its kernels are never called; all others, PyTorch among them,
# test for Triton and run without it. initialize.py imports the first module since 0.16. The experts
# import the second in 0.18, and the third since 0.19. Mamba's modules are of 0.20.
_UNCONDITIONAL_IMPORTERS = frozenset(
    {
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
        "megatron.core.ssm.ops.common.causal_conv1d_varlen",
        "megatron.core.ssm.ops.mamba2.batch_invariant_decode",
        "megatron.core.ssm.ops.mamba2.ssd_bmm",
        "megatron.core.ssm.ops.mamba2.ssd_chunk_scan",
        "megatron.core.ssm.ops.mamba2.ssd_chunk_state",
        "megatron.core.ssm.ops.mamba2.ssd_state_passing",
    }
)
_installed = False
_megatron_lm_installed = False


def install() -> None:
    """Install the stand-ins for megatron-core, and import it with them. Idempotent; survives
    fork().

    Does nothing on a machine with a GPU. Raises RuntimeError when megatron.core was imported
    before, since it has then already bound the calls that must be replaced.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("without a GPU, install the stand-ins before megatron.core is imported")
    _replace_device()
    _replace_factories()
    _replace_tensor_methods()
    _replace_streams()
    _replace_generators()
    # Parameters are gathered in coalesced calls (param_and_grad_buffer.py:274), on gloo here.
    gathers.patch_plain_groups()
    with _eager_compile(), _missing_imports_supplied():
        importlib.import_module("megatron.core.transformer.transformer_layer")
        importlib.import_module("megatron.core.transformer.moe.moe_layer")
    _finish_after_import()
    _installed = True


def install_megatron_lm(checkout: Path) -> None:
    """Import Megatron-LM from ``checkout``, with stand-ins. Idempotent; survives fork().

    Does nothing on a machine with a GPU. Raises ValueError if ``checkout`` is none, RuntimeError
    when megatron.core was imported before or a package is missing that Megatron-LM imports.
    """
    global _megatron_lm_installed
    if torch.cuda.is_available():
        return
    _put_first(checkout.resolve())
    if _megatron_lm_installed:
        return
    # This comes first, since torch._dynamo takes an inventory of torch's functions.
    importlib.import_module("torch._dynamo")
    install()
    _answer_for_a_device()
    _import_all()
    _replace_kernels()
    _accept_norms()
    _keep_generator_from_loaders()
    in_process_writer.install()
    _megatron_lm_installed = True


def with_own_generator(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like ``build`` whose loaders draw from a generator of their own.

    A loader draws a seed for its workers at each iteration over it: at once, or with
    ``--dataloader-type cyclic`` in the next iteration (training.py, ``cyclic_iter``). In a restored
    process that draw would follow the restore of the random states. Without a GPU, dropout draws
    from the same generator, and a run that loads a checkpoint and then builds its loaders would
    continue with other numbers.
    """

    @functools.wraps(build)
    def wrapper(*args: Any, **options: Any) -> Any:
        loader = build(*args, **options)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator()
        return loader

    return wrapper


def _replace_device() -> None:
    # Megatron passes the current device on as device=...: param_and_grad_buffer.py:800,
    # rotary_pos_embedding.py:78, p2p_communication.py:313, layers.py:261, router.py:90.
    torch.cuda.current_device = _the_cpu  # type: ignore[assignment]
    # Called after every receive (p2p_communication.py:398) and before a checkpoint is written.
    torch.cuda.synchronize = _nothing


def _the_cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*_args: object, **_options: object) -> None:
    return None


def _replace_factories() -> None:
    # Called with device='cuda' in optimizer.py:473, clip_grads.py:103, grad_scaler.py:15,
    # schedules.py:2138, exchange_utils.py:104, and all over megatron.training, as in
    # initialize.py:474.
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

    # Called for the shared embedding (language_module.py:244) and the loss scale
    # (grad_scaler.py:141).
    def cuda(self: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
        return self

    torch.Tensor.type = type_of  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]
    # Called by plans that compute and communicate on streams of their own
    # (pipeline_parallel/utils.py:228).
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]


class _NoStream:
    """A stream or an event on a device that finishes every operation at once."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def record_event(self, *_args: object) -> _NoStream:
        return self

    record = wait = wait_event = wait_stream = synchronize = _nothing

    def query(self) -> bool:
        return True


def _replace_streams() -> None:
    # Used by the MoE token dispatcher (token_dispatcher.py:445, 871-895), and by gradient reduction
    # with several optimizer instances (distributed_data_parallel.py, param_and_grad_buffer.py:417).
    only = _NoStream()
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _NoStream)
    for name in ("current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, lambda *_args, **_options: only)
    for name in ("range_push", "range_pop"):  # pipeline_parallel/utils.py:212
        setattr(torch.cuda.nvtx, name, _nothing)


def _replace_generators() -> None:
    # tensor_parallel/random.py keeps named states of "the CUDA generator". On the CPU dropout draws
    # from the default generator, which therefore switches between those states.
    # _lazy_call must be replaced before the import: random.py:12 binds it by name.
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
    with replaced(torch, compile=lambda function, *_args, **_options: function):
        yield


@contextlib.contextmanager
def _missing_imports_supplied() -> Iterator[None]:
    """While the block runs, let Megatron import kernels that are not installed and never called,
    and a name of a later Python.
    """
    if not hasattr(typing, "override"):  # before Python 3.12; 0.18, training/models/hybrid.py:5
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    real, triton = builtins.__import__, _Stub("triton")
    triton.language = _Stub("triton.language")

    def find(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        importer = (globals or {}).get("__name__")
        if name.split(".")[0] == "triton" and importer in _UNCONDITIONAL_IMPORTERS:
            return triton.language if fromlist and name == "triton.language" else triton
        return real(name, globals, locals, fromlist or (), level)

    with replaced(builtins, __import__=find):
        yield


class _Stub(types.ModuleType):
    """A module whose names are all decorators that leave the function as it is."""

    language: types.ModuleType
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(function: Callable[..., Any] | None = None, **_options: object) -> Any:
    return _unchanged if function is None else function


def _finish_after_import() -> None:
    # The "CUDA" generator is the CPU generator here, so fork() finds it changed after each dropout.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)

    # moe_utils.py:1192 tests a name that exists only with Transformer Engine.
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.te_general_gemm = getattr(  # type: ignore[attr-defined]
        moe_utils, "te_general_gemm", None
    )

    # moe_utils.py:1078 turns split sizes into numbers only if they are CUDA tensors, while
    # all_to_all_single needs numbers.
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for module in (moe_utils, dispatcher):
        module.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]


def _answer_for_a_device() -> None:
    # Without a device Megatron refuses to start (initialize.py:62), creates no groups
    # (initialize.py:319) and sets no seeds (:422). All other callers get the true answer.
    _only_for("megatron.training.initialize", "is_available", True)
    _only_for("megatron.training.initialize", "device_count", 1)
    # Called by initialize.py:331.
    torch.cuda.set_device = lambda device: None
    # arguments.py:928 reads the generation of the device; from the tenth on, it does not touch
    # CUDA_DEVICE_MAX_CONNECTIONS.
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(  # type: ignore[assignment,return-value]
        name="CPU", major=10, minor=0
    )
    # Called by utils.py:289 for --log-device-memory-used; the other statistics are zero already.
    torch.cuda.device_memory_used = lambda device=None: 0


def _only_for(module: str, function: str, answer: object) -> None:
    """Have ``torch.cuda.<function>`` return ``answer`` to ``module``, and the truth to others."""
    real: Callable[[], object] = getattr(torch.cuda, function)

    @functools.wraps(real)
    def wrapper() -> object:
        if sys._getframe(1).f_globals.get("__name__") == module:
            return answer
        return real()

    setattr(torch.cuda, function, wrapper)


def _replace_kernels() -> None:
    # 0.16 compiles its fused kernels with nvcc even when all options that use them are off
    # (initialize.py:224); 0.17 has no such kernels.
    with contextlib.suppress(ModuleNotFoundError):
        kernels = importlib.import_module("megatron.legacy.fused_kernels")
        kernels.load = lambda args: None  # type: ignore[attr-defined]


def _accept_norms() -> None:
    """Let PyTorch's norms serve instead of Apex's under sequence parallelism.

    torch_norm.py:30 refuses sequence parallelism, and persist_layer_norm, which is on by default.
    The latter only chooses a kernel. For the former, the norm's parameters lack the mark by which
    finalize_model_grads.py:354 sums their gradients over the tensor-parallel ranks.
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
    """Give loaders generators of their own in unprotected runs as well, for comparisons."""
    training = importlib.import_module("megatron.training.training")
    build = with_own_generator(training.build_pretraining_data_loader)
    training.build_pretraining_data_loader = build  # type: ignore[attr-defined]


def _put_first(checkout: Path) -> None:
    """Have ``megatron.core`` and ``megatron.training`` both come from ``checkout``.

    ``megatron`` is a namespace package: a wheel of megatron-core that is installed as well adds to
    it, and the first entry of the path decides for ``megatron.core``. Raises ValueError,
    and RuntimeError when megatron.core has been imported from elsewhere.
    """
    if not (checkout / "megatron" / "training" / "training.py").is_file():
        raise ValueError(f"{checkout} has no megatron/training: not a Megatron-LM checkout")
    place = str(checkout)
    core = sys.modules.get("megatron.core")
    if core is not None and not str(core.__file__).startswith(place + os.sep):
        raise RuntimeError(f"megatron.core was imported from {core.__file__}, not from {place}")
    if place in sys.path:
        sys.path.remove(place)
    sys.path.insert(0, place)
    if sys.pycache_prefix is None:
        # Compiled modules go to the user's caches instead of into the checkout.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        sys.pycache_prefix = str(cache / "deadpool-megatron" / "pycache")


def _import_all() -> None:
    """Import the modules that a run needs; megatron.core was imported already.

    Raises RuntimeError that names a missing package.
    """
    _use_compiled_helpers()
    with _missing_imports_supplied():
        for name in _MODULES:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if f"{name}.".startswith(f"{error.name}."):
                    continue  # the checkout lacks this module, or its package
                raise RuntimeError(
                    f"Megatron-LM needs the package {error.name}:"
                    " pip install '.[megatron-lm]' in the checkout"
                ) from error


def _use_compiled_helpers() -> None:
    """Take the compiled index builder from an installed wheel if the checkout has none.

    initialize.py:190 would run ``make`` in the checkout, with the first ``python3-config`` on the
    path, and end the process without a message when that fails. Without a wheel of the same source
    that still happens.
    """
    datasets = importlib.import_module("megatron.core.datasets")
    library = _compiled_helpers(Path(str(datasets.__file__)).parent)
    if library is None:
        return
    loader = importlib.machinery.ExtensionFileLoader(_HELPERS, str(library))
    spec = importlib.util.spec_from_file_location(_HELPERS, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_HELPERS] = module
    datasets.helpers_cpp = module  # type: ignore[attr-defined]
    utils = importlib.import_module("megatron.core.datasets.utils")
    utils.compile_helpers = lambda: None  # type: ignore[attr-defined]
    importlib.import_module("megatron.core.datasets.helpers")


def _compiled_helpers(own: Path) -> Path | None:
    """Return the library in ``own``, or else in a wheel with the same source; None if there is
    none."""
    wheels = importlib.metadata.distributions(name="megatron-core")
    installed = (Path(str(wheel.locate_file("megatron/core/datasets"))) for wheel in wheels)
    source = _helpers_source(own)
    for folder in (own, *(place for place in installed if _helpers_source(place) == source)):
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            if (library := folder / f"helpers_cpp{suffix}").is_file():
                return library
    return None


def _helpers_source(datasets: Path) -> bytes:
    source = datasets / "helpers.cpp"
    return source.read_bytes() if source.is_file() else b""
