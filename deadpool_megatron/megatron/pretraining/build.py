"""One pass of pretrain() up to train(): what it built, and how to make its iterators again.

A script parses its arguments itself from Megatron-LM 0.18 on: once, before pretrain(), when this
process has no role yet; they are parsed again for every role that it gets. Before 0.18
initialize_megatron() parses them, and :class:`CommandLine` does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.process.program import LOADED
from deadpool_megatron.comms import is_detached
from deadpool_megatron.hookpoints import Handler
from deadpool_megatron.megatron.exact_load import load_exactly
from deadpool_megatron.megatron.pretraining import index_files, stages
from deadpool_megatron.megatron.pretraining.dispatch import use_handlers
from deadpool_megatron.megatron.pretraining.families import family
from deadpool_megatron.megatron.pretraining.user_buffers import UserBuffers
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.megatron.stand_ins import drawing_apart


class Reached(BaseException):
    """Leaves pretrain() where a pass ends. Not an Exception: nothing of Megatron may catch it."""


class NothingToTrain(ValueError):
    """The arguments leave nothing to protect; one clear line."""


class CommandLine:
    """Of one process. ``_parse``: Megatron's function with what the script gave it."""

    def __init__(self) -> None:
        self._parse: Callable[[], Any] | None = None

    def parse_without_role(self, parse: Callable[[], Any]) -> Any:
        """Returns the arguments for the script to make its config of. Says nothing, and opens no
        writers: a role does that."""
        self._parse = parse
        os.environ["WORLD_SIZE"] = str(MemberPlace.from_environment().world_size)
        with no_writers(), contextlib.redirect_stdout(io.StringIO()):
            return parse()

    def parse_for_role(self) -> None:
        """Parse arguments that the script has parsed again, for RANK as it is now."""
        if self._parse is not None:
            forget_globals()
            self._parse()


@contextlib.contextmanager
def no_writers() -> Iterator[None]:
    """Nobody opens TensorBoard's or W&B's files while the block runs."""
    from megatron.training import global_vars

    with (
        replaced(global_vars, "_set_tensorboard_writer", lambda args: None),
        replaced(global_vars, "_set_wandb_writer", lambda args: None),
    ):
        yield


def forget_globals() -> None:
    """Forget what parsing and initialize_megatron() set, so that they can be called again. The
    groups stay."""
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    global_vars.unset_global_variables()
    destroy_rerun_state_machine()


@dataclass
class _Source:
    """The data of one model chunk. ``datasets``: as the provider made them, once."""

    make_iterators: Callable[..., tuple[Any, Any, Any]]
    provider: Any
    datasets: Any = None


