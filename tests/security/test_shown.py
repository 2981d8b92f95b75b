"""Output, secrets and imports: no escape sequences, no secret in a member, no planted modules."""

import ast
import io
import json
import os
import subprocess
from pathlib import Path

import deadpool_megatron
from deadpool_megatron import cli
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cli.start import run
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.observe.narration import printable
from deadpool_megatron.process_names import interpreter
from deadpool_megatron.wire import auth

PACKAGE = Path(deadpool_megatron.__file__).parent


def test_output_has_no_escape_sequences_of_others(tmp_path, capsys):
    text = "loss\x1b]0;owned\x07 1.5 é\r\u009b2J\n\tnext"
    assert printable(text) == "loss?]0;owned? 1.5 é??2J\n\tnext"
    stream = io.StringIO()
    display = Display(stream)
    display.line(text)
    display.status(text)
    display.close()
    assert "\x1b" not in stream.getvalue()
    run.print_result(RunDirectory(tmp_path), 1, text)
    assert cli.main(["status", str(tmp_path / text)]) == 2
    assert "\x1b" not in capsys.readouterr().err


MEMBER = """
import json, socket, sys
from deadpool_megatron.cluster.process.member_main import MemberSpec, become_member
near, far = socket.socketpair()
become_member(MemberSpec.from_dict(json.loads(sys.argv[1])), far.fileno())
"""


def test_member_has_no_secret_in_its_environment(tmp_path):
    """Nor does /proc show the secret with which its process was started."""
    script, secret = tmp_path / "script.py", "0123456789abcdef"
    script.write_text(
        "import os\n"
        "print(dict(os.environ), open('/proc/self/environ').read(), file=open('seen', 'w'))\n"
    )
    spec = {
        "place": dict.fromkeys(("node", "local_rank", "incarnation"), 0),
        "command": [str(script)],
        "directory": str(tmp_path),
        "log": str(tmp_path / "log"),
        "environment": {"DEADPOOL_RUN_DIR": str(tmp_path), auth.ENVIRONMENT_NAME: secret},
    }
    environment = {**os.environ, "BEFORE": "1", auth.ENVIRONMENT_NAME: secret, "BEHIND": "2"}
    program = interpreter("-c", MEMBER, json.dumps(spec))
    subprocess.run(program, env=environment, check=True)
    seen = (tmp_path / "seen").read_text()
    assert secret not in seen
    assert f"BEFORE=1\0{auth.ENVIRONMENT_NAME}={'-' * len(secret)}\0BEHIND=2" in seen


def test_working_directory_shadows_no_library(tmp_path):
    (tmp_path / "queue.py").write_text("raise SystemExit('planted')")
    for arguments in (("-c", "import queue"), ("-m", "deadpool_megatron.vault", "--help")):
        subprocess.run(interpreter(*arguments), cwd=tmp_path, check=True, capture_output=True)


def test_package_starts_interpreters_without_the_working_directory():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            elements = [ast.unparse(element) for element in getattr(node, "elts", ())]
            if "sys.executable" in elements:
                following = elements[elements.index("sys.executable") + 1]
                assert following in ("'-P'", "'-I'"), f"{path}: {following}"
