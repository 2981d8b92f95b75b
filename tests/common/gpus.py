"""The GPUs of this machine: hidden from the tests, and shown to those that need them.

So tests are of the CPU and of gloo wherever they run. Who shows them does so in a process of its
own, before CUDA is used there.
"""

import os

from deadpool_megatron.preflight.host import VISIBLE

#: what the environment said before; "all" where it said nothing
_BEFORE = "DEADPOOL_TEST_GPUS"
_ALL = "all"


def hide() -> None:
    """From this process, and from what it starts."""
    os.environ.setdefault(_BEFORE, os.environ.get(VISIBLE, _ALL))
    os.environ[VISIBLE] = ""


def show() -> None:
    """In this process again."""
    environment = shown()
    os.environ.pop(VISIBLE, None)
    os.environ.update(environment)


def shown() -> dict[str, str]:
    """Returns an environment for a process that sees them again."""
    environment = dict(os.environ)
    before = environment.get(_BEFORE, _ALL)
    environment.pop(VISIBLE, None)
    return environment if before == _ALL else environment | {VISIBLE: before}
