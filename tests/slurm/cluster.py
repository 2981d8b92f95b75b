"""A real Slurm cluster on one machine: slurmctld on ``host0``, slurmd on ``host1`` .. ``hostN``.

Each host is a set of namespaces (tests/netns); the file system is shared, as a cluster's is.
Nothing outside the cluster's directory is used: own configuration, munge key and state, no
systemd, no database. Several clusters can be there side by side.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.process import posix
from tests.common.wait import wait_for
from tests.netns.lab import hosts
from tests.netns.lab.hosts import Host, Hosts

MAX_WAIT_SECONDS = 90.0
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
SWITCH = "DEADPOOL_TEST_SLURM"
_ROOT = Path(__file__).parents[2]
_PREFIX = "dpslurm"
_MEMBER = re.compile(r"dp-n\d+s")

_CONFIGURATION = """\
ClusterName=deadpool
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/log/%n.log
SlurmdSpoolDir={directory}/spool/%n
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
TopologyPlugin=topology/tree
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={silence_seconds}
SlurmctldTimeout=10
TCPTimeout=2
MessageTimeout=5
KillWait=2
MinJobAge=3600
UnkillableStepTimeout=20
NodeName=DEFAULT CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000
NodeName=host[1-{nodes}] Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE
"""


def missing_requirement() -> str:
    """Why there can be no cluster here; empty when there can."""
    if os.environ.get(SWITCH) != "1":
        return f"'scripts/test.sh --slurm' runs these (or {SWITCH}=1)"
    if hosts.missing():
        return hosts.missing()
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    return (
        f"needs {', '.join(missing)}: scripts/system-packages.sh installs them" if missing else ""
    )


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _remove_stale() -> None:
    """Directories of sessions that were killed; their processes died with them."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            shutil.rmtree(left, ignore_errors=True)


