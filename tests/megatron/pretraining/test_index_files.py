"""Index files of data sets are made by a process that misses them, and appear whole."""

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from deadpool_megatron.megatron.pretraining import index_files


@pytest.fixture(autouse=True)
def second_role(tmp_path, monkeypatch):
    monkeypatch.setenv("DEADPOOL_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1 if group is None else 3)


def test_files_appear_whole(tmp_path, monkeypatch):
    path, save = tmp_path / "index.npy", np.save
    seen: list[bool] = []

    def slow_save(*args: Any, **options: Any) -> None:
        save(*args, **options)
        seen.append(path.exists())

    monkeypatch.setattr(np, "save", slow_save)
    with index_files.written_whole():
        np.save(str(path), np.arange(3), allow_pickle=True)
    assert seen == [False]
    assert np.load(path).tolist() == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["index.npy"]


def test_process_without_index_files_makes_them_as_rank_0_does(tmp_path, capfd):
    path = tmp_path / "cache" / "abc-sample_index.npy"

    def make() -> tuple[Any, int]:
        if not path.exists() and dist.get_rank() == 0:
            path.parent.mkdir()
            np.save(path, np.arange(3))
        return np.load(path).tolist(), dist.get_rank("group")  # type: ignore[arg-type]

    assert index_files.made_where_missing(make) == ([0, 1, 2], 3)
    assert dist.get_rank() == 1
    line = f"abc-sample_index.npy is not in {path.parent}: this process makes the index files"
    assert line in capfd.readouterr().err
    assert index_files.made_where_missing(make) == ([0, 1, 2], 3)
    assert not capfd.readouterr().err


def test_data_that_is_missing_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"text\.idx"):
        index_files.made_where_missing(lambda: (tmp_path / "text.idx").read_bytes())


def test_data_files_are_those_that_the_arguments_name(tmp_path):
    names = ["a.bin", "a.idx", "b.bin", "b.idx", "c.jsonl", "tokenizer.model", "blend.json"]
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_text("")
    files[-1].write_text(f'{{"train": ["0.3", "{tmp_path}/b"]}}')
    arguments = {
        "data_path": ["0.5", f"{tmp_path}/a", "0.5", str(files[4])],
        "valid_data_path": None,
        "per_split_data_args_path": str(files[-1]),
        "tokenizer_model": str(files[5]),
        "vocab_file": f"{tmp_path}/missing",
        "load": f"{tmp_path}/a.bin",
    }
    assert set(index_files.data_files(arguments)) == set(files)
