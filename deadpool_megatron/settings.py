"""The settings of a run: a frozen dataclass, checked as a whole before a process is started.

The user chooses the first part of the fields. Each of these has its help text, and
:mod:`deadpool_megatron.arguments` derives its ``--deadpool-*`` flag, so a setting has a single
definition. The fields of the second part are derived from the first, or have values that suit all
known runs. Derived time limits scale with the limit that a site sets, so that a short limit never
encloses a long limit. ``--deadpool-set`` overrides a value of the second part. The launcher passes
all settings to every process as JSON in the environment variable :data:`ENVIRONMENT_NAME`.

The check of the order of all time limits is an idea of NVRx (``inprocess/wrap.py``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from deadpool_megatron import UserError

ENVIRONMENT_NAME = "DEADPOOL_SETTINGS"
#: the flag that sets a value of the second part, as ``NAME=VALUE``
SET_FLAG = "--deadpool-set"


class SchemeKind(StrEnum):
    """The ways to protect state, which :mod:`.layout.schemes` describes."""

    BUDDY = "buddy"
    PARITY = "parity"
    LOCAL = "local"
    LOCAL_TWICE = "local-twice"

    @property
    def is_local(self) -> bool:
        """Return whether a role's copies are all on its own node and lost with that node."""
        return self in (SchemeKind.LOCAL, SchemeKind.LOCAL_TWICE)

    @property
    def combines_roles(self) -> bool:
        """Return whether the scheme keeps blocks computed from the state of several roles."""
        return self is SchemeKind.PARITY


class SettingsError(UserError, ValueError):
    """A setting, or a combination of two, cannot work; the message has the setting and the
    remedy."""


def _setting(default: Any, help_text: str, *, nccl: Any = None) -> Any:
    """Return a field that the user sets. ``nccl``: the default with NCCL, if it differs."""
    metadata = {"help": help_text, "default": default, "nccl": nccl}
    return field(default=default if nccl is None else None, metadata=metadata)


def _fixed(value: Any) -> Any:
    """Return a field whose value suits all known runs."""
    metadata = {"default": value, "nccl": None, "of": ""}
    return field(default=value, metadata=metadata)


