"""A member process, before the user's command."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.wire import framing


def test_a_member_without_a_folder_for_its_log_prints_to_that_of_its_agent(tmp_path: Path) -> None:
    log = tmp_path / "cleaned" / "node0-slot0-1.log"
    environment = {"DEADPOOL_RUN_DIR": str(tmp_path)}
    spec = MemberSpec(0, 0, 1, ("-m", "this"), environment, log, tmp_path)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        framing.send(ours, spec.to_dict())
        module = "deadpool_megatron.cluster.process.member_main"
        ended = subprocess.run(
            [sys.executable, "-m", module, str(theirs.fileno()), ""],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 0, ended.stderr
    assert "node0-slot0-1.log is here: [Errno 2]" in ended.stderr
    assert "The Zen of Python" in ended.stdout
