"""Whole lives of pretrain() in a protected process, line by line: the calls of Megatron-LM's
functions, the lines that are printed and written, and the state that would be sealed.

Expected are the files in lives/. A change that is meant changes them as well: with
``DEADPOOL_TEST_WRITE=1`` in the environment these tests write them again, and the difference is
read like that of any other file.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from deadpool_megatron.cluster.process import member_place
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.comms import Communicators, EpochClosed
from deadpool_megatron.layout.records import BOUNDARIES
from deadpool_megatron.megatron.pretraining import logbook
from deadpool_megatron.megatron.pretraining.build import CommandLine, forget_globals
from deadpool_megatron.megatron.pretraining.pretrain_program import PretrainProgram
from deadpool_megatron.state import extras as codec
from tests.common import lives
from tests.megatron.pretraining.small_training import Chunk, SmallTraining, samples

LIVES = Path(__file__).parent / "lives"


def plain(value: Any) -> Any:
    """Bytes that are encoded extras, as what they hold."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, bytes):
        return plain(codec.decode(value)) if value else ""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


class Life:
    """A process in which pretrain() is a program; it is its own epoch's runner."""

    def __init__(self, small: SmallTraining, capsys: pytest.CaptureFixture[str], run: Path) -> None:
        self.small, self.capsys, self.run = small, capsys, run
        self.epoch, self.boundary, self.recomputed = 1, "step", 0
        self.closes_at = ""
        self.sealed: Any = None
        self.command_line = CommandLine()
        self.program = PretrainProgram(self.pretrain, self.command_line, run)
        self.loop: Any = None

    def pretrain(self) -> None:
        self.small.script(samples, self.model, self.forward)

    def model(self) -> Chunk:
        args = self.small.get_args()
        config = self.small.core_transformer_config_from_args(args)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        count = args.num_layers // args.pipeline_model_parallel_size
        return Chunk(config, 1 + stage * count, count)

    def forward(self, batches: Iterator[int], model: Chunk) -> int:
        sample = next(batches)
        with torch.no_grad():
            model.layers[0].weight.add_(sample)
        return sample

    def emit(self, kind: str, data: Any) -> None:
        self.small.note(f"emit {kind}", **data)

    def show(self, heading: str) -> None:
        """Write down what was printed, under a heading."""
        found = self.capsys.readouterr()
        for text in (found.out, found.err):
            self.small.lines += [f"    | {line}" for line in text.splitlines()]
        self.small.lines.append(f"{heading}:")

    def build(self) -> None:
        self.program.make_groups()
        self.loop = self.program.make_loop(self.emit)

    def train(self) -> None:
        try:
            self.loop.train(self)
        except (EpochClosed, SystemExit) as left:
            self.small.note(f"left by {left!r}")
            return
        ends = {"early": self.loop.early, "unsaved": self.loop.unsaved}
        self.small.note("over", **ends)

    def restore(self) -> None:
        """The loop of this process continues from what was sealed last."""
        self.epoch, self.closes_at, loop = self.epoch + 1, "", self.loop
        values = codec.decode(self.sealed[1])
        self.boundary = self.sealed[0]
        loop.counters.update(values["counters"])
        loop.scheduler.load_state_dict(values["schedule"])
        loop.model_chunks[0].layers[0].weight.data.copy_(values["weight"])
        loop.restore_extra_state(values["more"])
        loop.reset_after_interrupt()

    # The interface of an open epoch.

    def includes(self, boundary: str) -> bool:
        return BOUNDARIES.index(boundary) <= BOUNDARIES.index(self.boundary)

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        self.small.note("step", iteration)
        answer = run()
        self.check(f"step {iteration}")
        self._seal("step")
        return answer

    def segment(self, boundary: str, run: Callable[[], None]) -> None:
        self.small.note(f"segment {boundary}", self.loop.counters["iteration"])
        if not self.includes(boundary):
            run()
            self.check(f"{boundary} {self.loop.counters['iteration']}")
            self._seal(boundary)

    def check(self, where: str = "") -> None:
        where = where or f"log {self.loop.counters['iteration']}"
        if self.closes_at == where:
            raise EpochClosed(self.epoch, where)

    def capture_extras(self) -> bytes:
        return codec.encode({"unfinished": self.loop.extra_state()["unfinished_save"]})

    def count_as_durable(self, directory: Path, iteration: int, extras: bytes) -> None:
        self.small.note("durable", iteration, directory=directory, extras=plain(extras))

    def _seal(self, boundary: str) -> None:
        loop, self.boundary = self.loop, boundary
        weight = loop.model_chunks[0].layers[0].weight.detach().clone()
        values = {"counters": loop.counters, "more": loop.extra_state(), "weight": weight}
        values["schedule"] = loop.scheduler.state_dict()
        self.sealed = boundary, codec.encode(values)
        shown = {name: values[name] for name in ("counters", "more", "weight")}
        self.small.note(f"sealed {boundary}", **plain(codec.decode(codec.encode(shown))))


