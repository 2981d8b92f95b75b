"""The flags on Megatron-LM's command line: what they look like, and what they refuse to go with."""

import argparse
import json
import tomllib
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from megatron.core.transformer.enums import AttnBackend

from deadpool_megatron import arguments
from deadpool_megatron.hooks.pretraining import attach
from deadpool_megatron.settings import ENVIRONMENT_NAME, Settings
from deadpool_megatron.support import flags as flag_tables
from deadpool_megatron.support.flags import REVIEWED, ROWS, UNREVIEWED, FlagRow, Level
from deadpool_megatron.support.judgement import judge, never_run, notes, refusal, verdict
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import TAG, TAGS, TREES, checkout, needs_megatron_lm
from tests.megatron_lm.harness.parsing import Answer, Question, ask, in_checkout

ROOT = Path(__file__).parents[3]
MODEL = [*small(), "--save-interval", "5"]

_TABLES = tomllib.loads(Path(__file__).with_name("examples.toml").read_text())
EXAMPLES = dict.fromkeys(_TABLES["without_a_value"].split(), "") | _TABLES["examples"]
BY_HAND, HARMLESS, _PARSED_ONLY = (_TABLES[n] for n in ("by_hand", "harmless", "parsed_only"))


def parser() -> argparse.ArgumentParser:
    return attach.add_flags(argparse.ArgumentParser(allow_abbrev=False))


def refused(**given: object) -> str:
    return attach.refusal(argparse.Namespace(deadpool=True, **given), [])


def set_by(flag: str, **given: object) -> dict[str, object]:
    """The arguments that a row has set in a namespace with these."""
    args = argparse.Namespace(deadpool=True, **given)
    assert row_of(flag).level is Level.SET
    attach.set_for_the_user(args)
    assert not attach.refusal(args, ["pretrain_gpt.py"])
    return {name: value for name, value in vars(args).items() if name != "deadpool"}


def unread(argv: list[str]) -> str:
    return refusal(each for each in judge(argv) if each.level is Level.UNREAD)


def row_of(flag: str) -> FlagRow:
    """The first: what is set is set where the one that refuses does not apply."""
    return next(row for row in ROWS if flag in row.flags)


def test_defaults_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_NAME, raising=False)
    args = parser().parse_args([])
    assert not args.deadpool
    assert not args.deadpool_allow_untested_megatron
    assert arguments.settings_from(args) == Settings()
    settings = Settings(replicas=2, close_seconds=11.5)
    monkeypatch.setenv(ENVIRONMENT_NAME, settings.to_json())
    assert arguments.settings_from(parser().parse_args([])) == settings
    given = parser().parse_args(["--deadpool-replicas", "3"])
    assert given.deadpool_replicas == 3


def test_saves_must_not_go_where_exports_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEADPOOL_RUN_DIR", str(tmp_path / "run"))
    settings = Settings(persist_directory=str(tmp_path / "saves"))
    monkeypatch.setenv(ENVIRONMENT_NAME, settings.to_json())
    assert "is where the run's exports go" in refused(save=str(tmp_path / "saves"))
    assert not attach.refusal(argparse.Namespace(deadpool=True, save=str(tmp_path / "others")), [])
    assert not attach.refusal(argparse.Namespace(deadpool=True, save=None), [])


def test_nothing_is_refused_without_deadpool() -> None:
    argv = ["pretrain_mamba.py", "--of-tomorrow"]
    assert not attach.refusal(argparse.Namespace(), argv)
    assert not attach.refusal(argparse.Namespace(deadpool=False, inprocess_restart=True), argv)


def test_every_flag_of_every_row_is_tried() -> None:
    tried = EXAMPLES.keys() | BY_HAND.keys()
    stopping = [row for row in ROWS if row.level is not Level.ACCEPTED]
    assert {flag for row in stopping for flag in row.flags} == tried


