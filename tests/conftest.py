"""Shared by all tests: the selection of tests, and the check that no process outlives a session."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from deadpool_megatron import ownership
from tests.common import gpus
from tests.common.turns import in_turn

SEGMENT_ROOT = Path("/dev/shm")
SESSION_VARIABLE = "DEADPOOL_TEST_SESSION"
# Ending processes get this long to be gone before they count as left over.
_GRACE_SECONDS = 5.0
_GIT_SECONDS = 30.0


# How long an example may take says how busy the machine is. A test that has its own number of
# examples makes it from that of the profile where its examples take long.
settings.register_profile("some", deadline=None, max_examples=25)
settings.register_profile("many", deadline=None, max_examples=100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run every cell of the full fault matrix as well"
    )
    parser.addoption(
        "--full", action="store_true", help="run what the tests a person waits for leave out"
    )
    parser.addoption(
        "--netns", action="store_true", help="run the tests on hosts made of namespaces (root)"
    )
    parser.addoption(
        "--within",
        type=float,
        metavar="MINUTES",
        help="run those of --full last, by turns from commit to commit, and leave out, and say so,"
        " what has not begun after so many minutes",
    )
    parser.addoption("--cell", help="LAYOUT:CELL of the fault matrix to run alone")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``transcript``: each file of the folder ``calls`` next to the test's module."""
    if "transcript" in metafunc.fixturenames:
        found = sorted(metafunc.definition.path.parent.glob("calls/*.txt"))
        metafunc.parametrize("transcript", found, ids=[path.stem for path in found])


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup what is started would ignore the terminals that tests close.
        signal.signal(signal.SIGHUP, lambda *_: None)
    gpus.hide()
    # For what the tests start; it finds what plays NCCL there, as the tests do.
    paths = (str(Path(__file__).with_name("fakes")), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    settings.load_profile("many" if _wants_all(config) else "some")


def _wants_all(config: pytest.Config) -> bool:
    """Whether somebody asked for it. Who names a file wants all of it."""
    named = config.args_source is config.ArgsSource.ARGS
    return bool(config.getoption("--full") or config.getoption("--all") or named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set()
    if not config.getoption("--all"):
        left_out.add("exhaustive")
    if not _wants_all(config):
        left_out.add("full")
    deselected = [i for i in items if any(i.get_closest_marker(name) for name in left_out)]
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)
    if config.getoption("--cell") is None:
        items[:] = [item for item in items if item.name != "test_one_cell"]
    if config.getoption("--within") is not None:
        items[:] = in_turn(items, _may_be_left_out, lambda item: item.path, commit())
    if not Path("/dev/nvidiactl").exists():
        no_gpu = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(no_gpu)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str:
    within = config.getoption("--within")
    last = next((item for item in items if _may_be_left_out(item)), None)
    if within is None or last is None:
        return ""
    return f"those of --full come last, from {last.path.name} on, within {within:g} minutes"


def _may_be_left_out(item: pytest.Item) -> bool:
    full = item.get_closest_marker("full")
    return full is not None and not full.kwargs.get("every_time", False)


def commit() -> str:
    command = ("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""  # always the same order then


@pytest.fixture
def pipes_hang(monkeypatch):
    """A named pipe stands for a file of a file system that hangs, also to who opens files alone."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    monkeypatch.setattr(ownership, "open_regular", lambda path: os.open(path, flags))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.umask(0o022)  # a command that runs here may have left its own
    within = item.config.getoption("--within")
    if within is None or not _may_be_left_out(item):
        return
    if time.monotonic() - item.config.stash[_STARTED_SECONDS] > 60 * within:
        pytest.skip(f"{within:g} minutes were over before its turn (--within)")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_STARTED_SECONDS] = time.monotonic()
    # Inherited by everything that the tests start, however far down.
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    session.config.stash[_SEGMENTS_BEFORE] = _segments()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    for name in ("tests.trainer.ranks", "tests.common.forks"):
        shared = sys.modules.get(name)
        if shared is not None:
            shared.stop()  # processes that the tests of a session share
    remains = _remaining_processes()
    remains += [f"{path}" for path in _remaining_segments(session.config.stash[_SEGMENTS_BEFORE])]
    session.config.stash[_REMAINS] = remains
    if remains and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    megatron_lm = _megatron_lm_line(terminalreporter)
    if megatron_lm:
        terminalreporter.write_line(megatron_lm)
    remains = config.stash.get(_REMAINS, [])
    if remains:
        terminalreporter.section("left over by this session: a failure", red=True)
        for line in remains:
            terminalreporter.write_line(line)


def _megatron_lm_line(terminalreporter: pytest.TerminalReporter) -> str:
    """How many of the chosen tests ran against Megatron-LM's source, or why they did not."""
    counts: Counter[str] = Counter()
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "megatron_lm" not in report.keywords:
                continue
            if outcome == "skipped":
                counts[f"skipped: {str(report.longrepr[2]).removeprefix('Skipped: ')}"] += 1
            else:
                # Here, because this file also serves sessions that have no other one.
                from tests.megatron_lm.harness.checkout import checkout

                counts[f"run against {checkout()}"] += 1
    found = "; ".join(f"{number} {what}" for what, number in counts.items())
    return f"Megatron-LM tests: {found}" if found else ""


_STARTED_SECONDS: pytest.StashKey[float] = pytest.StashKey()
_SEGMENTS_BEFORE: pytest.StashKey[set[Path]] = pytest.StashKey()
_REMAINS: pytest.StashKey[list[str]] = pytest.StashKey()


def _remaining_processes() -> list[str]:
    """Processes of this session that do not end by themselves; they are killed and named."""
    token = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    deadline = time.monotonic() + _GRACE_SECONDS
    while (found := list(_processes_with(token))) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = []
    for pid in found:
        lines.append(f"process {pid}: {_command_line(pid)}")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return lines


def _processes_with(token: bytes) -> Iterator[int]:
    for pid, environment in _environments():
        if pid != os.getpid() and token in environment:
            yield pid


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # gone meanwhile, or of another user


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "(ended just now)"


def _segments() -> set[Path]:
    return set(SEGMENT_ROOT.glob("deadpool-*"))


def _remaining_segments(before: set[Path]) -> list[Path]:
    """New segments, save those of a run that somebody else has going on this machine, or that are
    named after a living process of somebody else: of another session of tests, say."""
    found = _segments() - before
    token = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    for pid, environment in _environments():
        if token not in environment and pid != os.getpid():
            runs = [e.decode() for e in environment if e.startswith(b"DEADPOOL_RUN_ID=")]
            found -= {SEGMENT_ROOT / f"deadpool-{run.partition('=')[2]}" for run in runs}
            found -= {path for path in found if path.name.startswith(f"deadpool-test-{pid}-")}
    return sorted(found)
