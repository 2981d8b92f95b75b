"""``deadpool support``: what it says of a command line, and with a real parser."""

from __future__ import annotations

import json

import pytest

from deadpool_megatron import cli
from tests.cli.told import CarryOut
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import checkout, needs_megatron_lm


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("pretrain_gpt.py --bf16", 0, "supported"),
        ("pretrain_gpt.py --enable-ft-package", 0, "supported"),
        (
            "own.py --log-straggler --a 1",
            2,
            "needs --deadpool-allow log-straggler --deadpool-allow-unreviewed a",
        ),
        ("own.py --log-straggler --deadpool-allow log-straggler", 0, "allowed"),
        ("pretrain_gpt.py --use-sharp", 2, "refused"),
    ],
)
def test_one_command_line(
    command: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status is that of a start; the last line is the verdict."""
    assert cli.main(["support", "--", *command.split()]) == status
    assert capsys.readouterr().out.splitlines()[-1] == f"verdict: {said}"


@pytest.mark.parametrize(
    ("command", "variable", "verdict", "rows"),
    [
        ("own.py --of-tomorrow 1 2", "", "allowed", [("unread", True)]),
        ("x.py --use-sharp --of-tomorrow 1", "", "refused", [("refused", False), ("unread", True)]),
        ("own.py", "NCCL_ASYNC_ERROR_HANDLING", "supported", [("set", False)]),
        ("own.py", "TORCH_NCCL_USE_COMM_NONBLOCKING", "refused", [("refused", False)]),
        ("own.py --distributed-backend gloo", "TORCH_NCCL_USE_COMM_NONBLOCKING", "supported", []),
    ],
)
def test_as_an_object(
    command: str,
    variable: str,
    verdict: str,
    rows: list[tuple[str, bool]],
    carry_out: CarryOut,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flags that no version of Megatron-LM has are marked; variables count where NCCL reads
    them."""
    if variable:
        monkeypatch.setenv(variable, "1")
    _, out, _ = carry_out("support", "--json", "--", *command.split())
    found = json.loads(out)
    assert found["verdict"] == verdict
    assert [(row["level"], row["fork"]) for row in found["rows"]] == rows


@pytest.mark.full
@pytest.mark.megatron_lm
@needs_megatron_lm
def test_a_real_parser_gives_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the table knows nothing of a name, and the table judges what it does not take."""
    command = [*small(), "--async-save", "--use-persistent-ckpt-worker", "--use-nccl-ub"]
    for more in ([], ["--lr", "not-a-number"]):
        tree = ["--megatron", str(checkout())]
        assert cli.main(["support", *tree, "--json", "--", "pretrain_gpt.py", *command, *more]) == 2
        shown = {row["shown"] for row in json.loads(capsys.readouterr().out)["rows"]}
        assert "--use-nccl-ub" in shown
