"""Jobs of the batch scripts in scripts/slurm on a test cluster, and the results of their runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.events import Event, Kind, read_events
from deadpool_megatron.layout.records import EpochRecord
from tests.cluster.counting_member import expected_sha256
from tests.cluster.runs import MEMBER
from tests.common.finished_run import read_final
from tests.common.limits import FAST, setting_flags
from tests.slurm.cluster import Cluster

SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"
# The counting member needs no torch: nothing is preloaded, a run starts in a second. Five nodes
# share a few cores, so that limits have to be a little longer.
SETTINGS = (
    *("--preload=", *FAST),
    *setting_flags(freeze_seconds=4, node_silence_seconds=5, fence_seconds=4),
    *setting_flags(rejoin_seconds=10, takeover_seconds=4),
)
# Events of every step, which hide the others in a story.
_MANY = (Kind.STEP, Kind.SEALED, Kind.COMMITTED)


@dataclass
class Job:
    """One submitted job and the run that it makes."""

    cluster: Cluster
    number: int
    run: RunDirectory
    roles: int

    def events(self, *kinds: Kind) -> list[Event]:
        """Events so far, of these kinds."""
        return [e for e in read_events(self.run.events) if e.kind in kinds]

    def wait_iteration(self, iteration: int) -> None:
        """Until a step has been reported."""

        def reached() -> bool:
            return any((e.iteration or 0) >= iteration for e in self.events(Kind.STEP))

        self.wait_for(f"iteration {iteration}", reached)

    def wait_for(self, condition: str, ready: Any) -> Any:
        """Poll; fail with the whole story when it takes too long."""
        try:
            return self.cluster.wait_for(condition, ready)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from error

    def wait_over(self) -> dict[str, Any]:
        """Wait until the run has its verdict; return its results."""
        self.wait_for("the end of the run", self.run.final.exists)
        return read_final(self.run.path)

    def wait_end(self, *states: str) -> dict[str, str]:
        """Wait until the job is in this state; return its fields."""
        return self.wait_for(  # type: ignore[no-any-return]
            f"job {self.number} to be {states}", lambda: self._state_in(states)
        )

    def _state_in(self, states: tuple[str, ...]) -> dict[str, str]:
        fields = self.cluster.job(self.number)
        return fields if fields["JobState"] in states else {}

    def finish(self) -> dict[str, Any]:
        """Let an endless run end well, and check its result."""
        (self.run.path / "finish").touch()
        return self.check_result()

    def check_result(self) -> dict[str, Any]:
        """The run ended well, each step is there once, every role's state is exact."""
        final = self.wait_over()
        assert final["exit_status"] == 0, self.story()
        steps = [step["iteration"] for step in final["steps"]]
        assert steps == list(range(steps[0], steps[-1] + 1)), self.story()
        for role in range(self.roles):
            expected = expected_sha256(role, steps[-1])
            assert final["roles"][str(role)]["sha256"] == expected, self.story()
        return final

    def first_record(self) -> EpochRecord:
        """The seats and nodes that the run began with."""
        return EpochRecord.from_dict(Journal(self.run.journal).read("epoch", 1))

    def final_iteration(self) -> int:
        """The last iteration of a run that is over."""
        return int(read_json(self.run.final)["iterations"])

    def logs(self) -> str:
        """Return the output of the nodes' tasks."""
        found = sorted(Path(f"{self.run.path}.logs").glob("*.log"))
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in found)

    def host(self, node: int) -> str:
        """Name of the host on which a node of the run lives."""
        return str(read_json(self.run.node(node))["hostname"])

    def coordinator(self) -> str:
        """Name of the host on which the newest coordinator runs."""
        return str(read_json(self.run.coordinator)["hostname"])

    def story(self) -> str:
        """For a failed assertion: job, nodes, events."""
        parts = [f"job {self.number}: {self.cluster.job(self.number)}"]
        parts += [self.cluster.output(self.number), self.logs()]
        events = [e for e in read_events(self.run.events) if e.kind not in _MANY]
        parts += [str(e.to_dict()) for e in events[-40:]]
        return "\n".join(parts)


@dataclass
class Jobs:
    """Submits jobs whose runs lie under one directory."""

    cluster: Cluster
    directory: Path
    nodes: int = 4
    spares: int = 1
    settings: tuple[str, ...] = SETTINGS
    training: tuple[str, ...] = (MEMBER, "--step-seconds", "0.03")
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the variables that the batch scripts read."""
        return {
            "CHECKOUT": str(SCRIPTS.parents[1]),
            "RUNS": str(self.directory),
            "NODES": str(self.nodes),
            "SPARES": str(self.spares),
            "SETTINGS_TEXT": " ".join(self.settings),
            "DEADPOOL_BATCH_HOST_SECONDS": "2",
            **self.variables,
        }

    def submit(self, *options: str, script: str = "small_test.sbatch") -> Job:
        """Submit a script of the repository, on as many nodes as the run has."""
        size = f"--nodes={self.nodes + self.spares}"
        command = (str(SCRIPTS / script), *self.training)
        number = self.cluster.submit(*options, size, *command, **self.environment())
        return self.job(number)

    def chain(self, count: int, *options: str) -> list[Job]:
        """Submit a chain of jobs, each of which waits for its predecessor."""
        size = f"--nodes={self.nodes + self.spares}"
        command = (str(SCRIPTS / "small_test.sbatch"), *self.training)
        output = f"--output={self.cluster.directory}/job-%j.out"
        chain = (str(SCRIPTS / "chain.sh"), str(count), size, *options, output, *command)
        numbers = self.cluster.control(*chain, **self.environment())
        return [self.job(int(number)) for number in numbers.split()]

    def job(self, number: int) -> Job:
        """A job that is known by its number."""
        return Job(self.cluster, number, RunDirectory(self.directory / str(number)), self.nodes)
