"""pretrain_gpt.py continues with fewer model replicas, and with all of them again.

array.toml has the features of these runs. With DEADPOOL_TEST_ELASTIC=all their whole product runs.
"""

import itertools
import os
import tomllib
from collections import ChainMap
from pathlib import Path

import pytest

from deadpool_megatron.layout.ranks import SIZE_STEP
from tests.elastic.harness.runs import megatron_lm_job, run_elastic
from tests.faults.harness import jobs
from tests.megatron_lm.harness.checkout import checkout, needs_megatron_lm
from tests.megatron_lm.harness.runs import held_tree

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm]


def pairs(row):
    return set(itertools.combinations(row, 2))


FEATURES = tomllib.loads(Path(__file__).with_name("array.toml").read_text())
NEVER, ROWS = (set(map(tuple, FEATURES.pop(name))) for name in ("never", "rows"))
PRODUCT = {r for r in itertools.product(*FEATURES.values()) if not pairs(r) & NEVER}
FIRST = jobs.dies("first", "forward", 1, 5)


def test_rows_cover_all_pairs():
    assert set().union(*map(pairs, ROWS)) == set().union(*map(pairs, PRODUCT))


@pytest.mark.parametrize(
    "row",
    sorted(PRODUCT if os.environ.get("DEADPOOL_TEST_ELASTIC") == "all" else ROWS),
    ids="-".join,
)
def test_shrinks_as_stock_with_all_features(tmp_path, row):
    tag, layout, optimizer, _, _, protection, restore, evaluation, death = row
    if (tree := checkout(tag)) is None:
        pytest.skip(f"no checkout of {tag}")
    chosen = (each[name] for each, name in zip(FEATURES.values(), row, strict=True))
    flags = dict(ChainMap({"train_iters": 10}, *chosen))
    members = 2 if layout in {"pp2", "tp2"} else 1
    away = 1 if layout == "pp2" else 2  # from a node to that which has its copies
    node = 0 if death == "coordinator" else 3 - away
    lost = [node, node + away] if restore == "checkpoint" else [node]
    replicas = 3 if members == 2 and optimizer != "instances" and len(lost) == 1 else 4
    small = 2 if layout == "ep2" or optimizer == "instances" else replicas - len(lost)
    point = "evaluation.begin" if evaluation == "evaluated" else "forward"
    plan = [jobs.dies("first", point, node * members, 6, nodes=lost)]
    if death == "member":
        role = (replicas - small) * SIZE_STEP + 1
        plan += [jobs.dies("second", "optimizer.updated", role, 8, target="self")]
    job = megatron_lm_job(flags, replicas, replicas, members, every=2, checkout=tree)
    settings = f"--deadpool-protection {protection}"
    outcome, sizes = run_elastic(tmp_path / "run", job, plan, settings=settings)
    assert sizes == [replicas, small], outcome.story()
    kinds = ["initial", "durable" if restore == "checkpoint" else "memory"]
    assert jobs.restart_kinds(outcome)[:2] == kinds, outcome.story()


def test_last_replica_trains_as_stock(tmp_path):
    job = megatron_lm_job({"train_iters": 10, "tensor_model_parallel_size": 2}, 2, 2, members=2)
    outcome, sizes = run_elastic(tmp_path / "run", job, [FIRST])
    assert sizes == [2, 1], outcome.story()


@pytest.mark.parametrize("losses", [1, 2])
def test_grows_as_stock_at_full_size(tmp_path, monkeypatch, losses):
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"6-24={tmp_path}/run.grown")
    held_tree(tmp_path / "tree")
    plan = [FIRST, jobs.dies("second", "forward", SIZE_STEP, 6)][:losses]
    job = megatron_lm_job({"train_iters": 24}, 4, 4, within=tmp_path / "tree")
    outcome, sizes = run_elastic(tmp_path / "run", job, plan, grows=True, refill=losses)
    # The second loss may find the first new node, as a spare of the smaller size.
    assert sizes in ([4, 3, 4], [4, 3, 2, 4], [4, 3, 2, 3, 4]), outcome.story()
