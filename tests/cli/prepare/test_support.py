"""``deadpool support``: what it says of one command line and of many, and with a real parser."""

import json

import pytest

from deadpool_megatron import cli
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import checkout, needs_megatron_lm


@pytest.mark.full
@pytest.mark.megatron_lm
@needs_megatron_lm
def test_a_real_parser_gives_the_defaults(capsys):
    """Also where the table knows nothing of a name; what it takes not is refused in its words."""
    judge = ["support", "--megatron", str(checkout()), "--json", "--", "pretrain_gpt.py", *small()]
    assert cli.main([*judge, "--async-save", "--use-persistent-ckpt-worker", "--use-nccl-ub"]) == 2
    shown = {row["shown"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "--use-nccl-ub" in shown
    assert cli.main([*judge, "--lr", "not-a-number"]) == 2
    assert "--lr" in capsys.readouterr().err
