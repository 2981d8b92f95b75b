"""The coordinates of a role are those of Megatron's own groups; more is in calls/stages.txt."""

import os

import pytest
import torch
from megatron.core import parallel_state

from deadpool_megatron.comms import Communicators
from deadpool_megatron.megatron.pretraining import stages
from tests.megatron.pretraining.places import arguments

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
