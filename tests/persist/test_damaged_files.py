"""Small files of a run that a crash or a hand has damaged: a line, not the end of a coordinator."""

import json

import pytest

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import resume
from deadpool_megatron.cluster.coordinator.succession import valid_checkpoints
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.history import History
from deadpool_megatron.settings import Settings
from deadpool_megatron.state import template
from tests.persist.harness.exported import exported, saved_at

INFO = RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation", None),
        ("generation", [float("inf"), 2]),
        ("generation", "none"),
        ("sources", []),
        ("sources", {"0": {"shard": 1}}),
    ],
)
def test_damaged_pointer_to_the_newest_checkpoint_is_reported(tmp_path, name, value):
    run = RunDirectory(tmp_path)
    values = {**saved_at(4, tmp_path).to_dict(), name: value}
    run.latest.write_text(json.dumps({"valid": [values]}))
    with pytest.raises(ValueError, match=r"latest\.json is damaged"):
        valid_checkpoints(run)
    assert resume.saved_states(run, INFO, range(2), History()) == ([], [f"{run.latest} is damaged"])
    final = exported(run, tmp_path / "exports", 8)
    assert [restore.path for restore in valid_checkpoints(run)] == [str(final)]


def test_unreadable_pointer_to_the_newest_checkpoint_is_reported(tmp_path):
    run = RunDirectory(tmp_path)
    run.latest.mkdir()
    with pytest.raises(CommandError, match=r"latest\.json: Is a directory"):
        resume.saved_states(run, INFO, range(2), History())


@pytest.mark.parametrize("left", [0, 1, 300, -1])
def test_cut_skeleton_is_refused(tmp_path, left):
    """The coordinator's warning is the exporter's last line."""
    template.write_template(tmp_path, template.StateTemplate(3, "hash"))
    path = template.template_path(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(template.TemplateError, match=r"skeleton-3\.pt is damaged: \w+$"):
        template.read_template(tmp_path, 3, "hash")
