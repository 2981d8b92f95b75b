"""torch's own tests of torch.distributed over our groups: ``python -m tests.comms.torch_suite``.

They lie in torch's wheel. Four ranks on gloo, each test in four forks of this process. Which tests
run is in torch_suite.txt: those that run on the CPU. All others of torch 2.13 skip themselves, for
which they need 0.4 s each. ``--stock`` runs them on torch's own groups.

Three that run on torch's own groups are left out, as ours are meant to differ there:

test_ddp_logging_data_cpu  wants to read "gloo" in the logged data. See groups/group.py.
test_barrier_timeout_full_group  wants the time-out that new_group was given. Ours have that of the
    run, which has to be longer than it takes to notice that a node is lost.
test_barrier_timeout_global  makes WORLD anew from a file, by itself. Ours are connected by
    Communicators.attach only, and complete their operations locally before.

And one that fails now and then on torch's own groups, more often on ours:

test_new_subgroups_with_group_param  destroys a group that another rank still connects.
"""

import os
import sys
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD_SIZE = 4
# torch's module reads these variables at import.
os.environ.update(
    BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), INIT_METHOD="file://", OMP_NUM_THREADS="1"
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from deadpool_megatron.comms import Communicators, Limits  # noqa: E402

NAMES = Path(__file__).with_suffix(".txt").read_text().split()
_FORK = torch.multiprocessing.get_context("fork")
_MEETING_SECONDS = 60.0
_stock = False


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The tests, and how a rank of ours comes up."""

    def setUp(self) -> None:
        super().setUp()
        # torch's own meets over a file that is looked at every 0.1 s.
        self.meeting = _FORK.Barrier(WORLD_SIZE)
        type(self).current = self
        self._start_processes(_FORK.Process)

    def _barrier(self, *_: Any, **__: Any) -> None:
        self.meeting.wait(_MEETING_SECONDS)

    def call_dist_op(
        self, title: str, is_async: bool, operation: Any, *args: Any, **kwargs: Any
    ) -> None:
        """As torch, but for the number of events that a profiler sees in an all-gather of several
        tensors: ours goes tensor by tensor, as torch's own corrupts memory (comms/gathers.py).
        """
        if operation is dist.all_gather_coalesced and not _stock:
            kwargs["expect_event"] = False
        super().call_dist_op(title, is_async, operation, *args, **kwargs)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
        self = cls.current
        self.rank = rank
        self.file_name = file_name
        seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(
            test_name, distributed_test.default_pg_timeout
        )
        store = dist.FileStore(file_name, WORLD_SIZE)
        if _stock:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=WORLD_SIZE,
                timeout=timedelta(seconds=seconds),
            )
        else:
            # No epoch is closed here, so no wait for a close is needed.
            communicators = Communicators(limits=Limits(seconds, close_wait_seconds=0))
            communicators.install()
            dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
            communicators.attach(0, store, rank, _MEETING_SECONDS)
        self._barrier()
        self.run_test(test_name, pipe)
        self._barrier()
        dist.destroy_process_group()
        sys.exit(0)


def main(arguments: list[str]) -> int:
    """Run the named tests, or all; exit status 0 when all have passed and none was skipped."""
    global _stock
    _stock = "--stock" in arguments
    wanted = [name for name in arguments if not name.startswith("--")] or NAMES
    tests = [TorchSuite(name) for name in wanted if hasattr(TorchSuite, name)]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(tests))
    print(f"{len(tests)} of {len(wanted)} tests are in torch {torch.__version__}")
    return 0 if result.wasSuccessful() and not result.skipped else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
