"""The flags on Megatron-LM's command line, and the flags that they exclude."""

import argparse
import json
import tomllib
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deadpool_megatron.megatron.pretraining import pretrain_program
from deadpool_megatron.support.findings import judge, refusal
from deadpool_megatron.support.flags import REVIEWED, ROWS, UNREVIEWED, FlagRow, Level
from tests.common.pages import site_reference
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import TAG, TAGS, TREES, checkout, needs_megatron_lm
from tests.megatron_lm.harness.parsing import Answer, Question, ask, in_checkout

ROOT = Path(__file__).parents[3]
MODEL = [*small(), "--save-interval", "5"]
BOTH = "--decoupled-lr 1e-4 --mtp-num-layers 1 --pipeline-model-parallel-size 2"

_TABLES = tomllib.loads(Path(__file__).with_name("examples.toml").read_text())
EXAMPLES = dict.fromkeys(_TABLES["without_a_value"].split(), "") | _TABLES["examples"]
BY_HAND, HARMLESS, _PARSED_ONLY = (_TABLES[n] for n in ("by_hand", "harmless", "parsed_only"))


def refused(**given: object) -> str:
    return pretrain_program.refusal(argparse.Namespace(deadpool=True, **given), [])


def unread(argv: list[str]) -> str:
    return refusal(each for each in judge(argv) if each.level is Level.UNREAD)


def row_of(flag: str) -> FlagRow:
    """Return the first row: a value is set where the row that refuses does not apply."""
    return next(row for row in ROWS if flag in row.flags)


def test_every_flag_of_every_row_is_tried():
    tried = EXAMPLES.keys() | BY_HAND.keys()
    stopping = [row for row in ROWS if row.level is not Level.ACCEPTED]
    assert {flag for row in stopping for flag in row.flags} == tried


@pytest.mark.parametrize("flag", EXAMPLES)
def test_each_flag_is_seen_before_anything_starts(flag):
    assert row_of(flag).is_named_in(["--lr", "1", flag, *EXAMPLES[flag].split(), "--deadpool"])


@pytest.mark.parametrize("extra", HARMLESS)
def test_near_misses_are_not_seen_either(extra):
    argv = [*MODEL, "--deadpool", *extra.split()]
    assert not [row.shown for row in ROWS if row.is_named_in(argv, "0.16.1")]


@pytest.mark.parametrize("flag", BY_HAND)
def test_rows_that_the_parser_cannot_reach(flag):
    assert refused(**BY_HAND[flag]) == row_of(flag).line


def test_row_for_older_versions_applies_to_no_newer_one():
    found = {tag: judge(["own.py", *BOTH.split()], version=tag[6:]) for tag in TAGS}
    assert [each.shown for each in found[TAGS[1]]] == [row_of("--decoupled-lr").shown]
    assert [tag for tag in TAGS if found[tag]] == [*TAGS[:2]]


def test_no_flag_is_judged_twice():
    rows = [flag for row in ROWS for flag in row.flags]
    families = [flag for family in (*REVIEWED, *UNREVIEWED) for flag in family.flags]
    counts = Counter([*set(rows), *families])
    assert [flag for flag, count in counts.items() if count > 1] == []
    assert all(family.reason for family in (*REVIEWED, *UNREVIEWED))


def test_flags_that_no_cpu_runs_are_accepted_and_not_called_supported():
    """The reach tests leave them out: they have run nowhere."""
    cannot = tomllib.loads((ROOT / "tests" / "reach" / "rules.toml").read_text())["cannot"]
    patterns = " ".join(cannot.values()).split()
    options = ("options of what is in a row", "old names")
    run = [family for family in REVIEWED if family.title not in options]
    flags = [flag for family in run for flag in family.flags]
    assert [flag for flag in flags if any(fnmatch(flag, each) for each in patterns)] == []


def test_documentation_has_the_table():
    page = site_reference().flags_page()
    for row in ROWS:
        fate = {
            Level.ACCEPTED: "nothing",
            Level.READ: f"`--deadpool-allow {row.name}`",
            Level.SET: row.becomes,
        }.get(row.level, row.remedy)
        assert f"| `{row.shown.replace(', ', '`, `')}` | {row.reason} | {fate} |\n" in page
    for family in (*REVIEWED, *UNREVIEWED):
        assert f"| {family.title} | {family.reason} | `--" in page


#: Megatron's values for it: none that needs TransformerEngine or Apex.
GPU_PLAIN = {
    "transformer_impl": "'local'",
    "gradient_accumulation_fusion": "False",
    "masked_softmax_fusion": "False",
}


# With Megatron-LM's own parser.


def with_parser(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.full(pytest.mark.megatron_lm(needs_megatron_lm(test)))


@pytest.fixture(scope="module")
def parsers():
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
def test_every_flag_of_the_parsers_is_judged_and_no_other(parsers):
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
        # Flags of later versions were not reviewed, and are refused until then.
        assert all(unread(["pretrain_gpt.py", flag]) for flag in flags_of_tag - judged)
        assert not [flag for flag in flags_of_tag if flag.startswith("--deadpool")]


def configuration(name: str) -> list[str]:
    return (ROOT / "configs" / "megatron-lm" / name).read_text().split()


@pytest.fixture(scope="module")
def answers():
    """The answers of Megatron's parser and of ours to all command lines of this module, by name."""
    if checkout() is None:
        pytest.skip("no Megatron-LM checkout")
    questions = {
        f"{flag} {value}".strip(): Question(
            [*MODEL, "--deadpool", flag, *value.split()], validate=flag not in _PARSED_ONLY.split()
        )
        for flag, value in EXAMPLES.items()
    }
    for extra in HARMLESS:
        given = extra.split()
        # It needs training by samples.
        validate = "--rampup-batch-size" not in given
        questions[extra or "nothing"] = Question([*MODEL, "--deadpool", *given], validate=validate)
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
def test_each_flag_is_refused(answers, parsers, flag):
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
def test_near_misses_are_accepted(answers, extra):
    answer = answers[extra or "nothing"]
    assert (answer.error, answer.refused) == ("", "")


@with_parser
def test_without_deadpool_megatron_decides_alone(answers):
    assert answers["without"].shown == {"deadpool": "False", "use_sharp": "True"}
    assert answers["async"].shown == {"async_save": "False"}
    if TAGS[0] != TAG:
        assert answers["worker"].shown == {"async_strategy": "'mcore'"}


@with_parser
def test_small_configurations_are_valid_and_can_be_protected(answers):
    """tests/launch/test_pretrain_65b.py has the large configurations."""
    shown = {"data_parallel_size": "2"}
    assert answers["small.args"] == Answer(shown=shown)
    assert answers["cpu"] == Answer(shown={"distributed_backend": "'gloo'", **shown})
    assert answers["gpu-plain"] == Answer(shown=GPU_PLAIN)