def _limit(of: str, seconds: float, *, nccl: float | None = None, floor: str = "") -> Any:
    """Return a time limit that scales with setting ``of``: ``seconds`` at the default of ``of``,
    and never shorter than setting ``floor``."""
    metadata = {"default": seconds, "nccl": nccl, "of": of, "floor": floor}
    return field(default=None, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The settings of users, and the derived and fixed values. ``_seconds`` are seconds, ``_gb``
    are 10^9 bytes."""

    copies: int = _setting(
        1, "number of copies of each role's unique state on other nodes (parity: blocks of a group)"
    )
    protection: str = _setting(
        SchemeKind.BUDDY.value,
        "buddy: copies on other nodes; parity: erasure-coded blocks for groups of roles; local: on"
        " the own node only (survives no failed node); local-twice: there twice, against damaged"
        " slots",
    )
    parity_group: int = _setting(4, "parity: up to N roles, on as many nodes, share blocks")
    cadence: str = _setting(
        "auto",
        "protect every N-th iteration only; auto: every one, or fewer while the network is too"
        " slow (the cost of a failure is then reported)",
    )
    max_lag: int = _setting(0, "iterations by which commits may trail training (more slots)")
    memory_gb: float = _setting(
        0.0,
        "limit of host memory for generations on each node: own slots, copies and parity blocks"
        " (0: as much as /dev/shm has)",
    )
    extras_room_mb: float = _setting(
        0.0,
        "least room for the extras (counters, log sums, buffers) of each role, in 10^6 bytes"
        " (0: 1.5 times their size at the start, and 64 KiB)",
    )
    shm_gb: float = _setting(
        0.0,
        "shared memory that a node needs, as 'deadpool plan' computes it: a node with less free"
        " when it joins is excluded (0: not known)",
    )
    check: str = _setting(
        "facts",
        "how nodes are judged before they get roles: facts (versions, GPUs, memory, limits); off",
    )
    health_command: str = _setting(
        "",
        "shell command that checks a node: exit status 0 good, 1 a spare only, 2 excluded; runs"
        " when a node joins, each minute, also during training, and after a device error",
    )
    notify: str = _setting(
        "",
        "URL that gets a POST at a failure, a recovery, a quarantine, a wait for a spare, the end;"
        " @/FILE: the file that holds the URL",
    )
    on_event: str = _setting(
        "", "shell command that runs at these events, with the JSON as its input"
    )
    domains_file: str = _setting(
        "", "file with lines 'NODE DOMAIN' that names the failure domain (rack) of each node"
    )
    communicator: str = _setting("auto", "communication library: auto, gloo or nccl")
    interface: str = _setting(
        "127.0.0.1",
        "address on which vaults and communicators listen, or the name of the network interface"
        " that has it on each node; several with commas: copies use all, communicators the first",
    )
    node_silence_seconds: float = _setting(
        4.7, "the roles of a node that is silent for this long are reassigned"
    )
    hang_seconds: float = _setting(
        300.0, "no progress of any role for this long, or 2.5 times the longest step, is a hang"
    )
    start_seconds: float = _setting(300.0, "limit for a member from its start until it is warm")
    rebuild_seconds: float = _setting(
        60.0, "limit for connecting all groups of a new epoch", nccl=180.0
    )
    spare_timeout_seconds: float = _setting(
        300.0, "wait for a spare before the state is dumped and the run ends (75)"
    )
    elastic: str = _setting(
        "auto",
        "auto, on: without a spare the run continues with fewer model replicas, with all again when"
        " nodes have joined (on: with a warning if the program cannot); off: it waits for a spare",
    )
    elastic_wait: str = _setting(
        "auto",
        "seconds to wait for a spare before that; auto: what the start took, or twice a change",
    )
    audit_interval: int = _setting(
        0,
        "iterations between audits: peers compare weights, and recompute a micro-batch and an"
        " update of one of them, to find nodes with wrong numbers (0: never)",
    )
    evict_slow: str = _setting(
        "off", "on: a slow node is drained as soon as there is a spare; off: it is only reported"
    )
    nonfinite: str = _setting(
        "stop",
        "response to a loss or gradient norm that is NaN or infinite, except in a skipped update:"
        " stop (status 4), rollback (recompute the iteration from the previous state; the second"
        " time from an earlier checkpoint, or stop), ignore",
    )
    persist_interval: str = _setting(
        "auto",
        "iterations between standard checkpoints in the background, without a pause of training;"
        " off: only for 'deadpool persist'; auto: each half hour, less often if writing takes long,"
        " and off if the run directory is on a disk of this host and the script has no --save",
    )
    persist_directory: str = _setting(
        "", "directory of these checkpoints, shared by all nodes (empty: in --run-dir)"
    )
    persist_keep: int = _setting(2, "number of these checkpoints that are kept (0: all)")

    #: a process without a sign of life for this long is declared frozen
    freeze_seconds: float = _limit("node_silence_seconds", 3.0)
    #: a node that cannot reach its coordinator for this long ends its members
    fence_seconds: float = _limit("node_silence_seconds", 3.2)
    #: a standby takes over from a coordinator without a sign of life for this long
    takeover_seconds: float = _limit("node_silence_seconds", 2.0)
    #: a node that has not joined the new coordinator for this long is declared lost
    rejoin_seconds: float = _limit("node_silence_seconds", 12.0)
    #: limit for members to leave a closed epoch; slower members are killed and replaced
    close_seconds: float = _limit("rebuild_seconds", 10.0, nccl=40.0)
    #: time-out of a communication operation in a step, also of an abandoned operation;
    #  first_step_seconds applies instead during the build and the other sections that it covers
    operation_timeout_seconds: float = _limit("rebuild_seconds", 60.0)
    #: limit for the health command; a node whose command takes longer is used last
    health_seconds: float = _limit("start_seconds", 60.0)
    #: limit for build, load, first iteration, evaluation and save, and for each communication
    #  operation in them
    first_step_seconds: float = _limit("start_seconds", 1200.0, floor="hang_seconds")
    #: limit for a spare to build its new role
    adopt_seconds: float = _limit("start_seconds", 120.0)
    #: limit for fetching, checking and loading state
    restore_seconds: float = _limit("start_seconds", 120.0)
    #: limit for pinning, writing and checking a checkpoint in the background
    persist_seconds: float = _limit("start_seconds", 1800.0)
    #: a run grows once more model replicas have fit for this long
    settle_seconds: float = _limit("start_seconds", 300.0)
    #: how communicators of an epoch are created: "one-by-one", "side-by-side", or "split" (from
    #  the group of all roles, NCCL); auto: "one-by-one" over NCCL, otherwise "side-by-side"
    rebuild: str = _fixed("auto")
    #: how members start: auto, fork (from a process with the imports) or exec (parked)
    start_method: str = _fixed("auto")
    #: period of the beats of members and agents
    beat_interval_seconds: float = _fixed(0.2)
    #: a wait at the commit gate is reported each time it lasts this long
    gate_report_seconds: float = _fixed(5.0)
    #: limit for a connection to the coordinator or another vault
    connect_seconds: float = _fixed(20.0)
    #: iterations between hashes of the whole state (0: at the end only)
    hash_interval: int = _fixed(0)
    #: response to a replayed step whose numbers differ: stop (status 3), or report and continue;
    #  auto: report with NCCL, whose order of sums is not fixed, otherwise stop
    divergence: str = _fixed("auto")
    #: size of the pieces in which state is shipped
    chunk_bytes: int = _fixed(4 << 20)
    #: limit of a node's traffic for protection (not restores), in gigabits per second; 0: as fast
    #  as the pace needs
    rate_limit_gbps: float = _fixed(0.0)
    #: largest share of a link for copies while training sends (above 0, up to 1); more if a
    #  generation would otherwise need over half an iteration
    link_share: float = _fixed(0.3)
    #: on: copies use the whole link while training does not send, by the counters of its interface;
    #  off: always only their share
    link_gaps: str = _fixed("on")
    #: traffic class (DSCP) of the connections that ship copies, 0 to 63; 8 and 1 are usual for
    #  low-priority traffic
    dscp: int = _fixed(0)
    #: nice value of the vault's processes, which lowers their priority below training's (0 to 19)
    vault_nice: int = _fixed(5)
    #: role of rank 0 at full size
    first_role: int = _fixed(0)
    #: number of process restarts on a node within ten minutes before the node is given up
    restarts_in_place: int = _fixed(20)

    def __post_init__(self) -> None:
        for name, entry in FIELDS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, self._derive(entry))
            self._check(name)
        if self.health_command and self.check == "off":
            raise SettingsError(
                "--deadpool-health-command is a part of what nodes are judged by:"
                " --deadpool-check must not be off"
            )
        if self.elastic_wait != "auto" and float(self.elastic_wait) > self.spare_timeout_seconds:
            raise SettingsError("--deadpool-elastic-wait is above --deadpool-spare-timeout")
        # A limit must be longer than each limit inside it; otherwise the inner wait never reports.
        for shorter, longer, factor, reason in _LADDER:
            low, high = getattr(self, shorter), getattr(self, longer)
            if low * factor > high:
                raise SettingsError(
                    f"{flag_name(longer)} ({high:g} s) must be at least {factor:g} times"
                    f" {flag_name(shorter)} ({low:g} s): {reason}"
                )

    def _check(self, name: str) -> None:
        """Raise SettingsError for a value that is invalid by itself."""
        value, requirement = getattr(self, name), ""
        if (limits := _OPEN_RANGES.get(name)) and not limits[0] < value <= limits[1]:
            requirement = "above {} and at most {:.0f}".format(*limits)
        if (limits := _RANGES.get(name)) and not limits[0] <= value <= limits[1]:
            text = "at least {}" if limits[1] == math.inf else "between {} and {}"
            requirement = text.format(*limits)
        if (form := _FORMS.get(name)) and not re.fullmatch(form[0], value):
            requirement = form[1]
        if requirement:
            # A URL may be a secret.
            got = "" if name == "notify" else f", got {value!r}"
            raise SettingsError(f"{flag_name(name)} must be {requirement}{got}")

    def _derive(self, entry: dataclasses.Field[Any]) -> float:
        """Return the value of a field that is not set: the default, scaled with the setting that
        the field follows."""
        value: float = default_of(entry, self.communicator)
        if of := entry.metadata.get("of"):
            value *= getattr(self, of) / default_of(FIELDS[of], self.communicator)
        floor = entry.metadata.get("floor")
        return max(value, getattr(self, floor)) if floor else value

    @cached_property
    def drain_seconds(self) -> float:
        """Return the limit for threads, and for abandoned CPU communication, to end."""
        return self.close_seconds / 5

    @cached_property
    def gather_seconds(self) -> float:
        """Return the time after a close at which a node that has not sent its inventory is given
        up. It is longer than the agent needs to kill all processes of the node: ``close_seconds``
        for the members, and seven times :attr:`stage_seconds`.
        """
        return 5 * self.close_seconds

    @cached_property
    def stage_seconds(self) -> float:
        """Return the limit of each stage of a close: for the vault to stop sealing, for each of two
        reports of its inventory, and after each stage for killed processes to end, as a vault
        unmaps all its slots.
        """
        return self.close_seconds / 2

    @cached_property
    def exports(self) -> bool:
        """Return whether a run that has to end exports its state without a request."""
        return bool(self.export_iterations or self.persist_directory)

    @cached_property
    def export_iterations(self) -> int:
        """Return the number of iterations between two exports; 0 if the setting is no number."""
        return int(self.persist_interval) if self.persist_interval.isdigit() else 0

    @cached_property
    def memory_bytes(self) -> int:
        """Return the memory limit of a node's generations in bytes; 0: no limit."""
        return int(self.memory_gb * 1e9)

    @cached_property
    def extras_capacity_bytes(self) -> int:
        """Return the minimum space for the extras of a role at each boundary, in bytes."""
        return int(self.extras_room_mb * 1e6)

    def to_json(self) -> str:
        """Return a line of JSON from which :meth:`from_json` creates an equal object."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Settings:
        """Return the settings of :meth:`to_json`. Raises SettingsError for unknown names or bad
        values."""
        try:
            return Settings(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise SettingsError(f"settings not understood: {error}") from error

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Settings:
        """Return the settings that the launcher passed on, or the defaults."""
        return Settings.from_json(environment.get(ENVIRONMENT_NAME, "{}"))


#: the fields by name. Limits are longer with NCCL: an abort takes 0.5 s and 10 ms for each pending
#: operation (as NVRx has measured), after the device's earlier work; the first communicator of a
#: process takes up to a minute (nccl#1646), and a member has tens of communicators
FIELDS: Mapping[str, dataclasses.Field[Any]] = {
    entry.name: entry for entry in dataclasses.fields(Settings)
}

#: values of ``persist_interval`` with which checkpoints are only written on request
NEVER = ("off", "0")
# The kernel counts the time of a wait in milliseconds, as an int.
LONGEST_SECONDS = 1e6
LONGEST_CADENCE = 1000
#: name -> lower limit, which is excluded, and upper limit, which is included
_OPEN_RANGES: Mapping[str, tuple[float, float]] = {
    **{name: (0, LONGEST_SECONDS) for name in FIELDS if name.endswith("_seconds")},
    "link_share": (0, 1),
}
_COUNTS = ("max_lag", "hash_interval", "audit_interval", "persist_keep")
_SIZES = ("memory_gb", "extras_room_mb", "shm_gb", "rate_limit_gbps")
#: name -> lower and upper limit, both included
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys((*_COUNTS, "restarts_in_place"), (0, math.inf)),
    "copies": (1, math.inf),
    "parity_group": (2, math.inf),
    **dict.fromkeys(_SIZES, (0, 10**9)),
    "dscp": (0, 63),
    "vault_nice": (0, 19),
    "chunk_bytes": (4096, 1 << 30),
}
_FACTORY = r"[\w.]+:\w+"
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "protection": tuple(kind.value for kind in SchemeKind),
    "check": ("off", "facts"),
    "rebuild": ("auto", "one-by-one", "side-by-side", "split"),
    "start_method": ("auto", "fork", "exec"),
    "divergence": ("auto", "stop", "report"),
    "evict_slow": ("off", "on"),
    "elastic": ("auto", "on", "off"),
    "nonfinite": ("stop", "rollback", "ignore"),
    "link_gaps": ("on", "off"),
}
#: name -> pattern for the whole text, and description of the pattern
_FORMS: Mapping[str, tuple[str, str]] = {
    **{name: ("|".join(kinds), f"one of {', '.join(kinds)}") for name, kinds in _CHOICES.items()},
    "communicator": (rf"auto|gloo|nccl|{_FACTORY}", "one of auto, gloo, nccl"),
    "cadence": (
        rf"auto|[1-9][0-9]{{0,2}}|{LONGEST_CADENCE}",
        f"auto or a number from 1 to {LONGEST_CADENCE}",
    ),
    "elastic_wait": (r"auto|\d{1,6}(\.\d+)?", "auto or a number of seconds"),
    "persist_interval": (r"auto|off|\d+", "auto, off or a number of iterations"),
    "notify": (r"(?:https?://[^/\s]\S*|@/.+)?", "a URL of http or https, or @/FILE"),
    "persist_directory": (r"(?s:/.*)?", "an absolute path (every node writes to it)"),
}

# (inner limit, outer limit, factor, reason why the outer limit must be longer)
_LADDER: tuple[tuple[str, str, float, str], ...] = (
    ("beat_interval_seconds", "freeze_seconds", 5, "a few late beats are not a frozen process"),
    ("freeze_seconds", "node_silence_seconds", 1, "a frozen member is found before its node"),
    ("fence_seconds", "node_silence_seconds", 1.25, "a cut-off node stops before its roles go"),
    ("node_silence_seconds", "rejoin_seconds", 1, "a node allows itself the same part of both"),
    ("fence_seconds", "takeover_seconds", 0.5, "a late sign of life is not a dead coordinator"),
    ("beat_interval_seconds", "fence_seconds", 5, "a few late beats are not a cut"),
    ("health_seconds", "start_seconds", 1, "a node's health is asked before its members start"),
    ("node_silence_seconds", "hang_seconds", 1, "a lost node is not a hang"),
    ("hang_seconds", "first_step_seconds", 1, "the first step takes longer than later ones"),
    ("close_seconds", "operation_timeout_seconds", 1, "a survivor waits for the close in it"),
    ("operation_timeout_seconds", "first_step_seconds", 1, "a save waits in one operation"),
    ("close_seconds", "rebuild_seconds", 1, "a failure during rebuild has to be closed in it"),
)


def is_stand_in(communicator: str) -> bool:
    """Return whether a communicator is MODULE:FACTORY, with which tests name a stand-in for
    NCCL."""
    return re.fullmatch(_FACTORY, communicator) is not None


def default_of(entry: dataclasses.Field[Any], communicator: str) -> Any:
    """Return the value of a field in a run with this communicator and no other settings."""
    nccl = entry.metadata["nccl"]
    return nccl if communicator == "nccl" and nccl is not None else entry.metadata["default"]


def has_flag(field_name: str) -> bool:
    """Return whether the field has a flag of its own, as a user chooses its value."""
    return "of" not in FIELDS[field_name].metadata


def flag_name(field_name: str) -> str:
    """Return the flag that sets a field, as ``--deadpool-hang-seconds`` or ``--deadpool-set
    dscp``."""
    name = field_name.replace("_", "-")
    return f"--deadpool-{name}" if has_flag(field_name) else f"{SET_FLAG} {name}"
