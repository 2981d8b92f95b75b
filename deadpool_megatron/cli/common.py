"""Helpers that several sub-commands share: errors with exit status 2, warnings, the size of a run,
requests to its coordinator, addresses, and tables of plain text.
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
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from deadpool_megatron import UserError, ownership
from deadpool_megatron.cluster.journal.journal import Journal, JournalError
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.cluster.journal.user_requests import Request
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.cleanup import remaining_memory
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.layout.records import Restore
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
#: limit of a poll at one address; two addresses must fit into the 10 s of a Prometheus scrape
POLL_SECONDS = 3.0


class CommandError(UserError):
    """A command cannot do its work; the message is for its user."""


class RunNotReachable(CommandError):
    """No coordinator answers."""


class NotNow(RunNotReachable):
    """The coordinator cannot accept the request now: no journal, or agents have not returned."""


class RequestRefused(CommandError):
    """The coordinator refuses the request; the message gives the reason."""

    prefix = "refused"


class DumpFailed(RequestRefused):
    """The run has ended without its dump, so its state is only in memory; the message gives the
    reason."""

    prefix = "the run has ended"


#: errors of a request that may succeed later: the coordinator is lost, its journal fails, or the
#: run directory is not available for a while
TRANSIENT = (
    *(CommandError, run_files.RunDirectoryError, OwnershipError),
    *(auth.AuthenticationError, OSError),
)


@contextmanager
def refusing_system_errors() -> Iterator[None]:
    """Turn an error of the system, such as no space or no permission, into a CommandError. For use
    before a process is started; later a traceback is more useful.
    """
    try:
        yield
    except (OSError, RecursionError) as error:
        raise CommandError(system_error_line(error)) from error


def system_error_line(error: OSError | RecursionError) -> str:
    """Return ``FILE: reason``, as far as the system names them."""
    if isinstance(error, RecursionError):
        return f"what was read is nested too deeply: {error}"
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def number(
    kind: type[int] | type[float], minimum: float, maximum: float = math.inf
) -> Callable[[str], Any]:
    """Return the type of an option whose value is in the given range."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if minimum <= (value := kind(text)) <= maximum:
                return value
        bounds = f"between {minimum} and {maximum}"
        bounds = f"at least {minimum}" if maximum == math.inf else bounds
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")

    return read


