"""What torch's C++ finds when it asks a group for its backend.

Newer versions of torch ask every new group for its default backend. A group of ours has none of
its own in the eyes of C++, and the inner one must not be shown there: C++ keeps the first backend
of a type for ever, and a call through one of an old epoch would reach peers of an old epoch.

So what is found is a backend whose collectives raise. It is registered for a device on which
nothing is ever sent, and C++ chooses the backend of an operation by the device of its tensors. An
operation that goes past the methods of our group therefore ends in torch's own "No backend type
associated with device type cpu". It has no threads and no sockets: a process may still fork.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup

#: What C++ reads as the name of the backend. It takes what a group called "gloo" has for an object
#: of gloo's class, without a look at it (DistributedDataParallel, for the number of threads).
NAME_IN_CPP = "deadpool"
#: tensors there have no data to send
_NO_DATA = torch.device("meta")


def show_stand_in(group: ProcessGroup, rank: int, size: int) -> None:
    """Let C++ find a backend when it asks ``group`` for one."""
    fake: Any = FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    cpp: Any = ProcessGroup
    kind = ProcessGroup.BackendType.CUSTOM
    cpp._register_backend(group, _NO_DATA, kind, fake._create_internal(rank, size, options))
    cpp._set_default_backend(group, kind)
