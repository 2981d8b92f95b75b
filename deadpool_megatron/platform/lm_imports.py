"""Imports Megatron-LM from a checkout on a machine without a GPU, and writes nothing into it."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from deadpool_megatron.platform import unasked_imports

_HELPERS = "megatron.core.datasets.helpers_cpp"
# The script by its name, for all that it imports: it is run as a script itself afterwards. The
# others are imported late, when there is one process per rank; they moved with 0.17.
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


class NotACheckoutError(ValueError):
    """The folder holds no Megatron-LM; the message is one line."""


def put_first(checkout: Path) -> None:
    """Have ``megatron.core`` and ``megatron.training`` both come from ``checkout``.

    ``megatron`` is a namespace package: a wheel of megatron-core that is installed as well adds to
    it, and whoever comes first on the path decides for ``megatron.core``. Raises NotACheckoutError,
    and RuntimeError when megatron.core has been imported from elsewhere.
    """
    if not (checkout / "megatron" / "training" / "training.py").is_file():
        raise NotACheckoutError(f"{checkout} has no megatron/training: not a Megatron-LM checkout")
    place = str(checkout)
    core = sys.modules.get("megatron.core")
    if core is not None and not str(core.__file__).startswith(place + os.sep):
        raise RuntimeError(f"megatron.core was imported from {core.__file__}, not from {place}")
    if place in sys.path:
        sys.path.remove(place)
    sys.path.insert(0, place)
    if sys.pycache_prefix is None:
        # Compiled modules go beside the user's other caches instead of into the checkout.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        sys.pycache_prefix = str(cache / "deadpool-megatron" / "pycache")


def import_all() -> None:
    """Import what pretrain_gpt.py imports; megatron.core is there already.

    Raises RuntimeError naming a package that is missing.
    """
    _use_compiled_helpers()
    try:
        with unasked_imports.answered():
            for name in _MODULES:
                if _is_there(name):
                    importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"Megatron-LM needs the package {error.name}:"
            " pip install 'deadpool-megatron[megatron-lm]'"
        ) from error


def _is_there(name: str) -> bool:
    """Whether the checkout has a module of this name."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor has it the package
        return False


def _use_compiled_helpers() -> None:
    """Take the compiled index builder from the wheel where the checkout has none.

    initialize.py:190 would run ``make`` in the checkout, with whatever ``python3-config`` is first
    on the path, and end the process without a word when that fails. Without a wheel that was made
    from the same source that still happens.
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
    """The library in ``own``, else in a wheel with the same source; None when neither has it."""
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
