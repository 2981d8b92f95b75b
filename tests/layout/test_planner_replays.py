"""What the planner makes of chains: a whole copy of some base and every step since."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.part_kinds import SUMS_PART, UPDATE_PART, gradients_part
from deadpool_megatron.layout.planner import NoRestore, RestoreQuery, choose_restore
from deadpool_megatron.layout.records import (
    BadPart,
    Generation,
    Holding,
    Inventory,
    PartInfo,
    Recipe,
    Restore,
    RoleLayout,
    Seat,
    Source,
)
from deadpool_megatron.layout.replaying import REPLAY, key, step_parts, suspects

WHOLE = frozenset({"shard0", "extras@step"})
STEP = frozenset({gradients_part("shard0"), UPDATE_PART, SUMS_PART, "extras@step"})
OWN = WHOLE | STEP
LINES = {1: 7, 2: NO_LIMIT}


def g(iteration: int) -> Generation:
    """On the kept line: lineage 1 up to iteration 7, then lineage 2."""
    return Generation(1 if iteration <= 7 else 2, iteration)


def layout(role: int) -> RoleLayout:
    own = (role,)
    parts = (
        PartInfo("shard0", 8, own),
        *step_parts({"shard0": PartInfo("", 4, own)}, 64, role),
        PartInfo("extras@step", 8, own),
    )
    return RoleLayout(role, parts, (0, 1), 2, "same")


Content = dict[int, list[tuple[int, Generation, frozenset[str]]]]


def ask(content: Content, *, roles: int = 1, **more: object) -> RestoreQuery:
    """Nodes whose vaults hold ``content``; role r sits on node 9 and has come from node r."""
    inventories = {
        node: Inventory(
            node,
            1,
            tuple(Holding(role, generation, parts) for role, generation, parts in held),
            tuple(layout(role) for role in sorted({role for role, _, _ in held})),
        )
        for node, held in content.items()
    }
    seats = {role: Seat(9, role, 0) for role in range(roles)}
    owners = {role: Seat(role, 0, 0) for role in range(roles)}
    query = RestoreQuery(3, roles, inventories, seats, owners, LINES)
    return replace(query, **more)  # type: ignore[arg-type]


def chosen(query: RestoreQuery) -> Restore:
    answer = choose_restore(query)
    assert isinstance(answer, Restore), answer
    return answer


def test_a_lost_role_is_recomputed_from_what_its_buddy_holds() -> None:
    content: Content = {1: [(0, g(5), WHOLE), (0, g(6), STEP), (0, g(7), STEP)]}
    answer = chosen(ask(content))
    assert answer.generation == g(7)
    replay = answer.recipes[0].replay
    assert replay is not None
    assert (replay.base, replay.steps) == (g(5), (g(6), g(7)))
    here = (Source(1, 0),)
    assert replay.sources[g(5)] == {"shard0": here}
    wanted = {gradients_part("shard0"): here, UPDATE_PART: here, SUMS_PART: here}
    assert replay.sources[g(6)] == replay.sources[g(7)] == wanted
    assert answer.sources[0] == {"shard0": (), "extras@step": here}
    assert Recipe.from_dict(answer.recipes[0].to_dict()) == answer.recipes[0]


def test_a_whole_copy_anywhere_is_preferred() -> None:
    chain: list[tuple[int, Generation, frozenset[str]]] = [(0, g(6), WHOLE), (0, g(7), STEP)]
    answer = chosen(ask({1: chain, 2: [(0, g(7), OWN)]}))
    assert (answer.recipes, answer.sources[0]["shard0"]) == ({}, (Source(2, 0),))


def test_a_chain_may_lie_on_several_nodes_and_cross_epochs() -> None:
    content: Content = {
        1: [(0, g(7), WHOLE), (0, g(9), STEP)],
        2: [(0, g(8), STEP), (0, g(9), STEP)],
    }
    replay = chosen(ask(content)).recipes[0].replay
    assert replay is not None
    assert (replay.base, replay.steps) == (g(7), (g(8), g(9)))
    assert replay.sources[g(9)][UPDATE_PART] == (Source(1, 0), Source(2, 0))


def test_a_broken_chain_gives_the_newest_generation_before_the_break() -> None:
    steps: list[tuple[int, Generation, frozenset[str]]] = [
        (0, g(5), WHOLE),
        (0, g(6), STEP),
        (0, g(7), STEP - {SUMS_PART}),
        (0, g(8), STEP),
    ]
    assert chosen(ask({1: steps})).generation == g(6)
    other_line = [(0, Generation(1, 8), STEP), *steps[:2], (0, g(7), STEP)]
    assert chosen(ask({1: other_line})).generation == g(7)
    assert isinstance(choose_restore(ask({1: steps[1:]})), NoRestore)


def test_what_failed_is_not_tried_again() -> None:
    content: Content = {1: [(0, g(5), WHOLE), (0, g(6), STEP), (0, g(7), STEP)]}
    recipe = chosen(ask(content)).recipes[0]
    different = set(suspects(recipe, g(7), REPLAY))
    assert different == {BadPart(1, 0, g(7), SUMS_PART)}
    assert chosen(ask(content, bad_parts=frozenset(different))).generation == g(6)
    damaged = set(suspects(recipe, g(7), key(g(6), gradients_part("shard0"))))
    assert damaged == {BadPart(1, 0, g(6), gradients_part("shard0"))}
    assert chosen(ask(content, bad_parts=frozenset(damaged))).generation == g(5)
    assert list(suspects(recipe, g(7), "shard0")) == []


@st.composite
def contents(draw: st.DrawFn) -> tuple[int, Content]:
    roles = draw(st.integers(1, 2))
    names = ["shard0", gradients_part("shard0"), UPDATE_PART, SUMS_PART]
    content: Content = {}
    for node in range(draw(st.integers(1, 3))):
        content[node] = []
        for role in range(roles):
            for iteration in range(5, 10):
                parts = draw(st.sampled_from([WHOLE, STEP, OWN, frozenset[str]()]))
                lost = draw(st.sampled_from([*names, "", "", "", "", ""]))
                content[node].append((role, g(iteration), parts - {lost}))
    return roles, content


@given(contents())
def test_newest_that_all_roles_can_copy_or_recompute(case: tuple[int, Content]) -> None:
    roles, content = case
    answer = choose_restore(ask(content, roles=roles))

    def holders(role: int, generation: Generation, part: str) -> set[Source]:
        return {
            Source(node, role)
            for node, held in content.items()
            for r, found, parts in held
            if (r, found) == (role, generation) and part in parts
        }

    def producible(role: int, iteration: int) -> bool:
        """Written the slow way: is there any base from which every step is there?"""
        if holders(role, g(iteration), "shard0"):
            return True
        names = (gradients_part("shard0"), UPDATE_PART, SUMS_PART)
        step = all(holders(role, g(iteration), name) for name in names)
        return step and iteration > 5 and producible(role, iteration - 1)

    good = [
        iteration
        for iteration in range(5, 10)
        if all(
            holders(role, g(iteration), "extras@step") and producible(role, iteration)
            for role in range(roles)
        )
    ]
    if not good:
        assert isinstance(answer, NoRestore)
        return
    assert isinstance(answer, Restore)
    assert answer.generation == g(max(good))
    for role in range(roles):
        recipe = answer.recipes.get(role)
        assert (recipe is None) == bool(answer.sources[role]["shard0"])
        if recipe is None or recipe.replay is None:
            continue
        line = [recipe.replay.base, *recipe.replay.steps]
        assert [one.iteration for one in line] == list(
            range(line[0].iteration, answer.generation.iteration + 1)
        )
        for generation, parts in recipe.replay.sources.items():
            for name, found in parts.items():
                assert set(found) == holders(role, generation, name)
                assert found
