"""The loaded program of a process, compared with that of the other processes of its run.

A source file is noted at the moment of its import, so that a process that is forked later knows the
version that it has, even if the file has changed since. Data is identified by size and times, and
not read. Packages and environment variables are compared in the check of nodes. A fact is a name
with a list of values. The facts of one start of a run lie in a folder of its run directory, in
numbered files. A file is written once, by the first process with facts that are new, and never
changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import socket
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from deadpool_megatron import file_systems

#: this folder of a run directory has a folder for each start, named by the newest epoch before it
FOLDER = "program"
# The number that stands for the newest start of another run, which this run continues.
_BEFORE = -1
_SHOWN_CHANGES = 3
_STANDARD = re.escape(sysconfig.get_path("stdlib"))
_OF_THE_ENVIRONMENT = re.compile(rf"{_STANDARD}/|.*/(site|dist)-packages/")
_PLAIN = (bool, int, float, str, Path, type(None))
Facts = dict[str, list[str]]


class OtherProgram(BaseException):
    """A program that differs from that of the run; the message is one line. It is a BaseException,
    because code that tries an import may catch any Exception."""


class LoadedProgram:
    """The program of this process. ``facts``: name -> values. ``ended_epoch``: the newest epoch of
    earlier starts; a record up to that epoch belongs to another start. Any thread may import, but
    only one thread may call the methods."""

    def __init__(self) -> None:
        self.facts: Facts = {}
        self.ended_epoch = 0
        self._places: dict[str, str] = {}  # name of a fact -> path of its source file
        self._folder: Path | None = None  # None: there are no facts to compare with yet
        self._known: Facts = {}  # the facts of the run
        self._files_read = 0

    def watch_imports(self) -> None:
        """Note the source files that are already imported, and from now on each file at its
        import."""
        load: Any = SourceFileLoader.get_code
        if load.__name__ == "load_noted":
            return
        for name, module in list(sys.modules.items()):
            if name != "__main__":
                self.note_source(f"module {name}", getattr(module, "__file__", None) or "")

        def load_noted(loader: SourceFileLoader, name: str) -> Any:
            code = load(loader, name)
            self.note_source(f"module {name}", loader.path)
            with contextlib.suppress(OSError, ValueError):
                self.check()
            return code

        SourceFileLoader.get_code = load_noted  # type: ignore[method-assign,assignment]

    def note_source(self, name: str, path: str) -> None:
        """Note a source file that is being loaded now."""
        with contextlib.suppress(OSError):
            if path.endswith(".py") and not _OF_THE_ENVIRONMENT.match(path):
                digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
                self.facts[name], self._places[name] = [f"sha256={digest[:16]}"], path

    def note_arguments(self, values: Mapping[str, Any], of_a_process: Iterable[str] = ()) -> None:
        """Note the parsed arguments with plain values, except for the names ``of_a_process``, whose
        values differ between processes. Only the first call counts: a process has one command line,
        and later parsers know fewer of its arguments."""
        names = sorted(values.keys() - set(of_a_process))
        plain = [f"{name}={values[name]}" for name in names if _is_plain(values[name])]
        self.facts.setdefault("arguments", plain)

    def note_data(self, paths: Iterable[Path]) -> None:
        """Note the identity of these files, and of the files in these folders, without reading
        them."""
        inside = (path.iterdir() if path.is_dir() else [path] for path in paths)
        for path in filter(Path.is_file, itertools.chain(*inside)):
            status = path.stat()
            values = [
                f"size={status.st_size}",
                f"mtime={status.st_mtime_ns}",
                f"inode={status.st_ino}",
            ]
            self.facts[f"file {path} on {socket.gethostname()}"] = values
            # Hosts may have separate copies, with times of their own.
            self.facts[f"file {path}"] = values[: 2 if file_systems.is_shared(path) else 1]

    def agree(self, run: Path, start: int) -> str:
        """Compare with the processes of this start of the run, and write the new facts to a file.
        If this process is the first, return a line on the changes since the previous start; else
        return an empty string.

        Raises OtherProgram, OSError, and ValueError for a damaged file.
        """
        start = max(start, self.ended_epoch)
        folder = self._enter(run, start)
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.check()
            new = {name: self.facts[name] for name in dict(self.facts).keys() - self._known.keys()}
            path, content = folder / f"{self._files_read}.json", json.dumps(new).encode()
            if not new or file_systems.write_once(path, content, file_systems.WRITTEN_MODE):
                break
        if self._known:
            return ""
        # A file may be listed twice, as a script and as a module.
        changes = [*dict.fromkeys(self._differences(_newest(run, start), "before"))]
        text = "; ".join(changes[:_SHOWN_CHANGES])
        return f"changed since the start before ({len(changes)}): {text}" if changes else ""

    def check(self) -> None:
        """Compare with the newest facts of the run. Raises as :meth:`agree` does."""
        if self._folder is None:
            return
        while (path := self._folder / f"{self._files_read}.json").exists():
            self._known = {**_read(path), **self._known}
            self._files_read += 1
        for line in self._differences(self._known, "in the run"):
            raise OtherProgram(f"this process has another program than its run: {line}")

    def check_after_failure(self, run: Path) -> None:
        """Compare with the newest start of a run, because this process may have failed before it
        was compared with the others. Raises as :meth:`agree` does."""
        newest = max(_starts(run), default=_BEFORE)
        if self._folder is None and newest >= self.ended_epoch:
            self._enter(run, newest)
        self.check()

    def _enter(self, run: Path, start: int) -> Path:
        if (folder := run / FOLDER / str(start)) != self._folder:
            self._folder, self._known, self._files_read = folder, {}, 0
        return folder

    def _differences(self, known: Facts, where: str) -> Iterator[str]:
        """Yield a line for each fact whose values differ from ``known``."""
        for name in sorted(dict(self.facts).keys() & known.keys()):
            own, others = self.facts[name], known[name]
            if own != others:
                only = " ".join(word for word in own if word not in others) or "nothing"
                missing = " ".join(word for word in others if word not in own) or "nothing"
                yield f"{self._places.get(name, name)}: {only}, {where} {missing}"


def inherit_program(old: Path, new: Path) -> None:
    """Let the first start of the run in ``new`` be compared with the newest start in ``old``."""
    (new / FOLDER / str(_BEFORE)).mkdir(parents=True, exist_ok=True)
    file_systems.write_text(new / FOLDER / str(_BEFORE) / "0.json", json.dumps(_newest(old)))


def _newest(run: Path, before: float = math.inf) -> Facts:
    """Return the facts of the newest start before the start ``before``."""
    start = max((number for number in _starts(run) if number < before), default=_BEFORE)
    paths = sorted((run / FOLDER / str(start)).glob("*.json"))
    return {name: values for path in paths for name, values in _read(path).items()}


def _starts(run: Path) -> list[int]:
    return [int(path.name) for path in (run / FOLDER).glob("*")]


def _read(path: Path) -> Facts:
    facts: Facts = json.loads(path.read_text())
    return facts


def _is_plain(value: Any) -> bool:
    return (
        all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)
    )


#: the program of this process; forked processes begin with a copy
LOADED_PROGRAM = LoadedProgram()
