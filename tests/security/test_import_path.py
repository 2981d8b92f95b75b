"""No process of ours imports what lies in the working directory."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import deadpool_megatron
from deadpool_megatron.process_names import interpreter

PACKAGE = Path(deadpool_megatron.__file__).parent


def test_a_file_in_the_working_directory_takes_no_library_s_place(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('planted')")
    for arguments in (("-c", "import queue"), ("-m", "deadpool_megatron.vault", "--help")):
        subprocess.run(interpreter(*arguments), cwd=tmp_path, check=True, capture_output=True)


def test_every_interpreter_is_started_without_the_working_directory() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            words = [ast.unparse(one) for one in getattr(node, "elts", ())]
            if "sys.executable" in words:
                following = words[words.index("sys.executable") + 1]
                assert following in ("'-P'", "'-I'"), f"{path}: {following}"
