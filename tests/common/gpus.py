"""The GPUs of this machine: hidden from the tests, and shown to those that need them.

So tests use the CPU and gloo wherever they run. A test that shows them does so in a process of its
own, before CUDA is used there.
"""

import os

from deadpool_megatron.preflight.host import GPU_VARIABLE

#: the variable's value before; "all" if it was not set
_BEFORE = "DEADPOOL_TEST_GPUS"
_ALL = "all"


def hide() -> None:
    """Hide them from this process and its children."""
    os.environ.setdefault(_BEFORE, os.environ.get(GPU_VARIABLE, _ALL))
    os.environ[GPU_VARIABLE] = ""


def show() -> None:
    """Show them to this process again."""
    environment = shown()
    os.environ.pop(GPU_VARIABLE, None)
    os.environ.update(environment)


def shown() -> dict[str, str]:
    """Return an environment for a process that sees them again."""
    environment = dict(os.environ)
    before = environment.get(_BEFORE, _ALL)
    environment.pop(GPU_VARIABLE, None)
    return environment if before == _ALL else environment | {GPU_VARIABLE: before}
