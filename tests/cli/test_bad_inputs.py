"""Whatever a user gets wrong: one clear line on standard error that names it, exit status 2,
nothing started and nothing left behind."""

import shlex
import tomllib
from pathlib import Path

import pytest

from tests.cli.start.refused import SCRIPT, old_run

TABLE = Path(__file__).with_name("bad_inputs.toml")
CONFIGS = Path(__file__).parents[2] / "configs"
SIZE = "--nodes 2 --nproc-per-node 1 --preload '' --run-dir new"
# Longer than a name may be: that is refused to root as well, where a missing permission is not.
PLACEHOLDERS = {"LONG": "x" * 300, "CONFIGS": str(CONFIGS), "RUN": f"run {SIZE}"}
PLACEHOLDERS["AGENT"] = f"agent --node-id 0 {SIZE}"
FILES = {
    "full/x": b"",
    "tree/pretrain_gpt.py": b"pretrain(model)\n",
    "tree/megatron/training/__init__.py": b"",
    "list.yaml": b"- 1\n",
    "bad.yaml": b"a: [1\n",
    "deep.yaml": b"[" * 3000,
    "date.yaml": b"a: 2026-13-45\n",
    "unknown.yaml": b"modell: {}\n",
    "binary.yaml": b"\xff\xfe\0",
}


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory):
    """The folder that all of them are given in: none of them changes anything."""
    place = tmp_path_factory.mktemp("place")
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    old_run(place / "old")
    old_run(place / "over").final.write_text("{}")
    return place


@pytest.mark.usefixtures("nothing_starts", "imports_nothing")
@pytest.mark.parametrize(("line", "named"), tomllib.loads(TABLE.read_text())["rows"])
def test_bad_input(line, named, place, complain, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    if line[:3] in ("RUN", "AGE") and "--" not in line.split():
        line += f" -- {SCRIPT}"
    for word, text in PLACEHOLDERS.items():
        line, named = line.replace(word, text), named.replace(word, text)
    line_shown = complain(*shlex.split(line))
    assert named in line_shown
    assert sorted(place.rglob("*")) == before
