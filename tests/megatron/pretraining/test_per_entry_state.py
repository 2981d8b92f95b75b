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
    ("done", "begins", "is_made"),
    [(None, 10, True), (0, 10, True), (9, 10, True), (10, 10, False), (300, 10, False)],
)
def test_a_profile_that_has_begun_is_not_begun_again(training, done, begins, is_made):
    training.args.profile = True
    training.args.iteration = max((done or 0) - 1, 0)
    with per_entry_state.for_training(list, done, 0):
        assert (training.args.profile, training.args.profile_step_start) == (is_made, begins)
    assert training.args.profile


def test_a_profile_of_torch_counts_from_the_start_of_the_run(training):
    training.args.profile = training.args.use_pytorch_profiler = True
    training.args.iteration = 106
    training.args.profile_step_start = 110
    with per_entry_state.for_training(list, 107, 100):
        assert training.args.profile_step_start == 104
    assert training.args.profile_step_start == 110


def test_an_interrupted_profile_is_ended(training):
    training.args.profile, training.args.iteration = True, 11
    torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).start()
    is_profiling = torch.autograd._profiler_enabled
    assert is_profiling()
    with per_entry_state.for_training(list, 12, 0):
        assert not is_profiling()


def test_a_warm_up_starts_none_of_them(training):
    training.args.profile = training.args.log_straggler = True
    with per_entry_state.for_warm_up():
        assert not training.args.profile
        assert not training.args.log_straggler
    assert training.args.profile
    assert training.args.log_straggler


@pytest.mark.parametrize(
    ("dispatcher", "overlaps", "steps"),
    [("alltoall", False, 1), ("flex", False, 0), ("alltoall", True, 0)],
)
def test_a_step_without_peers_makes_no_shared_buffers(training, dispatcher, overlaps, steps):
    """As DeepEP does, which maps their memory in a forward pass, and Transformer Engine before."""
    entries = list[dict[str, str]]()
    loop = PretrainLoop.__new__(PretrainLoop)
    training.args.moe_token_dispatcher_type, training.args.tp_comm_overlap = dispatcher, overlaps
    loop._args = training.args
    loop.build = Build(CommandLine())
    loop.build.train = lambda **given: entries.append(given)
    loop.warm_up()
    assert len(entries) == steps


def test_sums_of_an_interrupted_step_are_not_those_of_the_next(training):
    """Those of the newest iteration are consumed again as at first."""
    lengths: list[float | None] = []
    with per_entry_state.for_training(lambda: lengths, 4, 0) as take:
        assert training.training._seqlen_stats_in_iteration is None
        assert not training.training._seqlen_stats_active
        assert training.training.consume_seqlen_stats_in_iteration() == ()
        lengths = list(take())
        assert training.training.consume_seqlen_stats_in_iteration() == (6.0, 14.0)
    del training.training.consume_seqlen_stats_in_iteration
    with per_entry_state.for_training(list, 4, 0) as take:
        assert list(take()) == []


def test_the_detector_is_configured_for_the_rank_that_the_process_has(
    training, detector, monkeypatch
):
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
