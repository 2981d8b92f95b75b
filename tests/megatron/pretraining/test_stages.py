"""Stage classes: coordinates as Megatron's own groups have them, and what a class depends on."""

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deadpool_megatron.megatron import stand_ins

stand_ins.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from deadpool_megatron.comms import Communicators  # noqa: E402
from deadpool_megatron.megatron.pretraining import stages  # noqa: E402


def arguments(world: int, tp: int = 1, pp: int = 1, **sizes: Any) -> SimpleNamespace:
    """Megatron's validated arguments, as far as they decide over places."""
    values = {
        "world_size": world,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "use_tp_pp_dp_mapping": False,
        "virtual_pipeline_model_parallel_size": None,
    }
    return SimpleNamespace(**{**values, **sizes})


def config(args: SimpleNamespace, layers: int = 8, **options: Any) -> TransformerConfig:
    """A model of that many layers, cut as ``args`` say."""
    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        **options,
    )


LAYOUTS = [
    arguments(8, 2, 2),
    arguments(8, 2, 2, use_tp_pp_dp_mapping=True),
    arguments(16, 2, 2, context_parallel_size=2),
    arguments(16, 2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    arguments(16, 2, 2, expert_model_parallel_size=4, expert_tensor_parallel_size=1),
    arguments(16, 1, 4, expert_model_parallel_size=2),
]


@pytest.mark.parametrize("args", LAYOUTS, ids=range(len(LAYOUTS)))
def test_coordinates_are_those_of_the_groups(args):
    communicators = Communicators()
    communicators.install()
    try:
        for role in range(args.world_size):
            os.environ.update(RANK=str(role), WORLD_SIZE=str(args.world_size))
            torch.distributed.init_process_group()
            order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                order=order,
            )
            found = stages.coordinates(args, role)
            assert found == stages.Coordinates(
                tensor=parallel_state.get_tensor_model_parallel_rank(),
                context=parallel_state.get_context_parallel_rank(),
                pipeline=parallel_state.get_pipeline_model_parallel_rank(),
                expert=parallel_state.get_expert_model_parallel_rank(),
                expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
            ), role
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    finally:
        communicators.uninstall()


def classes(args: SimpleNamespace, **options: Any) -> list[str]:
    return [
        stages.stage_class(args, config(args, **options), role) for role in range(args.world_size)
    ]


def test_data_parallel_peers_and_middle_stages_are_of_one_class():
    found = classes(arguments(8, 1, 4))  # data 2: roles 0, 1 are the first stage
    assert found[0] == found[1]
    assert found[2] == found[3] == found[4] == found[5]
    assert found[6] == found[7]
    assert len(set(found)) == 3


def test_a_class_depends_on_slices_and_uneven_stages():
    assert len(set(classes(arguments(4, 2, 1)))) == 2
    uneven = classes(
        arguments(4, 1, 4),
        layers=9,
        num_layers_in_first_pipeline_stage=1,
        num_layers_in_last_pipeline_stage=2,
    )
    assert uneven[1] == uneven[2]
    assert "layers3" in uneven[1]


@pytest.mark.parametrize(
    ("pattern", "kinds", "offsets"),
    [
        # Without marks it is cut as the layers of any model.
        ("*-*-*-M-", ["*-", "*-", "*-", "M-"], [[0], [2], [4], [6]]),
        ("*-|*-|M|*-M", ["*-", "*-", "M", "*-M"], [[0], [2], [4], [5]]),
        ("*|-|M|*|-|-|E|E/*/*", ["*+-", "-+-", "M+E", "*+E"], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_a_class_depends_on_the_kinds_of_layers(pattern, kinds, offsets):
    """As Megatron cuts a pattern: segments go round the stages."""
    chunks = 2 if pattern.count("|") > 4 else None
    args = arguments(
        4, 1, 4, hybrid_layer_pattern=pattern, virtual_pipeline_model_parallel_size=chunks
    )
    made = config(args, layers=8)
    found = [stages.stage_class(args, made, role) for role in range(4)]
    assert [each.split(".")[1] for each in found] == [f"layers{each}" for each in kinds]
    assert [stages.layer_offsets(args, made, role) for role in range(4)] == offsets


def test_ratios_of_layers_are_a_pattern():
    """Megatron 0.16, whose flags say how many of each kind there are."""
    given = {"hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.5}
    args = SimpleNamespace(num_layers=8, hybrid_override_pattern=None, **given)
    assert Counter(stages.layer_pattern(args)) == {"M": 2, "*": 2, "-": 4}
    args.hybrid_override_pattern = "M-*-M-*-"
    assert stages.layer_pattern(args) == "M-*-M-*-"
    assert stages.layer_pattern(arguments(4)) == ""


def test_layers_of_a_users_own_are_not_moved():
    assert len(set(classes(arguments(4, 1, 4, spec=["module", "layers"])))) == 4


def test_layers_that_know_their_number_are_not_moved():
    found = classes(arguments(4, 1, 4), apply_query_key_layer_scaling=True)
    assert len(set(found)) == 4


def test_context_parallel_roles_are_built_anew():
    assert len(set(classes(arguments(4, 1, 1, context_parallel_size=2)))) == 4


def test_a_spare_builds_for_the_commonest_class():
    args = arguments(16, 2, 4)  # nodes of 2: slot is the tensor rank
    chosen = stages.commonest_role(args, config(args), wanted=1, members_per_node=2)
    assert chosen % 2 == 1
    assert stages.coordinates(args, chosen).pipeline in (1, 2)
    two = arguments(8, 2, 2)
    assert stages.commonest_role(two, config(two), wanted=1, members_per_node=2) == 1


def test_layers_get_the_numbers_of_their_new_stage():
    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_number = number
            self.attention = torch.nn.Module()
            self.attention.layer_number = number

    chunk = torch.nn.Sequential(Layer(3), Layer(4))
    args = arguments(4, 1, 4)
    before = stages.layer_offsets(args, config(args), 1)
    after = stages.layer_offsets(args, config(args), 2)
    stages.shift_layers([chunk], [b - a for a, b in zip(before, after, strict=True)])
    assert [(layer.layer_number, layer.attention.layer_number) for layer in chunk] == [
        (5, 5),
        (6, 6),
    ]


def test_a_layout_of_the_user_is_read_for_each_stage_before_there_are_groups():
    args = arguments(4, pp=2, virtual_pipeline_model_parallel_size=2)
    made = config(args, 4, pipeline_model_parallel_layout="Et|tt|t|L")
    assert [stages.layer_offsets(args, made, role) for role in (0, 2)] == [[0, 3], [1, 4]]
    classes = [stages.stage_class(args, made, role) for role in range(4)]
    assert classes[0] == classes[1] != classes[2] == classes[3]
