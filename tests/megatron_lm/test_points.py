"""The names in Megatron-LM on which the hooks rely, compared with its source.

A new version fails here first. Nothing of Megatron is imported: the source is read.
"""

import ast
import runpy
from pathlib import Path

import pytest

from deadpool_megatron.support import versions
from deadpool_megatron.support.versions import FAMILIES
from tests.megatron_lm.harness.checkout import TREES, checkout

pytestmark = pytest.mark.megatron_lm

_TRAINING = "megatron/training/training.py"

#: the return values of train_step(), in this order
_ANSWER = (
    "loss_reduced",
    "skipped_iter",
    "should_checkpoint",
    "should_exit",
    "exit_code",
    "grad_norm",
    "num_zeros_in_grad",
    "log_max_attention_logit",
)


@pytest.fixture(params=TREES)
def tree(request):
    """Of each tag whose source is there."""
    found = checkout(request.param)
    if found is None:
        pytest.skip(f"no checkout of {request.param}")
    return found


def version_of(tree: Path) -> str:
    return str(runpy.run_path(str(tree / "megatron/core/package_info.py"))["__version__"])


def test_every_name_is_there(tree):
    assert versions.missing_names(tree, version_of(tree)) == ()


def test_places_of_families_are_among_the_names():
    assert tuple(FAMILIES) == versions.VERSIONS
    for version, row in FAMILIES.items():
        expected = {(name.file, name.name) for name in versions.expected_in(f"{version}.0")}
        places = (row["globals_setter"], row["finalising"], *row["common_saves"], *row["openers"])
        for module, path in (place.split(":") for place in places):
            # A builtin has no definition there.
            name = path.removesuffix(".open")
            assert name == "open" or (module.replace(".", "/") + ".py", name) in expected


def test_step_answers_in_the_known_order(tree):
    step = versions.find(ast.parse((tree / _TRAINING).read_text()), "train_step")
    assert step is not None
    answers = [
        [ast.unparse(element) for element in node.value.elts]
        for node in ast.walk(step)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    ]
    # At an early end, with losses, and without.
    assert len(answers) == 3
    assert list(_ANSWER) in answers
    for answer in answers:
        assert len(answer) == len(_ANSWER)
        assert answer[3] == "should_exit"
