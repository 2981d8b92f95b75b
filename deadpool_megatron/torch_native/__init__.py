"""Loops on plain PyTorch: DistributedDataParallel and FSDP2, without Megatron.

loop         the base classes of a program: TorchLoop, TorchProgram
framework    the state of a built role, for the member
loop_state   the state of a loop by name
wrappers     DistributedDataParallel and FSDP2 in a model: replicas, and remains of an interrupted
             step
plain_state  states of schedulers and scalers as JSON, without a loss of types
"""

from deadpool_megatron.torch_native.loop import TorchLoop, TorchProgram

__all__ = ["TorchLoop", "TorchProgram"]
