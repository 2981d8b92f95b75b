"""The repeated check of a node's host, by a real process."""

import asyncio
from typing import Any

from deadpool_megatron.cluster.agent.node_checker import NodeChecker
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.settings import Settings


def test_node_checker_reads_facts_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(AgentOptions, "segments", tmp_path)
    info = RunInfo("testrun", 1, 1, 1, 1, (), Settings())
    facts = HostFacts("at the start", noted="an earlier run quarantined it")
    options = AgentOptions(0, RunDirectory(tmp_path), info, b"", "127.0.0.1", "", facts=facts)
    sent: list[Any] = []
    checker = NodeChecker(options, sent.append, lambda: None)
    asyncio.run(checker.look())
    assert sent == [{"t": "facts", "facts": checker.facts()}]
    read = HostFacts.from_dict(sent[0]["facts"])
    assert (read.address, read.noted) == ("127.0.0.1", facts.noted)
