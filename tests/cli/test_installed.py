"""What an installed wheel offers, outside of any checkout."""

import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import deadpool_megatron
from deadpool_megatron.cli.prepare import patch
from tests.megatron_lm.harness.checkout import checkout, needs_megatron_lm

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))
ADDRESS = "https://example.org/deadpool"
#: what is in the checkout and in no distribution
_UNSHIPPED = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
#: what an installation without extras brings, and what `deadpool plan` reads its files with
_LIGHT = ("numpy", "numpy.libs", "xxhash", "yaml", "_yaml")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a source distribution, as an installation from the package index may be; one that
    has a public address."""
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, place / "tree", ignore=_UNSHIPPED)
    sdist = place / build("sdist", place / "tree", place)
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    tree = place / sdist.name.removesuffix(".tar.gz")
    with open(tree / "pyproject.toml", "a") as project:
        project.write(f'[project.urls]\nRepository = "{ADDRESS}"\n')
    return place / build("wheel", tree, place)


def build(kind: str, tree: Path, out: Path) -> str:
    program = f"import setuptools.build_meta as b; print('made', b.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^made (\S+)$", done.stdout, re.MULTILINE)[-1]


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel, and an empty directory to work in."""

    environment: Path
    here: Path

    def deadpool(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        variables["PATH"] = f"{self.environment / 'bin'}:{variables['PATH']}"
        command = ["deadpool", *map(str, arguments)]
        return subprocess.run(command, cwd=self.here, env=variables, capture_output=True, text=True)


def environment(place: Path) -> Path:
    """An empty one, which sees the packages that are in ``place/base``."""
    made = place / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    [packages] = made.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(f"{place / 'base'}\n")
    return made


def pip_install(made: Path, *arguments: str) -> None:
    """What an installation does, without an index to take anything from."""
    pip = [sys.executable, "-m", "pip", "--python", str(made), "install", "-q", "--no-index"]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def install(wheel: Path, place: Path) -> Installation:
    """An environment whose other packages are in ``place/base``."""
    made = environment(place)
    pip_install(made, "--no-deps", str(wheel))
    (place / "here").mkdir()
    return Installation(made, place / "here")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Beside torch and Megatron."""
    place = tmp_path_factory.mktemp("installed")
    (place / "base").symlink_to(PACKAGES)
    return install(wheel, place)


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory):
    """On a machine that has neither torch nor Megatron."""
    place = tmp_path_factory.mktemp("light")
    (place / "base").mkdir()
    for name in _LIGHT:
        if (PACKAGES / name).exists():
            (place / "base" / name).symlink_to(PACKAGES / name)
    return install(wheel, place)


@pytest.fixture(scope="module")
def described(wheel):
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_readme_of_an_index_has_absolute_links(wheel, described):
    tree = next(wheel.parent.glob("deadpool_megatron-*/PKG-INFO")).parent
    assert (tree / "README.md").read_text() in (tree / "PKG-INFO").read_text()  # without an address
    links = re.findall(r"(!?)\[[^\]]*\]\((?!#)([^)#]+)", described.get_payload())
    internal = [link for link in links if link[1].startswith(ADDRESS)]
    assert internal
    assert all(link.startswith("https://") for _, link in links)
    for kind, link in internal:
        prefix = f"{ADDRESS}/{'raw' if kind else 'blob'}/v{deadpool_megatron.__version__}/"
        assert (REPOSITORY / link.removeprefix(prefix)).exists(), link


def test_torch_and_megatron_are_left_to_the_machine(described):
    needs = [line for line in described.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"\W", line)[0] for line in needs} == {"numpy", "xxhash"}


_TORCH_AND_MEGATRON = """
import importlib.metadata as metadata
for name in ("torch", "megatron-core"):
    there = metadata.distribution(name)
    print(there.version, there.locate_file(""), there.read_text("RECORD"))
"""


@pytest.mark.full
@pytest.mark.parametrize("extra", ["", "[megatron]"])
def test_pip_leaves_torch_and_megatron_of_an_image_alone(extra, wheel, tmp_path):
    """Whose packages the environment sees, as that of an image does."""
    (tmp_path / "base").symlink_to(PACKAGES)
    made = environment(tmp_path)

    def torch_and_megatron() -> str:
        command = [str(made / "bin" / "python"), "-c", _TORCH_AND_MEGATRON]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    before = torch_and_megatron()
    pip_install(made, f"{wheel}{extra}")
    assert torch_and_megatron() == before
    [packages] = made.glob("lib/python*/site-packages")
    assert [each.name.partition("-")[0] for each in packages.glob("*.dist-info")] == [
        "deadpool_megatron"
    ]


@pytest.mark.full
def test_a_machine_is_checked_outside_of_a_checkout(installed):
    done = installed.deadpool("check", "--json")
    found = json.loads(done.stdout)
    # Whether this machine has a problem is not asked here.
    assert done.returncode == (0 if found["ok"] else 1), done.stderr
    versions = found["facts"]["versions"]
    assert versions["deadpool-megatron"] == deadpool_megatron.__version__
    assert versions["torch"] == importlib.metadata.version("torch")


def test_every_example_is_installed(installed):
    done = installed.deadpool("examples")
    assert done.returncode == 0, done.stderr
    root = Path(done.stdout.rstrip("\n"))
    assert root.parent.name == "deadpool_megatron"
    for folder in ("configs", "patches", "scripts/slurm", "scripts/launch"):
        for file in (REPOSITORY / folder).rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                lies = root / file.relative_to(REPOSITORY)
                assert lies.read_bytes() == file.read_bytes()
                assert os.access(lies, os.X_OK) == os.access(file, os.X_OK)


@pytest.mark.full(every_time=True)
def test_a_node_is_lost_and_replaced(installed):
    done = installed.deadpool("demo", "--iterations", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical: yes" in done.stdout


@needs_megatron_lm
@pytest.mark.megatron_lm
def test_patches_come_along(installed, tmp_path):
    source = checkout()
    assert source is not None
    for name in {name for patch_set in patch.find_patch_sets() for name in patch_set.hashes}:
        if (source / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, tmp_path / name)
    done = installed.deadpool("patch", "apply", tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_torch_all_but_training_works(light):
    assert "usage: deadpool" in light.deadpool("--help").stdout
    examples = light.deadpool("examples").stdout.strip()
    assert light.deadpool("plan", f"{examples}/configs/65b.yaml", "--json").returncode == 0
    assert light.deadpool("status", "runs/none").returncode == 2
    done = light.deadpool("demo")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "torch and megatron-core" in line
