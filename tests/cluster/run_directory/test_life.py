"""The life of a run's files and memory, line by line: each thing that is asked, and its answer.

Expected are the files in lives/, which ``DEADPOOL_TEST_WRITE=1`` in the environment has written
again; the difference is read like that of any other file.
"""

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import UserError, __version__
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup, directory as run_files, orphaned_slots
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings
from tests.common import lives

LIVES = Path(__file__).parent / "lives"
RUN_ID = secrets.token_hex(4)  # processes of another run of this test are not its own
INFO = RunInfo(RUN_ID, 2, 2, 1, 1, ("x.py",), Settings())
HOST = "this-host"
_NEVER = 1 << 40  # no process started then


class Recorder:
    """``lines``: each call, and what it answered, or raised."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.lines, self.names = directory, list[str](), dict[str, int]()

    def __call__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        answer: Any = None
        try:
            answer = function(*arguments, **named)
            shown = repr(sorted(answer) if isinstance(answer, frozenset) else answer)
        except (OSError, ValueError, UserError, orphaned_slots.NodeTaken) as error:
            shown = f"{type(error).__name__}: {error}"
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in named.items())]
        self.note(f"{function.__name__}({', '.join(given)}): {shown}")
        return answer

    def note(self, line: str) -> None:
        line = re.sub(r"<[\w.]*\.(\w+) object at \w+>|(Settings)\([^()]*\)", r"\1\2", line)
        names = {"DIR": self.directory, "RUN": RUN_ID, "VERSION": __version__, **self.names}
        for shown, name in names.items():
            line = re.sub(rf"(?<!\w){re.escape(str(name))}(?!\d)", shown, line)
        self.lines.append(re.sub("nbytes=[1-9][0-9]*", "nbytes=...", line))

    def tree(self, path: Path) -> None:
        self.note(f"    {sorted(str(found.relative_to(path)) for found in path.rglob('*'))}")

    def compare(self, name: str) -> None:
        lives.hold(LIVES / f"{name}.txt", self.lines)


@pytest.fixture
def show(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "SEGMENT_ROOT", tmp_path / "shm")
    monkeypatch.setattr(cleanup.socket, "gethostname", lambda: HOST)
    (tmp_path / "shm").mkdir()
    return Recorder(tmp_path)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_run_files_are_as_recorded(show, tmp_path):
    run = RunDirectory(tmp_path / "run")
    show(run.read_run)
    show(run.create, INFO)
    show(run.create, replace(INFO, nodes=9))
    show.tree(run.path)
    show.note(f"{run.read_run() == INFO} {(run.path / 'run.json').stat().st_mode & 0o77}")
    show(run.replace_run, replace(INFO, finished=7))
    show.note(f"finished: {run.read_run().finished}")
    kept = (run.path / "run.json").read_text()
    for text in ("[]", "{", '{"run_id": "../../x"}', '{"version": 3, "settings": {"of_old": 1}}'):
        written(run.path / "run.json", text)
        show(run.read_run)
    written(run.path / "run.json", '{"version": "0.1", "settings": {"of_old": 1}}')
    show(run.read_run)
    written(run.path / "run.json", kept)
    run.path.chmod(0o777)
    show(run.read_run)
    show.note(f"only to show: {run.read_run(only_to_show=True).run_id}")
    run.path.chmod(0o755)
    for text in ("", "[1]", '{"exit_status": 0}', '{"exit_status": "0", "reason": ""}'):
        if text:
            written(run.final, text)
        show(run.has_final)
        show(run.read_final)
        show(run_files.slots_are_kept, run)
    written(run.final, '{"exit_status": 0, "reason": "", "iterations": 3, "slots_kept": true}')
    show(run.read_final)
    show(run_files.slots_are_kept, run)
    for text in ("{}", '{"host": "h", "port": "7"}', '{"host": "h", "port": "x"}', "[]"):
        show(run_files.address_in, text)
    for node, text in enumerate(
        (
            *("{}", '{"agent": 7, "started": {"7": 1}}', '{"agent": "7"}', "{"),
            *('{"agent": 7, "started": {"x": 1}}', '{"agent": 7, "started": {"8": null}}'),
        )
    ):
        written(run.node(node), text)
    show(run.node_listings)
    run.run_id = "ffffffff"
    for ask in (run.check_own, run.has_final, run.read_final, run.node_listings):
        show(ask)
    run.run_id = RUN_ID
    for ask in (run.check_own, run.check_own, run.has_final):
        show(ask)
    show.compare("files")


def test_checkpoints_are_as_recorded(show, tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(INFO)
    valid = []
    for number, names in enumerate(
        (["a.distcp", ".metadata"], ["a.distcp"], ["weights"], [".metadata"], []), 1
    ):
        path = tmp_path / "saves" / f"iter_{number}"
        path.mkdir(parents=True)
        for name in names:
            written(path / name, f"{number}")
        valid.append(Restore("durable", Generation(1, number), "save", str(path)))
    dump = run.dump / "1-7"
    dump.mkdir()
    valid.append(Restore("dump", Generation(1, 7), path=str(dump)))
    valid.append(Restore("dump", Generation(1, 8), path=str(run.dump)))
    gone = Restore("durable", Generation(1, 9), "save", str(tmp_path / "gone"))
    show(run_files.still_valid, run.latest, gone)
    found = [
        show(run_files.with_identity, one)
        for one in (*valid, gone, Restore("initial", Generation(0, 0)))
    ]
    for one in (*found, replace(found[0], identity="ab"), replace(found[5], identity="other")):
        show(run_files.is_there, one)
    show(run_files.missing_paths, valid[:8])
    show(run_files.write_latest, run.latest, [found[0], found[5], found[7]])
    show.note(run.latest.read_text())
    show(run_files.read_valid, run.latest)
    show(run_files.still_valid, run.latest, found[0])
    run_files.write_latest(run.latest, [found[0]] * 20)
    show.note(f"remembered: {len(run_files.read_valid(run.latest))}")
    written(run.latest, "{")
    show(run_files.read_valid, run.latest)
    show(run_files.still_valid, run.latest, found[0])
    for path in (tmp_path / "saves", run.path / "saves"):
        show(run_files.stored_path, path, run.path)
        show(run_files.take_saves, run, path)
        show.note(f"{run.saves.read_text()} {(path / 'deadpool-writer').read_text()}")
    for name in ("1.1", "12.0123abcd.2", "x", "1", "../1.1"):
        show(run_files.export_name, name)
    for place in ("/d/n", "d/n", "/d/m"):
        show(run_files.export_directory, place, "n")
    (tmp_path / "link").symlink_to(run.dump)
    for place in (run.dump, run.dump / "1-7", run.dump / "x", tmp_path / "link", tmp_path / "d"):
        show(run_files.dump_directory, str(place), run)
    final = Path("/s/iter_7")
    for temporary in ("/s/iter_7", "/s/.iter_7.epoch3", "/t/.iter_7.epoch3", "/s/.iter_7.epochx"):
        show(run_files.check_save, Path(temporary), final)
    show(run_files.check_save, Path("/s/.home.epoch3"), Path("/s/home"))
    for path in (final, Path("iter_7"), Path("/s/home")):
        show(run_files.is_checkpoint, path)
    show.compare("checkpoints")


@pytest.fixture
def processes(show):
    """Of two nodes, and of another run, by name."""
    made: dict[str, subprocess.Popen[bytes]] = {}
    for name, run_id in (("agent", ""), ("vault", RUN_ID), ("member", RUN_ID), ("other", "0")):
        arguments = ["deadpool_megatron.vault"] if name == "vault" else []
        place = str(show.directory / "shm" / f"deadpool-{RUN_ID}" / "node1")
        command = ["bash", "-c", "read", *arguments, *([place] if name == "member" else [])]
        environment = {**os.environ, "DEADPOOL_RUN_ID": run_id}
        made[name] = subprocess.Popen(command, env=environment, stdin=-1, process_group=0)
        show.names[f"<{name}>"] = made[name].pid
    show.names["<this>"] = os.getpid()
    yield {name: process.pid for name, process in made.items()}
    for process in made.values():
        posix.kill_group(process.pid)
        process.wait()


def test_memory_is_as_recorded(show, tmp_path, processes, monkeypatch):
    run = RunDirectory(tmp_path / "run")
    show(cleanup.remaining_memory, run)
    run.create(INFO)
    for ask in (cleanup.may_be_alive, cleanup.remaining_memory):
        show(ask, run)
    show(cleanup.is_held, RUN_ID)
    held = cleanup.claim_segments(run, RUN_ID)
    show(cleanup.is_held, RUN_ID)
    os.close(held)
    (tmp_path / "shm" / "deadpool-xyz").mkdir(mode=0o700)
    (tmp_path / "shm" / "deadpool-00000001").mkdir()
    (tmp_path / "shm" / "deadpool-00000001").chmod(0o755)
    (tmp_path / "shm" / "deadpool-00000002.ab").mkdir(mode=0o700)
    show(cleanup.runs_in_memory)
    nodes = [run.segments(RUN_ID, node) for node in range(4)]
    locks = [orphaned_slots.claim(nodes[node], node) for node in range(3)]
    show(orphaned_slots.claim, nodes[0], 0)
    for node in (1, 2):
        written(nodes[node] / "own-0.seg", "x" * (2 << 20))
        written(nodes[node] / "logs" / f"node{node}-vault.log", f"printed {node}")
    values = json.loads(cleanup.listing(processes["vault"], {1: (processes["other"], 3)}, nodes[0]))
    found = {int(pid): ticks for pid, ticks in values.pop("started").items()}
    show.note(f"{values} {[(pid, found[pid] == posix.start_time(pid)) for pid in found]}")
    for node, hostname in ((1, HOST), (3, "elsewhere")):
        pids = [processes["agent"], processes["member"]]
        started = {str(pid): posix.start_time(pid) for pid in pids}
        of_node = {"agent": pids[0], "hostname": hostname, "started": started}
        run_files.write_json(run.node(node), of_node)
    run_files.write_json(run.coordinator, {"hostname": HOST, "started": {os.getpid(): _NEVER}})
    for ask in (cleanup.run_processes, cleanup.working_processes):
        show(ask, run, RUN_ID)
    for node in (0, 1, 3):
        show(cleanup.node_processes, run, node)
    show(cleanup.may_be_alive, run)
    show(cleanup.kept_memory, run, RUN_ID)
    show(orphaned_slots.adopt_slots, run, RUN_ID, nodes[0])
    for lock in locks[1:]:
        os.close(lock)
    monkeypatch.setattr(orphaned_slots, "newest_sealed", lambda path: path.name == "node1")
    show(orphaned_slots.adopt_slots, run, RUN_ID, nodes[0], {1, 2})
    show(orphaned_slots.adopt_slots, run, RUN_ID, nodes[0])
    show(orphaned_slots.adopt_slots, run, RUN_ID, nodes[0])
    show(cleanup.run_processes, run, RUN_ID)
    show.tree(tmp_path / "shm")
    show(cleanup.clean_node, run, RUN_ID, 2, keep_slots=True)
    show(cleanup.clean_node, run, RUN_ID, 2)
    show.tree(run.path / "logs")
    written(nodes[3] / "logs" / "node3-agent.log", "printed 3")
    names = orphaned_slots.held_names(run, RUN_ID, 0, nodes[0])
    for path in (cleanup.owner_file(RUN_ID), nodes[0] / "agent.lock"):
        path.rename(tmp_path / path.name)
    show.note(str([name.look() for name in names]))
    os.close(locks[0])
    show(cleanup.is_held, RUN_ID)
    written(nodes[3] / "x", "")
    run.final.write_text('{"slots_kept": true}')
    show(cleanup.remaining_memory, run)
    show(orphaned_slots.remove_unclaimed, run, RUN_ID)
    show.tree(tmp_path / "shm")
    show.tree(run.path / "logs")
    show(cleanup.clean_run, run, RUN_ID, keep_slots=True)
    show(cleanup.clean_run, run, RUN_ID)
    show(cleanup.remaining_memory, run)
    show(cleanup.remove_segments, nodes[0])
    show.tree(tmp_path / "shm")
    show(cleanup.may_be_alive, run)
    show.note(f"listed: {list(run.node_listings())}")
    of_node = {"agent": os.getpid(), "hostname": HOST, "started": {os.getpid(): _NEVER}}
    run_files.write_json(run.node(1), of_node)
    run.node(3).unlink()
    show(cleanup.may_be_alive, run)
    show.compare("memory")
