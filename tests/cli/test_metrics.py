"""A run as metrics and as a page's state: what it says, and of a coordinator that is away."""

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.metrics import RunCollector, metrics
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import claim_term
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, write_json
from deadpool_megatron.events import Event, Kind, to_line
from deadpool_megatron.observe.view import view
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import create_secret
from tests.common.ports import free_port
from tests.common.synthetic_run import status_of, story_of

CONFIGS = Path(__file__).parents[2] / "configs"
#: the time for a scrape, unless the server is told otherwise
PROMETHEUS_SECONDS = 10.0


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no prometheus: scripts/system-packages.sh"
)
def test_rules_fire_and_clear():
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        there = CONFIGS / "prometheus"
        done = subprocess.run(["promtool", *words], cwd=there, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def told(
    events: list[Event], status: dict[str, Any] | None = None, now: float = 0.0
) -> dict[str, list[Any]]:
    """Every metric's samples."""
    seen = view(story_of(*events), status, "R", now)
    found = metrics(seen, {"run": "r", "version": "v"})
    return {metric.name: metric.samples for metric in found}


def test_metrics_of_the_dashboard_and_the_alerts_exist():
    """Also those of a run that continues, or has ended."""
    ended = Event(Kind.RUN_ENDED, 1, data={"exit_status": 0}, wall_seconds=99.0)
    saved = Event(Kind.DURABLE, 1, iteration=2, data={"path": "x"}, wall_seconds=50.0)
    events = [Event(Kind.RUN_STARTED, wall_seconds=1.0), *trained(5), saved]
    ways = [told([*events, *end], status_of(2, 4)) for end in ([], [ended])]
    known = {name for way in ways for name in way}
    known |= {sample.name for way in ways for found in way.values() for sample in found}
    texts = [*CONFIGS.glob("grafana/*.json"), CONFIGS / "prometheus" / "alerts.yml"]
    asked = {name for path in texts for name in re.findall(r"deadpool_\w+", path.read_text())}
    assert {name.removesuffix("_bucket") for name in asked} - known == set()


@pytest.mark.full
def test_metrics_answer_before_a_scrape_ends_although_a_host_is_off(silent_run):
    """Two coordinators are named, and neither answers."""
    create_secret(silent_run.path)
    first, second = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with first, second:
        place = {"host": "127.0.0.1", "port": first.getsockname()[1], "pid": 1}
        write_json(silent_run.coordinator, place)
        claim_term(Journal(silent_run.journal), 1, *second.getsockname(), None)
        began = time.monotonic()
        found = {
            metric.name: metric.samples[0].value for metric in RunCollector(silent_run).collect()
        }
        assert time.monotonic() - began < PROMETHEUS_SECONDS
    assert found["deadpool_up"] == 0.0
    assert found["deadpool_iteration"] == 5


def trained(steps: int) -> list[Event]:
    """A node that trains one iteration a second."""
    joined = Event(Kind.NODE_JOINED, 0, 0, data={"spare": False}, wall_seconds=0.0)
    opened = Event(Kind.EPOCH_OPENED, 1, wall_seconds=10.0)
    return [joined, opened, *(step(k, 10.0 + k) for k in range(1, steps + 1))]


def step(iteration: int, at: float) -> Event:
    return Event(Kind.STEP, 1, iteration=iteration, wall_seconds=at, data={"loss": "0x1p+0"})


@pytest.fixture
def silent_run(tmp_path):
    """A run that has written some events, and whose coordinator is away."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    info = RunInfo("0123abcd", 1, 1, 1, 0, ("x.py",), Settings())
    (run.path / "run.json").write_text(json.dumps(info.to_dict()))
    run.events.write_bytes(b"".join(map(to_line, trained(5))))
    write_json(run.coordinator, {"host": "127.0.0.1", "port": free_port(), "pid": 1})
    return run
