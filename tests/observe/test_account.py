"""The account of a run: each second of each node belongs to one use."""

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.account import Account, Use

PHASES = {"close": 1.0, "decide": 0.5, "rebuild": 2.0, "restore": 1.0, "sync": 0.5, "verify": 1.0}
KINDS = st.sampled_from(
    [
        *(Kind.STEP, Kind.EPOCH_CLOSED, Kind.EPOCH_DECIDED, Kind.EPOCH_OPENED, Kind.RECOVERED),
        *(Kind.SEGMENT, Kind.NODE_LOST, Kind.COORDINATOR, Kind.WAITING_FOR_SPARE),
    ]
)


def event(what: Kind, at: float, **values: object) -> Event:
    fields = {k: values.pop(k) for k in ("node", "iteration", "epoch") if k in values}
    return Event(what, wall_seconds=at, monotonic_seconds=at, data=values, **fields)  # type: ignore[arg-type]


def started(nodes: int = 2, spares: int = 1) -> list[Event]:
    joined = [event(Kind.NODE_JOINED, 0.0, node=n, spare=n >= nodes) for n in range(nodes + spares)]
    return [*joined, event(Kind.EPOCH_OPENED, 10.0, epoch=1, phases={})]


def account(events: list[Event]) -> Account:
    found = Account()
    for one in events:
        found.take(one)
    return found


def spent(found: Account) -> dict[str, float]:
    return {use.value: s for use, s in found.uses().items() if s > 1e-9}


def joined(at: float, *nodes: int) -> list[Event]:
    return [event(Kind.NODE_JOINED, at, node=node, spare=node == 2) for node in nodes]


def opened(at: float, epoch: int = 1, **phases: float) -> Event:
    return event(Kind.EPOCH_OPENED, at, epoch=epoch, phases=phases)


def steps(*at: float) -> list[Event]:
    return [event(Kind.STEP, one, iteration=k) for k, one in enumerate(at, 1)]