@pytest.mark.parametrize("flag", EXAMPLES)
def test_each_flag_is_seen_before_anything_starts(flag: str) -> None:
    assert row_of(flag).is_named_in(["--lr", "1", flag, *EXAMPLES[flag].split(), "--deadpool"])


@pytest.mark.parametrize("extra", HARMLESS)
def test_near_misses_are_not_seen_either(extra: str) -> None:
    argv = [*MODEL, "--deadpool", *extra.split()]
    assert not [row.shown for row in ROWS if row.is_named_in(argv, "0.16.1")]


@pytest.mark.parametrize("flag", BY_HAND)
def test_rows_that_the_parser_cannot_reach(flag: str) -> None:
    assert refused(**BY_HAND[flag]) == row_of(flag).line


def test_what_deadpool_replaces_is_left_out_by_the_parser() -> None:
    """At once: a script looks at --inprocess-restart before anything validates."""
    assert set_by("--inprocess-restart", inprocess_restart=True) == {"inprocess_restart": False}
    local = {"non_persistent_ckpt_type": "local", "non_persistent_save_interval": 4}
    unset = {"non_persistent_ckpt_type": None, "non_persistent_save_interval": None}
    assert set_by("--non-persistent-ckpt-type", **local) == {**unset, "replication": False}
    made = attach._add_arguments(lambda parser: parser, argparse.ArgumentParser())
    made.add_argument("--enable-ft-package", action="store_true")
    for argv in (["--enable-ft-package"], ["--enable-ft-package", "--deadpool"]):
        args = made.parse_args(argv)
        assert args.enable_ft_package is not args.deadpool


def test_what_was_read_is_taken_by_name() -> None:
    argv = ["pretrain_gpt.py", "--log-straggler", "--deadpool"]
    line = refusal(judge(argv))
    assert line.endswith("--deadpool-allow log-straggler")
    args = argparse.Namespace(deadpool=True, log_straggler=True)
    assert attach.refusal(args, argv) == line
    allowing = [*argv, "--deadpool-allow", "log-straggler"]
    assert not attach.refusal(args, allowing)
    assert notes(judge(allowing)) == ["--log-straggler is read and never run, and let through"]


def test_several_flags_are_named_at_once() -> None:
    line = refused(fim_data=True, use_sharp=True, nccl_ub=True, log_straggler=True)
    assert line.startswith("--use-nccl-ub cannot be protected: ")
    assert "(refused as well: --use-sharp, --fim-data)" in line
    assert line.endswith("(read and never run as well: --log-straggler)")


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["--dataloader-type=external"], "--dataloader-type external"),
        (["--yaml-cfg", "x.yaml"], "--yaml-cfg"),
        (["--optimizer", "soap", "--lr", "1"], "--optimizer other than adam"),
        (["--error-injection-rate=2"], "--error-injection-rate above 0"),
        (["--dataloader-type", "external", "--dataloader-type", "single"], ""),
        (["--error-injection-rate", "many"], ""),
        (["use-sharp"], ""),
    ],
)
def test_what_the_command_line_alone_says(argv: list[str], found: str) -> None:
    line = refusal(judge(["own.py", *argv]))
    assert line.startswith(found)
    assert bool(line) == bool(found)


AUX = "--moe-router-load-balancing-type"


