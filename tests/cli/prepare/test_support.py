"""``deadpool support``: what it says of one command line and of many, and with a real parser."""

import json
from pathlib import Path

import pytest

from deadpool_megatron import cli
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import checkout, needs_megatron_lm

CASES = [
    ("plain", "pretrain_gpt.py", {"--num-layers": "4", "--bf16": True}, {}, "supported"),
    ("set", "pretrain_gpt.py", {"--enable-ft-package": True}, {}, "supported"),
    ("read", "pretrain_gpt.py", {"--log-straggler": True, "--lr": 0.1}, {}, "allowed"),
    ("fork", "own.py", {"--of-tomorrow": ["1", "2"]}, None, "allowed"),
    ("sharp", "pretrain_gpt.py", {"--use-sharp": True, "--of-tomorrow": "1"}, {}, "refused"),
    ("boilerplate", "own.py", {}, {"NCCL_ASYNC_ERROR_HANDLING": "1"}, "supported"),
    ("purpose", "own.py", {}, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, "refused"),
    ("gloo", "own.py", {"--distributed-backend": "gloo"}, {"NCCL_COMM_BLOCKING": 0}, "supported"),
]


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    names = ("id", "script", "flags", "env")
    lines = (json.dumps(dict(zip(names, case, strict=False))) for case in CASES)
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node 8 --rdzv_endpoint host:29500",
        "python -m torch.distributed.run --nnodes 2 --node-rank=0",
        "-m torch.distributed.launch",
        "accelerate launch --num_processes 8",
        "srun -N 2 --ntasks-per-node=1 /usr/bin/python3.11 -u",
    ],
)
@pytest.mark.parametrize("program", ["pretrain_gpt.py --use-sharp", "-m pkg.train --use-sharp"])
def test_a_launcher_that_was_pasted_is_left_out(
    launcher: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It judges, and starts, what the launcher would have started."""
    assert cli.main(["support", "--", *launcher.split(), *program.split()]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "verdict: refused"
    assert said.out.count("--use-sharp") == len(said.out.splitlines()) - 1 == 1
    assert said.err == f"deadpool: '{launcher}' is left out: deadpool starts the processes\n"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("pretrain_gpt.py --wandb-exp-name python --bf16", 0, "supported"),
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
    printed = capsys.readouterr()
    assert (printed.out.splitlines()[-1], printed.err) == (f"verdict: {said}", "")


def test_many_as_objects(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "--json", "--batch", str(batch)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["id"], each["verdict"]) for each in found] == [
        (case[0], case[-1]) for case in CASES
    ]
    by_id = {each["id"]: each for each in found}
    assert by_id["fork"]["without_fork"] == "supported"
    assert by_id["sharp"]["without_fork"] == "refused"
    assert [row["level"] for row in by_id["set"]["rows"]] == ["set"]
    assert [row["fork"] for row in by_id["sharp"]["rows"]] == [False, True]


def test_many_as_a_table(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "--batch", str(batch)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[: len(CASES)]] == [
        [case[-1], case[0]] for case in CASES
    ]
    assert "    2  not reviewed (a fork's): --of-tomorrow" in lines
    assert lines[-2].endswith("as they are: supported 4, accepted 0, allowed 2, refused 2")
    assert lines[-1].endswith("only a fork has: supported 5, accepted 0, allowed 1, refused 2")


@pytest.mark.full
@pytest.mark.megatron_lm
@needs_megatron_lm
def test_a_real_parser_gives_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the table knows nothing of a name; what it takes not is refused in its words."""
    judge = ["support", "--megatron", str(checkout()), "--json", "--", "pretrain_gpt.py", *small()]
    assert cli.main([*judge, "--async-save", "--use-persistent-ckpt-worker", "--use-nccl-ub"]) == 2
    shown = {row["shown"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "--use-nccl-ub" in shown
    assert cli.main([*judge, "--lr", "not-a-number"]) == 2
    assert "--lr" in capsys.readouterr().err