class Cluster:
    """Use as a context manager: in it all nodes are idle; at its end nothing is left."""

    def __init__(self, nodes: int, *, silence_seconds: int = 6) -> None:
        self.nodes = tuple(f"host{number}" for number in range(1, nodes + 1))
        _remove_stale()
        # Short, because of the munge socket's name in it.
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
        self._hosts = Hosts(1 + nodes, self.directory)
        self._silence_seconds = silence_seconds
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self._hosts.__enter__()
            self._start_munge()
            self._start(self._hosts[0], "slurmctld")
            for node in self.nodes:
                self._start(self.host(node), "slurmd")
            self.wait_idle(len(self.nodes))
        except BaseException:
            self.show()
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Switch everything off and remove every file."""
        self._hosts.down()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def host(self, name: str) -> Host:
        """The host of that name."""
        return self._hosts[int(name.removeprefix("host"))]

    def show(self) -> None:
        """Print the state of the cluster after a failed test."""
        for log in (*self.directory.glob("*.console"), *self.directory.glob("log/*")):
            text = log.read_text(errors="replace").strip()
            print(f"== {log.name}\n{text[-2000:]}")

    def _configure(self) -> None:
        self.directory.chmod(0o755)
        for name in ("state", "log", "spool"):
            (self.directory / name).mkdir()
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                directory=self.directory,
                silence_seconds=self._silence_seconds,
                nodes=len(self.nodes),
            )
        )
        # Files take the place of devices: nothing opens them.
        for number in range(8):
            (self.directory / f"gpu{number}").touch()
        (self.directory / "gres.conf").write_text(f"Name=gpu File={self.directory}/gpu[0-7]\n")
        # Neighbours in different racks: then copies lie on training nodes, not on spares alone.
        (self.directory / "topology.conf").write_text(
            f"SwitchName=rack0 Nodes={','.join(self.nodes[::2])}\n"
            f"SwitchName=rack1 Nodes={','.join(self.nodes[1::2])}\n"
            "SwitchName=core Switches=rack[0-1]\n"
        )

    def rack(self, node: str) -> str:
        """The switch above a node."""
        return f"rack{self.nodes.index(node) % 2}"

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        here = self.directory
        munge = subprocess.Popen(
            [
                *("munged", "--foreground", "--force"),
                *(f"--key-file={key}", f"--socket={here}/munge.sock", "--num-threads=4"),
                *(f"--pid-file={here}/munged.pid", f"--seed-file={here}/munge.seed"),
                f"--log-file={here}/log/munged.log",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment(),
            preexec_fn=functools.partial(posix.die_with_parent, os.getpid()),
        )
        self._daemons.append(munge)
        self.wait_for("munged", (here / "munge.sock").exists)

    def environment(self) -> dict[str, str]:
        """Of every command on the cluster: this checkout, its Python, nothing of an outer run."""
        outer = ("SLURM_", "SBATCH_", "DEADPOOL_RUN", "DEADPOOL_SETTINGS", "DEADPOOL_FAULTS")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
        return {
            **inherited,
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "PATH": f"{_ROOT}/.venv/bin:{_path()}",
            "PYTHONPATH": str(_ROOT),
        }

    def _start(self, host: Host, service: str) -> None:
        console = self.directory / f"{host.name}.console"
        self._daemons.append(host.start([service, "-D"], console, self.environment()))

    # Commands.

    def control(self, *command: str, **variables: str) -> str:
        """Run a command on the control host to its end, which has to be good; its output."""
        given = {**self.environment(), **variables}
        settings = [f"{name}={value}" for name, value in given.items()]
        done = self._hosts[0].run("env", "-i", *settings, *command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on the control host, which the caller has to end."""
        console = self.directory / "begun.console"
        return self._hosts[0].start(command, console, self.environment())

    def submit(self, *words: str, **variables: str) -> int:
        """``sbatch`` with these words; answers the job's number, whose output is in
        ``<directory>/job-<number>.out``."""
        where = f"--output={self.directory}/job-%j.out"
        return int(self.control("sbatch", "--parsable", where, *words, **variables))

    def output(self, job: int) -> str:
        """Return the output of a job's batch script."""
        path = self.directory / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """Return the fields of ``scontrol show job``."""
        fields = self.control("scontrol", "show", "job", "-o", str(job)).split()
        return dict(field.partition("=")[::2] for field in fields)

    def nodes_of(self, job: int) -> list[str]:
        """Names of the nodes that a job has."""
        return self.control("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def job_of_element(self, array: int, element: int) -> dict[str, str]:
        """Return the fields of ``scontrol show job`` for one element of a job array."""
        fields = self.control("scontrol", "show", "job", "-o", f"{array}_{element}").split()
        return dict(field.partition("=")[::2] for field in fields)

    def ended(self, array: int) -> bool:
        """Whether no element of the array is pending or at work."""
        return not self.control("squeue", "-h", "-j", str(array), "-o", "%i")

    def members(self, name: str) -> list[str]:
        """Training processes on a host, by the names that they have given themselves."""
        return [found for found in self.host(name).running() if _MEMBER.match(found)]

    def wait_job(self, job: int, *states: str) -> dict[str, str]:
        """Wait until the job is in one of these states (default: ended); return its fields."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

        def reached() -> dict[str, str]:
            fields = self.job(job)
            return fields if fields["JobState"] in wanted else {}

        return self.wait_for(f"job {job} to be {' or '.join(wanted)}", reached)

    def wait_for(self, condition: str, ready: Callable[[], Any]) -> Any:
        """Poll until ``ready()`` is true."""
        return wait_for(condition, ready, MAX_WAIT_SECONDS)

    def wait_idle(self, number: int) -> None:
        """Wait until this number of nodes can take a job."""

        def idle() -> bool:
            listed = self.control("sinfo", "-h", "-o", "%t %D").splitlines()
            counts = dict(line.split() for line in listed)
            return counts == {"idle": str(number)}

        self.wait_for("slurmctld", self._answers)
        self.wait_for(f"{number} idle nodes", idle)

    def _answers(self) -> bool:
        given = [f"{name}={value}" for name, value in self.environment().items()]
        return self._hosts[0].run("env", "-i", *given, "scontrol", "ping").returncode == 0

    # Faults.

    def lose(self, *nodes: str) -> None:
        """Cut the power of nodes, and report it to Slurm at once."""
        for node in nodes:
            self.host(node).power_off()
        for node in nodes:
            self.control("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def mend(self, node: str) -> None:
        """Plug a cable in again; returns when it carries, for which kernels take a second."""
        host = self.host(node)
        host.mend()
        reach = f"exec 3<>/dev/tcp/{self._hosts[0].address}/6817"
        self.wait_for(f"the cable of {node}", lambda: host.run("bash", "-c", reach).returncode == 0)

    def repair(self) -> None:
        """Boot every node that is off, mend every cable, resume every drained node; until idle."""
        for node in self.nodes:
            host = self.host(node)
            booted = not host.is_on
            if booted:
                host.boot(self.directory / "hosts")
                host.wait_up()
            self.mend(node)
            if booted:
                self._start(host, "slurmd")
        for line in self.control("sinfo", "-h", "-N", "-o", "%n %t").splitlines():
            name, state = line.split()
            if state.rstrip("*") in ("drain", "drng"):  # one failed test leaves no other without it
                self.control("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait_idle(len(self.nodes))
