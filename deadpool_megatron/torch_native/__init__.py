"""Loops on plain PyTorch: DistributedDataParallel and FSDP2, without Megatron.

loop         what a program provides: TorchLoop, TorchProgram
framework    the state of a built role, as the member asks for it
loop_state   the state of a loop by name
wrappers     DistributedDataParallel and FSDP2 in a model: replicas, and remains of an interrupted
             step
plain_state  states of schedulers and scalers as JSON, without a loss
"""

from deadpool_megatron.torch_native.loop import TorchLoop, TorchProgram

__all__ = ["TorchLoop", "TorchProgram"]
