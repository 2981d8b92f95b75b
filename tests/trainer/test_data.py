"""Data: the same text and position give the same samples to every reader."""

import itertools
import json
from typing import Any

import pytest
import torch

from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.trainer import __main__ as protected
from deadpool_megatron.trainer.config import parse_args
from deadpool_megatron.trainer.gpt_loop import DataError, build_sources
from tests.trainer.layouts import MODEL


def sources(text: str, data_rank: int = 0, size: int = 2) -> tuple[Any, Any]:
    config = parse_args(f"{MODEL} {text} --micro-batch-size 2".split())
    return build_sources(config, data_rank, size)


def test_ranks_share_out_every_sample_once(text):
    dealt = []
    for rank in range(4):
        source = sources(text, rank, 4)[0]
        batches = list(itertools.islice(source.indices_at(16), 2))
        dealt += [index for batch in batches for index in batch]
    assert sorted(dealt) == list(range(16, 32))
    first = next(sources(text, 1, 4)[0].indices_at(16))
    assert first == [18, 19], "as Megatron's sampler: consecutive samples to consecutive ranks"


def test_too_little_text_is_one_clear_line(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match="a text of 5 bytes"):
        sources(f"--data {tmp_path / 'short.txt'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text files in"):
        sources(f"--data {tmp_path / 'empty'}")


def test_a_protected_run_without_text_ends_with_that_line(tmp_path, monkeypatch, capsys):
    """And status 2: no other process would find any."""

    class Joined:
        """A session that builds at once."""

        def run(self, program: Any) -> None:
            sources(f"--data {tmp_path / 'empty'}")

    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("DEADPOOL_MEMBER", json.dumps(MemberPlace(0, 0, 0).to_dict()))
    monkeypatch.setattr(protected.Session, "join", Joined)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert protected.main([]) == 2
    assert capsys.readouterr().err == f"trainer: no text files in {tmp_path / 'empty'}\n"
