"""A run as metrics: read by a real Prometheus, of a real run that loses a node."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.observe import metrics, serve
from deadpool_megatron.cli.observe.metrics import Watched
from deadpool_megatron.cli.observe.samples import Samples
from deadpool_megatron.cli.observe.serve import PageState
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.journal.journal import DirectoryJournal
from deadpool_megatron.cluster.journal.terms import claim_term
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, write_json
from deadpool_megatron.events import Event, Kind, to_line
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import create_secret
from tests.cli.told import Complain
from tests.cluster.running import Run, environment, send
from tests.common.ports import free_port
from tests.common.waiting import wait_for

CONFIGS = Path(__file__).parents[3] / "configs"
CONFIG = """\
global: { scrape_interval: 1s, evaluation_interval: 1s }
rule_files: [%s]
scrape_configs:
  - job_name: deadpool
    static_configs: [{ targets: ['127.0.0.1:%d'] }]
"""
#: the time for a scrape, unless the server is told otherwise
PROMETHEUS_SECONDS = 10.0
#: what is there once it has happened only
_LATER = ("checkpoint_iteration",)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus: scripts/system-packages.sh"
)


@needs_prometheus
def test_rules_fire_and_clear() -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        command = ["promtool", *words]
        there = CONFIGS / "prometheus"
        done = subprocess.run(command, cwd=there, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A server of its own that scrapes one port."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1"

    def values(self, expression: str) -> list[float]:
        """The values of an instant query."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._base}/query?{query}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
        return [float(series["value"][1]) for series in found]

    def is_up(self) -> bool:
        try:
            return self.values("up") == [1.0]
        except (OSError, urllib.error.URLError):
            return False


@contextmanager
def process(*command: object, log: Path) -> Iterator[None]:
    with open(log, "wb") as output:
        child = subprocess.Popen(
            list(map(str, command)), env=environment(), stdout=output, stderr=output
        )
        try:
            yield
        finally:
            child.kill()
            child.wait()


@contextmanager
def prometheus(place: Path, scraped: int) -> Iterator[Prometheus]:
    port = free_port()
    config = place / "prometheus.yml"
    config.write_text(CONFIG % (CONFIGS / "prometheus" / "alerts.yml", scraped))
    words = [f"--config.file={config}", f"--storage.tsdb.path={place / 'tsdb'}"]
    address = f"--web.listen-address=127.0.0.1:{port}"
    with process("prometheus", *words, address, log=place / "prometheus.log"):
        yield Prometheus(port)


