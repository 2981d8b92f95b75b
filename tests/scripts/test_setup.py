"""The torch and the Python that ``scripts/setup.sh`` takes: nothing is installed here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """\
#!/bin/bash
# Plays an interpreter, its virtual environment and pip, whose arguments go to a file.
case "$*" in
    *'"%d.%d"'*) echo "$VERSION" ;;
    -V) echo "Python $VERSION" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "$3" >"$3/pyvenv.cfg" ;;
    "-m pip "*) echo "$*" >>"$ASKED" ;;
    *importlib.metadata*) echo none ;;
esac
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.asked, self.bin = folder / "asked", folder / "bin"
        (folder / "scripts").mkdir()
        for name in ("scripts/setup.sh", "pyproject.toml", "scripts/lock.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.bin.mkdir()
        roomy = "#!/bin/bash\necho\necho / 99999 1 99999 1% /\n"
        # The interpreters of this machine are out of the way.
        others = {f"python{number}": "#!/bin/bash\necho 2.7\n" for number in (3, 3.11, 3.12, 3.13)}
        for name, text in {"python": PYTHON, "df": roomy, **others}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self.script = folder / "scripts" / "setup.sh"

    def set_up(self, *flags: str, version: str = "3.12") -> tuple[str, list[str]]:
        """Return what it prints, and which builds of torch pip was asked for: by name, or by a
        lock, where each package has its hash."""
        self.asked.write_text("")
        more = {"PYTHON": str(self.bin / "python"), "VERSION": version, "ASKED": str(self.asked)}
        more["PATH"] = f"{self.bin}:{os.environ['PATH']}"
        done = subprocess.run(
            [self.script, *flags],
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        builds = re.findall(r"torch==(\S+)", self.asked.read_text())
        for lock in re.findall(r"--require-hashes .*-r (\S+)", self.asked.read_text()):
            builds += re.findall(r"^torch==(\S+)", Path(lock).read_text(), re.MULTILINE)
        return done.stdout, builds


def test_the_build_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    """demo.sh and test.sh call it with no flag, on a login node without a GPU as well."""
    checkout = Checkout(tmp_path)
    said, builds = checkout.set_up("--gpu")
    assert "torch with CUDA" in said
    assert [build.partition("+")[2] for build in builds] == [""]
    assert checkout.set_up() == ("", [])
    _, builds = checkout.set_up("--cpu")
    assert {build.partition("+")[2] for build in builds} == {"cpu"}
    assert checkout.set_up() == ("", [])


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_each_python_that_is_supported_is_taken_and_named(tmp_path: Path, version: str) -> None:
    checkout = Checkout(tmp_path)
    said, _ = checkout.set_up(version=version)
    assert f"Setting up .venv: Python {version} ({checkout.bin}/python)" in said