def is_interrupted(make: Callable[..., Life]) -> Life:
    """In a pass, in the lines of an iteration, in an evaluation and after it, after a save."""
    life = make()
    life.build()
    life.show("it trains")
    life.loop.model_chunks[0].remove_forward_pre_hook_handles["chunk"] = "gathers"

    def closes() -> None:
        raise EpochClosed(life.epoch, "allreduce")

    life.small.acts["train_step 3"] = closes
    life.train()
    life.small.acts |= {"skips 3": disk_full, "skips 5": disk_full}
    for moment in ("log 3", "evaluation 4", "save 4", "validation 5"):
        life.show(f"interrupted, it trains on until {moment}")
        life.restore()
        life.closes_at = moment
        life.train()
    life.show("interrupted, it trains to the end")
    life.restore()
    life.train()
    life.show("another process takes the role after the end")
    sealed, life = life.sealed, make(life.small)
    life.build()
    life.sealed = sealed
    life.restore()
    life.train()
    return life


def saves_in_the_background(make: Callable[..., Life]) -> Life:
    """A save is interrupted and owed, another cannot be written, the last is never finished."""
    life = make(async_save=True, train_iters=9, non_persistent_save_interval=3)
    life.build()
    queue = life.small
    life.small.acts["train_step 4"] = lambda: setattr(life, "closes_at", "step 4")
    life.show("a save is interrupted")
    life.train()
    life.show("it is written again")
    life.restore()

    def ends() -> None:
        for call in queue._async_calls_queue.async_calls:
            call.ends = True

    life.small.acts |= {"directory iter_0000006": disk_full, "directory iter_0000009": disk_full}
    life.small.acts |= {f"train_step {iteration}": ends for iteration in range(4, 9)}
    life.train()
    return life


def saves_cannot_be_written(make: Callable[..., Life]) -> Life:
    """The place of a save is taken, and the disk is full in a save and before the last."""
    life = make(ckpt_format="torch", train_iters=6)
    life.build()
    taken = life.run / "saves" / "iter_0000002"
    taken.write_text("taken")
    life.small.acts |= {"tracker 4": disk_full, "directory iter_0000006": disk_full}
    life.train()
    files = sorted(str(path) for path in life.run.glob("saves/iter*/*"))
    life.small.note("files", names=files)
    life.show("what is owed is written by the next")
    life.sealed = "save", life.sealed[1]
    life.restore()
    life.train()
    return life


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def checkpoints_are_loaded(make: Callable[..., Life]) -> Life:
    """By the program itself, and as a fall-back; the run ends early, twice."""
    life = make(exit_interval=6, train_iters=8, ckpt_format="torch")
    made = life.run / "saves" / "iter_0000004"
    (made / "mp_rank_00").mkdir(parents=True)
    (made / "metadata.json").touch()
    life.small.given["load"] = str(made.parent)
    life.build()
    life.show("it was loaded as the program was built")
    life.small.note("loaded", it=life.loop.loaded, by=life.program.loaded_checkpoint(4))
    life.small.acts["exits 6"] = disk_full
    life.train()
    life.small.acts.clear()
    life.show("fallen back to")
    life.loop.restore_extra_state(codec.decode(codec.encode(life.loop.extra_state())))
    args = life.small.get_args()
    args.no_save_rng = args.no_save_optim = args.no_load_rng = args.no_load_optim = True
    life.loop.load_checkpoint(made.with_name("iter_0000003"))
    args.no_save_rng = args.no_save_optim = args.no_load_rng = args.no_load_optim = None
    life.loop.load_checkpoint(made)
    (group,) = life.loop.optimizer.param_groups
    life.small.note("group", **{name: group[name] for name in ("lr", "weight_decay")})
    life.loop.model_chunks[0].remove_forward_pre_hook_handles["chunk"] = "gathers"
    life.boundary = "save"
    life.loop.reset_after_interrupt()
    life.small.note("counters", **life.loop.counters, **life.loop.extra_state())
    life.train()
    life.show("entered once more after its end")
    life.restore()
    life.train()
    life.show("its state as a save would write it")
    state = life.loop.checkpoint_state()
    life.small.note("state", **{name: state[name] for name in state if name != "args"})
    life.small.note("arguments", marks=state["args"].marks, whole=vars(state["args"].whole))
    life.small.note("model", **life.loop.model_arguments())
    life.loop.close()
    build = life.loop.build
    held = build.objects, build.iterators, build.train_arguments, life.loop.model_chunks
    life.small.note("closed", held=held)
    life.program.drop_groups()
    return life


