"""Things that several sub-commands need: the error with exit status 2, warnings, the size of a run,
talking to its coordinator, addresses, and text in aligned columns, which reads the same on a
terminal, in a log and in a bug report.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import math
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from deadpool_megatron import UserError, ownership
from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.cluster.journal.user_requests import Request
from deadpool_megatron.cluster.run_directory.cleanup import what_remains
from deadpool_megatron.cluster.run_directory.directory import (
    RUN_FILE,
    RunDirectory,
    RunDirectoryError,
    RunInfo,
    address_in,
)
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.observe.story import Story
from deadpool_megatron.observe.view import TABLE, State, View, view
from deadpool_megatron.ownership import OwnershipError
from deadpool_megatron.preflight import host
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.framing import WireError

INTERFACE_VARIABLE = "DEADPOOL_INTERFACE_NAME"
_SIOCGIFADDR = 0x8915
_ASK_SECONDS = 10.0
_UNANSWERED = TABLE[State.UNANSWERED]["to_do"]
_NO_ADDRESS = "has no coordinator yet, or its coordinator.json was removed"
#: the patience of whoever looks again and again: two addresses are asked within the ten seconds
#: after which a Prometheus server gives a scrape up
LOOK_SECONDS = 3.0


class CommandError(UserError):
    """Of a command."""


class RunNotReachable(CommandError):
    """There is no coordinator to talk to."""


class NotNow(RunNotReachable):
    """The coordinator cannot take it now: the journal does not work, or agents are not back."""


class RequestRefused(CommandError):
    """The coordinator does not take the request; why."""

    prefix = "refused"


class DumpFailed(RequestRefused):
    """The run has ended, and its state is in memory only; why."""

    prefix = "the run has ended"


#: of a coordinator that is not there or whose journal fails, and of a run directory that is away
#: for a moment, to whoever has found them when the process started
PASSING = (CommandError, RunDirectoryError, OwnershipError, auth.AuthenticationError, OSError)


@contextmanager
def refusing_system_errors() -> Iterator[None]:
    """Errors of the system meanwhile are an answer like any other bad input: no room, no
    permission. For as long as nothing has been started: later it is not the user who has to know
    where it happened. Raises CommandError.
    """
    try:
        yield
    except (OSError, RecursionError) as error:
        raise CommandError(system_error_line(error)) from error


def system_error_line(error: OSError | RecursionError) -> str:
    """``FILE: why``, as far as the system tells."""
    if isinstance(error, RecursionError):
        return f"what was read is nested too deeply: {error}"
    why = error.strerror or str(error)
    return why if error.filename is None else f"{error.filename}: {why}"


def number(
    kind: type[int] | type[float], least: float, most: float = math.inf
) -> Callable[[str], Any]:
    """Return the type of an option whose value lies between these two."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        bounds = f"at least {least}" if most == math.inf else f"between {least} and {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")

    return read


def add_run_directory(parser: argparse.ArgumentParser) -> None:
    """The positional argument that names a run."""
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="run directory (--run-dir)")


