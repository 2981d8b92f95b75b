"""Open files: the soft limit is raised to what the size of a run needs."""

from __future__ import annotations

import resource

# Of libraries, logs, listeners, the loop; strangers at a door have a quarter of the limit.
_OWN = 256


def needed_by_coordinator(nodes: int) -> int:
    """Returns how many open files a coordinator of so many nodes, spares included, needs: two
    connections of each agent while one replaces the other, and one more on its way in.
    """
    return _OWN + 3 * nodes


def needed_by_agent(nodes: int, nproc: int) -> int:
    """Returns how many open files an agent or its vault needs: some for each process of the node,
    and two streams to or from each other node.
    """
    return _OWN + 8 * nproc + 2 * nodes


def raise_limit(needed: int) -> str:
    """Raise the soft limit of this process and of those that it starts to ``needed``.

    Returns one line that says what to do when that is not possible, else nothing.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == needed:
        return ""
    return (
        f"a run of this size may need {needed} open files, and the limit of this host is {hard}:"
        f" raise it (ulimit -Hn {needed}, LimitNOFILE={needed})"
    )