def a_spare_takes_roles(make: Callable[..., Life]) -> Life:
    """Built without peers for one stage, warmed up, and given another role of its class."""
    life = make(pipeline_model_parallel_size=2, num_layers=8, train_iters=None)
    communicators = Communicators()
    communicators.install()

    def parse() -> str:
        life.small.note("the script parses", os.environ["WORLD_SIZE"])
        life.small.set_args("arguments")
        return "arguments"

    life.small.note("the script has", life.command_line.parse_without_role(parse))
    role = life.program.provisional_role(3, 8)
    life.show(f"built for role {role}")
    os.environ["RANK"] = "3"
    life.build()
    life.loop.warm_up()
    life.show(f"of {life.loop.stage_class()}")
    for role in (1, 2, 5):
        life.small.note("serves", role, it=life.program.serves(life.loop, role))
    life.small.note("spares", may=life.program.spares_may_build())
    os.environ["RANK"] = "1"
    communicators.renumber(1)
    with communicators.reusing_groups():
        life.loop = life.program.renumber(life.loop, life.emit)
    chunk, args = life.loop.model_chunks[0], life.small.get_args()
    numbers = [layer.layer_number for layer in chunk.layers]
    shard = chunk.bucket_groups[0].intra_distributed_optimizer_instance_rank
    life.small.note("renumbered", role=life.loop.role, layers=numbers, shard=shard)
    life.small.note("schedule", iters=args.train_iters, built=life.loop.optimizer is not None)
    life.program.drop_groups()
    communicators.uninstall()
    return life


@pytest.fixture
def make(monkeypatch, capsys, tmp_path):
    """Make a process of a run of one role, in an earlier one's place if that is given."""
    place = MemberPlace(0, 0, 0, world_size=8, members_per_node=2)
    member = {member_place.VARIABLE: json.dumps(place.to_dict())}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **member}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DEADPOOL_RUN_DIR", str(tmp_path))
    times = iter(range(0, 10000, 10))
    monkeypatch.setattr(logbook, "time", SimpleNamespace(time=lambda: float(next(times))))

    def made(small: SmallTraining | None = None, **given: Any) -> Life:
        if small is not None:
            forget_globals()
        small = small or SmallTraining(monkeypatch, tmp_path, **given)
        return Life(small, capsys, tmp_path)

    yield made
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "live",
    [
        is_interrupted,
        saves_in_the_background,
        saves_cannot_be_written,
        checkpoints_are_loaded,
        a_spare_takes_roles,
    ],
)
def test_a_life_is_as_it_was_before(live, make, tmp_path):
    life = live(make)
    life.show("the end")
    for file in ("datasets-ready", "lines-written.json", "saves.json"):
        path = tmp_path / file
        life.small.note(file, text=path.read_text() if path.exists() else None)
    lines = [line.replace(str(tmp_path), "DIR") for line in life.small.lines]
    lives.hold(LIVES / f"{live.__name__}.txt", lines)
