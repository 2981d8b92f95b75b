"""`deadpool simulate`: the shipped plan is answered, the same way each time."""

import json

import pytest

from deadpool_megatron import cli
from deadpool_megatron.simulation.hazards import CONSTANTS, SimulationError, read_log
from tests.simulation.jobs import ROOT

PLAN = str(ROOT / "configs" / "65b.yaml")


def simulated(capsys, *options):
    assert cli.main(["simulate", PLAN, "--seeds", "3", *options]) == 0
    return capsys.readouterr().out


def test_the_shipped_plan_is_answered(capsys):
    text = simulated(capsys)
    for name in ("restart, sync", "in-job restart", "others continue", "hot swap, elastic"):
        assert name in text
    assert "In 30 days, in GPU-hours: hot swap" in text
    assert "it pays" in text


def test_equal_seeds_give_equal_bytes_and_others_do_not(capsys):
    options = ["--json", "--days", "2", "--seeds", "1"]
    runs = [simulated(capsys, *options, "--seed", seed) for seed in ("a", "a", "b")]
    assert runs[0] == runs[1] != runs[2]
    curves = json.loads(runs[0])["curves"]
    assert max(map(int, curves["gpus"])) == 131_072
    assert {"rebuild", "large", "overhead", "spares", "survival"} <= curves.keys()


@pytest.mark.slow
def test_plots_are_drawn(capsys, tmp_path):
    simulated(capsys, "--days", "1", "--seeds", "1", "--plot", str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_each_constant_has_a_source_and_lies_in_its_range(capsys):
    assert cli.main(["simulate", "--list"]) == 0
    listed = capsys.readouterr().out
    for name, (value, low, high, mark, source) in CONSTANTS.items():
        assert low <= value <= high
        assert mark in ("measured", "published", "assumed", "setting")
        assert name in listed
        assert source in listed


def test_a_log_is_replayed(capsys, tmp_path):
    log = tmp_path / "log.jsonl"
    rows = [
        {"time": "2026-01-01T00:00:00", "node": "a", "kind": "hbm", "repaired_at": 1767312000},
        {"time": "2026-01-02T12:00:00", "node": "b", "kind": "process"},
        {"time": "2026-01-20T12:00:00", "node": "a", "kind": "hang"},
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_log(log, 66)
    assert [(each.node, each.sign) for each in trace.failures] == [
        (0, "node"),
        (1, "process"),
        (0, "hang"),
    ]
    assert trace.seconds == pytest.approx(19.5 * 86_400, abs=86_400)
    assert "ETTR" in simulated(capsys, "--rates", str(log))


@pytest.mark.parametrize(
    "line", ["{", '{"time": 1, "node": "a"}', '{"time": 1, "node": "a", "kind": "moth"}']
)
def test_a_wrong_line_of_a_log_is_named(tmp_path, line):
    log = tmp_path / "log.jsonl"
    log.write_text(f'{{"time": 0, "node": "a", "kind": "node", "repaired_at": 5}}\n\n{line}\n')
    with pytest.raises(SimulationError, match="line 3"):
        read_log(log, 66)


@pytest.mark.parametrize("assumed", ["rebild=3", "rebuild=three"])
def test_an_unknown_or_wrong_assumption_is_refused(capsys, assumed):
    assert cli.main(["simulate", PLAN, "--assume", assumed]) == 2
    assert "--assume" in capsys.readouterr().err


def test_the_coordinator_itself_can_decide(capsys):
    assert cli.main(["simulate", PLAN, "--seeds", "1", "--days", "5", "--exact"]) == 0
    found = capsys.readouterr()
    assert "minutes of one processor" in found.err
    assert "hot swap, elastic" in found.out
