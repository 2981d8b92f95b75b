"""The check at the end of each test session: what a session leaves behind makes it fail."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CONFTEST = Path(__file__).with_name("conftest.py")
# Our conftest imports from here, wherever it lies.
ROOT = CONFTEST.parent.parent


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def run_session(directory: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A session of its own with our conftest, less patient, and one test with ``body``."""
    text = CONFTEST.read_text().replace("_GRACE_SECONDS = 5.0", "_GRACE_SECONDS = 0.3")
    (directory / "conftest.py").write_text(text)
    (directory / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    return run_pytest(directory, str(directory))


def test_session_without_remains_passes(tmp_path):
    done = run_session(tmp_path, "pass")
    assert done.returncode == 0, done.stdout


def test_session_names_and_ends_a_remaining_process(tmp_path):
    token = f"token-{uuid.uuid4().hex}"
    body = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c',"
        f" 'import time; time.sleep(60)', '{token}'], start_new_session=True)"
    )
    done = run_session(tmp_path, body)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("process ")]
    assert token in line
    assert done.stdout.splitlines()[-1].startswith("1 passed")
    pid = line.split()[1].rstrip(":")
    # Killed; until its new parent has looked after it, it may still be listed, without a name.
    try:
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        pass


def test_session_names_a_remaining_segment(tmp_path):
    segment = Path("/dev/shm") / f"deadpool-remaining-{uuid.uuid4().hex}"
    try:
        done = run_session(tmp_path, f"open({str(segment)!r}, 'w').close()")
        assert done.returncode == 1
        assert str(segment) in done.stdout
    finally:
        segment.unlink(missing_ok=True)


@pytest.mark.parametrize("named", ["deadpool-{run_id}", "deadpool-test-{pid}-{run_id}"])
def test_session_ignores_segments_of_others(tmp_path, named):
    run_id = f"other-{uuid.uuid4().hex}"
    environment = {k: v for k, v in os.environ.items() if k != "DEADPOOL_TEST_SESSION"}
    other = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        env={**environment, "DEADPOOL_RUN_ID": run_id},
        stdin=subprocess.PIPE,
    )
    segment = Path("/dev/shm") / named.format(run_id=run_id, pid=other.pid)
    try:
        done = run_session(tmp_path, f"open({str(segment)!r}, 'w').close()")
        assert done.returncode == 0, done.stdout
    finally:
        segment.unlink(missing_ok=True)
        other.communicate(b"\n", timeout=10)


def test_session_that_could_not_run_reports_it_and_what_remains(tmp_path):
    segment = Path("/dev/shm") / f"deadpool-remaining-{uuid.uuid4().hex}"
    try:
        body = f"pass\nopen({str(segment)!r}, 'w').close()\nraise SystemError"
        done = run_session(tmp_path, body)
        assert done.returncode == pytest.ExitCode.INTERRUPTED
        assert str(segment) in done.stdout
    finally:
        segment.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ((), "1 passed, 2 deselected"),
        (("--full",), "2 passed, 1 deselected"),
        (("--all",), "3 p"),
        (("test_it.py",), "2 passed, 1 deselected"),
    ],
)
def test_session_runs_long_tests_only_on_request(tmp_path, flag, expected):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  full: x\n  exhaustive: x\n  gpu: x\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_one(): pass\n@pytest.mark.full\ndef test_two(): pass\n"
        "@pytest.mark.exhaustive\ndef test_three(): pass\n"
    )
    done = run_pytest(tmp_path, *flag)
    assert done.stdout.splitlines()[-1].startswith(expected)
