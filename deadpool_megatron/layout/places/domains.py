"""Failure domains: which nodes are lost together, from the user's file. Pure.

The file has lines ``NODE DOMAIN``: NODE is a node id or a host name, DOMAIN any word (a rack, a
power feed). Empty lines and text after ``#`` are skipped. A node that is not named is a domain of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping


class DomainsError(ValueError):
    """The domains file cannot be understood; the message names the line."""


def parse_domains(text: str) -> dict[str, str]:
    """NODE -> DOMAIN of a domains file's text. Raises DomainsError for a malformed line."""
    table: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise DomainsError(f"domains file, line {number}: expected 'NODE DOMAIN', got {line!r}")
        node, domain = words
        if table.setdefault(node, domain) != domain:
            raise DomainsError(
                f"domains file, line {number}: node {node} is in {table[node]} and in {domain}"
            )
    return table


def domain_of(table: Mapping[str, str], node: int, host: str = "") -> str:
    """The failure domain of a node: by its id, else by its host name, else its own.

    A host may call itself by its whole name, where the file has the short one.
    """
    named = (table.get(name) for name in (str(node), host, host.partition(".")[0]))
    return next((domain for domain in named if domain), f"node{node}")