def add_run_directory(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument that names a run."""
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="run directory (--run-dir)")


def add_size(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--nodes``, ``--spares``, ``--nproc-per-node``, and ``--plan``. ``default``: the text of
    the help for the number of nodes without ``--nodes``."""
    text = f"nodes that train (default: {default})"
    parser.add_argument("--nodes", type=number(int, 1), metavar="N", help=text)
    text = "nodes that wait, warm (default: 0, and 1 without --nodes)"
    parser.add_argument("--spares", type=number(int, 0), metavar="S", help=text)
    text = "training processes on each node; there are N x P roles"
    parser.add_argument("--nproc-per-node", type=number(int, 1), metavar="P", help=text)
    text = "file of 'deadpool plan': the shared memory that a node needs"
    parser.add_argument("--plan", type=Path, metavar="FILE", help=text)


def size_conflict(
    args: argparse.Namespace, info: RunInfo, *names: str
) -> tuple[str, int, int] | None:
    """Return the first of the options ``names`` that differs from the run: its flag, its value, and
    the run's value. Return None if no option differs; an option that is not given never differs."""
    for name in names:
        value, run_value = getattr(args, name), getattr(info, name)
        if value and value != run_value:
            return f"--{name.replace('_', '-')}", value, run_value
    return None


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add ``--host`` and ``--interface``, which exclude each other."""
    address = parser.add_mutually_exclusive_group()
    address.add_argument("--host", metavar="ADDRESS", help="address that other nodes reach")
    text = (
        "or the interface that has it (default: the variable"
        f" {INTERFACE_VARIABLE}, else NCCL_SOCKET_IFNAME)"
    )
    address.add_argument("--interface", metavar="NAME", help=text)


def make_info(
    args: argparse.Namespace, settings: Settings, restore: Sequence[Restore] = (), first: int = 0
) -> RunInfo:
    """Return the facts of a new run, with a new run id. ``first``: the role of rank 0 in the run
    that this run continues, else 0."""
    return RunInfo(
        run_id=secrets.token_hex(4),
        world_size=args.nodes * args.nproc_per_node,
        nodes=args.nodes,
        spares=args.spares,
        nproc_per_node=args.nproc_per_node,
        command=tuple(args.command),
        settings=replace(settings, first_role=first or settings.first_role),
        directory=str(Path.cwd()),
        environment=host.numeric_variables(),
        restore=tuple(restore),
    )


def coordinator_address(run: RunDirectory) -> tuple[str, int] | None:
    """Return the address that the coordinator has published, or None."""
    try:
        return run_files.address_in(run.coordinator.read_text())
    except (OSError, ValueError):
        return None


def ask(
    run: RunDirectory, message: Mapping[str, Any], limit_seconds: float = _ASK_SECONDS
) -> dict[str, Any]:
    """Send a command to the run's coordinator and return its answer.

    The published address is tried first; if it does not answer within the limit, the address of
    the newest term in the journal. Raises RunNotReachable if no coordinator can accept the command
    now, CommandError if the coordinator declines.
    """
    info = run.read_run()
    published, failure = coordinator_address(run), RunNotReachable(f"{run.path} {_NO_ADDRESS}")
    if published is not None:
        try:
            return ask_at(published, run, info.run_id, message, limit_seconds)
        except RunNotReachable as error:
            failure = error
    try:
        term = newest_term(Journal(run.journal))
    except (JournalError, KeyError, TypeError, ValueError):
        raise failure from None  # no term, or a claim of another version
    if term is None or term.address == published or run.final.exists():
        raise failure
    return ask_at(term.address, run, info.run_id, message, limit_seconds)


def ask_at(
    address: tuple[str, int],
    run: RunDirectory,
    run_id: str,
    message: Mapping[str, Any],
    limit_seconds: float = _ASK_SECONDS,
) -> dict[str, Any]:
    """Send a command to a known address; see :func:`ask`."""
    secret = auth.load_secret(run.path)
    try:
        with auth.connect(address, secret, run_id, limit_seconds) as connection:
            framing.send(connection, {"t": "control", **message})
            answer = framing.receive(connection)
    except (OSError, UnicodeError, WireError) as error:
        if run.final.exists():
            raise RunNotReachable(f"the run in {run.path} is over") from error
        line = remaining_memory(run)
        advice = f"all its processes ended; {line}" if line else _UNANSWERED.format(run=run.path)
        if isinstance(error, auth.AuthenticationError):  # the run may be healthy
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


class StatusPoller:
    """Polls the status of a run, for commands that only display it. Not thread-safe."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._last_error = ""

    def status(self) -> dict[str, Any] | None:
        """Return the coordinator's status; None if it does not answer or the run has its result.
        Print an error of the run directory on standard error, and equal errors in a row once.
        """
        if self.run.final.exists() or not (self.run.path / run_files.RUN_FILE).exists():
            return None
        try:
            status: dict[str, Any] = ask(self.run, {"command": "status"}, POLL_SECONDS)["status"]
        except CommandError:
            return None
        except (run_files.RunDirectoryError, OwnershipError, WireError) as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                print(f"the coordinator cannot be asked: {error}", file=sys.stderr, flush=True)
            return None
        return status if "roles" in status else None

    def view(self, story: Story) -> View:
        """Return the present view of the run. A status of another version counts as no answer."""
        final, remaining = None, ""
        with suppress(run_files.RunDirectoryError):
            final = self.run.read_final() if self.run.has_final() else None
        if (status := self.status()) is None:
            remaining = remaining_memory(self.run)
        now, run = time.time(), self.run.path
        try:
            return view(story, status, run, now, remaining=remaining, final=final)
        except DAMAGE:
            return view(story, None, run, now, remaining=remaining, final=final)


def facts(run_view: View, status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts of the facts on the whole run. Raises :data:`events.DAMAGE` for the
    status of another version."""
    term, rpo, export = (status[name] for name in ("coordinator", "rpo", "export"))
    node = "" if term["node"] is None else f", next to node {term['node']}"
    seconds = rpo["most_lost_seconds"]
    about = "" if seconds is None else f", about {seconds:.1f} s"
    wanted = f"; becomes {rpo['wanted']}" if rpo["wanted"] else ""
    pairs = [
        ("coordinator", f"term {term['term']} at {term['host']}:{term['port']}{node}"),
        ("protection", f"{status['protection'] or 'not yet decided'}{wanted}"),
    ]
    pairs += [("size", run_view.replicas)] if run_view.replicas else []
    if status["epoch"] and run_view.state is not State.OVER:
        pairs.append(("lost if a node fails now (RPO)", f"{run_view.at_risk()}{about}"))
    requests = map(Request.from_dict, status["requests"])
    pairs += [(f"request {request.number}", request.to_line()) for request in requests]
    if now := export["now"]:
        pairs.append(("checkpoint", f"of iteration {now['iteration']}, {now['step']}"))
    if last := export["last"]:
        result = f"failed: {last['error']}" if last["error"] else f"is in {last['path']}"
        pairs.append(("last checkpoint", f"of iteration {last['iteration']}, {result}"))
    return [*pairs, *run_view.notes()]


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``. Resolve the host here, as later callers must not block. Raises
    CommandError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise CommandError(f"{text!r} is not HOST:PORT")
    return _resolve(host, f"host {host!r} cannot be resolved"), int(port)


def host_address(host: str) -> str:
    """Return the IPv4 address of a host name. Raises CommandError if there is none, or other nodes
    cannot reach it.
    """
    advice = f"give --host ADDRESS or --interface NAME (or {INTERFACE_VARIABLE})"
    address = _resolve(host, f"{advice}: the address of {host!r} is not known")
    if address.startswith("127."):
        raise CommandError(
            f"{host!r} resolves to {address}, which other nodes cannot reach: {advice}"
        )
    return address


def local_addresses(text: str) -> list[str]:
    """Return the addresses that a value of ``--deadpool-interface`` means on this machine. Raises
    CommandError, for example if there are several and they are not available or not distinct."""
    found = [_local_address(part) for part in text.split(",")]
    if len({*found}) < len(found):
        raise CommandError(
            f"--deadpool-interface {text} names an address twice ({', '.join(found)})"
        )
    for address in found[1:]:
        listen(address, 0).close()
    return found


def _local_address(text: str) -> str:
    """Return the address of the interface with this name, or the value itself if it is an address
    or a host name. Raises CommandError for any other value."""
    names = [name for _, name in socket.if_nameindex()]
    if text in names:
        return interface_address(text)
    _resolve(
        text,
        f"--deadpool-interface {text!r} is neither an address nor a network interface of"
        f" {socket.gethostname()} ({', '.join(names)})",
    )
    return text


def _resolve(host: str, message: str) -> str:
    """Return the IPv4 address of a host. Raises CommandError with the message and the reason."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or long label
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"{message} ({reason})") from error


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface. Raises CommandError if it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(other for _, other in socket.if_nameindex())
            raise CommandError(
                f"network interface {name!r} has no IPv4 address ({error.strerror}); there are:"
                f" {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def nccl_address(environment: Mapping[str, str]) -> str | None:
    """Return the address of the first interface that ``NCCL_SOCKET_IFNAME`` names and that has an
    IPv4 address. Return None if there is none, or the variable names exclusions (``^``)."""
    value = environment.get("NCCL_SOCKET_IFNAME", "")
    parts = [part for part in value.lstrip("=").split(",") if part and value[0] != "^"]
    for _, name in socket.if_nameindex():
        if name in parts or (value[0:1] != "=" and name.startswith(tuple(parts))):
            with suppress(CommandError):
                return interface_address(name)
    return None


def listen_address(text: str, *, min_port: int = 1) -> tuple[str, int]:
    """Return host and port of ``--listen ADDR:PORT``. Raises CommandError for another form."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not min_port <= int(port) <= 65535:
        raise CommandError(f"--listen {text}: give ADDRESS:PORT, like 127.0.0.1:9478")
    return host.strip("[]") or "0.0.0.0", int(port)


def url_host(host: str) -> str:
    """Return the host in the form for a URL."""
    return f"[{host}]" if ":" in host else host


def listen(
    host: str, port: int, *, flags: tuple[str, str] = ("--port", "--deadpool-interface")
) -> socket.socket:
    """Return a listening TCP socket. Raises CommandError if the address is not available; the
    message names the flag to change, which ``flags`` gives for the port and for the address."""
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
    """Return the lines of a table: first column left-aligned, others right-aligned, a rule under
    the header."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return (" " * indent + "  ".join(padded)).rstrip()

    rule = " " * indent + "  ".join("-" * width for width in widths)
    return [line(header), rule, *(line(row) for row in rows)]


def seconds(value: float | None) -> str:
    """Format with three decimals, or a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def size(count: float) -> str:
    """Format bytes like 12.3 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def warn_of_danger_above(path: Path, info: RunInfo | None = None) -> None:
    """Print a line for each directory that another user could replace, among this directory and
    those of the run's checkpoints."""
    paths = [path]
    if info is not None:
        tokens = (*info.command, "")
        saves = [after for token, after in pairwise(tokens) if token == "--save"]
        paths += [Path(name) for name in (info.settings.persist_directory, *saves) if name]
    for danger in filter(None, map(ownership.danger_above, paths)):
        print(f"{danger} (docs/security.md)", file=sys.stderr, flush=True)


def ignore_notices() -> None:
    """Ignore SIGUSR1, a scheduler's notice before a time limit, in this process and those that it
    starts."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def check_platform() -> None:
    """Check that this host can run nodes; print a warning if the system may remove the shared
    memory of a run. Raises CommandError for a missing feature."""
    if problem := host.missing_feature():
        raise CommandError(problem)
    if warning := host.removal_warning(os.geteuid()):
        print(warning, file=sys.stderr, flush=True)
