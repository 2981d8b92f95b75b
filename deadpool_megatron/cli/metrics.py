"""Says what a run does as metrics: iterations, recoveries by kind and phase, where the time of its
nodes went, goodput, exposure. It reads the events of the run and asks the coordinator, as
`deadpool status` does; no part of the run waits for it. Any node that sees the run directory may
run it. Without --listen and --textfile it prints them once.

examples:
  deadpool metrics runs/first
  deadpool metrics runs/first --listen 127.0.0.1:9478     for a server that scrapes
  deadpool metrics runs/first --textfile /var/lib/node_exporter/deadpool.prom

configs/ has a dashboard for Grafana and rules for alerts. Exit status: 0 printed, or the run is
over; 2 bad arguments; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import deadpool_megatron
from deadpool_megatron.cli.common import (
    Asker,
    CommandError,
    add_run_directory,
    listen_address,
    shown_host,
)
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import EventTail
from deadpool_megatron.observe.story import RECENT_STEPS, Story

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_INTERVAL_SECONDS = 5.0
# After the end of a run its last numbers can be fetched for so long.
_LINGER_SECONDS = 60.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``metrics`` to the commands."""
    text = "a run as metrics, for Prometheus"
    parser = subparsers.add_parser("metrics", help=text, description=__doc__)
    add_run_directory(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--listen", metavar="ADDR:PORT", help="answer GET /metrics there")
    where.add_argument(
        "--textfile", type=Path, metavar="FILE.prom", help="write the file anew every few seconds"
    )
    parser.add_argument(
        "--linger-seconds",
        type=float,
        default=_LINGER_SECONDS,
        metavar="S",
        help="stay so long after the end of the run (default: %(default)g)",
    )


class WatchedMetrics:
    """A run whose metrics can be collected at any time; the collector of ``prometheus_client``.

    One lock: a server may scrape from several threads.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Raises RunDirectoryError when there is no run."""
        self._run, self._asker, self._tail = run, Asker(run), EventTail(run.events)
        info = run.read_run(only_to_show=True)
        self._about = {"run": info.run_id, "version": deadpool_megatron.__version__}
        self._story = Story(RECENT_STEPS + 1)
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as of now."""
        from deadpool_megatron.observe.samples import metrics

        with self._lock:
            self._tail.feed(self._story.take)
            yield from metrics(self._story, self._about, self._asker.status(), time.time())

    def is_over(self) -> bool:
        """Return whether the run has its result."""
        return self._run.final.exists()


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool metrics``. Raises CommandError."""
    try:
        import prometheus_client
    except ImportError:
        raise CommandError("it needs prometheus-client: pip install prometheus-client") from None
    watched = WatchedMetrics(RunDirectory(args.run_dir))
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(watched)
    try:
        if args.listen is not None:
            host, port = listen_address(args.listen)
            server, _ = prometheus_client.start_http_server(port, host, registry)
            print(f"http://{shown_host(host)}:{server.server_port}/metrics", flush=True)
            _stay(watched, args.linger_seconds, lambda: None)
        elif args.textfile is not None:
            write = prometheus_client.write_to_textfile
            _stay(watched, args.linger_seconds, lambda: write(str(args.textfile), registry))
        else:
            print(prometheus_client.generate_latest(registry).decode(), end="")
    except OSError as error:
        raise CommandError(f"{args.listen or args.textfile or args.run_dir}: {error}") from error
    return 0


def _stay(watched: WatchedMetrics, linger_seconds: float, look: Callable[[], None]) -> None:
    """Look every few seconds, until some time after the end of the run. Raises OSError where the
    first look fails; a later one is told, once for each reason, and made again.
    """
    look()
    said = ""
    ended: float | None = None
    while ended is None or time.monotonic() - ended < linger_seconds:
        if ended is None and watched.is_over():
            ended = time.monotonic()
        try:
            look()
        except OSError as error:
            if str(error) != said:
                said = str(error)
                print(f"deadpool metrics: {error}; it is tried again", file=sys.stderr, flush=True)
        time.sleep(min(_INTERVAL_SECONDS, max(0.05, linger_seconds)))
