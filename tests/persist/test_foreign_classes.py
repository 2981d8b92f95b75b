"""An exporter writes objects of Megatron's classes as it read them, and imports no Megatron."""

from __future__ import annotations

import pickle
import subprocess
import sys
from argparse import Namespace

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

# Reads pickles from standard input, and writes them again.
_CARRY = """
import pickle, sys
from deadpool_megatron.persist.__main__ import stand_in_for_megatron
stand_in_for_megatron()
carried = pickle.load(sys.stdin.buffer)
pickle.dump(carried, sys.stdout.buffer, protocol=2)
assert not hasattr(sys.modules["megatron.core"], "__file__")
"""


@pytest.mark.parametrize("by_name", [False, True], ids=["called", "attribute"])
def test_what_is_read_is_written(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_name:
        monkeypatch.setattr(
            AttnBackend, "__reduce_ex__", lambda self, _: (getattr, (AttnBackend, self.name))
        )
    plain = ProcessGroupCollection()
    args = Namespace(backend=AttnBackend.flash, again=AttnBackend.flash, plain=plain, lr=0.5)
    given = {"args": args, "mask": [AttnMaskType.causal, AttnBackend.auto]}
    done = subprocess.run(
        [sys.executable, "-c", _CARRY],
        input=pickle.dumps(given, protocol=2),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    came = pickle.loads(done.stdout)
    assert came["mask"] == given["mask"]
    assert came["args"].backend is came["args"].again is AttnBackend.flash
    assert came["args"].lr == 0.5
    assert vars(came["args"].plain) == vars(plain)
    assert type(came["args"].plain) is ProcessGroupCollection
