"""The torch and the Python of ``scripts/setup.sh``, and the commands of ``scripts/compat.sh`` with
an interpreter of the user's: nothing is installed here."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.common.programs import check_output

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
        ample = "#!/bin/bash\necho\necho / 99999 1 99999 1% /\n"
        # The interpreters of this machine are out of the way.
        others = {f"python{number}": "#!/bin/bash\necho 2.7\n" for number in (3, 3.11, 3.12, 3.13)}
        for name, text in {"python": PYTHON, "df": ample, **others}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self.script = folder / "scripts" / "setup.sh"

    def set_up(self, *flags: str, version: str = "3.12") -> tuple[str, list[str]]:
        """Return its output, and the builds of torch that pip was asked for: by name, or by a
        lock, in which each package has its hash."""
        self.asked.write_text("")
        more = {"PYTHON": str(self.bin / "python"), "VERSION": version, "ASKED": str(self.asked)}
        more["PATH"] = f"{self.bin}:{os.environ['PATH']}"
        printed = check_output(self.script, *flags, **more)
        builds = re.findall(r"torch==(\S+)", self.asked.read_text())
        for lock in re.findall(r"--require-hashes .*-r (\S+)", self.asked.read_text()):
            builds += re.findall(r"^torch==(\S+)", Path(lock).read_text(), re.MULTILINE)
        return printed, builds


def test_setup_keeps_the_build_that_was_asked_for(tmp_path):
    """demo.sh and test.sh call it with no flag, on a login node without a GPU as well."""
    checkout = Checkout(tmp_path)
    output, builds = checkout.set_up("--gpu")
    assert "torch with CUDA" in output
    assert [build.partition("+")[2] for build in builds] == [""]
    assert checkout.set_up() == ("", [])
    _, builds = checkout.set_up("--cpu")
    assert {build.partition("+")[2] for build in builds} == {"cpu"}
    assert checkout.set_up() == ("", [])


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_setup_accepts_and_names_each_supported_python(tmp_path, version):
    checkout = Checkout(tmp_path)
    output, _ = checkout.set_up(version=version)
    assert f"Setting up .venv: Python {version} ({checkout.bin}/python)" in output


def test_compat_runs_all_parts_with_an_interpreter_of_the_user(tmp_path):
    """Its stand-in, which has all packages, writes its commands."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || {{ echo 3.99.0; exit; }}\necho "$@" >>{tmp_path}/ran\n'
    )
    program.chmod(0o755)
    programs = tmp_path / "base" / "python3.99.0" / "venv-torch2.14-megatron0.19" / "bin"
    programs.mkdir(parents=True)
    (programs.parent / "ready").touch()
    (programs / "python").symlink_to(program)
    command = (ROOT / "scripts" / "compat.sh", "--torch", "2.14", "--python", program)
    printed = check_output(*command, "--root", tmp_path / "base")
    parts = [line.split()[1] for line in printed.splitlines() if line.startswith("== ")]
    assert parts == ["groups:", "fast:", "demo:", "megatron:", "faults:"]
    ran = (tmp_path / "ran").read_text().splitlines()
    assert len(ran) == len(parts)
    assert " tests/megatron_lm --full --deselect tests/megatron_lm/test_tags.py" in ran[3]


def test_compat_refuses_a_path_without_an_interpreter(tmp_path):
    command = [ROOT / "scripts" / "compat.sh", "--python", tmp_path / "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"compat: {tmp_path}/none is no Python that runs"
