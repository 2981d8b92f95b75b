"""Draws the picture of a demo: the losses of both runs, and below them the phases of the recovery,
or the numbers of model replicas of an elastic run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.observe.story import PHASES, Interruption, Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Mostly Okabe and Ito's colours, which are distinct for people with any kind of colour vision.
_SHADES = """
#D55E00 #E69F00 #B9B4A2 #F0E442 #CC79A7 #0072B2 #009E73 #44803F #7A6FAC #8FD6C1 #56B4E9 #555555
"""
_COLOURS = dict(zip(PHASES, _SHADES.split(), strict=True))
_KILL_TITLE = "A node dies in the middle of an iteration"
_GREY, _PALE, _BLUE, _RED = "#999999", "#B8C4CE", "#0B5394", "#C0392B"


def draw(path: Path, undisturbed: Story, failed: Story, *, identical: bool) -> None:
    """Write the picture to ``path`` (the suffix names the format). Raises CommandError.

    ``identical``: whether the runs are bit-identical, for the title. Only the first failure of
    ``failed`` is drawn. If that run changed its size, all its changes are drawn instead, and
    ``undisturbed`` is stock training at the same sizes.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise CommandError(f"a plot needs matplotlib: pip install matplotlib ({error})") from error
    if not undisturbed.steps or not failed.steps:
        raise CommandError("there are no steps to draw")
    changes = failed.changes
    failure = failed.failures[0] if failed.failures and not changes else None
    lanes = _lanes(failure) if failure is not None else []
    heights = [3.6, 0.9 + 0.24 * max(2 if changes else 4, len(lanes))]
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, figsize=(10, sum(heights) + 1.2), height_ratios=heights, layout="constrained"
        )
        verdict = f"bit-identical: {'yes' if identical else 'no'}"
        event = "Two nodes continue for three, until another one joins" if changes else _KILL_TITLE
        figure.suptitle(f"{event}   ·   {verdict}", fontsize=13)
        label = "run that lost a node" + (": the same losses" if identical else "")
        _draw_losses(upper, undisturbed, failed, failure, label)
        if changes:
            _draw_sizes(upper, lower, failed)
        elif failure is None or not lanes:
            lower.text(0.5, 0.5, "no recovery recorded", ha="center", transform=lower.transAxes)
            lower.set_axis_off()
        else:
            _draw_recovery(lower, failure, lanes)
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise CommandError(f"cannot write {path}: {error}") from error
        finally:
            pyplot.close(figure)


def _draw_losses(
    axes: Axes, undisturbed: Story, failed: Story, failure: Interruption | None, label: str
) -> None:
    """Draw the losses of both runs over the iterations, and the kill between two finished
    iterations."""
    thick: dict[str, Any] = {"color": _PALE, "linewidth": 7.0, "solid_capstyle": "round"}
    thin: dict[str, Any] = {"color": _BLUE, "linewidth": 1.4, "marker": "o", "markersize": 3.5}
    reference = "stock training at the same sizes" if failed.changes else "undisturbed run"
    axes.plot(*curve_of(undisturbed), label=reference, **thick)
    axes.plot(*curve_of(failed), label=label, **thin)
    axes.legend(loc="lower left", frameon=False)
    if failure is not None:
        killed = failure.last_iteration + 0.5
        axes.axvline(killed, color=_RED, linewidth=1.4)
        axes.annotate(
            f"  a node is killed in iteration {failure.last_iteration + 1};\n  it is finished"
            f" {(failure.ended or failed.last_wall) - failure.began:.2f} s later, on the spare",
            xy=(killed, 0.97),
            xycoords=("data", "axes fraction"),
            va="top",
            color=_RED,
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss")
    axes.grid(axis="y", alpha=0.25)


def _draw_sizes(upper: Axes, lower: Axes, run: Story) -> None:
    """Draw the number of model replicas over the iterations, and each change in both axes."""
    numbers = [run.changes[0][1], *(after for _, _, after in run.changes)]
    edges = [0.5, *(first - 0.5 for first in run.sizes), run.last_iteration + 0.5]
    lower.stairs(numbers, edges, fill=True, color=_PALE)
    for row, (edge, failure) in enumerate(zip(edges[1:-1], run.failures, strict=False)):
        colour = _GREY if failure.planned else _RED
        upper.axvline(edge, color=colour, linewidth=1.4)
        place, verb = upper.get_xaxis_transform(), "joins" if failure.planned else "is killed"
        text = f"  a node {verb}: {failure.seconds or 0:.2f} s"
        upper.text(edge, 0.95 - 0.08 * row, text, color=colour, transform=place)
    lower.sharex(upper)
    lower.set_yticks(range(max(numbers) + 1))
    lower.set_xlabel("iteration")
    lower.set_ylabel("model replicas")


def curve_of(run: Story) -> tuple[list[int], list[float]]:
    """Return the iterations and their losses."""
    losses = [float("nan") if s.loss is None else float.fromhex(s.loss) for s in run.steps]
    return [s.iteration for s in run.steps], losses


Bar = tuple[str, float, float]  # phase, start, end; seconds since the failure


def _lanes(failure: Interruption) -> list[tuple[str, list[Bar]]]:
    """Return the titles and bars of lanes, from the top: the recovery, the copies, each role.
    Return no lanes for a failure that is not over."""
    if not failure.is_over:
        return []
    run_bars, decided_at = list[Bar](), 0.0
    lanes = [("recovery", run_bars)]
    for phase, length in failure.phases.items():
        if phase == "reprotect":  # starts after the decision, concurrent with the other phases
            lanes.append(("copies", [(phase, decided_at, decided_at + length)]))
            continue
        start = run_bars[-1][2] if run_bars else 0.0
        run_bars.append((phase, start, start + length))
        decided_at = start + length if phase == "decide" else decided_at
    for role in sorted({part.role for part in failure.parts if part.role is not None}):
        parts = [part for part in failure.parts if part.role == role]
        bars = [(p.phase, p.start - failure.began, p.end - failure.began) for p in parts]
        nodes = [f" (node {part.node})" for part in parts if part.node is not None]
        lanes.append((f"role {role}{''.join(nodes[-1:])}", bars))
    return lanes


def _draw_recovery(
    axes: Axes, failure: Interruption, lanes: Sequence[tuple[str, list[Bar]]]
) -> None:
    from matplotlib.patches import Patch

    last = max(end for _, bars in lanes for _, _, end in bars)
    for row, (_, bars) in enumerate(lanes):
        for phase, start, end in bars:
            axes.barh(
                row,
                max(end - start, last / 400),
                left=start,
                height=0.7,
                color=_COLOURS.get(phase, _GREY),
                edgecolor="white",
                linewidth=0.5,
            )
    axes.set_yticks(range(len(lanes)), [title for title, _ in lanes])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds since the node was killed")
    axes.set_xlim(left=min(0.0, *(start for _, bars in lanes for _, start, _ in bars)))
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    drawn = {phase for _, bars in lanes for phase, start, end in bars if end - start >= 0.0005}
    handles = []
    for phase in [*(p for p in PHASES if p in drawn), *sorted(drawn - PHASES.keys())]:
        name = "flush" if phase == "drain" else phase  # of communicators
        label = f"{name} {failure.phases[phase]:.3f} s" if phase in failure.phases else name
        handles.append(Patch(color=_COLOURS.get(phase, _GREY), label=label))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
