"""A script of Megatron-LM with --deadpool: what its processes run, and which settings hold."""

import argparse
import sys
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import launch, scripts
from deadpool_megatron.megatron_lm import importing
from tests.cli.told import Complain

DEFAULT = "a.module,another"
SIZE = ("--nodes", "2", "--nproc-per-node", "1")
THREADS = "OPENBLAS_NUM_THREADS"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "pretrain_gpt.py"
    path.write_text("")
    return str(path)


def adopted(options: str, command: str) -> argparse.Namespace:
    args = argparse.Namespace(options=options.split(), command=command.split())
    scripts.adopt(args)
    return args


def refused(options: str, command: str) -> str:
    with pytest.raises(CommandError) as error:
        adopted(options, command)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "command",
    [
        "pretrain_gpt.py --num-layers 4",
        "pretrain_gpt.py --deadpool-replicas 2",
        "-m deadpool_megatron.trainer --train-iters 5",
        "train.py",
        "-m my_trainer @some.args",
    ],
)
def test_other_commands_are_left_alone(command: str) -> None:
    args = adopted("--nodes 2", command)
    assert args.command == command.split()
    assert not [name for name in vars(args) if name.startswith("deadpool")]
    assert scripts.script_of(args.command) is None
    assert scripts.modules(None, DEFAULT, args.command) == ("a.module", "another")


def test_a_script_runs_with_the_hooks_in_it() -> None:
    command = "lm/pretrain_gpt.py --lr 1 --deadpool"
    args = adopted("--nodes 2", command)
    assert args.command == ["-m", scripts.MODULE, *command.split()]
    assert scripts.script_of(args.command) == "lm/pretrain_gpt.py"
    assert scripts.modules(None, DEFAULT, args.command) == (scripts.PRELOAD,)
    assert scripts.modules("", DEFAULT, args.command) == ()
    assert scripts.modules("mine", DEFAULT, args.command) == ("mine",)
    # Once more, as when somebody copies the command of a member.
    assert scripts.member_command(args.command) == tuple(args.command)


def test_a_module_is_refused() -> None:
    assert "give the file of pretrain_gpt instead" in refused("", "-m pretrain_gpt --deadpool")


def test_what_nobody_vouches_for_is_refused_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = "lm/pretrain_gpt.py --of-tomorrow 3 --deadpool"
    assert refused("", command).startswith("--of-tomorrow is not reviewed")
    assert capsys.readouterr().err == ""
    answered = f"{command} --deadpool-allow-unreviewed of-tomorrow"
    assert adopted("", answered).command == ["-m", scripts.MODULE, *answered.split()]
    assert capsys.readouterr().err == "deadpool: --of-tomorrow is not reviewed, and let through\n"


def test_settings_of_the_script_hold() -> None:
    args = adopted(
        "--nodes 2 --deadpool-replicas 2 --deadpool-max-lag 1",
        "x.py --deadpool --deadpool-replicas 2 --deadpool-set link-gaps=off --deadpool-domains f",
    )
    named = {name: value for name, value in vars(args).items() if name.startswith("deadpool_")}
    assert named == {
        "deadpool_replicas": 2,
        "deadpool_link_gaps": "off",
        "deadpool_domains_file": "f",
    }


def test_the_script_is_named_to_what_is_preloaded() -> None:
    environment = {"OTHER": "1"}
    scripts.announce(("-m", scripts.MODULE, "lm/x.py"), environment)
    assert environment == {"OTHER": "1", scripts.VARIABLE: str(Path("lm/x.py").absolute())}
    scripts.announce(("-m", "other"), environment)
    assert environment == {"OTHER": "1"}
    assert importing.SCRIPT_VARIABLE == scripts.VARIABLE


def test_run(script: str, tmp_path: Path, started: list[launch.Launcher]) -> None:
    directory = str(tmp_path / "run")
    own = ("run", *SIZE, "--run-dir", directory, "--deadpool-max-lag", "1", "--quiet")
    # Each alone does not go with the default of the other.
    given = ("--deadpool-set", "close-seconds=100", "--deadpool-rebuild-seconds", "200")
    more = (*given, "--deadpool-set", "operation-timeout-seconds=100")
    assert cli.main([*own, "--", script, "--lr", "1", "--deadpool", *more]) == 0
    (options,) = started
    assert options.info.command == ("-m", scripts.MODULE, script, "--lr", "1", "--deadpool", *more)
    assert options.info.settings.close_seconds == 100
    assert options.info.settings.max_lag == 1
    assert options.modules == (scripts.PRELOAD,)
    assert importing.script_of_this_run() == Path(script)


@pytest.mark.parametrize("subcommand", ["run", "agent"])
def test_looking_for_the_users_module_starts_no_threads(
    subcommand: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complain: Complain
) -> None:
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


def test_argument_files_of_the_embedded_trainer_are_read_once(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer.args", tmp_path / "inner.args"
    outer.write_text(f"--lr 1 # a comment\n@{inner}\n")
    inner.write_text("--seed 7")
    args = adopted("", f"-m deadpool_megatron.trainer @{outer} --train-iters 3")
    assert args.command[2:] == ["--lr", "1", "--seed", "7", "--train-iters", "3"]
