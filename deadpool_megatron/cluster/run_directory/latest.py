"""What the next start of a run goes on from, as ``latest.json`` says: the valid checkpoints and
dumps, the best first. None of them is decided on without a look whether it is still there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.run_directory.directory import DAMAGE, read_json, write_json
from deadpool_megatron.layout.records import Generation, Restore

# So many are remembered: what was saved long before is found by who looks for it.
_MOST_VALID = 16
_INDEX = ".metadata"


def read_valid(latest: Path) -> tuple[Restore, ...]:
    """Raises OSError, and ValueError when the file is damaged."""
    try:
        return valid_in(read_json(latest))
    except DAMAGE as error:
        raise ValueError(f"{latest} is damaged: {error!r}") from error


def valid_in(values: Mapping[str, Any]) -> tuple[Restore, ...]:
    """What :func:`as_dict` was given; nothing in an empty mapping. Raises what is in DAMAGE."""
    found = (values, *values.get("older", ())) if values else ()
    return tuple(map(Restore.from_dict, found))


def as_dict(valid: Sequence[Restore]) -> dict[str, Any]:
    """JSON form of at least one: that of the first, with the others beside it."""
    first, *older = valid
    beside = {"older": [one.to_dict() for one in older]} if older else {}
    return {**first.to_dict(), **beside}


def point_at(latest: Path, valid: Sequence[Restore]) -> None:
    """Have the next start go on from the first of these that it can use. Raises OSError."""
    write_json(latest, as_dict(valid[:_MOST_VALID]), lasting=True)


def still_valid(latest: Path, without: Restore) -> list[Restore]:
    """All but one of those that are noted, and still there; none where the file is damaged."""
    try:
        known = read_valid(latest)
    except (FileNotFoundError, ValueError):
        return []
    return [one for one in known if one.path not in ("", without.path) and is_there(one)]


def is_there(restore: Restore) -> bool:
    """Whether its directory and its index are there. What cannot be looked at just now may be."""
    try:
        names = [one.name for one in Path(restore.path).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    # Other formats than torch_dist, of a loop of one's own, have an index of another name or none.
    has_shards = any(name.endswith(".distcp") for name in names)
    return restore.kind == "dump" or _INDEX in names or (bool(names) and not has_shards)


def found_in(saves: Path) -> list[Restore]:
    """Complete checkpoints of Megatron's, the newest first, in the directory that ``saves``
    names: written since it does, and their index last. Nobody may have been told of them, so the
    line that they are of is not known.
    """
    found = list[Restore]()
    try:
        since = saves.stat().st_mtime
        for path in Path(read_json(saves)["directory"]).glob("iter_[0-9]*"):
            times = [one.stat().st_mtime for one in path.glob("*.distcp")]
            is_whole = (path / _INDEX).exists() and (path / "metadata.json").exists()
            if is_whole and since <= max(times) <= (path / _INDEX).stat().st_mtime:
                generation = Generation(0, int(path.name.removeprefix("iter_")))
                found.append(Restore("durable", generation, "save", str(path)))
    except (OSError, *DAMAGE):
        pass  # what is noted is there all the same
    return sorted(found, key=lambda one: one.generation.iteration, reverse=True)


def gone(valid: Sequence[Restore]) -> frozenset[str]:
    """The paths of those that are not there any more. May take as long as a file system does."""
    return frozenset(one.path for one in valid if not is_there(one))