@pytest.mark.parametrize(
    ("said", "named", "allowed"),
    [
        ("pretrain_gpt.py --lr 1 --of-tomorrow --deadpool", "--of-tomorrow", "of-tomorrow"),
        (
            "pretrain_gpt.py --fp8-output-proj=8 --spec my.specs stack",
            "--fp8-output-proj",
            "--spec=stack)",
        ),
        ("/lm/pretrain_vlm.py --deadpool", "pretrain_vlm.py", "pretrain_vlm.py"),
        ("own.py --a --b --deadpool-allow-unreviewed a", "--b", "b"),
        (f"pretrain_gpt.py {AUX} aux_loss new", f"{AUX}=new", f"{AUX[2:]}=new"),
        ("pretrain_gpt.py --rope-type=spiral", "--rope-type=spiral", "rope-type=spiral"),
        ("own.py --rope-type=spiral --deadpool-allow-unreviewed=rope-type=spiral", "", ""),
        ("pretrain_gpt.py --rope-type yarn --seed spiral", "", ""),
        ("pretrain_gpt.py --bf16 --deadpool --deadpool-replicas 2", "", ""),
    ],
)
def test_what_nobody_vouches_for_is_refused_by_name(said: str, named: str, allowed: str) -> None:
    """With the flag that lets it through, or with the others that are as well."""
    argv = said.split()
    line = unread(argv)
    assert bool(line) == bool(named)
    assert "\n" not in line
    if line:
        assert line.startswith(f"{named} is not reviewed: ")
        assert line.endswith(f" {allowed}")
        assert attach.refusal(argparse.Namespace(deadpool=True), argv) == line


def test_several_can_be_answered_for() -> None:
    allow = ["--deadpool-allow-unreviewed", "a", "--deadpool-allow-unreviewed=--c"]
    argv = ["pretrain_gpt.py", "--a", "--b", "--c", *allow]
    assert unread(argv).startswith("--b is not reviewed")
    through = [f"--{name} is not reviewed, and let through" for name in "ac"]
    assert notes(judge(argv)) == through
    assert parser().parse_args(allow).deadpool_allow_unreviewed == ["a", "--c"]


def test_one_logger_is_refused_where_it_would_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not attach.refusal(argparse.Namespace(deadpool=True, enable_one_logger=True), [])
    monkeypatch.setattr(flag_tables, "_is_installed", lambda package: package == "one_logger")
    assert not attach.refusal(argparse.Namespace(deadpool=True, enable_one_logger=False), [])
    assert refused(enable_one_logger=True).endswith("give --no-one-logger")


def test_no_flag_is_judged_twice() -> None:
    rows = [flag for row in ROWS for flag in row.flags]
    families = [flag for family in (*REVIEWED, *UNREVIEWED) for flag in family.flags]
    counts = Counter([*set(rows), *families])
    assert [flag for flag, count in counts.items() if count > 1] == []
    assert all(family.reason for family in (*REVIEWED, *UNREVIEWED))


def test_what_no_cpu_runs_is_accepted_and_not_called_supported() -> None:
    """As the reach tests leave it out: nobody has run it, anywhere."""
    cannot = tomllib.loads((ROOT / "tests" / "reach" / "rules.toml").read_text())["cannot"]
    patterns = " ".join(cannot.values()).split()
    options = ("options of what is in a row", "old names")
    run = [one for one in REVIEWED if one.title not in options]
    flags = [flag for family in run for flag in family.flags]
    assert [flag for flag in flags if any(fnmatch(flag, each) for each in patterns)] == []


def test_what_was_never_run_is_said_and_stops_nothing() -> None:
    given = ["--context-parallel-size", "2", "--bf16", "--fp8-format", "hybrid"]
    found = judge(["pretrain_gpt.py", *given])
    assert verdict(found) == "accepted"
    assert never_run(found) == ["--context-parallel-size", "--fp8-format"]
    assert refusal(found) == ""
    assert notes(found)[0].startswith("--context-parallel-size was reviewed and never run: ")
    plain = ["pretrain_gpt.py", "--context-parallel-size", "1", "--attention-backend", "unfused"]
    assert verdict(judge(plain)) == "supported"
    args = argparse.Namespace(attention_backend=AttnBackend.flash, context_parallel_size=1)
    assert never_run(judge(plain[:1], args)) == [flag_tables.ACCEPTED[3].shown]


