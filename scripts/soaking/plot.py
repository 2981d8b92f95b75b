"""The picture of a soak: every fault with its seconds, and what lived on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soaking import growth


def draw(facts: dict[str, Any], path: Path) -> None:
    """Write a PNG: above, seconds to the next iteration of each fault; below, growth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, middle, below) = pyplot.subplots(
        3, 1, figsize=(11, 11), sharex=True, layout="constrained"
    )
    kinds = sorted(facts["kinds"])
    colours = pyplot.get_cmap("tab20")
    for number, kind in enumerate(kinds):
        these = [fault for fault in facts["struck"] if fault["kind"] == kind and fault["seconds"]]
        above.scatter(
            [fault["at_seconds"] / 60 for fault in these],
            [fault["seconds"] for fault in these],
            s=14,
            color=colours(number % 20),
            label=f"{kind} ({len(these)})",
        )
    above.set_yscale("log")
    above.set_ylabel("seconds, fault to next iteration")
    above.legend(ncols=4, fontsize=7, loc="upper center")
    verdict = "passed" if facts["passed"] else "FAILED"
    above.set_title(
        f"soak, seed {facts['soak']['seed']}: {facts['faults']} faults in"
        f" {facts['seconds'] / 60:.0f} min, {facts['hashes_compared']} states compared: {verdict}"
    )
    shades = {"coordinator": "C3", "agent": "C0", "vault": "C2", "member": "C7"}
    for life in growth.lives(growth.Sample(**sample) for sample in facts["samples"]):
        minutes = [sample.seconds / 60 for sample in life]
        middle.plot(minutes, [sample.rss_mb for sample in life], color=shades[life[0].part], lw=0.7)
    for part, shade in shades.items():
        middle.plot([], [], color=shade, label=part)
    middle.set_ylabel("resident memory, MB, one line a process")
    middle.legend(fontsize=8)
    minutes = [files["seconds"] / 60 for files in facts["files_seen"]]
    below.plot(
        minutes, [files["segments_mb"] for files in facts["files_seen"]], label="shared memory"
    )
    directory = [files["directory_mb"] for files in facts["files_seen"]]
    below.plot(minutes, directory, label="run directory (anew each round)")
    below.set_ylabel("MB")
    below.set_xlabel("minutes")
    below.legend(fontsize=8)
    figure.savefig(path, dpi=110)
