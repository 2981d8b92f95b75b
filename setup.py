"""Two steps of a build that pyproject.toml cannot express. The files that a user starts from become
data of the package, and README's links lead to the repository once it has a public address."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# deadpool_megatron/cli/examples.py finds them in share/ of an installation, here in a checkout.
SHARED = ("configs", "patches", "scripts/launch", "scripts/slurm")


class BuildWithSharedFiles(build_py):
    """Copies the shared folders into the package that is built; an editable one is the checkout."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        share = Path(self.build_lib, "deadpool_megatron", "share")
        shutil.rmtree(share, ignore_errors=True)
        for folder in SHARED:
            shutil.copytree(
                ROOT / folder, share / folder, ignore=shutil.ignore_patterns("__pycache__")
            )


def readme() -> str:
    """Return README.md, its links absolute where [project.urls] names the Repository."""
    text = (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project.get("urls", {}).get("Repository")
    if address is None:
        return text
    package = (ROOT / "deadpool_megatron" / "__init__.py").read_text()
    version = re.search('__version__ = "(.*)"', package)
    return re.sub(
        r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)",
        lambda link: f"{link[0]}{address}/{'raw' if link[1] else 'blob'}/v{version[1]}/",
        text,
    )


setup(
    cmdclass={"build_py": BuildWithSharedFiles},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
