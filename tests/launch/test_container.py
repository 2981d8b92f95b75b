"""The recipe for a container image: linted, and held against what it names; not built."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.megatron_lm.harness.checkout import TAGS

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "share" / "container" / "Dockerfile"


def test_it_is_linted() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not there for this machine")
    done = subprocess.run([linter, RECIPE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_it_names_is_there() -> None:
    text = RECIPE.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = re.findall(r"deadpool-megatron\[([a-z-]+)\]", text)
    assert extras
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
    assert re.findall(r"core_v[\d.]+", text) == [TAGS[-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    used = {project["project"]["readme"], "LICENSE", "pyproject.toml", "deadpool_megatron"}
    for files in project["tool"]["setuptools"]["data-files"].values():
        used |= {file.partition("/")[0] for file in files}
    assert sent == used
