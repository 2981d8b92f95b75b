"""An exporter writes objects of Megatron's classes as it read them, and imports no Megatron."""

import pickle
import subprocess
import sys
from argparse import Namespace
from io import BytesIO

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

# Reads two pickles from standard input, and writes them again.
_CARRY = """
import pickle, sys
from deadpool_megatron.persist.__main__ import stand_in_for_megatron
stand_in_for_megatron()
for _ in range(2):
    pickle.dump(pickle.load(sys.stdin.buffer), sys.stdout.buffer, protocol=2)
assert not hasattr(sys.modules["megatron.core"], "__file__")
"""


@pytest.mark.slow
def test_foreign_objects_are_written_as_read(monkeypatch):
    """Members of an enumeration by a call of their class, and as its attributes."""
    plain = ProcessGroupCollection()
    args = Namespace(backend=AttnBackend.flash, again=AttnBackend.flash, plain=plain, lr=0.5)
    given = {"args": args, "mask": [AttnMaskType.causal, AttnBackend.auto]}
    called = pickle.dumps(given, protocol=2)
    by_name = {"__reduce_ex__": lambda self, _: (getattr, (AttnBackend, self.name))}
    monkeypatch.setattr(AttnBackend, *next(iter(by_name.items())))
    command = [sys.executable, "-c", _CARRY]
    sent = called + pickle.dumps(given, protocol=2)
    done = subprocess.run(command, input=sent, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    written = BytesIO(done.stdout)
    for came in (pickle.load(written), pickle.load(written)):
        assert came["mask"] == given["mask"]
        assert came["args"].backend is came["args"].again is AttnBackend.flash
        assert came["args"].lr == 0.5
        assert vars(came["args"].plain) == vars(plain)
        assert type(came["args"].plain) is ProcessGroupCollection
