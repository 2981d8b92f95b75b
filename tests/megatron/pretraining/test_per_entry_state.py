"""A profile, the detector of stragglers and sums over sequences, as train() is entered again."""

import argparse
import socket
import types

import pytest
import torch
from megatron.core.utils import StragglerDetector

from deadpool_megatron.megatron.pretraining import per_entry_state
from deadpool_megatron.megatron.pretraining.build import Build, CommandLine
from deadpool_megatron.megatron.pretraining.training_loop import PretrainLoop


@pytest.fixture
def detector():
    """The real detector, a singleton of the process, restored at the end."""
    real, before = StragglerDetector(), dict(vars(StragglerDetector()))
    yield real
    vars(real).clear()
    vars(real).update(before)
    StragglerDetector._configured = False


@pytest.fixture
def training(monkeypatch, detector):
    """Stands in for megatron.training, which is not in the wheel."""
    args = argparse.Namespace(
        profile=False, profile_step_start=10, use_pytorch_profiler=False, log_straggler=False
    )
    module = types.SimpleNamespace(
        stimer=detector, _seqlen_stats_in_iteration="sums", _seqlen_stats_active=True
    )
    module.consume_seqlen_stats_in_iteration = lambda: (6.0, 14.0)
    package = types.SimpleNamespace(get_args=lambda: args, training=module, args=args)
    monkeypatch.setitem(__import__("sys").modules, "megatron.training", package)
    return package


@pytest.mark.parametrize(
    ("dispatcher", "overlaps", "steps"),
    [("alltoall", False, 1), ("flex", False, 0), ("alltoall", True, 0)],
)
def test_step_without_peers_makes_no_shared_buffers(training, dispatcher, overlaps, steps):
    """As DeepEP does, which maps their memory in a forward pass, and Transformer Engine before."""
    entries = list[dict[str, str]]()
    loop = PretrainLoop.__new__(PretrainLoop)
    training.args.moe_token_dispatcher_type, training.args.tp_comm_overlap = dispatcher, overlaps
    loop._args = training.args
    loop.build = Build(CommandLine())
    loop.build.train = lambda **given: entries.append(given)
    loop.warm_up()
    assert len(entries) == steps


def test_detector_is_configured_for_the_rank_that_the_process_has(training, detector, monkeypatch):
    """As often as train() is entered, also by the rank that listens, and on as at the start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    training.args.log_straggler = True
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    for rank in (3, 0, 0):
        with per_entry_state.for_training(list, 4, 0):
            detector.configure(8, rank, port=port, prefill=1, enabled=True)
        assert (detector.rank, detector.enabled, detector.start_gemm_tm) == (rank, True, [])
        detector._off, detector.start_gemm_tm = True, [7]
    with socket.create_connection(("localhost", port), timeout=10) as caller:
        caller.send(b"x")
        assert caller.recv(1024).startswith(b"HTTP/1.0 200 OK")
    per_entry_state.forget_detector(detector)
    assert detector.ctrlr is not None
    detector.ctrlr.join(timeout=10)
    assert not detector.ctrlr.is_alive()