class Build:
    """See the module text. ``detached``: built without peers. ``kinds``: of parameters, as an
    earlier build of this run has left them."""

    def __init__(self, command_line: CommandLine, kinds: Sequence[tuple[Any, Any]] = ()) -> None:
        self._command_line = command_line
        self.kinds = kinds
        self.user_buffers = UserBuffers()
        self.detached = False
        self.complete = False
        #: what setup_model_and_optimizer() answered
        self.objects: tuple[Any, ...] = ()
        #: of every model chunk: iterators for training, validation and test
        self.iterators: list[tuple[Any, Any, Any]] = []
        self.train: Callable[..., Any] = _not_reached
        self.train_arguments: dict[str, Any] = {}
        self._sources: list[_Source] = []
        self._setup_call: Callable[..., tuple[Any, ...]] = _not_reached
        self._train_iters: int | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """The scene of the pass."""
        return {
            "initialize_megatron": self._initialize,
            "setup_model_and_optimizer": self._setup,
            "load_checkpoint": self._load,
            "build_train_valid_test_data_iterators": self.make_training_iterators,
            "build_train_valid_test_datasets": self._make_datasets,
            "train": self._reach,
        }

    def renew_iterators(self) -> None:
        """Iterators from where the counters in Megatron's arguments point, on the same data sets.

        Collective. Draws from the random generators.
        """
        # As rank 0 finds them: without peers they were only assumed.
        _assume_data(False)
        made = []
        for source in self._sources:
            known = {"build_train_valid_test_datasets": _keep(source.datasets)}
            with use_handlers(known), _loaders_with_own_generators(), _loaders_may_be_empty():
                made.append(source.make_iterators(source.provider))
        self.iterators = made
        train, valid, _ = self.iterator_arguments()
        self.train_arguments.update(train_data_iterator=train, valid_data_iterator=valid)

    def renumber(self, old: int, new: int) -> None:
        """Make what was built for role ``old`` that of ``new``, of the same stage class.

        Megatron's groups are those of the new role already. The model stays, with its buffers; the
        optimizer, whose shard is another, is made by Megatron's own function.
        """
        from megatron.training import get_args

        model, config = self.objects[0], self.train_arguments["config"]
        before = stages.layer_offsets(get_args(), config, old)
        after = stages.layer_offsets(get_args(), config, new)
        stages.shift_layers(model, [b - a for a, b in zip(before, after, strict=True)])
        stages.renumber_buckets(model)
        # The old optimizer's memory is needed for the new one.
        self.objects = (model, None, None)
        self.train_arguments.update(optimizer=None, opt_param_scheduler=None)
        gc.collect()
        # Where the user names samples, the first call noted their iterations here: with them the
        # schedule would be that of a run that is told by iterations, without a warm-up.
        get_args().train_iters = self._train_iters
        made_up = {"load_checkpoint": lambda *_args, **_kwargs: (0, 0)}
        with use_handlers(made_up), self.kinds_exchanged():
            self.objects = family().set_up_around(self._setup_call, model)
        _, optimizer, scheduler = self.objects
        self.train_arguments.update(optimizer=optimizer, opt_param_scheduler=scheduler)

    def close(self) -> None:
        """Let go of everything. Loaders end their worker processes when they are freed, at once if
        it is by their last reference; the garbage collector closes their queues before they can
        tell the workers to end, and they wait for each of them."""
        self.iterators.clear()
        self.train_arguments.clear()
        self.objects = ()
        self._sources.clear()
        self._setup_call = _not_reached

    def iterator_arguments(self) -> tuple[Any, Any, Any]:
        """The three as pretrain() hands them on: lists where there are virtual stages."""
        if isinstance(self.train_arguments["train_data_iterator"], list):
            train, valid, test = zip(*self.iterators, strict=True)
            return list(train), list(valid), list(test)
        return self.iterators[0]

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._command_line.parse_for_role()
        original(*args, **kwargs)
        self.detached = is_detached(dist.group.WORLD)

    @contextlib.contextmanager
    def progress_log_kept(self) -> Iterator[None]:
        """While the block runs, Megatron's log of progress is left alone by a spare that is built
        for role 0: it does not start the job."""
        from megatron.training import training

        append = training.append_to_progress_log

        def unless_detached(*args: Any, **kwargs: Any) -> None:
            if not self.detached:
                append(*args, **kwargs)

        with replaced(training, "append_to_progress_log", unless_detached):
            yield

    @contextlib.contextmanager
    def kinds_exchanged(self) -> Iterator[None]:
        """While the block runs, :attr:`kinds` becomes what ranks tell each other of their
        parameters, so that each has a group of each kind (megatron/core/optimizer/__init__.py,
        _get_param_groups); without peers they are heard from it.

        A stage without experts, or without embeddings, has kinds less than others. They follow from
        the model and from what an optimizer is told of some parameters.
        """
        from megatron.core import optimizer

        make, gather = optimizer._get_param_groups, dist.all_gather_object
        told: list[tuple[Any, Any]] = []

        def make_groups(model: Any, config: Any, overrides: Any) -> Any:
            given = list((overrides or {}).values())

            def tell(found: list[Any], own: Any) -> None:
                gather(found, own)
                if is_detached(dist.group.WORLD) and len(told) < len(self.kinds):
                    known, kinds = self.kinds[len(told)]
                    found += [kinds] if known == given else []
                told.append((given, list(dict.fromkeys(itertools.chain(*found)))))

            with replaced(dist, "all_gather_object", tell):
                return make(model, config, overrides)

        with replaced(optimizer, "_get_param_groups", make_groups):
            yield
        self.kinds = told

    def _setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        self._setup_call = functools.partial(original, *args, **kwargs)
        self._train_iters = get_args().train_iters
        self.objects = self._setup_call()
        return self.objects

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Without peers nothing can be loaded, nor has to be: the state comes with a role."""
        if self.detached:
            return 0, 0
        return load_exactly(original, *args, **kwargs)

    def make_training_iterators(self, original: Callable[..., Any], provider: Any) -> Any:
        if failpoints.ACTIVE:
            original = _announcing(original)
        self._sources.append(_Source(original, provider))
        if self.detached:
            _assume_data(True)
        with _loaders_with_own_generators():
            made = original(provider)
        self.iterators.append(made)
        return made

    def _make_datasets(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        LOADED.note_data(index_files.data_files(vars(get_args())))
        make = functools.partial(original, *args, **kwargs)
        with index_files.written_whole():
            datasets = index_files.made_where_missing(make) if self.detached else make()
        for one in datasets:
            _keep_whole_mask(one)
        self._sources[-1].datasets = datasets
        return datasets

    def _reach(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        self.train, self.train_arguments = original, dict(bound.arguments)
        self.complete = True
        raise Reached


def _keep_whole_mask(dataset: Any) -> None:
    """Have the mask of losses that a data set keeps for all of its samples be one without holes.

    Megatron keeps that of the first sample which a process, or each worker of a loader, reads, and
    then masks the padding of that sample in it (gpt_dataset.py, ``__getitem__``). So what counts of
    later samples would depend on where a process has begun, and a spare begins elsewhere.
    """
    for one in getattr(dataset, "datasets", [dataset]):  # of a blend
        if getattr(one, "masks_and_position_ids_are_cacheable", False) and len(one) > 0:
            one[0]
            one.cached_loss_mask.fill_(1)


@contextlib.contextmanager
def _loaders_with_own_generators() -> Iterator[None]:
    from megatron.training import training

    name = "build_pretraining_data_loader"
    with replaced(training, name, drawing_apart(getattr(training, name))):
        yield


@contextlib.contextmanager
def _loaders_may_be_empty() -> Iterator[None]:
    """While the block runs, a data set of which every sample is read gets a loader without batches.

    Megatron's sampler refuses to begin there (data_samplers.py), and there a run stands after its
    last iteration and its last evaluation: a blend has just as many samples as they take.
    """
    from megatron.training import get_args, training

    name = "build_pretraining_data_loader"
    build = getattr(training, name)

    def made(dataset: Any, consumed_samples: int) -> Any:
        begins_anew = get_args().dataloader_type != "single"
        if dataset is None or begins_anew or consumed_samples < len(dataset):
            return build(dataset, consumed_samples)
        return []

    with replaced(training, name, made):
        yield


def _assume_data(there: bool) -> None:
    """Set what build_train_valid_test_data_loaders() otherwise takes from rank 0 alone: whether
    there is data to train and evaluate on."""
    from megatron.training import get_args

    args = get_args()
    evaluates = there and bool(args.full_validation or args.eval_iters)
    args.do_train, args.do_valid, args.do_test = there, evaluates, evaluates


def _keep(datasets: Any) -> Handler:
    return lambda original, *args, **kwargs: datasets


def _announcing(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same iterators; each announces every batch that it draws."""

    def announced(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            failpoints.hit("data.next")
            yield batch

    def made(provider: Any) -> Any:
        iterators = make(provider)
        for rerunnable in filter(None, iterators):
            rerunnable.iterable = announced(rerunnable.iterable)
        return iterators

    return made


def _not_reached(**arguments: Any) -> NoReturn:
    raise RuntimeError(f"train() was not reached, and is called with {sorted(arguments)}")