def add_size(parser: argparse.ArgumentParser, usual: str) -> None:
    """``--nodes``, ``--spares``, ``--nproc-per-node``, and ``--plan``. ``usual``: for help, what a
    size is without the first and the last."""
    parser.add_argument(
        "--nodes", type=number(int, 1), metavar="N", help=f"nodes that train (default: {usual})"
    )
    parser.add_argument(
        "--spares",
        type=number(int, 0),
        metavar="S",
        help="nodes that wait, warm (default: 0, and 1 without --nodes)",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=number(int, 1),
        metavar="P",
        help="training processes on each node; there are N x P roles",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="file of 'deadpool plan': the shared memory that a node needs",
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add ``--host`` and ``--interface``, of which one may be given."""
    address = parser.add_mutually_exclusive_group()
    address.add_argument("--host", metavar="ADDRESS", help="address that other nodes reach")
    text = (
        "or the interface that has it (default: the variable"
        f" {INTERFACE_VARIABLE}, else NCCL_SOCKET_IFNAME)"
    )
    address.add_argument("--interface", metavar="NAME", help=text)


def make_info(
    args: argparse.Namespace, settings: Settings, restore: Mapping[str, Any] | None = None
) -> RunInfo:
    """The facts of a new run, with a fresh run id."""
    run_id = secrets.token_hex(4)
    return RunInfo(
        run_id=run_id,
        world_size=args.nodes * args.nproc_per_node,
        nodes=args.nodes,
        spares=args.spares,
        nproc_per_node=args.nproc_per_node,
        command=tuple(args.command),
        settings=settings,
        directory=str(Path.cwd()),
        restore={} if restore is None else restore,
    )


def coordinator_address(run: RunDirectory) -> tuple[str, int] | None:
    """Return where the coordinator says it listens; None before it has said so."""
    try:
        return address_in(run.coordinator.read_text())
    except (OSError, ValueError):
        return None


def ask(
    run: RunDirectory, message: Mapping[str, Any], limit_seconds: float = _ASK_SECONDS
) -> dict[str, Any]:
    """Send one command to the run's coordinator: to the one that has said where it listens, and if
    that does not answer within the limit to the one that the journal names.

    Raises RunNotReachable when there is none that can take it now, CommandError when it declines.
    """
    info = run.read_run()
    told, failure = coordinator_address(run), RunNotReachable(f"{run.path} {_NO_ADDRESS}")
    if told is not None:
        try:
            return ask_at(told, run, info.run_id, message, limit_seconds)
        except RunNotReachable as error:
            failure = error
    try:
        term = newest_term(Journal(run.journal))
    except (JournalError, KeyError, TypeError, ValueError):
        raise failure from None  # none, or a claim that is not understood: of another version
    if term is None or term.address == told or run.final.exists():
        raise failure
    return ask_at(term.address, run, info.run_id, message, limit_seconds)


def ask_at(
    address: tuple[str, int],
    run: RunDirectory,
    run_id: str,
    message: Mapping[str, Any],
    limit_seconds: float = _ASK_SECONDS,
) -> dict[str, Any]:
    """:func:`ask` at a known address."""
    secret = auth.load_secret(run.path)
    try:
        with auth.connect(address, secret, run_id, limit_seconds) as connection:
            framing.send(connection, {"t": "control", **message})
            answer = framing.receive(connection)
    except (OSError, UnicodeError, WireError) as error:
        if run.final.exists():
            raise RunNotReachable(f"the run in {run.path} is over") from error
        left = what_remains(run)
        advice = f"all its processes ended; {left}" if left else _UNANSWERED.format(run=run.path)
        if isinstance(error, auth.AuthenticationError):  # the run may be in the best of health
            advice = f"if one is there, give {auth.ENVIRONMENT_NAME} as the run has it"
        raise RunNotReachable(
            f"no coordinator at {address[0]}:{address[1]} for {run.path}"
            f" ({getattr(error, 'strerror', None) or error}); {advice}"
        ) from error
    if "refused" in answer:
        raise RequestRefused(str(answer["refused"]))
    if answer.get("again"):
        raise NotNow(str(answer["error"]))
    if not answer.get("ok"):
        raise CommandError(str(answer.get("error", "the coordinator declined")))
    return answer


class Asker:
    """Asks again and again what a run does, for whoever only looks. Not thread-safe."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._said = ""

    def status(self) -> dict[str, Any] | None:
        """Return what ``deadpool status --json`` says; None where nobody answers, and once the run
        has its result. Why the coordinator cannot be asked at all is said once, on standard error.
        """
        if self.run.final.exists() or not (self.run.path / RUN_FILE).exists():
            return None
        try:
            status: dict[str, Any] = ask(self.run, {"command": "status"}, LOOK_SECONDS)["status"]
        except CommandError:
            return None
        except (RunDirectoryError, OwnershipError, WireError) as error:
            if str(error) != self._said:
                self._said = str(error)
                print(f"the coordinator cannot be asked: {error}", file=sys.stderr, flush=True)
            return None
        return status if "roles" in status else None

    def view(self, story: Story) -> View:
        """Return what is to be shown of the run now; as if nobody answered where the coordinator is
        of another version."""
        final, left = None, ""
        with suppress(RunDirectoryError):
            final = self.run.read_final() if self.run.has_final() else None
        if (status := self.status()) is None:
            left = what_remains(self.run)
        now, run = time.time(), self.run.path
        try:
            return view(story, status, run, now, left=left, final=final)
        except DAMAGE:
            return view(story, None, run, now, left=left, final=final)


def facts(seen: View, status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts of what is neither of a node nor of a failure. Raises
    :data:`events.DAMAGE` for the status of another version."""
    term, rpo, export = (status[name] for name in ("coordinator", "rpo", "export"))
    node = "" if term["node"] is None else f", next to node {term['node']}"
    seconds = rpo["most_lost_seconds"]
    about = "" if seconds is None else f", about {seconds:.1f} s"
    wanted = f"; becomes {rpo['wanted']}" if rpo["wanted"] else ""
    found = [
        ("coordinator", f"term {term['term']} at {term['host']}:{term['port']}{node}"),
        ("protection", f"{status['protection'] or 'not yet decided'}{wanted}"),
    ]
    if status["epoch"] and seen.state is not State.OVER:
        found.append(("lost if a node fails now (RPO)", f"{seen.at_risk()}{about}"))
    requests = map(Request.from_dict, status["requests"])
    found += [(f"request {one.number}", one.told()) for one in requests]
    if now := export["now"]:
        found.append(("checkpoint", f"of iteration {now['iteration']}, {now['step']}"))
    if last := export["last"]:
        how = f"failed: {last['error']}" if last["error"] else f"is in {last['path']}"
        found.append(("last checkpoint", f"of iteration {last['iteration']}, {how}"))
    return [*found, *seen.notes()]


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, the host resolved to a number now, as later nothing may block."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise CommandError(f"{text!r} is not HOST:PORT")
    return _resolved(host, f"host {host!r} cannot be resolved"), int(port)


def host_address(host: str) -> str:
    """The IPv4 address that a host's name resolves to. Raises CommandError when other nodes cannot
    reach it, or there is none.
    """
    advice = f"give --host ADDRESS or --interface NAME (or {INTERFACE_VARIABLE})"
    address = _resolved(host, f"{advice}: the address of {host!r} is not known")
    if address.startswith("127."):
        raise CommandError(
            f"{host!r} resolves to {address}, which other nodes cannot reach: {advice}"
        )
    return address


def local_address(text: str) -> str:
    """Return what ``--deadpool-interface`` means on this machine: the address of the interface of
    that name, or the address (or host name) itself. Raises CommandError for what is neither.
    """
    names = [name for _, name in socket.if_nameindex()]
    if text in names:
        return interface_address(text)
    _resolved(
        text,
        f"--deadpool-interface {text!r} is neither an address nor a network interface of"
        f" {socket.gethostname()} ({', '.join(names)})",
    )
    return text


def _resolved(host: str, complaint: str) -> str:
    """The IPv4 address of a host. Raises CommandError with the complaint, and why."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # a name with an empty or a long label is none
        why = getattr(error, "strerror", None) or error
        raise CommandError(f"{complaint} ({why})") from error


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface. Raises CommandError when it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(found for _, found in socket.if_nameindex())
            raise CommandError(
                f"network interface {name!r} has no IPv4 address ({error.strerror}); there are:"
                f" {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def nccl_address(environment: Mapping[str, str]) -> str | None:
    """Return the address of the first interface that has one of those NCCL is told to use."""
    named = environment.get("NCCL_SOCKET_IFNAME", "")
    parts = [part for part in named.lstrip("=").split(",") if part and named[0] != "^"]
    for _, name in socket.if_nameindex():
        if name in parts or (named[0:1] != "=" and name.startswith(tuple(parts))):
            with suppress(CommandError):
                return interface_address(name)
    return None


def listen_address(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Return host and port of ``--listen ADDR:PORT``; raise CommandError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not least_port <= int(port) <= 65535:
        raise CommandError(f"--listen {text}: give ADDRESS:PORT, like 127.0.0.1:9478")
    return host.strip("[]") or "0.0.0.0", int(port)


def shown_host(host: str) -> str:
    """Return the host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def listen(
    host: str, port: int, *, flags: tuple[str, str] = ("--port", "--deadpool-interface")
) -> socket.socket:
    """A listening TCP socket. Raises CommandError, which names the one of ``flags`` (of port and
    address) that is to blame, when the address cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        flag = flags[error.errno != errno.EADDRINUSE]
        raise CommandError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another {flag}"
        ) from error
    return listener


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Lines of a table: first column left-aligned, the others right-aligned, a rule under the
    header."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return (" " * indent + "  ".join(padded)).rstrip()

    rule = " " * indent + "  ".join("-" * width for width in widths)
    return [line(header), rule, *(line(row) for row in rows)]


def seconds(value: float | None) -> str:
    """Three decimals, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def size(count: float) -> str:
    """Bytes for people: 12.3 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def warn_of_danger_above(path: Path, info: RunInfo | None = None) -> None:
    """Say in a line each that somebody else could put another directory in place of this one, or of
    those that checkpoints of the run go to."""
    paths = [path]
    if info is not None:
        words = (*info.command, "")
        saves = [after for word, after in pairwise(words) if word == "--save"]
        paths += [Path(name) for name in (info.settings.persist_directory, *saves) if name]
    for why in filter(None, map(ownership.danger_above, paths)):
        print(f"{why} (docs/security.md)", file=sys.stderr, flush=True)


def ignore_notices() -> None:
    """A scheduler's notice before a time limit ends neither this process nor any that it starts."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def check_platform() -> None:
    """This host offers what any run takes, or CommandError says what is missing; one line more
    where what a run has in memory may be removed."""
    if why := host.missing_feature():
        raise CommandError(why)
    if why := host.removal_warning(os.geteuid()):
        print(why, file=sys.stderr, flush=True)
