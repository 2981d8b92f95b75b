"""Whole runs of launcher, agents, standbys, vaults and counting members, with real kills."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from deadpool_megatron.events import Event, Kind, read_events
from tests.cluster.counting_member import expected_sha256
from tests.cluster.runs import Run, deadpool, send
from tests.common.limits import setting_flags
from tests.common.wait import MAX_WAIT_SECONDS

pytestmark = pytest.mark.slow
# Wait of a new coordinator for a node that was lost together with the old coordinator.
_SOON = setting_flags(rejoin_seconds=6)


@pytest.mark.full
def test_killed_and_stopped_vaults_come_back_without_an_interruption(tmp_path):
    with Run(tmp_path / "r", spares=0) as run:
        run.wait_iteration(5)
        send(run.listing(0)["vault"])
        run.wait_event(Kind.VAULT_LOST)
        run.wait_iteration(5 + run.newest_iteration())
        send(run.listing(1)["vault"], signal.SIGSTOP)
        run.wait_event(Kind.VAULT_LOST, 2)
        final = run.finish()
    assert final["recoveries"] == []


def test_training_continues_without_a_coordinator_and_through_a_takeover(tmp_path):
    faults = [_stop_at_claim(node) for node in (1, 2)]
    with Run(tmp_path / "r", faults=faults) as run:
        run.wait_iteration(5)
        send(read_json(run.run.coordinator)["pid"])
        standbys = _stopped(run, faults)  # no standby takes over
        before = _computed(run)
        run.wait_for("10 iterations without a coordinator", lambda: _computed(run) >= before + 10)
        for pid in standbys:
            os.kill(pid, signal.SIGCONT)
        run.wait_for("all agents", lambda: any("stays open" in text for text in _texts(run)))
        run.wait_iteration(before + 10)
        final = run.finish()
        assert "coordinator: " in run.output.read_text()
        assert len(list(run.run.journal.glob("epoch-*"))) == 1
    assert {event.epoch for event in run.events(Kind.EPOCH_OPENED)} == {1}
    assert final["recoveries"] == []


def _stop_at_claim(node: int) -> dict[str, Any]:
    """The standby of a node stops right before it takes over."""
    match = {"term": 2, "node": node}
    return {"id": f"claim-{node}", "point": "standby.claim", "match": match, "signal": "STOP"}


def _stopped(run: Run, faults: Sequence[dict[str, Any]]) -> list[int]:
    """Once each of these faults has stopped a process: these."""
    fired = run.run.path.with_name(run.run.path.name + "-faults.json.fired")
    markers = [fired / str(fault["id"]) for fault in faults]
    run.wait_for("all of them to be stopped", lambda: all(map(Path.exists, markers)))
    return [int(read_json(marker)["pid"]) for marker in markers]


def _computed(run: Run) -> int:
    """Return the iteration that role 0 has completed, by the counters of the members."""
    return int.from_bytes((run.run.path / "lockstep").read_bytes()[8:16], "little")


def test_stopped_coordinator_is_replaced_by_one_on_another_port_and_steps_down(tmp_path):
    # The standby of node 0, which claims if that of node 1 is late, is held up.
    other = {"id": "other", "point": "standby.claim", "match": {"term": 1, "node": 0}}
    faults = [{**other, "signal": "STOP", "resume_after_seconds": 6}]
    with Run(tmp_path / "r", spares=0, faults=faults) as run:
        run.wait_iteration(5)
        first = read_json(run.run.coordinator)
        send(first["pid"], signal.SIGSTOP)
        run.wait_for("another one", lambda: read_json(run.run.coordinator)["pid"] != first["pid"])
        run.wait_for("all agents", lambda: any("stays open" in text for text in _texts(run)))
        # An agent changes over at its welcome, and reports to the old coordinator until then.
        run.wait_for("all to beat for the new one", lambda: _beating(run) == {0, 1})
        woken = time.monotonic()
        os.kill(first["pid"], signal.SIGCONT)
        logs = [run.run.log(f"node{node}-standby") for node in (0, 1)]
        run.wait_for("its last output", lambda: "steps down" in "".join(map(_text, logs)))
        run.wait_iteration(_computed(run) + 5)
        written = [json.loads(line) for line in run.run.events.open()]  # by the first term
        # Earlier messages to it are written, under the date at which it reads them.
        assert not [event for event in written if event["monotonic_seconds"] > woken]
        final = run.finish()
    assert final["recoveries"] == []


def _beating(run: Run) -> set[int]:
    """Return the nodes with beats at the present coordinator."""
    answer = deadpool("status", str(run.run.path), "--json")
    if answer.returncode:
        return set()  # it is not there yet
    roles = json.loads(answer.stdout)["roles"].values()
    return {role["seat"][0] for role in roles if role["section"] != "unknown"}


@pytest.mark.full
def test_coordinators_follow_after_the_loss_of_their_nodes(tmp_path):
    """Two nodes keep standbys; when they have gone one after the other, others do."""
    with Run(tmp_path / "r", nodes=2, spares=2, options=_SOON) as run:
        run.wait_iteration(3)
        for term in (1, 2):
            coordinator = _term(run, term)
            assert coordinator.node in (3, 2)
            assert (
                deadpool("kill", str(run.run.path), "--node", str(coordinator.node)).returncode == 0
            )
        assert _term(run, 3).node in (0, 1)
        run.wait_for("all agents", lambda: any("stays open" in text for text in _texts(run)))
        final = run.finish()
    assert final["recoveries"] == [], "spares, both of them"


def _term(run: Run, number: int) -> Event:
    """Once the coordinator of this term serves."""
    return run.wait_event(Kind.COORDINATOR, number)


def test_run_without_a_node_that_starts_ends_soon(tmp_path):
    faults = [
        {"id": f"a{node}", "point": "member.start", "match": {"node": node}, "target": "agent"}
        for node in (0, 1)
    ]
    with Run(tmp_path / "r", spares=0, faults=faults) as run:
        assert run.launcher.wait(MAX_WAIT_SECONDS) == 1
    assert "no node came up" in run.output.read_text()


def test_undisturbed_run_listens_only_at_the_given_address(tmp_path):
    with Run(tmp_path / "r", nproc=2) as run:
        run.wait_iteration(2)
        pids = cleanup.run_processes(run.run, run.run.read_run().run_id)
        listening = _listening(pids)
        final = run.finish()
    assert final["recoveries"] == []
    kinds = [event.kind for event in read_events(run.run.events)]
    assert kinds.count(Kind.EPOCH_OPENED) == 1
    assert kinds[0] is Kind.RUN_STARTED
    assert Kind.RUN_ENDED in kinds
    assert len(listening) == 4, "the coordinator, and a vault for each node"
    assert {address for address, _ in listening} == {"127.0.0.1"}


def _listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(str(handle.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                parts = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(parts)), int(port, 16)))
    return found


def _texts(run: Run) -> list[str]:
    """Return the logged lines."""
    return [str(event.data["text"]) for event in run.events(Kind.LOG)]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_killed_or_stopped_agent_is_a_lost_node(tmp_path, number):
    with Run(tmp_path / "r") as run:
        run.wait_iteration(3)
        agent = run.listing(1)["agent"]
        send(agent, number)
        lost = run.wait_event(Kind.NODE_LOST)
        assert lost.node == 1
        kind = "node-frozen" if number == signal.SIGSTOP else "node-lost"
        assert lost.data["kind"] == kind
        assert run.wait_event(Kind.RECOVERED).data["kind"] == kind
        if number == signal.SIGSTOP:
            os.kill(agent, signal.SIGCONT)  # it wakes up and learns that it is fenced
            run.wait_for("the old node to end", lambda: not run.run.node(1).exists())
        run.finish()


def test_stopped_member_is_killed_and_replaced(tmp_path):
    with Run(tmp_path / "r", spares=0) as run:
        run.wait_iteration(3)
        send(run.listing(1)["members"]["0"], signal.SIGSTOP)
        lost = run.wait_event(Kind.MEMBER_LOST)
        assert lost.node == 1
        stack = run.wait_event(Kind.STACK)
        final = run.finish()
    assert "frozen" in final["recoveries"][0]["cause"]
    assert final["recoveries"][0]["kind"] == "member-frozen"
    assert "stopped and cannot answer" in stack.data["missing"]


def test_hanging_member_is_found_and_replaced(tmp_path):
    limits = ("hang", "first_step", "operation_timeout", "close")
    options = setting_flags(**{f"{name}_seconds": 2 for name in limits})
    with Run(
        tmp_path / "r", "--iterations", "20", "--misbehave", "hang", spares=0, options=options
    ) as run:
        final = run.check_result(20)
        (stack,) = run.events(Kind.STACK)
    cause = final["recoveries"][0]["cause"]
    assert "role 1 in section train of iteration 4; 1 role waits in operation" in cause
    assert "(barrier) of group world(0,1)" in cause
    assert (final["recoveries"][0]["kind"], stack.role) == ("hang", 1)
    assert "hang_if_asked" in " ".join(stack.data["frames"])
    (failure,) = json.loads(deadpool("report", "--json", str(run.run.path)).stdout)["failures"]
    (hang,) = failure["hangs"]
    (group,) = hang["groups"]
    assert (hang["roles"], group["operation"], group["number"]) == ([1], "barrier", 5)
    assert group["rows"] == [
        {"roles": [1], "where": "missing", "begun": 4},
        {"roles": [0], "where": "waits", "begun": 5},
    ]
    assert failure["stacks"][0]["role"] == 1


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


# For every interpreter of a run that finds it: files of events have no room.
_FULL_FOR_EVENTS = """
import errno, os
_open = os.open
def without_events(path, flags, *more, **named):
    name = os.path.basename(os.fspath(path))
    if flags & os.O_APPEND and name.startswith(("events", b"events")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    return _open(path, flags, *more, **named)
os.open = without_events
"""


@pytest.mark.parametrize(("misbehaves", "status"), [(False, 0), (True, 3)])
def test_run_decides_the_same_if_its_events_cannot_be_written(tmp_path, misbehaves, status):
    """It recovers, compares replayed steps, and ends as ever."""
    (tmp_path / "sitecustomize.py").write_text(_FULL_FOR_EVENTS)
    seam = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    match = {"role": 1, "iteration": 6}
    faults = [{"id": "n", "point": "member.seal", "match": match}]
    diverges = ("--misbehave", "diverge") if misbehaves else ()
    decided = []
    for name, extra in (("told", {}), ("silent", seam)):
        command = ("--iterations", "12", *diverges)
        with Run(tmp_path / name, *command, spares=0, faults=faults, extra=extra) as run:
            assert run.launcher.wait(MAX_WAIT_SECONDS) == status, run.output.read_text()
            assert run.run.events.exists() is (name == "told")
            final = run.run.read_final()
            records = [read_json(path) for path in sorted(run.run.journal.glob("epoch-*"))]
        shown = ("epoch", "seats", "replicas", "protection")
        decided.append(
            [
                [[record[key] for key in shown] for record in records],
                {role: values["sha256"] for role, values in final["roles"].items()},
                [(each["kind"], each["seats_changed"]) for each in final["recoveries"]],
            ]
        )
    assert decided[0] == decided[1]


def test_failing_command_ends_the_run_with_its_last_line(tmp_path):
    with Run(tmp_path / "r", "--misbehave", "raise") as run:
        final = run.wait_end(1)
    assert "RuntimeError: the user's command is broken" in final["reason"]
    log = (run.run.path / "logs" / "node0-rank0-0.log").read_text()
    assert "agent.py" not in log
    assert "runpy" not in log


@pytest.mark.slow
def test_requests_outlive_the_coordinator(tmp_path):
    with Run(tmp_path / "r", spares=2) as run:
        where = str(run.run.path)
        run.wait_iteration(3)
        for kind, *part in (
            (Kind.MEMBER_LOST, "--role", "0"),
            (Kind.VAULT_LOST, "--vault", "0"),
            (Kind.NODE_LOST, "--agent", "1"),
        ):
            assert deadpool("kill", where, *part).returncode == 0
            run.wait_event(kind)
            run.wait_iteration(run.newest_iteration() + 2)
        refused = deadpool("kill", where, "--vault", "1")
        assert (refused.returncode, "node 1 is not connected" in refused.stderr) == (1, True)
        assert deadpool("kill", where, "--coordinator").returncode == 0
        answer = deadpool("drain", where, "--node", "0", "--wait", "50")
        assert answer.stdout == "drain of node 0: done: node 0 has no role\n", answer.stderr
        refused = deadpool("drain", where, "--node", "1", "--wait", "50")
        assert refused.returncode == 1
        assert "node 1 is not connected" in refused.stderr
        status = json.loads(deadpool("status", where, "--json").stdout)
        requests = [(each["number"], each["verb"], each["stage"]) for each in status["requests"]]
        assert requests == [(1, "drain", "done")]
        run.finish()


@pytest.mark.full
@pytest.mark.slow
def test_bug_ends_the_run_and_another_run_resumes_at_its_newest_iteration(tmp_path):
    first = tmp_path / "first"
    with Run(first, "--iterations", "20", "--misbehave", "fail", spares=0) as run:
        final = run.wait_end(1)
        output = run.output.read_text().strip()
        status = deadpool("status", str(first)).stdout
        report = deadpool("report", str(first)).stdout
    assert final["kind"] == "bug"
    assert "2 times the same failure" in final["reason"]
    assert f"continue with 'deadpool run --resume {first} --run-dir NEW'" in output.splitlines()[-1]
    assert "ended with status 1 [bug]" in output
    assert "--attach" not in output.rpartition("ended with status 1")[2]
    for text in (output, status):
        assert "to do: fix the program or the data first" in text
        assert "[bug]" in text
    assert re.search(r"^failure \d \[bug\]", report, re.MULTILINE)
    again = ("--resume", str(first))
    with Run(tmp_path / "second", "--iterations", "20", spares=0, options=again) as run:
        final = run.wait_end()
    saved = read_json(RunDirectory(first).latest)["valid"][0]["generation"][1]
    assert saved in (6, 7), "at most one iteration before the failed iteration"
    steps = [step["iteration"] for step in final["steps"]]
    assert steps == list(range(saved, 21)), "the restored iteration is reported again"
    assert final["roles"]["1"]["sha256"] == expected_sha256(1, 20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_in_order(tmp_path, number):
    with Run(tmp_path / "r", nproc=2) as run:
        run.wait_iteration(3)
        run.launcher.send_signal(number)
        final = run.wait_end(130)
        run_id = run.run.read_run().run_id
        is_kept = segment_root(run_id).exists()
        cleanup.clean_run(run.run, run_id)
    assert final["reason"].startswith("interrupted")
    assert is_kept == (number == signal.SIGINT), "for the same command, where a person is there"


@pytest.mark.full
def test_second_interrupt_ends_at_once(tmp_path):
    """Also without a coordinator that could end the run in order."""
    with Run(tmp_path / "r", options=("--deadpool-set", "takeover-seconds=60")) as run:
        run.wait_iteration(1)
        send(read_json(run.run.coordinator)["pid"], signal.SIGSTOP)
        run.launcher.send_signal(signal.SIGINT)
        run.launcher.send_signal(signal.SIGTERM)
        assert run.launcher.wait(MAX_WAIT_SECONDS) == 130
    assert not run.run.final.exists()


@pytest.mark.full
def test_lost_journal_ends_the_run_with_a_dump(tmp_path):
    options = ("--deadpool-spare-timeout-seconds", "2")
    with Run(tmp_path / "r", options=options) as run:
        run.wait_iteration(5)
        journal = run.run.journal
        journal.rename(journal.with_name("journal-aside"))
        journal.write_text("no directory")
        send(run.listing(1)["members"]["0"])
        final = run.wait_end(1)
        assert final["reason"].startswith("epoch 2 cannot be journalled: cannot write")
        assert len(list(run.run.dump.iterdir())) == 1
        assert len(run.events(Kind.DUMPED)) == 1
        output = run.output.read_text().strip().splitlines()[-1]
        assert "epoch 2 cannot be journalled" in output
        assert f"continue with 'deadpool run --resume {run.run.path}" in output


@pytest.mark.full
def test_interrupt_before_anything_runs(tmp_path):
    with Run(tmp_path / "r") as run:
        run.wait_for("run.json", lambda: (run.run.path / "run.json").exists())
        run.launcher.send_signal(signal.SIGINT)
        assert run.launcher.wait(60) == 130


@pytest.mark.full
def test_exec_start_method_uses_parked_processes(tmp_path):
    faults = [{"id": "m", "point": "member.step", "match": {"role": 1, "iteration": 5}}]
    options = ("--deadpool-set", "start-method=exec")
    with Run(tmp_path / "r", "--iterations", "12", spares=0, faults=faults, options=options) as run:
        final = run.check_result(12)
    assert final["recoveries"][0]["seats_changed"] == {"1": [[1, 0, 0], [1, 0, 1]]}


def test_status_of_a_live_and_of_a_finished_run(tmp_path):
    with Run(tmp_path / "r", nproc=2) as run:
        run.wait_iteration(3)
        shown = deadpool("status", str(run.run.path)).stdout.splitlines()
        assert shown[0].startswith("Running")
        assert not any(line.startswith("  role ") for line in shown)
        every = deadpool("status", str(run.run.path), "--all").stdout
        assert "role   3: process 1 of node 1" in every
        assert deadpool("stop", "--discard", str(run.run.path)).returncode == 0
        run.wait_end(130)
    shown = deadpool("status", str(run.run.path))
    assert shown.returncode == 0
    assert shown.stdout.startswith("over, exit status 130")
    for command in (("drain", "--node", "0"), ("stop",)):
        answer = deadpool(command[0], str(run.run.path), *command[1:])
        assert answer.returncode == 2
        assert "is over" in answer.stderr
    answer = deadpool("kill", str(run.run.path), "--node", "0")
    assert answer.returncode == 2
