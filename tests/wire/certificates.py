"""Certificates for tests, made with the very lines that docs/security.md gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deadpool_megatron.settings import Settings

_PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def documented_lines() -> str:
    """The openssl lines of the page."""
    _, found, rest = _PAGE.read_text().partition("```openssl\n")
    assert found, "docs/security.md says how to make certificates"
    return rest.partition("```")[0]


def make(directory: Path, change: tuple[str, str] = ("", "")) -> dict[str, str]:
    """Run the lines, one text replaced by another; answers the three settings."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    directory.mkdir(parents=True, exist_ok=True)
    lines = documented_lines()
    if change[0]:
        assert change[0] in lines
    script = "set -e\n" + lines.replace(*change) if change[0] else "set -e\n" + lines
    subprocess.run(["bash", "-c", script], cwd=directory, check=True, capture_output=True)
    return {
        "tls_certificate": str(directory / "node.pem"),
        "tls_key": str(directory / "node.key"),
        "tls_authority": str(directory / "authority.pem"),
    }


def options(settings: dict[str, str]) -> list[str]:
    """The settings as flags."""
    known = Settings(**settings)  # type: ignore[arg-type]
    return [
        *("--deadpool-tls-certificate", known.tls_certificate),
        *("--deadpool-tls-key", known.tls_key),
        *("--deadpool-tls-authority", known.tls_authority),
    ]
