"""Two processes have one program, or one of them ends with a line that names the difference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import program
from deadpool_megatron.cluster.process.program import LoadedProgram, OtherProgram

LATE = """
import sys
from pathlib import Path
from deadpool_megatron.cluster.process.program import LOADED_PROGRAM
LOADED_PROGRAM.watch_imports()
import edited
Path(sys.argv[1], "edited.py").write_text("VALUE = 2")
LOADED_PROGRAM.agree(Path(sys.argv[2]), 0)
try:
    import edited_later
except Exception:
    print("caught")
"""


def having(**facts: list[str]) -> LoadedProgram:
    made = LoadedProgram()
    made.facts = dict(facts)
    return made


def test_program_is_compared_with_that_of_the_first_process(tmp_path):
    assert having(a=["x=1"]).agree(tmp_path, 0) == ""
    other = having(a=["x=2", "y=3"])
    with pytest.raises(OtherProgram, match=r"a: x=2 y=3, in the run x=1$"):
        other.agree(tmp_path, 0)
    assert len(list((tmp_path / program.FOLDER / "0").iterdir())) == 1


def test_new_facts_are_added_and_compared_later(tmp_path):
    having(a=["1"]).agree(tmp_path, 0)
    first = having(a=["1"], b=["1"])
    first.agree(tmp_path, 0)
    having(b=["1"]).agree(tmp_path, 0)
    with pytest.raises(OtherProgram, match="b: 2, in the run 1"):
        having(b=["2"]).agree(tmp_path, 0)
    first.facts["c"] = ["1"]
    having(c=["2"]).agree(tmp_path, 0)
    with pytest.raises(OtherProgram, match="c"):
        first.agree(tmp_path, 0)


def test_another_start_names_its_differences(tmp_path):
    having(a=["x=1"]).agree(tmp_path, 0)
    changed = having(a=["x=2"])
    assert changed.agree(tmp_path, 7).endswith("since the start before (1): a: x=2, before x=1")
    assert having(a=["x=2"]).agree(tmp_path, 7) == ""


def test_continued_run_names_its_differences(tmp_path):
    having(a=["x=1"]).agree(tmp_path / "old", 0)
    having(a=["x=3"]).agree(tmp_path / "old", 5)
    program.inherit_program(tmp_path / "old", tmp_path / "new")
    line = having(a=["x=2"]).agree(tmp_path / "new", 0)
    assert line.endswith("a: x=2, before x=3")
    program.inherit_program(tmp_path / "none", tmp_path / "other")
    assert having(a=["x=2"]).agree(tmp_path / "other", 0) == ""


def test_module_is_noted_as_imported(tmp_path):
    """Whoever imports it after it was edited has another program."""
    (tmp_path / "edited.py").write_text("VALUE = 1")
    command = [sys.executable, "-B", "-c", LATE, str(tmp_path), str(tmp_path)]
    environment = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    (tmp_path / "edited_later.py").write_text("")
    first = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    facts = json.loads((tmp_path / program.FOLDER / "0" / "0.json").read_text())
    assert not [name for name in facts if "json" in name or "numpy" in name]
    second = subprocess.run(command, env=environment, capture_output=True, text=True)
    line = f"this process has another program than its run: {tmp_path}/edited.py: sha256="
    assert line in second.stderr


def test_late_import_is_compared_at_once(tmp_path):
    (tmp_path / "edited.py").write_text("VALUE = 1")
    (tmp_path / "edited_later.py").write_text("")
    folder = tmp_path / program.FOLDER / "0"
    folder.mkdir(parents=True)
    (folder / "0.json").write_text(json.dumps({"module edited_later": ["sha256=0"]}))
    command = [sys.executable, "-B", "-c", LATE, str(tmp_path), str(tmp_path)]
    environment = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    line = f"{tmp_path}/edited_later.py: sha256=e3b0c44298fc1c14, in the run sha256=0"
    assert line in ended.stderr
    assert not ended.stdout


def test_early_failure_is_compared_with_the_newest_start(tmp_path):
    having(a=["1"]).agree(tmp_path, 0)
    having(a=["2"]).agree(tmp_path, 5)
    having(a=["2"]).check_after_failure(tmp_path)
    other = having(a=["3"])
    other.ended_epoch = 5
    with pytest.raises(OtherProgram):
        other.check_after_failure(tmp_path)
    other = having(a=["3"])
    other.ended_epoch = 6  # the run was started again since
    other.check_after_failure(tmp_path)


def test_process_is_not_compared_with_an_earlier_start(tmp_path):
    """A process of a run that was started again is built before its first record is decided."""
    having(a=["1"]).agree(tmp_path, 0)
    edited, later = having(a=["2"]), having(a=["2"])
    edited.ended_epoch = later.ended_epoch = 4
    assert "since the start before" in edited.agree(tmp_path, 0)
    assert later.agree(tmp_path, 4) == ""


def test_data_is_identified_by_size_and_times(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    (data / "text.bin").write_text("old")
    first, later = LoadedProgram(), LoadedProgram()
    first.note_data([data])
    first.agree(tmp_path, 0)
    (data / "new").write_text("new")
    (data / "new").replace(data / "text.bin")
    later.note_data([data / "text.bin"])
    with pytest.raises(OtherProgram, match=r"text.bin on \S+: mtime=\d+ inode=\d+, in the run"):
        later.agree(tmp_path, 0)
    # A host with a copy of its own has other times, and no other size.
    monkeypatch.setattr(program.socket, "gethostname", lambda: "another-host")
    elsewhere = LoadedProgram()
    elsewhere.note_data([data])
    elsewhere.agree(tmp_path, 0)


def test_arguments_are_compared_separately(tmp_path):
    first, other = LoadedProgram(), LoadedProgram()
    for one, rank, clip in ((first, 0, 1.0), (other, 1, 0.2)):
        values = {"clip_grad": clip, "rank": rank, "seeds": [1, 2], "maker": len}
        one.note_arguments(values, ["rank"])
    first.agree(tmp_path, 0)
    first.note_arguments({"clip_grad": 1.0})  # by a parser that knows less
    assert first.facts["arguments"] == ["clip_grad=1.0", "seeds=[1, 2]"]
    with pytest.raises(OtherProgram, match=r"arguments: clip_grad=0\.2, in the run clip_grad=1\.0"):
        other.agree(tmp_path, 0)
