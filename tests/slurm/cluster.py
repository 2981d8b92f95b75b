"""A real Slurm cluster on one machine: slurmctld on host ``ctl``, slurmd on ``node1`` .. ``nodeN``.

Nothing outside its directory is used: own configuration, munge key and state, no systemd, no
database. Several clusters can be there side by side.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.slurm.hosts import Hosts

CONTROL = "ctl"
PATIENCE_SECONDS = 90.0
TOOLS = (
    *("slurmctld", "slurmd", "sbatch", "srun", "munged"),
    *("ip", "nsenter", "unshare", "setpriv"),
)
SWITCH = "DEADPOOL_TEST_SLURM"
_ROOT = Path(__file__).parents[2]

_CONFIGURATION = """\
ClusterName=deadpool
SlurmctldHost={control}
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
NodeName=node[1-{nodes}] State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE
"""


def why_not() -> str:
    """Why there can be no cluster here; empty when there can."""
    if os.environ.get(SWITCH) != "1":
        return f"'scripts/test.sh --slurm' runs these (or {SWITCH}=1)"
    if os.geteuid() != 0:
        return "needs root, for the namespaces that stand for hosts"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    return (
        f"needs {', '.join(missing)}: scripts/system-packages.sh installs them" if missing else ""
    )


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """Use as a context manager: in it all nodes are idle; at its end nothing is left."""

    def __init__(self, nodes: int, *, silence_seconds: int = 6) -> None:
        self.nodes = tuple(f"node{number}" for number in range(1, nodes + 1))
        # Short, because of the munge socket's name in it.
        self.directory = Path(tempfile.mkdtemp(prefix="dpslurm-"))
        self.hosts = Hosts(self.directory, (*self.nodes, CONTROL))
        self._silence_seconds = silence_seconds
        self._munge: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self.hosts.__enter__()
            self._start_munge()
            self._boot(CONTROL, "slurmctld -D")
            for node in self.nodes:
                self._boot(node, "slurmd -D")
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
        self.hosts.close()
        if self._munge is not None:
            self._munge.kill()
            self._munge.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def show(self) -> None:
        """Print what a failed test needs to be understood."""
        for log in (*self.directory.glob("*.console"), *self.directory.glob("log/*")):
            text = log.read_text(errors="replace").strip()
            print(f"== {log.name}\n{text[-2000:]}")

    def _configure(self) -> None:
        self.directory.chmod(0o755)
        for name in ("state", "log", "spool"):
            (self.directory / name).mkdir()
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                control=CONTROL,
                directory=self.directory,
                silence_seconds=self._silence_seconds,
                nodes=len(self.nodes),
            )
        )
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
        self._munge = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "munged", "--foreground", "--force"),
                *(f"--key-file={key}", f"--socket={here}/munge.sock", "--num-threads=4"),
                *(f"--pid-file={here}/munged.pid", f"--seed-file={here}/munge.seed"),
                f"--log-file={here}/log/munged.log",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment(),
        )
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

    def _boot(self, host: str, service: str) -> None:
        self.hosts.boot(host, service, self.environment())

    # Commands.

    def on(self, host: str, *command: str, **variables: str) -> str:
        """Run a command on a host to its end, which has to be good; answers its output."""
        done = subprocess.run(
            self.hosts.command(host, *command),
            capture_output=True,
            text=True,
            env={**self.environment(), **variables},
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def control(self, *command: str, **variables: str) -> str:
        """Run a command on the control host."""
        return self.on(CONTROL, *command, **variables)

    def submit(self, script: Path | str, *options: str, **variables: str) -> int:
        """``sbatch``; answers the job's number. Output goes to ``<directory>/job-<number>.out``."""
        where = f"--output={self.directory}/job-%j.out"
        command = ("sbatch", "--parsable", where, *options, str(script))
        return int(self.control(*command, **variables))

    def output(self, job: int) -> str:
        """What the batch script of a job has printed."""
        path = self.directory / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` says, by field."""
        words = self.control("scontrol", "show", "job", "-o", str(job)).split()
        return dict(word.partition("=")[::2] for word in words)

    def job_of_element(self, array: int, element: int) -> dict[str, str]:
        """What ``scontrol show job`` says of one element of a job array."""
        words = self.control("scontrol", "show", "job", "-o", f"{array}_{element}").split()
        return dict(word.partition("=")[::2] for word in words)

    def ended(self, array: int) -> bool:
        """Whether no element of the array is pending or at work."""
        return not self.control("squeue", "-h", "-j", str(array), "-o", "%i")

    def members(self, host: str) -> list[int]:
        """Training processes on a host, by the name that they have given themselves."""
        command = self.hosts.command(host, "pgrep", r"^dp-n[0-9]+s")
        done = subprocess.run(command, capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def wait_job(self, job: int, *states: str) -> dict[str, str]:
        """Until the job is in one of these states (default: ended); answers its fields."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

        def reached() -> dict[str, str]:
            fields = self.job(job)
            return fields if fields["JobState"] in wanted else {}

        return self.wait_for(f"job {job} to be {' or '.join(wanted)}", reached)

    def wait_for(self, what: str, ready: Callable[[], Any]) -> Any:
        """Poll until ``ready()`` is true."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while not (found := ready()):
            assert time.monotonic() < limit, f"waited too long for {what}"
            time.sleep(0.05)
        return found

    def wait_idle(self, number: int) -> None:
        """Until so many nodes can take a job."""

        def idle() -> bool:
            command = self.hosts.command(CONTROL, "sinfo", "-h", "-t", "idle", "-o", "%D")
            done = subprocess.run(command, capture_output=True, text=True, env=self.environment())
            return sum(map(int, done.stdout.split())) == number

        self.wait_for(f"{number} idle nodes", idle)

    # Faults.

    def lose(self, *nodes: str) -> None:
        """Pull nodes' power cords, and let Slurm know at once what it would find out later."""
        for node in nodes:
            self.hosts.power_off(node)
        for node in nodes:
            self.control("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def repair(self) -> None:
        """Boot every node that is off, mend every cable, and wait until all are idle."""
        for node in self.nodes:
            self.hosts.mend(node)
            if not self.hosts.is_up(node):
                self._boot(node, "slurmd -D")
        self.wait_idle(len(self.nodes))
