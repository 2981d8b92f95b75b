"""The command line and ``trainer.plain``: good lines are understood, bad lines cost a line."""

import json

import pytest

from deadpool_megatron.trainer.config import BadArgumentsError, parse_args
from tests.common.programs import check_output
from tests.trainer.layouts import MODEL, losses, repository, train
from tests.trainer.ranks import run_ranks

BAD = {
    "--num-layers 5 --pipeline-model-parallel-size 2": "--num-layers 5 is not a multiple",
    "--hidden-size 30 --num-attention-heads 4": "--hidden-size 30 is not a multiple",
    "--micro-batch-size 0": "--micro-batch-size must be positive",
    "--bf16 --fp16": "choose one of --bf16 and --fp16",
    "--sequence-parallel": "--sequence-parallel needs",
    "--expert-model-parallel-size 2": "needs --num-experts",
    "--num-experts 4": "need --disable-bias-linear",
    "--num-layers-per-virtual-pipeline-stage 1": "needs --pipeline-model-parallel-size",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2": "does not split",
    "--overlap-param-gather --use-distributed-optimizer": "needs --overlap-grad-reduce",
    "--num-distributed-optimizer-instances 2": "needs --use-distributed-optimizer",
    "--save-interval 5": "--save-interval needs --save",
    "--data /no/such/text": "no such file or folder: /no/such/text",
    "--lr fast": "invalid float value",
    "--num-layer 4": "unrecognized arguments: --num-layer",
    "@no-such-file": "no-such-file",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_costs_one_line_and_status_2(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(line.split())
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert BAD[line] in output.err


@pytest.mark.parametrize(
    ("line", "ranks", "problem"),
    [
        ("--pipeline-model-parallel-size 2", 3, "ranks \\(3\\) is no multiple of 2"),
        ("--global-batch-size 6", 4, "--global-batch-size \\(6\\) is no multiple of 4"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
            " --global-batch-size 6",
            4,
            "schedule cannot run 3 micro-batches",
        ),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 3",
            4,
            "dp x cp \\(4\\) is no multiple of 3",
        ),
        (
            "--num-experts 4 --expert-model-parallel-size 4 --global-batch-size 6",
            6,
            "dp / etp \\(6\\) is no multiple of 4",
        ),
    ],
)
def test_a_layout_must_fit_the_ranks(line, ranks, problem):
    config = parse_args(line.split())
    with pytest.raises(BadArgumentsError, match=problem):
        config.check_world_size(ranks)


def test_flags_come_from_files_with_comments(tmp_path):
    file = tmp_path / "some.args"
    file.write_text("# a comment\n--num-layers 6 --bf16  # and another\n\n--lr 2e-3\n")
    config = parse_args([f"@{file}", "--lr", "1e-3"])
    assert (config.num_layers, config.bf16, config.lr) == (6, True, 1e-3)


@pytest.mark.parametrize("name", ["tiny", "small", "20m"])
def test_shipped_models_parse(name):
    config = parse_args([f"@{repository() / 'configs' / name}.args"])
    for ranks in (1, 2, 4, 8):
        config.check_world_size(ranks)
    if name == "20m":
        assert config.global_batch_size * config.seq_length == 8192


@pytest.mark.slow
@pytest.mark.full
def test_a_run_writes_its_facts(text, tmp_path):
    out = tmp_path / "final.json"
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = ("-m", "deadpool_megatron.trainer.plain", *MODEL.split(), *text.split())
    output = check_output(*command, "--out", out, **rank)
    assert [line.split(" |")[0] for line in output.splitlines()] == [
        "iteration 3/6",
        "iteration 6/6",
    ]
    facts = json.loads(out.read_text())
    assert len(losses(facts)) == facts["iterations"] == 6
    assert facts["samples"] == 48
    (forked,) = run_ranks(1, train, f"{MODEL} {text}")
    assert facts["hashes"] == forked["hashes"], "a fork and a fresh process train the same"
