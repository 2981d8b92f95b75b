"""Megatron-LM's own parser and validation, asked in a process of its own.

Other tests of a session import megatron.core from site-packages, and stand-ins stay where they are.
"""

import contextlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.megatron_lm.harness.checkout import TAG, checkout

_MODULE = "tests.megatron_lm.harness.parsing"
# For a hang; on a busy machine the import alone takes a minute. Less than a test may take.
_SECONDS = 240


@dataclass(frozen=True)
class Question:
    """A command line of a training script. ``validate``: as well as parse; ``show``: names of the
    arguments that are of interest.

    ``environment``: that of the script, but for WORLD_SIZE; None: that of the tests.
    ``gpu_generation``: the major compute capability that stands in for the machine's; None: its
    own, or the stand-in of a machine without a GPU.
    """

    arguments: Sequence[str]
    world_size: int = 1
    validate: bool = True
    show: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    gpu_generation: int | None = None


@dataclass(frozen=True)
class Answer:
    """``error`` is Megatron's, ``refused`` is ours; both empty when all is well."""

    error: str = ""
    refused: str = ""
    shown: dict[str, Any] = field(default_factory=dict)


def ask(questions: Sequence[Question]) -> list[Answer]:
    """One answer each, from the parser of the checkout with our flags in it."""
    lines = "".join(json.dumps(vars(question)) + "\n" for question in questions)
    return [Answer(**json.loads(line)) for line in in_checkout("parsing", lines)]


def in_checkout(task: str, given: str = "", tag: str = TAG) -> list[str]:
    """Lines that ``_<task>`` of this module prints, run with the checkout imported."""
    tree = checkout(tag)
    assert tree is not None
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", _MODULE, str(tree), task],
        input=given,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def _parsing() -> list[str]:
    return [json.dumps(_answer(json.loads(line))) for line in sys.stdin]


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    from megatron.training import arguments

    from deadpool_megatron.megatron.pretraining import pretrain_program

    sys.argv = ["pretrain_gpt.py", *question["arguments"]]
    try:
        with _as_asked(question):
            args = arguments.parse_args(pretrain_program.add_flags)
            pretrain_program.set_implied(args)
            if question["validate"]:
                arguments.validate_args(args)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if line := pretrain_program.refusal(args, sys.argv):
        return {"refused": line}
    return {"shown": {name: repr(getattr(args, name)) for name in question["show"]}}


@contextlib.contextmanager
def _as_asked(question: dict[str, Any]) -> Iterator[None]:
    """The environment and the GPU of a question, for as long as Megatron looks at them."""
    import torch

    before, properties = dict(os.environ), torch.cuda.get_device_properties
    if question["environment"] is not None:
        os.environ.clear()
        os.environ.update(question["environment"])
    os.environ["WORLD_SIZE"] = str(question["world_size"])
    if (generation := question["gpu_generation"]) is not None:
        device = types.SimpleNamespace(name="stand-in", major=generation, minor=0)
        torch.cuda.get_device_properties = lambda device_index=None: device
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.cuda.get_device_properties = properties


def _flags() -> list[str]:
    """Every flag of the parser without ours, the values that it lists, as a user writes them (None
    where it lists none), and whether it takes a value."""
    import argparse
    import enum

    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

    def written(choices: Any) -> list[str] | None:
        if choices is None:
            return None
        return [each.name if isinstance(each, enum.Enum) else str(each) for each in choices]

    found = sorted(parser._option_string_actions.items())
    return [
        json.dumps([flag, written(action.choices), action.nargs != 0]) for flag, action in found
    ]


def _points() -> list[str]:
    """Print the results of :mod:`versions`, installed twice; and two copies that were replaced."""
    import megatron.training
    from megatron.training import arguments, training

    from deadpool_megatron.hookpoints import is_marked, points_of
    from deadpool_megatron.support import versions

    report = versions.examine()
    versions.check(report, allow_untested=False)
    copies = (megatron.training.pretrain, arguments.validate_args, training.save_checkpoint)
    before = [is_marked(copy) for copy in copies]
    installed, again = versions.install_points(), versions.install_points()
    copies = (megatron.training.pretrain, arguments.validate_args, training.save_checkpoint)
    facts = {
        "version": report.version,
        "beside": report.tree_version,
        "troubles": [found.problem for found in report.points if found.problem],
        "marked before": before,
        "installed": installed,
        "again": again,
        "marked": [is_marked(copy) for copy in copies],
        "all": all(
            is_marked(getattr(sys.modules[point.module], point.function))
            for point in points_of(report.version)
        ),
    }
    return [json.dumps(facts)]


def _main(tree: Path, task: str) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        if torch.cuda.is_available():
            sys.path.insert(0, str(tree))
        else:
            from deadpool_megatron.megatron import stand_ins

            stand_ins.install_megatron_lm(tree)
        lines = {"parsing": _parsing, "flags": _flags, "points": _points}[task]()
    print("\n".join(lines))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