def test_the_documentation_has_the_table() -> None:
    page = (ROOT / "docs" / "megatron-lm.md").read_text()
    for row in ROWS:
        if row.level is Level.ACCEPTED:
            assert all(f"`{flag}`" in page for flag in row.flags)
            continue
        fate = row.becomes if row.level is Level.SET else f"refused: {row.remedy}"
        if row.level is Level.READ:
            fate = f"read: `--deadpool-allow {row.name}`"
        assert f"| `{row.shown.replace(', ', '`, `')}` | {row.reason} | {fate} |\n" in page


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "WORLD_SIZE": "32",
    "LOCAL_WORLD_SIZE": "8",
    "RANK": "0",
}
ARGV = ["pretrain_gpt.py", "--data-path", "my text", "--deadpool"]
#: What Megatron makes of it: nothing that TransformerEngine or Apex has to bring.
GPU_PLAIN = {
    "transformer_impl": "'local'",
    "gradient_accumulation_fusion": "False",
    "masked_softmax_fusion": "False",
}
COMMAND = "--run-dir DIR -- pretrain_gpt.py --data-path 'my text' --deadpool"


@pytest.mark.parametrize(
    ("environ", "reason", "nodes", "members"),
    [
        (TORCHRUN, "torchrun", 4, 8),
        (
            {**TORCHRUN, "WORLD_SIZE": "8", "SLURM_STEP_ID": "0", "SLURM_NNODES": "3"},
            *("torchrun", 1, 8),
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "16"},
            *("started by srun", 2, 8),
        ),
        ({}, "no agent", 1, 1),
        ({"WORLD_SIZE": "4", "SLURM_JOB_ID": "1"}, "no agent", 4, 1),
        ({"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": ""}, "no agent", 1, 1),
    ],
)
def test_another_launcher_is_told_how(
    environ: dict[str, str], reason: str, nodes: int, members: int
) -> None:
    line = attach.launch_problem(environ, ARGV)
    assert line is not None
    assert "\n" not in line
    assert line.startswith(reason)
    size = f"--nodes {nodes} --spares 1 --nproc-per-node {members}"
    assert f"deadpool run {size} {COMMAND}" in line
    assert ("one 'deadpool agent' on each" in line) == (nodes > 1)


def test_members_and_unprotected_runs_have_no_problem() -> None:
    assert attach.launch_problem({**TORCHRUN, "DEADPOOL_AGENT_FD": "5"}, ARGV) is None
    assert attach.launch_problem(TORCHRUN, ["pretrain_gpt.py", "--deadpool-replicas", "2"]) is None


# With Megatron-LM's own parser.