RESTART = event(Kind.EPOCH_CLOSED, 1003.0, kind="restart")
STORIES: dict[str, tuple[list[Event], dict[str, float]]] = {
    "a new coordinator hears of known steps again": (
        [
            *started(),
            *steps(12.0, 14.0),
            event(Kind.COORDINATOR, 15.0, term=2),
            *steps(15.0, 15.0, 16.0),
        ],
        {"start": 20.0, "training": 12.0, "spare": 16.0},
    ),
    "a resumed run tells the step that it begins with": (
        [*started()[:-1], event(Kind.STEP, 9.0, iteration=29), *started()[-1:], *steps(12.0)],
        {"start": 20.0, "recomputed": 4.0, "spare": 12.0},
    ),
    "a run without a failure": (
        [
            *started(),
            *steps(12.0, 14.0, 16.0, 18.0, 20.0),
            event(Kind.SEGMENT, 23.0, boundary="save", seconds=3.0),
            event(Kind.SEGMENT, 24.0, boundary="evaluation", seconds=1.0),
            event(Kind.RUN_ENDED, 25.0, exit_status=0),
        ],
        {
            "start": 20.0,
            "training": 20.0,
            "saving": 6.0,
            "evaluation": 2.0,
            "ending": 2.0,
            "spare": 25.0,
        },
    ),
    "nodes are there while a coordinator takes over": (
        [*started(), *steps(12.0), *joined(20.0, 0, 1, 2), opened(21.0), *steps(12.0, 14.0, 22.0)],
        {"start": 20.0, "training": 24.0, "spare": 22.0},
    ),
    "a run that was away as a whole": (
        [*started(), *steps(12.0), *joined(1000.0, 0, 1, 2), RESTART],
        {"start": 26.0, "training": 4.0, "spare": 15.0},
    ),
    "and comes back on other nodes": (
        [
            *(*started(), *steps(12.0), *joined(1000.0, 3, 4)),
            *(event(Kind.NODE_LOST, 1002.0, node=node) for node in range(3)),
            RESTART,
        ],
        {"start": 26.0, "training": 4.0, "spare": 12.0},
    ),
    "a run that ended and goes on": (
        [
            *(*started(1, 0), *steps(12.0), event(Kind.RUN_ENDED, 13.0, exit_status=75)),
            *(*joined(100.0, 0), event(Kind.EPOCH_CLOSED, 101.0, kind="restart")),
            *(opened(103.0, 2, restore=2.0), event(Kind.STEP, 104.0, iteration=2)),
        ],
        {"start": 11.0, "training": 3.0, "recovery-restore": 2.0, "ending": 1.0},
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_each_second_has_its_use(name: str) -> None:
    events, uses = STORIES[name]
    assert spent(account(events)) == uses


def recovery(at: float, again: int, kind: str = "node-lost", wait: float = 0.0) -> list[Event]:
    """An epoch is closed, node 1 is replaced by node 2, and ``again`` steps are done once more."""
    opened = at + wait + sum(PHASES.values())
    return [
        event(Kind.NODE_LOST, at, node=1),
        event(Kind.EPOCH_CLOSED, at, kind=kind),
        *([event(Kind.WAITING_FOR_SPARE, at + 1.0)] if wait else []),
        event(Kind.EPOCH_DECIDED, at + 1.5 + wait),
        event(Kind.EPOCH_OPENED, opened, epoch=2, phases=PHASES),
        event(Kind.STEP, opened + 2.0 * (again + 1), iteration=3),
        event(
            Kind.RECOVERED,
            opened + 2.0 * (again + 1),
            kind=kind,
            steps_recomputed=again,
            seats_changed={"1": [[1, 0, 0], [2, 0, 0]]},
        ),
    ]


def test_a_lost_node_costs_a_part_of_a_step_a_recovery_and_what_is_computed_again() -> None:
    steps = [event(Kind.STEP, 10.0 + 2 * k, iteration=k) for k in range(1, 3)]
    found = account([*started(), *steps, *recovery(15.0, again=1)])
    # Of the spare's time until it has a role nothing but "spare" can be said.
    assert spent(found) == {
        "start": 20.0,
        "training": 8.0 + 2.0,
        "recomputed": 2.0,
        "interrupted": 2.0,
        "recovery-close": 1.0,
        "recovery-decide": 0.5,
        "recovery-rebuild": 2.0,
        "recovery-restore": 1.0,
        "recovery-sync": 0.5,
        "recovery-verify": 1.0,
        "spare": 25.0,
    }


def test_a_wait_for_a_spare_is_told_apart_from_the_recovery() -> None:
    """One node waits, the other one is lost; while it does, the counter grows."""
    events = recovery(15.0, again=0, wait=100.0)
    found = account([*started(), *events[:3]])
    waited = [found.settled(at)[Use.WAITING_FOR_SPARE] for at in (20.0, 60.0, None)]
    assert waited == [4.0, 44.0, 44.0]
    for one in events[3:]:
        found.take(one)
    assert found.uses()[Use.WAITING_FOR_SPARE] == pytest.approx(100.5)
    assert found.uses()[Use.CLOSE] == pytest.approx(1.0)
    assert found.uses()[Use.OTHER_RECOVERY] == pytest.approx(0.0)


def test_a_hang_stands_still_and_a_planned_swap_loses_nothing() -> None:
    hang = account([*started(), *recovery(310.0, again=0, kind="hang")])
    assert hang.uses()[Use.STANDING_STILL] == 600.0
    planned = account([*started(), *recovery(15.0, again=0, kind="drained")])
    assert planned.uses()[Use.INTERRUPTED] == 0.0


@given(st.lists(st.tuples(KINDS, st.floats(0.0, 50.0)), max_size=40))
def test_nothing_is_counted_twice_or_forgotten(story: list[tuple[Kind, float]]) -> None:
    """Whatever the order of events: the sum is the time, and what is settled only grows."""
    found, now, there, left = account(started(3, 1)), 10.0, {0, 1, 2, 3}, 0.0
    before = dict(found.seconds)
    for kind, later in story:
        now += later
        values: dict[str, object] = {"kind": "node-lost", "phases": PHASES, "boundary": "save"}
        if kind is Kind.NODE_LOST and there:
            values["node"] = there.pop()
            left += now
        if kind is Kind.STEP:
            values["iteration"] = 1
        found.take(event(kind, now, **values))
        assert sum(found.uses(now).values()) == pytest.approx(left + now * len(there))
        after = dict(found.seconds)
        assert all(after[use] >= before[use] for use in Use)
        before = after


def test_a_recovery_of_which_nobody_tells_the_end() -> None:
    """Its coordinator was lost behind the opening, and the next one knows of no recovery."""
    untold = recovery(15.0, again=0)[:-1]
    joined = [event(Kind.NODE_JOINED, 22.0, node=n) for n in (0, 2)]
    more = [event(Kind.STEP, 21.0 + 2.0 * k, iteration=3 + k, epoch=2) for k in range(1, 11)]
    later = event(Kind.EPOCH_CLOSED, 42.0, kind="node-lost")
    found = account([*started(), *untold, *joined, *more, later]).uses()
    # Ten steps of two nodes, of two seconds each; and what was cut off before both closes.
    assert found[Use.TRAINING] == pytest.approx(40.0, abs=4.0)
    assert (found[Use.RECOMPUTED], found[Use.INTERRUPTED]) == (0.0, pytest.approx(10.0 + 2.0))
