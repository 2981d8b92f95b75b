"""Kinds of ends of processes, by exit status, signal and last output."""

import pytest

from deadpool_megatron import failures
from deadpool_megatron.cluster.process.logs import fatal_error, last_output
from deadpool_megatron.events import not_finite

DEVICE = failures.FailureKind.DEVICE_ERROR
COMMUNICATOR = failures.FailureKind.COMMUNICATOR_ERROR
CRASH = failures.FailureKind.PROCESS_CRASH
FOR_GOOD = (48, 63, 74, 79, 94, 95)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", CRASH),
        ("RuntimeError: CUDA error: device-side assert triggered", CRASH),
        ("RuntimeError: CUDA error: misaligned address", CRASH),
        ("cudaErrorIllegalAddress: in a kernel", CRASH),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:94, unhandled cuda error."
            " Last error: Cuda failure 700 'an illegal memory access was encountered'",
            CRASH,
        ),
        ("RuntimeError: CUDA error: unspecified launch failure", DEVICE),
        ("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", CRASH),
        ("CUDA error: unknown error (Xid 31)", CRASH),
        ("NVRM: Xid (PCI:0000:3b:00): 999, of another driver", CRASH),
        ("CUDA error: unknown error, see Xid", DEVICE),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", DEVICE),
        ("RuntimeError: cuBLAS error: CUBLAS_STATUS_EXECUTION_FAILED when calling", DEVICE),
        ("RuntimeError: CUDNN_STATUS_INTERNAL_ERROR", DEVICE),
        *((f"NVRM: Xid (PCI:0000:3b:00): {n}, it says", DEVICE) for n in FOR_GOOD),
        ("RuntimeError: No CUDA GPUs are available", DEVICE),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:94,"
            " unhandled cuda error, NCCL version 2.27.5",
            DEVICE,
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:94, unhandled system error",
            DEVICE,
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:94, invalid usage",
            COMMUNICATOR,
        ),
        (
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534]"
            " Connection closed by peer [127.0.0.1]:5",
            COMMUNICATOR,
        ),
        ("torch.distributed.DistNetworkError: failed to recv", COMMUNICATOR),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda"
            " functions before calling NumCudaDevices() that might have already set an error?"
            " Error 802: system not yet initialized",
            DEVICE,
        ),
        (
            "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up"
            " environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
            DEVICE,
        ),
        ("No CUDA GPUs are available", DEVICE),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", CRASH),
        ("RuntimeError: CUDA error: out of memory", CRASH),
        ("ValueError: bad sample", CRASH),
        ("Fatal Python error: Segmentation fault", CRASH),
        ("", CRASH),
    ],
)
def test_kind_of_end(line, kind):
    assert failures.kind_of_end(line) is kind


def test_ends_of_a_device_that_is_broken_for_good():
    for number in FOR_GOOD:
        assert failures.is_broken_for_good(None, f"NVRM: Xid (PCI:1:0): {number}, x")
    for line in ("Xid 13", "Xid 31", "Xid", "uncorrectable ECC error encountered", ""):
        assert not failures.is_broken_for_good(1, line), line
    assert failures.is_broken_for_good(failures.ExitStatus.NO_DEVICE, "")


def test_the_exception_counts_not_the_advice_that_torch_prints_after_it():
    log = (
        "step 3\nTraceback (most recent call last):\n"
        '  File "train.py", line 3, in step\n    loss.item()\n'
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
    )
    assert last_output(log).startswith("torch.AcceleratorError: CUDA error")
    assert failures.kind_of_end(last_output(log)) is DEVICE


def test_fatal_errors_of_cpp_and_of_python():
    aborted = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG ID 0] Process group watchdog thread terminated with exception:"
        " CUDA error: unspecified launch failure\nmore\n"
    )
    assert failures.kind_of_end(fatal_error(aborted)) is DEVICE
    crashed = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "x.py", line 1 in f\n'
    )
    assert fatal_error(crashed) == "Fatal Python error: Segmentation fault"
    assert fatal_error("epoch 1 ends here with EpochClosed\n") == ""


def test_an_exception_logged_long_before_the_end_is_not_its_cause():
    log = "Traceback (most recent call last):\n  File x\nValueError: old\n" + "a step\n" * 120
    assert last_output(log) == "a step"


def test_numbers_do_not_make_another_cause():
    first = "Rank 3: found NaN at 0x7f31, tried to allocate 2.10 GiB"
    assert failures.without_numbers(first) == failures.without_numbers(
        "Rank 11: found NaN at 0xabc, tried to allocate 1.5 GiB"
    )
    assert failures.without_numbers(first) != failures.without_numbers(
        "Rank 3: found Inf at 0x7f31"
    )


def test_every_kind_has_a_meaning():
    planned = {failures.FailureKind.PLANNED, failures.FailureKind.RESTART}
    assert set(failures.MEANINGS) == set(failures.FailureKind)
    assert {kind for kind, meaning in failures.MEANINGS.items() if not meaning.to_do} == planned
    assert max(map(failures.precedence, failures.FailureKind)) < failures.precedence(
        "of the future"
    )
    assert failures.describe_kind("node-lost") == "a node was lost"
    assert failures.describe_kind("of the future") == "of the future"


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ({"loss": "nan", "skipped": False}, ("loss", "nan")),
        ({"loss": "inf", "grad_norm": "nan"}, ("loss", "inf")),
        ({"loss": "-inf"}, ("loss", "-inf")),
        ({"loss": "0x1p+1", "grad_norm": "nan", "skipped": False}, ("gradient norm", "nan")),
        ({"loss": None, "grad_norm": "inf"}, ("gradient norm", "inf")),
        ({"loss": "inf", "grad_norm": "inf", "skipped": True}, None),
        ({"loss": "0x1.8p+1", "grad_norm": None}, None),
        ({"loss": None}, None),
        ({"loss": 3}, None),
        ({"loss": "what"}, None),
        ({}, None),
    ],
)
def test_numbers_that_are_not_finite(step, found):
    assert not_finite(step) == found


def test_each_exit_status_is_the_number_that_users_know():
    """Scripts, job systems and older agents go by the numbers."""
    numbers = [1, 2, 3, 4, 68, 69, 70, 71, 72, 73, 75, 76, 77, 130, 143]
    assert [int(status) for status in failures.ExitStatus] == numbers
    assert failures.ExitStatus.FAILED == 1
    assert failures.ExitStatus.SAVED == 75
