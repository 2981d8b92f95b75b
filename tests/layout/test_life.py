"""What is decided for a cluster in its life, line by line: where copies and blocks lie and what
they take, who gets the roles of lost nodes, and from where each role restores.

In a life lines are what happens (see lives/decisions.txt). Nodes hold what the plan has them hold.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.layout import memory_needs, planner, records, schemes
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.parity_groups import INPUTS, ParityPlacement
from deadpool_megatron.layout.placement import CopyPlacement, is_covered, missing_copies
from deadpool_megatron.settings import Settings
from tests.common import lives

BOUNDARIES = ("step", "evaluation", "save")


def short(value: Any) -> str:
    """The same for people: sources as node.role."""
    if isinstance(value, records.Generation):
        return f"{value.lineage}:{value.iteration}"
    if isinstance(value, records.Source):
        return f"{value.node}.{value.role}"
    if isinstance(value, dict):
        return " ".join(f"{short(key)}={short(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return f"[{' '.join(map(short, value))}]"
    return str(value)


class Cluster:
    """``lines``: what came of it. Roles of one tensor-parallel rank are peers."""

    def __init__(self, options: dict[str, Any]) -> None:
        nodes, self.per_node = options["nodes"], options.get("per_node", 1)
        self.survived, racks = options.get("survived", 1), options.get("racks", 0)
        self.settings = Settings(copies=self.survived, protection=options["plan"])
        every, group = options.get("every", 1), options.get("group", 3)
        self.plan = schemes.plan_of_kind(options["plan"], every, group)
        numbers = range(nodes + options.get("spares", 0))
        self.live = {n: f"rack{n // racks}" if racks else f"node{n}" for n in numbers}
        self.roles = range(nodes * self.per_node)
        self.seats = {r: records.Seat(*divmod(r, self.per_node), 0) for r in self.roles}
        self.layouts = {r: self.layout(r, options.get("shared", 1)) for r in self.roles}
        self.epoch, self.kept = 1, {1: NO_LIMIT}
        self.held: dict[int, dict[tuple[int, records.Generation], set[str]]] = {}
        self.blocks: dict[int, records.RoleLayout] = {}
        self.bad: set[records.BadPart] = set()
        self.facts: dict[str, Any] = {}
        self.lines: list[str] = []

    def layout(self, role: int, shared: int) -> records.RoleLayout:
        """``shared``: so many peers have equal bytes of the second part."""
        peers = tuple(self.roles[role % self.per_node :: self.per_node])
        first = peers.index(role) // shared * shared
        same, own = peers[first : first + shared], (role,)
        shards = {
            "shard": records.PartInfo("shard", 70_000 + 9000 * (role % 3), own, "weights"),
            "tail": records.PartInfo("tail", 5000, same, f"tail of {same[0]}"),
        }
        extras = [records.PartInfo(f"extras@{name}", 3000, own) for name in BOUNDARIES]
        parts = (*shards.values(), *extras)
        return records.RoleLayout(role, parts, peers, 2, f"hash{role}", f"role {role}")

    def say(self, what: str, value: Any = "") -> None:
        self.lines.append(f"    {what}: {short(value)}")

    def placed(self) -> tuple[dict[int, int], dict[int, str], list[int]]:
        seats = {role: seat.node for role, seat in self.seats.items()}
        return seats, self.live, sorted(self.live.keys() - set(seats.values()))

    def copies(self) -> CopyPlacement:
        return CopyPlacement(*self.placed(), 0 if self.plan.kind.is_local else self.survived)

    def place(self) -> None:
        placed, copies = self.placed(), self.copies()
        self.say("copies", {r: copies.buddies(r, self.layouts[r].peers) for r in self.seats})
        self.say("too few for", sorted(missing_copies(*placed, self.survived)))
        if self.plan.kind is schemes.SchemeKind.PARITY:
            for group in ParityPlacement(*placed, self.plan, self.survived).groups:
                self.say(f"group {short(group.roles)} has blocks on", group.holders)
        scene = memory_needs.Topology(self.layouts, *placed, self.survived)
        used = memory_needs.memory_by_use(self.plan, scene)
        self.say("own and kept bytes", {n: used[n] for n in self.live})
        budgets = {n: sum(used[n]) - 1000 * n for n in self.live if n}
        lack = memory_needs.shortfall(self.plan, scene, budgets)
        self.say("lacks", lack and lack.describe())
        needs = memory_needs.node_needs(self.layouts[0], self.per_node, self.settings)
        self.say(f"each needs {needs.total}, at most {needs.peak} bytes", needs.describe())
        self.say("plan", schemes.describe_plan(self.plan, self.survived))
        self.say("refused", memory_needs.refusal(self.plan, len(self.live), self.settings))

    def commit(self, iteration: int, boundary: str = "step", *behind: str) -> None:
        """All nodes hold what they should of a generation; of named roles only their owners."""
        generation = records.Generation(self.epoch, iteration)
        placed, copies = self.placed(), self.copies()
        extras = records.extras_part(boundary)
        is_parity = self.plan.kind is schemes.SchemeKind.PARITY
        for role, node in placed[0].items():
            layout = self.layouts[role]
            shards = [part for part in layout.parts if part.name in layout.shard_parts]
            names = [part.name for part in shards]
            self.hold(node, role, generation, [extras, *names])
            sent = [
                part.name
                for part in ([] if is_parity else shards)
                if not is_covered(part.replicas, role, *placed[:2], self.survived)
            ]
            for buddy in [] if str(role) in behind else copies.buddies(role, layout.peers):
                self.hold(buddy, role, generation, [extras, *sent])
        if is_parity and boundary == "step" and not behind:
            parity = ParityPlacement(*placed, self.plan, self.survived)
            for group in parity.groups:
                for block, holder in zip(group.blocks, group.holders, strict=True):
                    found = self.blocks[block] = parity.layout(block, self.layouts)
                    self.hold(holder, block, generation, [*found.shard_parts, INPUTS])

    def hold(self, node: int, role: int, at: records.Generation, parts: Iterable[str]) -> None:
        self.held.setdefault(node, {}).setdefault((role, at), set()).update(parts)

    def lose(self, *words: str) -> None:
        """Nodes by number; ``leaving=3``, ``last=4``, ``member=2``, ``warm=5`` for others."""
        named: dict[str, list[int]] = {"leaving": [], "last": [], "member": [], "warm": []}
        for word in words:
            name, _, number = word.rpartition("=")
            if name:
                named[name].append(int(number))
            else:
                self.live.pop(int(number))
                self.held.pop(int(number), None)
        slots = range(self.per_node)
        members = {(n, slot): int(n in named["member"]) for n in self.live for slot in slots}
        answer = planner.assign_seats(
            self.seats,
            members,
            warm=frozenset((node, 0) for node in named["warm"]),
            leaving=frozenset(named["leaving"]),
            deprioritized=frozenset(named["last"]),
        )
        moved = {r: s.to_list() for r, s in answer.seats.items() if self.seats[r] != s}
        self.say("new seats", moved)
        if answer.unseated:
            self.say("without seat", answer.unseated)
        self.restore(answer.seats)

    def restore(self, seats: Any = None) -> None:
        """From what is held; into seats of before, where none are given."""
        inventories = {}
        for node, held in self.held.items():
            holdings = [records.Holding(*key, frozenset(parts)) for key, parts in held.items()]
            roles = dict.fromkeys(role for role, _ in held)
            layouts = [self.layouts.get(role) or self.blocks[role] for role in roles]
            inventories[node] = records.Inventory(node, 1, tuple(holdings), tuple(layouts))
        self.epoch += 1
        query = planner.RestoreQuery(
            *(self.epoch, range(len(self.roles)), inventories, seats or self.seats, self.seats),
            self.kept,
            bad_parts=frozenset(self.bad),
            every=self.plan.every,
            **self.facts,
        )
        found = planner.choose_restore(query)
        if isinstance(found, planner.NoRestore):
            self.say("nothing", found.reason)
            return
        self.seats = dict(query.seats)
        self.kept = planner.keep_lineages(self.kept, found, self.epoch)
        self.say(f"{found.kind} {found.path}", (found.generation, found.boundary))
        self.say("kept", {k: "" if v == NO_LIMIT else v for k, v in self.kept.items()})
        for role, sources in found.sources.items():
            self.say(f"role {role}", sources)
            recipe = found.recipes.get(role)
            for name, decoding in (recipe.decodings if recipe else {}).items():
                group = f"{short(decoding.group)}+{decoding.parities}"
                nodes = {n: tuple(s.node for s in of) for n, of in decoding.blocks.items()}
                self.say(f"role {role} decodes {name} of {group}", nodes)

    def spoil(self, node: str, role: str, lineage: str, iteration: str, part: str) -> None:
        generation = records.Generation(int(lineage), int(iteration))
        self.bad.add(records.BadPart(int(node), int(role), generation, part))

    def doubt(self, lineage: str, iteration: str) -> None:
        generation = records.Generation(int(lineage), int(iteration))
        self.facts["bad_generations"] = frozenset({generation})

    def checkpoint(self, kind: str, iteration: str) -> None:
        generation = records.Generation(self.epoch, int(iteration))
        self.facts[kind] = records.Restore(
            "initial" if kind == "start" else "durable", generation, "save", f"/{kind}"
        )


def live(script: Sequence[str], options: dict[str, Any], _: Path) -> list[str]:
    cluster = Cluster(options)
    for line in script:
        cluster.lines.append(line)
        what, *words = line.split()
        if what == "commit":
            cluster.commit(int(words[0]), *words[1:])
        else:
            getattr(cluster, what)(*words)
    return cluster.lines


def test_decisions_are_those_of_the_transcript(tmp_path):
    lives.compare(Path(__file__).parent / "lives" / "decisions.txt", live, tmp_path)
