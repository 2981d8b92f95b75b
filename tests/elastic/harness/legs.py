"""A training without protection at one number of ranks after the other, through checkpoints, to
compare elastic runs with.

A leg is what is trained at one number of ranks. Legs are given as pairs: the number of ranks, and
the last iteration.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.megatron_lm.harness.ranks import three_runs
from tests.trainer.layouts import Facts, make_loop
from tests.trainer.ranks import run_ranks

LEG_SECONDS = 3600.0  # in a soak
Lengths = Sequence[tuple[int, int]]


@dataclass
class Leg:
    """``steps``: as a run reports them; ``saves``: the checkpoint at its end; ``hashes``: by rank,
    of its state after each iteration, and where it began; ``samples``: digests of all sequences of
    each iteration, sorted."""

    saves: Path
    steps: list[Facts] = field(default_factory=list)
    hashes: list[dict[int, str]] = field(default_factory=list)
    samples: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))


def trainer_legs(arguments: str, lengths: Lengths, folder: Path) -> Iterator[Leg]:
    """Train the embedded trainer."""
    before = None
    for number, (ranks, last) in enumerate(lengths):
        leg = Leg(folder / f"leg{number}")
        results = run_ranks(ranks, _train, arguments, before, last, leg.saves, seconds=LEG_SECONDS)
        for emitted, hashes, samples in results:
            leg.steps += emitted
            leg.hashes.append(hashes)
            for iteration, digests in samples.items():
                leg.samples[iteration] = sorted(leg.samples[iteration] + digests)
        before = leg.saves
        yield leg


def megatron_lm_legs(
    checkout: Path, flags: Mapping[str, object], lengths: Lengths, folder: Path
) -> Iterator[Leg]:
    """Train pretrain_gpt.py of stock Megatron-LM."""
    results = three_runs(checkout, folder, flags, lengths)
    for (_, last), (ranks, saves) in zip(lengths, results, strict=True):
        # The first rank with losses: the reporting rank is among them.
        rank = next(rank for rank in ranks if rank.losses)
        yield Leg(
            saves / f"iter_{last:07d}",
            [
                {
                    "iteration": int(iteration),
                    "loss": loss,
                    "grad_norm": None if iteration in rank.skipped else rank.norms[iteration],
                    "learning_rate": rank.rates[iteration],
                }
                for iteration, loss in rank.losses.items()
            ],
        )


def _train(
    arguments: str, before: Path | None, last: int, saved: Path
) -> tuple[list[Facts], dict[int, str], dict[int, list[str]]]:
    from megatron.core import parallel_state

    from deadpool_megatron.trainer import gpt_loop

    loop, emitted = make_loop(arguments)
    samples, forward_step = defaultdict(list), gpt_loop.forward_step
    hashes = dict[int, str]()
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    is_noting = is_first and parallel_state.get_tensor_model_parallel_rank() == 0

    def note(batch: Any) -> Any:
        if is_noting and loop.model_chunks[0].training:
            digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch["tokens"]]
            samples[loop.counters["iteration"] + 1] += digests
        return batch

    def noted(iterator: Any, chunk: Any) -> Any:
        return forward_step(map(note, iterator), chunk)

    if before is not None:
        loop.load_checkpoint(before)
        hashes[loop.counters["iteration"]] = loop.state_hash()
    with patch.object(gpt_loop, "forward_step", noted):
        while (iteration := loop.counters["iteration"]) < last:
            loop.train_step()
            hashes[iteration + 1] = loop.state_hash()
            for segment in loop.segments_after(iteration + 1):
                loop.run_segment(segment)
    loop.save_checkpoint(saved)
    return [facts for kind, facts in emitted if kind == "step"], hashes, dict(samples)