def with_parser(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.full(pytest.mark.megatron_lm(needs_megatron_lm(test)))


@pytest.fixture(scope="module")
def parsers() -> dict[str, dict[str, list[str]]]:
    """By tag: each flag, and the values that its parser lists; "" for a flag without a value."""
    return {
        tag: {
            flag: listed or ([] if takes_value else [""])
            for flag, listed, takes_value in map(json.loads, in_checkout("flags", tag=tag))
        }
        for tag in TREES
        if checkout(tag) is not None
    }


@with_parser
def test_every_flag_of_the_parsers_is_judged_and_no_other(
    parsers: dict[str, dict[str, list[str]]],
) -> None:
    """With :func:`test_no_flag_is_judged_twice`: each is in exactly one list."""
    known = {
        tag: {flag for flag in flags_of_tag if flag.startswith("--")}
        for tag, flags_of_tag in parsers.items()
    }
    judged = {flag for family in (*REVIEWED, *UNREVIEWED) for flag in family.flags}
    judged |= {flag for row in ROWS for flag in row.flags}
    of_a_package = {flag for row in ROWS if row.only_with == "kitchen" for flag in row.flags}
    if len(known) == len(TREES):
        assert judged - of_a_package <= set().union(*known.values())
    for tag, flags_of_tag in known.items():
        if tag == TAGS[0]:
            assert flags_of_tag <= judged
        # Nobody has read what came later: it is refused until somebody has.
        assert all(unread(["pretrain_gpt.py", flag]) for flag in flags_of_tag - judged)
        assert not [flag for flag in flags_of_tag if flag.startswith("--deadpool")]


def configuration(name: str) -> list[str]:
    return (ROOT / "configs" / "megatron-lm" / name).read_text().split()


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """By name: what Megatron's parser and ours say to all command lines of this module."""
    if checkout() is None:
        pytest.skip("no Megatron-LM checkout")
    questions = {
        f"{flag} {value}".strip(): Question(
            [*MODEL, "--deadpool", flag, *value.split()], validate=flag not in _PARSED_ONLY.split()
        )
        for flag, value in EXAMPLES.items()
    }
    for extra in HARMLESS:
        words = extra.split()
        # It needs training by samples.
        validate = "--rampup-batch-size" not in words
        questions[extra or "nothing"] = Question([*MODEL, "--deadpool", *words], validate=validate)
    questions["without"] = Question([*MODEL, "--use-sharp"], show=("deadpool", "use_sharp"))
    if TAGS[0] != TAG:
        beside = [*MODEL, "--deadpool", "--async-save", "--use-persistent-ckpt-worker"]
        questions["worker"] = Question(beside, show=("async_strategy",))
    questions["async"] = Question([*MODEL, "--deadpool", "--async-save"], show=("async_save",))
    small_model = [*configuration("small.args"), "--deadpool", "--save", "there"]
    questions["small.args"] = Question(small_model, 4, show=("data_parallel_size",))
    both = [*configuration("small.args"), *configuration("cpu.args"), "--deadpool"]
    questions["cpu"] = Question(both, 4, show=("distributed_backend", "data_parallel_size"))
    plain = [*configuration("small.args"), *configuration("gpu-plain.args"), "--bf16", "--deadpool"]
    questions["gpu-plain"] = Question(plain, 4, show=tuple(GPU_PLAIN))
    return dict(zip(questions, ask(list(questions.values())), strict=True))


@with_parser
@pytest.mark.parametrize("flag", EXAMPLES)
def test_each_flag_is_refused(
    answers: dict[str, Answer], parsers: dict[str, dict[str, list[str]]], flag: str
) -> None:
    answer = answers[f"{flag} {EXAMPLES[flag]}".strip()]
    if answer.error.startswith("SystemExit"):
        values = parsers[TAG].get(flag)
        assert values is None or (values and EXAMPLES[flag] not in values), answer.error
        pytest.skip(f"{TAG} does not have it")
    assert answer.error == ""
    if row_of(flag).level is Level.SET:
        assert answer.refused == ""
        return
    # Graphs turn on the generators of another row.
    assert answer.refused.startswith(row_of(flag).line)


@with_parser
@pytest.mark.parametrize("extra", HARMLESS)
def test_near_misses_are_accepted(answers: dict[str, Answer], extra: str) -> None:
    answer = answers[extra or "nothing"]
    assert (answer.error, answer.refused) == ("", "")


@with_parser
def test_without_deadpool_megatron_decides_alone(answers: dict[str, Answer]) -> None:
    assert answers["without"].shown == {"deadpool": "False", "use_sharp": "True"}
    assert answers["async"].shown == {"async_save": "False"}
    if TAGS[0] != TAG:
        assert answers["worker"].shown == {"async_strategy": "'mcore'"}


@with_parser
def test_small_configurations_are_valid_and_can_be_protected(answers: dict[str, Answer]) -> None:
    """tests/launch/test_pretrain_65b.py has the large ones."""
    shown = {"data_parallel_size": "2"}
    assert answers["small.args"] == Answer(shown=shown)
    assert answers["cpu"] == Answer(shown={"distributed_backend": "'gloo'", **shown})
    assert answers["gpu-plain"] == Answer(shown=GPU_PLAIN)