def dashboard() -> list[str]:
    """Every expression of the dashboard, for the last seconds of all runs."""
    panels = json.loads((CONFIGS / "grafana" / "deadpool.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [e.replace("$instance", ".*").replace("$__rate_interval", "10s") for e in found]


@pytest.mark.full
@needs_prometheus
@pytest.mark.slow
def test_a_server_sees_a_run_lose_a_node(tmp_path: Path) -> None:
    scraped = free_port()
    deadpool = (sys.executable, "-m", "deadpool_megatron")
    listen = ("--listen", f"127.0.0.1:{scraped}")
    with Run(tmp_path / "r") as run:
        run.wait_iteration(3)
        with (
            process(*deadpool, "metrics", run.run.path, *listen, log=tmp_path / "metrics.log"),
            prometheus(tmp_path, scraped) as server,
        ):
            run.wait_for("a first scrape", server.is_up)
            run.wait_for("a coordinator", lambda: server.values("deadpool_up") == [1.0])
            run.wait_for("the spare", lambda: spares(server) == [1.0])
            send(run.listing(0)["agent"])
            recovered = 'deadpool_recoveries_total{kind="node-lost"}'
            run.wait_for("the recovery", lambda: server.values(recovered) == [1.0])
            grown = "sum(increase(deadpool_recoveries_total[5m])) > 0"
            run.wait_for("the first of its kind to count", lambda: server.values(grown))
            run.wait_for("the spare to be used", lambda: spares(server) == [0.0])
            alert = 'ALERTS{alertname="DeadpoolNoSpare"}'
            run.wait_for("the alert to be pending", lambda: server.values(alert) == [1.0])
            wanted = [e for e in dashboard() if not any(name in e for name in _LATER)]
            run.wait_for("all panels", lambda: all(map(server.values, wanted)))
            run.finish()
            wait_for("the end", lambda: server.values("deadpool_exit_status") == [0.0])


def test_what_has_not_happened_yet_is_there_as_zero() -> None:
    """A server sees no increase of a series that begins at one."""
    samples = Samples("run", "version")

    def counted() -> dict[tuple[str, str], float]:
        return {
            (sample.name, label): sample.value
            for metric in samples.metrics(None, 0.0)
            for sample in metric.samples
            for label in (sample.labels.get("kind"), sample.labels.get("phase"))
            if label is not None
        }

    before = counted()
    assert set(before.values()) == {0.0}
    for kind in FailureKind:
        assert ("deadpool_recoveries_total", kind) in before
        assert ("deadpool_recovery_seconds_count", kind) in before
    assert ("deadpool_recovery_phase_seconds_total", "restore") in before
    samples.add(Event(Kind.RUN_STARTED, wall_seconds=5.0))
    (started,) = (m for m in samples.metrics(None, 0.0) if "start_timestamp" in m.name)
    assert started.samples[0].value == 5.0
    data = {"kind": "node-lost", "seconds": 2.0, "phases": {"restore": 1.5}}
    samples.add(Event(Kind.RECOVERED, data=data))
    after = counted()
    assert after.keys() == before.keys()
    assert after["deadpool_recoveries_total", "node-lost"] == 1.0
    assert after["deadpool_recovery_phase_seconds_total", "restore"] == 1.5


def spares(server: Prometheus) -> list[float]:
    return server.values('deadpool_nodes{state="spare"}')


@pytest.mark.full
def test_a_host_that_is_off_is_told_before_a_server_gives_the_scrape_up(
    silent_run: RunDirectory,
) -> None:
    """Two coordinators are named, and neither answers: the run is seen to be away, and its other
    numbers are there."""
    create_secret(silent_run.path)
    with (
        socket.create_server(("127.0.0.1", 0)) as told,
        socket.create_server(("127.0.0.1", 0)) as named,
    ):
        place = {"host": "127.0.0.1", "port": told.getsockname()[1], "pid": 1}
        write_json(silent_run.coordinator, place)
        claim_term(DirectoryJournal(silent_run.journal), 1, *named.getsockname(), None)
        began = time.monotonic()
        found = {metric.name: metric.samples[0].value for metric in Watched(silent_run).collect()}
        took = time.monotonic() - began
        shown = json.loads(serve.Watched(silent_run).answer())
        page_took = time.monotonic() - began - took
    assert found["deadpool_up"] == 0.0
    assert "deadpool_iteration" in found
    assert took < PROMETHEUS_SECONDS
    # Whoever looks at the page waits for whoever looked before.
    assert shown["status"] is None
    assert page_took < PROMETHEUS_SECONDS


@pytest.mark.parametrize("text", ["9478", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x"])
@pytest.mark.parametrize("command", ["metrics", "serve"])
def test_addresses_that_are_none(
    command: str, text: str, tmp_path: Path, complain: Complain
) -> None:
    complain(command, tmp_path, "--listen", text)


def value_of(samples: Samples, name: str, status: dict[str, Any] | None, now: float) -> float:
    """The only value of a metric."""
    (found,) = (m for m in samples.metrics(status, now) if m.name == f"deadpool_{name}")
    return found.samples[0].value


def trained(steps: int) -> list[Event]:
    """A node that trains one iteration a second."""
    joined = Event(Kind.NODE_JOINED, 0, 0, data={"spare": False}, wall_seconds=0.0)
    opened = Event(Kind.EPOCH_OPENED, 1, wall_seconds=10.0)
    return [joined, opened, *(step(k, 10.0 + k) for k in range(1, steps + 1))]


def step(iteration: int, at: float) -> Event:
    return Event(Kind.STEP, 1, iteration=iteration, wall_seconds=at)


def samples_of(events: list[Event]) -> Samples:
    samples = Samples("run", "version")
    for event in events:
        samples.add(event)
    return samples


def test_a_run_that_was_killed_as_a_whole_trains_no_more() -> None:
    samples, page = samples_of(trained(10)), PageState("run")
    assert value_of(samples, "goodput_ratio", None, 1e6) == pytest.approx(0.5)
    for event in trained(10):
        page.add(event)
    shown = page.to_dict(None, 1e6)
    assert shown["node_seconds"] == {"start": 10.0, "training": 10.0}
    assert shown["goodput"] == 0.5


def test_steps_that_are_thrown_away_are_not_the_newest() -> None:
    forgotten = Event(Kind.EPOCH_DECIDED, 2, data={"forgotten_from": 6}, wall_seconds=21.0)
    samples = samples_of([*trained(10), forgotten])
    assert value_of(samples, "iteration", None, 22.0) == 5


@pytest.fixture
def silent_run(tmp_path: Path) -> RunDirectory:
    """A run that has written some events, and whose coordinator is away."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    info = RunInfo("0123abcd", 1, 1, 1, 0, ("x.py",), Settings(), "/dev/shm/x")
    (run.path / "run.json").write_text(json.dumps(info.to_dict()))
    run.events.write_bytes(b"".join(map(to_line, trained(5))))
    write_json(run.coordinator, {"host": "127.0.0.1", "port": free_port(), "pid": 1})
    return run


@pytest.mark.parametrize("what", ["no secret", "another version", "directory gone"])
def test_a_coordinator_that_cannot_be_asked_costs_its_answer_alone(
    silent_run: RunDirectory, what: str
) -> None:
    watched, page = Watched(silent_run), serve.Watched(silent_run)
    if what == "another version":
        (silent_run.path / "run.json").write_text('{"settings": {"of_tomorrow": 1}}')
    elif what == "directory gone":
        shutil.rmtree(silent_run.path)
    found = {metric.name: metric.samples[0].value for metric in watched.collect()}
    assert found["deadpool_up"] == 0.0
    assert json.loads(page.answer())["status"] is None


def test_a_disk_that_is_full_for_a_moment_does_not_end_the_textfile(
    silent_run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, answers = prometheus_client.write_to_textfile, iter([None, True, True, None])

    def full_for_a_moment(path: str, registry: Any) -> None:
        if next(answers, None):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, registry)
        tries.append(path)
        silent_run.final.write_text("{}")  # the run is over

    tries: list[str] = []
    textfile = tmp_path / "deadpool.prom"
    monkeypatch.setattr(prometheus_client, "write_to_textfile", full_for_a_moment)
    monkeypatch.setattr(metrics, "_INTERVAL_SECONDS", 0.05)
    words = ["--textfile", str(textfile), "--linger-seconds", "1"]
    assert cli.main(["metrics", str(silent_run.path), *words]) == 0
    assert len(tries) > 1
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_textfile_that_cannot_be_written_at_all(
    silent_run: RunDirectory, complain: Complain
) -> None:
    textfile = silent_run.path / "none" / "deadpool.prom"
    complain("metrics", silent_run.path, "--textfile", textfile)


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_is_started_again_says_when(ended: bool) -> None:
    """With an exit status no alert would fire for the rest of the run."""
    samples = samples_of([Event(Kind.RUN_STARTED, wall_seconds=1.0), *trained(5)])
    if ended:
        samples.add(Event(Kind.RUN_ENDED, 1, data={"exit_status": 75}, wall_seconds=30.0))
        assert value_of(samples, "exit_status", None, 31.0) == 75
        samples.add(Event(Kind.NODE_JOINED, 1, 0, data={}, wall_seconds=100.0))
    else:
        samples.add(Event(Kind.NODE_JOINED, 1, 0, data={}, wall_seconds=99.0))
        samples.add(Event(Kind.EPOCH_CLOSED, 1, data={"kind": "restart"}, wall_seconds=100.0))
    assert value_of(samples, "start_timestamp_seconds", None, 101.0) == 100.0
    assert "deadpool_exit_status" not in [m.name for m in samples.metrics(None, 101.0)]


def test_a_status_of_another_version_costs_itself_alone() -> None:
    samples, page = samples_of(trained(5)), PageState("run")
    for event in trained(5):
        page.add(event)
    status = {"phase": "running", "roles": {}, "nodes": {"0": {"host": "b0"}}}
    found = {metric.name: metric.samples for metric in samples.metrics(status, 16.0)}
    assert found["deadpool_up"][0].value == 1.0
    assert found["deadpool_iteration"][0].value == 5
    assert page.to_dict(status, 16.0)["iteration"] == 5


@pytest.mark.parametrize(
    "bad",
    [
        Event(Kind.STEP, 1, iteration=6, wall_seconds=math.inf),
        Event(Kind.STEP, 1, iteration=6, wall_seconds=math.nan),
        Event(Kind.STEP, 1, iteration=6, data={"loss": "0x1p+5000"}, wall_seconds=16.0),
        Event(Kind.EXPOSED, 1, data={"seconds": math.inf}, wall_seconds=16.0),
    ],
)
def test_a_number_that_is_none_costs_its_event_alone(silent_run: RunDirectory, bad: Event) -> None:
    closed = Event(Kind.EPOCH_CLOSED, 1, data={"kind": "node-lost"}, wall_seconds=15.5)
    with open(silent_run.events, "ab") as file:
        file.write(to_line(closed) + to_line(bad) + to_line(step(7, 17.0)))
    found = {m.name: m.samples[0].value for m in Watched(silent_run).collect() if m.samples}
    assert found["deadpool_iteration"] == 7
    assert found["deadpool_last_step_timestamp_seconds"] == 17.0
    assert 0.0 < found["deadpool_goodput_ratio"] < 1.0
    assert json.loads(serve.Watched(silent_run).answer())["iteration"] == 7
