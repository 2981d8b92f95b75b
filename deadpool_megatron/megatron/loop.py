"""A loop on Megatron: its objects, the names of its parameters, and the content of a save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.utils import get_model_config

from deadpool_megatron.member.loop import ProtectedLoop
from deadpool_megatron.state.template import TemplateError

# Megatron's function that runs the passes of an iteration; called with keywords.
ForwardBackward = Callable[..., Any]

# Fields of Megatron's configuration that give the same bytes another meaning: those that Megatron's
# load of a checkpoint compares, and the kinds of norm and of feed-forward layer.
_MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "normalization",
    "layernorm_zero_centered_gamma",
    "gated_linear_unit",
)


class MegatronLoop(ProtectedLoop):
    """A loop with Megatron's model chunks, optimizer and scheduler.

    ``f`` is Megatron's function that runs the passes of an iteration. Where the loop would call
    ``f``, it calls ``around_passes(f)`` instead, so that an audit can wrap the passes.
    """

    around_passes: Callable[[ForwardBackward], ForwardBackward] = staticmethod(
        lambda passes: passes
    )
    #: Megatron's arguments, and those that the command line names
    arguments: tuple[Any, Any] | None = None
    model_chunks: list[Any]
    optimizer: Any
    scheduler: Any

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield every parameter of this role with its name in the whole model, which does not
        depend on the cut: layers have the numbers that Megatron gives them, from 0 as in
        checkpoints."""
        for chunk in self.model_chunks:
            names = {"": ""}
            for path, module in chunk.named_modules(remove_duplicate=False):
                parent, _, own = path.rpartition(".")
                number = layer_number(path, module)
                own = own if number is None else str(number - 1)
                is_wrapped = not path or (own == "module" and not names[parent])
                names[path] = "" if is_wrapped else f"{names[parent]}{own}."
                for name, parameter in module.named_parameters(recurse=False):
                    yield f"{names[path]}{name}", parameter

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments that give parameters of the same names and shapes another meaning:
        a state with other values belongs to another model."""
        config = model_config(self)
        return {name: getattr(config, name) for name in _MODEL_FIELDS if hasattr(config, name)}

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the state that a save would write, in the form that ``dist_checkpointing.save``
        accepts, without communication and without copies of tensors. The key ``optimizer`` has the
        result of the optimizer's ``sharded_state_dict``. Marks take the place of other values that
        an iteration changes (:mod:`deadpool_megatron.state.template`). Raises TemplateError where
        there is no such checkpoint.
        """
        raise TemplateError("the program does not say what its checkpoints hold")

    def close(self) -> None:
        """See :class:`ProtectedLoop`."""
        self.model_chunks = []


def layer_number(path: str, module: Any) -> int | None:
    """Return the number in the whole model, from 1, of a module in a list of layers; else None."""
    number = getattr(module, "layer_number", None)
    is_layer = path.rpartition(".")[2].isdigit() and isinstance(number, int)
    return number if is_layer else None


def model_config(loop: MegatronLoop) -> Any:
    """Return the TransformerConfig shared by all chunks."""
    return get_model_config(loop.model_chunks[0])


def trains_in_fp8(loop: MegatronLoop) -> bool:
    """Return whether the loop trains in FP8, for which modules may keep state."""
    return bool(loop.model_chunks and getattr(model_config(loop), "fp8", None))
