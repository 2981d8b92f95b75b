"""What a record says, its next reader hears, whatever it says."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from deadpool_megatron.layout import records as rec
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.schemes import Kind, ProtectionPlan, Scheme

G = rec.Generation(2, 7)
PLACES = {"shard": (rec.Source(1, 0),)}
RECIPE = rec.Recipe(
    {"tail": rec.Decoding((0, 1), 1, {2: (rec.Source(1, 9),)})}, rec.Replay(G, (G,), {G: PLACES})
)
RECORD = rec.EpochRecord(
    epoch=3,
    seats={0: rec.Seat(1, 0, 2)},
    nodes={1: rec.NodeAddress("host", 7, "rack1", True)},
    restore=rec.Restore("memory", G, "save", "/here", {0: PLACES}, {0: RECIPE}),
    replicas=2,
    emitted_up_to=6,
    fewer_copies=frozenset({0}),
    cause="a node is gone",
    protection=ProtectionPlan(Scheme(Kind.RECOMPUTE, full_every=4)),
    history=History(kept={2: 7}, recoveries=4),
)
LAYOUT = rec.RoleLayout(3, (rec.PartInfo("shard", 8, (3,)),), (3, 4), 3, "hash", meaning="first")


def test_nothing_of_a_record_is_lost_on_its_way() -> None:
    read = rec.EpochRecord.from_dict(json.loads(json.dumps(RECORD.to_dict())))
    for field in fields(rec.EpochRecord):
        assert getattr(read, field.name) == getattr(RECORD, field.name), field.name
    assert rec.RoleLayout.from_dict(json.loads(json.dumps(LAYOUT.to_dict()))) == LAYOUT


def test_an_older_record_keeps_a_line_in_memory_only() -> None:
    """A checkpoint begins a new one: what was computed before is of an abandoned lineage."""
    durable = replace(RECORD, restore=rec.Restore("durable", G, path="/here")).to_dict()
    del durable["history"]
    assert G.lineage not in rec.EpochRecord.from_dict(durable).history.kept


def test_slots_are_as_large_as_copies_and_replicas_make_them() -> None:
    shared = (replace(LAYOUT.parts[0], replicas=(3, 4)),)
    assert replace(LAYOUT, parts=shared).shape != LAYOUT.shape
