"""The recipe for a container image: linted, and its references are checked; not built."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deadpool_megatron.comms.inner import torch_warning
from tests.megatron_lm.harness.checkout import TAGS, checkout

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "container" / "Dockerfile"
INSTALL = RECIPE.with_name("install.sh")
#: versions in the vendor's image
TORCH = {"nvcr.io/nvidia/pytorch:26.06-py3": "2.13.0a0+8145d630e8.nv26.06"}


def test_recipe_passes_the_linter():
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not there for this machine")
    done = subprocess.run([linter, RECIPE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_recipe_names_existing_files_and_versions():
    text = RECIPE.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert str(INSTALL.relative_to(ROOT)) in text
    extras = re.findall(r'"\.\[([a-z-]+)\]"', INSTALL.read_text())
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
    assert re.findall(r"core_v[\d.]+", text) == [TAGS[-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    built = {"README.md", "LICENSE", "pyproject.toml", "setup.py", "deadpool_megatron"}
    assert sent == built | {"configs", "patches", "scripts"}


@pytest.mark.slow
def test_recipe_has_a_torch_that_a_run_accepts():
    """Its build checks it as well, as another base may have another torch."""
    text = RECIPE.read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert torch_warning(TORCH[base]) == ""
    (asks,) = re.findall(r"python -c '(.*torch_warning.*)'", text)
    assert subprocess.check_output([sys.executable, "-c", asks], text=True).strip() == ""
    tree = checkout(TAGS[-1])
    if tree is not None:
        assert (tree / "docker" / ".ngc_version.dev").read_text().strip() == base
