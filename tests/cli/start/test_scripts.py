"""The module of a user, which is looked for before anything starts."""

import sys

import pytest

THREADS = "OPENBLAS_NUM_THREADS"


@pytest.mark.parametrize("subcommand", ["run", "agent"])
def test_start_searches_the_users_module_without_threads(
    subcommand, tmp_path, monkeypatch, complain
):
    """Its package may import numpy, whose OpenBLAS asks this variable, at once and never again."""
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "train.py").touch()
    (package / "__init__.py").write_text(
        f"import os\nraise ImportError('threads: ' + os.environ.get({THREADS!r}, 'of every core'))"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv(THREADS, "of every core")  # so that it is as before afterwards
    monkeypatch.delenv(THREADS)
    which = ("--node-id", "0") if subcommand == "agent" else ()
    size = ("--nodes", "2", "--nproc-per-node", "1", "--deadpool-set", "start-method=fork")
    where = ("--run-dir", str(tmp_path / "run"))
    command = ("-m", "users_package.train")
    line = complain(subcommand, *which, *size, *where, "--", *command)
    assert line.endswith("(threads: 1)")
