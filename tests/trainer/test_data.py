"""Data: the same text and the same position give the same samples, whoever reads them."""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deadpool_megatron.trainer import __main__ as protected
from deadpool_megatron.trainer import corpus
from deadpool_megatron.trainer.arguments import parse_args
from deadpool_megatron.trainer.corpus import END_OF_DOCUMENT, DataError, token_file
from deadpool_megatron.trainer.data import build_sources
from deadpool_megatron.trainer.megatron_api import IndexedDataset
from tests.trainer.layouts import MODEL


def sources(text: str, data_rank: int = 0, size: int = 2) -> tuple[Any, Any]:
    config = parse_args(f"{MODEL} {text} --micro-batch-size 2".split())
    return build_sources(config, data_rank, size)


def take(source: Any, consumed: int, count: int) -> list[dict[str, torch.Tensor]]:
    return list(itertools.islice(source.iterator_at(consumed), count))


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in (*a, *b)
    )


def test_position_is_a_pure_function_of_consumed_samples(text: str) -> None:
    for source in sources(text):
        straight = take(source, 0, 6)
        assert same(straight[2:], take(source, 8, 4))
        assert same(straight, take(source, 0, 6))
    again, _ = sources(text)
    assert same(take(again, 8, 4), take(sources(text)[0], 8, 4))


def test_ranks_share_out_every_sample_once(text: str) -> None:
    dealt = []
    for rank in range(4):
        source = sources(text, rank, 4)[0]
        batches = list(itertools.islice(source.indices_at(16), 2))
        dealt += [index for batch in batches for index in batch]
    assert sorted(dealt) == list(range(16, 32))
    first = next(sources(text, 1, 4)[0].indices_at(16))
    assert first == [18, 19], "as Megatron's sampler: consecutive samples to consecutive ranks"


def test_no_global_generator_is_drawn_from(text: str) -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    take(sources(text)[0], 4, 2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


def test_labels_are_the_next_bytes_and_splits_are_apart(text: str) -> None:
    train, valid = sources(text)
    batch = take(train, 0, 1)[0]
    assert batch["tokens"].shape == batch["labels"].shape == (2, 32)
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["loss_mask"].dtype == torch.float32
    line = bytes(int(token) for token in batch["tokens"][0] if token < 256)
    assert b" squared" in line or b" is " in line
    assert not set(train._dataset.indices) & set(valid._dataset.indices)


def test_wrapping_at_the_end_of_the_dataset(text: str) -> None:
    source, _ = sources(text)
    length = len(source._dataset)
    assert next(source.indices_at(length)) == [0, 1]


def test_racing_processes_build_one_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 4000)
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            token_file([tmp_path / "a.txt"], tmp_path / "cache")
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 1
    assert sorted(p.name for p in folders[0].iterdir()) == ["text.bin", "text.idx"]


def test_a_builder_that_lost_the_race_takes_the_other_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 400)
    cache = tmp_path / "cache"
    prefix = token_file([tmp_path / "a.txt"], cache)
    written = prefix.with_suffix(".bin").read_bytes()
    corpus._build([tmp_path / "a.txt"], prefix.parent)
    assert prefix.with_suffix(".bin").read_bytes() == written
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_what_a_killed_builder_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 400)
    cache = tmp_path / "cache"
    built = token_file([tmp_path / "a.txt"], cache).parent
    torn = cache / f"{built.name}.{socket.gethostname()}.{os.getpid()}"
    built.rename(torn)
    (torn / "text.bin").write_bytes(b"half")
    assert token_file([tmp_path / "a.txt"], cache).parent == built
    assert not torn.exists()


def test_a_changed_text_is_built_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = token_file([file], tmp_path / "cache")
    file.write_text("other")
    assert token_file([file], tmp_path / "cache") != first


def test_folders_are_read_in_order_without_binaries(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("b")
    (folder / "a.txt").write_text("a")
    (folder / "c.bin").write_bytes(b"\0\1")
    (folder / ".hidden").write_text("h")
    texts = IndexedDataset(str(token_file([folder], tmp_path / "cache")))
    assert [list(texts[i]) for i in range(len(texts))] == [
        [ord("a"), END_OF_DOCUMENT],
        [ord("b"), END_OF_DOCUMENT],
    ]


def test_too_little_text_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match="train text has 6 tokens"):
        sources(f"--data {tmp_path / 'short.txt'} --data-cache-path {tmp_path / 'cache'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text files in"):
        sources(f"--data {tmp_path / 'empty'} --data-cache-path {tmp_path / 'cache'}")


def test_a_protected_run_without_text_ends_with_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And status 2: no other process would find any."""

    class Joined:
        """A session that builds at once."""

        def run(self, program: Any) -> None:
            sources(f"--data {tmp_path / 'empty'} --data-cache-path {tmp_path / 'cache'}")

    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("DEADPOOL_AGENT_FD", "-1")
    monkeypatch.setattr(protected.Session, "join", Joined)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert protected.main([]) == 2
    assert capsys.readouterr().err == f"trainer: no text files in {tmp_path / 'empty'}\n"


def test_the_default_text_is_the_standard_library() -> None:
    files = corpus._standard_library()
    assert files == corpus._standard_library()
    assert 4 << 20 < sum(file.stat().st_size for file in files) <= 8 << 20
    assert not any("site-packages" in file.parts for file in files)
