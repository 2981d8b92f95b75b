"""One pass of pretrain() up to train(): the objects that it built, and how to renew its iterators.

From Megatron-LM 0.18 on, a script parses its arguments itself, once, before pretrain(), when this
process has no role yet. They are parsed again for every role that the process gets. Before 0.18
initialize_megatron() parses them, and :class:`CommandLine` has no effect.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.process.program import LOADED_PROGRAM
from deadpool_megatron.comms import is_detached
from deadpool_megatron.hookpoints import Handler
from deadpool_megatron.megatron.exact_load import load_exactly
from deadpool_megatron.megatron.pretraining import index_files, stages
from deadpool_megatron.megatron.pretraining.dispatch import bound_arguments, use_handlers
from deadpool_megatron.megatron.pretraining.families import family
from deadpool_megatron.megatron.pretraining.user_buffers import UserBuffers
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.megatron.stand_ins import with_own_generator


class PassEnd(BaseException):
    """Leaves pretrain() where a pass ends. It is no Exception, so that Megatron cannot catch it."""


class NothingToTrain(ValueError):
    """The arguments leave no iteration to train; the message is one line."""


class CommandLine:
    """The command line of one process, parsed for each role that the process gets."""

    def __init__(self) -> None:
        # Megatron's function with the arguments of the script's call.
        self._parse: Callable[[], Any] | None = None

    def parse_without_role(self, parse: Callable[[], Any]) -> Any:
        """Return the arguments from which the script makes its config. Neither prints nor opens
        writers: both are for a process with a role."""
        self._parse = parse
        os.environ["WORLD_SIZE"] = str(MemberPlace.from_environment().world_size)
        with no_writers(), contextlib.redirect_stdout(io.StringIO()):
            return parse()

    def parse_for_role(self) -> None:
        """Parse the arguments again for the present RANK, if the script has parsed them."""
        if self._parse is not None:
            forget_globals()
            self._parse()


def no_writers() -> contextlib.AbstractContextManager[None]:
    """Keep TensorBoard's and W&B's files closed while the block runs."""
    from megatron.training import global_vars

    unset = dict.fromkeys(("_set_tensorboard_writer", "_set_wandb_writer"), lambda args: None)
    return replaced(global_vars, **unset)


def forget_globals() -> None:
    """Unset the globals of parsing and initialize_megatron(), so that both can be called again. The
    groups stay."""
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars

    global_vars.unset_global_variables()
    destroy_rerun_state_machine()


@dataclass
class _Source:
    """The data of one model chunk. ``datasets``: the data sets, which ``provider`` makes once."""

    make_iterators: Callable[..., tuple[Any, Any, Any]]
    provider: Any
    datasets: Any = None


class Build:
    """See the module text. ``detached``: built without peers. ``kinds``: the kinds of parameters
    that an earlier build of this run has recorded (:meth:`kinds_exchanged`)."""

    def __init__(self, command_line: CommandLine, kinds: Sequence[tuple[Any, Any]] = ()) -> None:
        self._command_line = command_line
        self.kinds = kinds
        self.user_buffers = UserBuffers()
        self.detached = False
        self.complete = False
        #: the result of setup_model_and_optimizer()
        self.objects: tuple[Any, ...] = ()
        #: for every model chunk: iterators for training, validation and test
        self.iterators: list[tuple[Any, Any, Any]] = []
        self.train: Callable[..., Any] = _not_reached
        self.train_arguments: dict[str, Any] = {}
        self._sources: list[_Source] = []
        self._setup_call: Callable[..., tuple[Any, ...]] = _not_reached
        self._train_iters: int | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """Return the handlers of the pass."""
        return {
            "initialize_megatron": self._initialize,
            "setup_model_and_optimizer": self._setup,
            "load_checkpoint": self._load,
            "build_train_valid_test_data_iterators": self.make_training_iterators,
            "build_train_valid_test_datasets": self._make_datasets,
            "train": self._reach,
        }

    def renew_iterators(self) -> None:
        """Make iterators that begin at the counters in Megatron's arguments, on the same data sets.

        Collective. Draws from the random generators.
        """
        # From now on rank 0 knows whether there is data: without peers that was only assumed.
        _assume_data(False)
        made = []
        for source in self._sources:
            known = {"build_train_valid_test_datasets": _keep(source.datasets)}
            with use_handlers(known), _loaders_with_own_generators(), _loaders_may_be_empty():
                made.append(source.make_iterators(source.provider))
        self.iterators = made
        train, valid = made[0][:2]
        if isinstance(self.train_arguments["train_data_iterator"], list):  # virtual stages
            train, valid = ([iterators[kind] for iterators in made] for kind in (0, 1))
        self.train_arguments.update(train_data_iterator=train, valid_data_iterator=valid)

    def renumber(self, old: int, new: int) -> None:
        """Give the objects of role ``old`` to role ``new``, of the same stage class.

        Megatron's groups are those of the new role already. The model stays, with its buffers;
        Megatron's own function makes a new optimizer, since its shard is another.
        """
        from megatron.training import get_args

        model, config = self.objects[0], self.train_arguments["config"]
        before = stages.layer_offsets(get_args(), config, old)
        after = stages.layer_offsets(get_args(), config, new)
        stages.shift_layers(model, [b - a for a, b in zip(before, after, strict=True)])
        stages.renumber_buckets(model)
        # The new optimizer needs the memory of the old.
        self.objects = (model, None, None)
        self.train_arguments.update(optimizer=None, opt_param_scheduler=None)
        gc.collect()
        # If the user gives samples, the first call has set train_iters from them. With it the
        # schedule would be that of a run by iterations, without a warm-up.
        get_args().train_iters = self._train_iters
        nothing_loaded = {"load_checkpoint": lambda *_args, **_kwargs: (0, 0)}
        with use_handlers(nothing_loaded), self.kinds_exchanged():
            self.objects = family().set_up_around(self._setup_call, model)
        _, optimizer, scheduler = self.objects
        self.train_arguments.update(optimizer=optimizer, opt_param_scheduler=scheduler)

    def close(self) -> None:
        """Drop all references. Loaders end their worker processes when they are freed. That is fast
        if their last reference is dropped here; the garbage collector would close their queues
        first, and they would wait for each worker."""
        self.iterators.clear()
        self.train_arguments.clear()
        self.objects = ()
        self._sources.clear()
        self._setup_call = _not_reached

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._command_line.parse_for_role()
        original(*args, **kwargs)
        self.detached = is_detached(dist.group.WORLD)

    def progress_log_kept(self) -> contextlib.AbstractContextManager[None]:
        """While the block runs, keep a spare that is built for role 0 from writing Megatron's log
        of progress: it does not start the job."""
        from megatron.training import training

        append = training.append_to_progress_log

        def unless_detached(*args: Any, **kwargs: Any) -> None:
            if not self.detached:
                append(*args, **kwargs)

        return replaced(training, append_to_progress_log=unless_detached)

    @contextlib.contextmanager
    def kinds_exchanged(self) -> Iterator[None]:
        """Record in :attr:`kinds` the kinds of parameters that ranks exchange while the block runs;
        without peers, take the kinds from there. Ranks exchange them so that each rank has a group
        of each kind (megatron/core/optimizer/__init__.py, _get_param_groups).

        A stage without experts, or without embeddings, has fewer kinds than others. The kinds
        follow from the model and from the optimizer's overrides for some parameters.
        """
        from megatron.core import optimizer

        make, gather = optimizer._get_param_groups, dist.all_gather_object
        exchanged: list[tuple[Any, Any]] = []

        def make_groups(model: Any, config: Any, overrides: Any) -> Any:
            values = list((overrides or {}).values())

            def exchange(found: list[Any], own: Any) -> None:
                gather(found, own)
                if is_detached(dist.group.WORLD) and len(exchanged) < len(self.kinds):
                    known, kinds = self.kinds[len(exchanged)]
                    found += [kinds] if known == values else []
                exchanged.append((values, list(dict.fromkeys(itertools.chain(*found)))))

            with replaced(dist, all_gather_object=exchange):
                return make(model, config, overrides)

        with replaced(optimizer, _get_param_groups=make_groups):
            yield
        self.kinds = exchanged

    def _setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        self._setup_call = functools.partial(original, *args, **kwargs)
        self._train_iters = get_args().train_iters
        self.objects = self._setup_call()
        return self.objects

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load the checkpoint, but not without peers: then the state comes with a role."""
        if self.detached:
            return 0, 0
        return load_exactly(original, *args, **kwargs)

    def make_training_iterators(self, original: Callable[..., Any], provider: Any) -> Any:
        original = _with_failpoints(original) if failpoints.ACTIVE else original
        self._sources.append(_Source(original, provider))
        if self.detached:
            _assume_data(True)
        with _loaders_with_own_generators():
            made = original(provider)
        self.iterators.append(made)
        return made

    def _make_datasets(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        LOADED_PROGRAM.note_data(index_files.data_files(vars(get_args())))
        make = functools.partial(original, *args, **kwargs)
        with index_files.written_whole():
            datasets = index_files.made_where_missing(make) if self.detached else make()
        for dataset in datasets:
            _keep_whole_mask(dataset)
        self._sources[-1].datasets = datasets
        return datasets

    def _reach(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.train, self.train_arguments = original, bound_arguments(original, args, kwargs)
        self.complete = True
        raise PassEnd


def _keep_whole_mask(dataset: Any) -> None:
    """Remove the holes from the mask of losses that a data set keeps for all of its samples.

    Megatron keeps the mask of the first sample that a process, or each worker of a loader, reads,
    and then masks the padding of that sample in it (gpt_dataset.py, ``__getitem__``). The loss of
    later samples would depend on the sample with which a process starts, and a spare starts with
    another.
    """
    for part in getattr(dataset, "datasets", [dataset]):  # a blend has several
        if getattr(part, "masks_and_position_ids_are_cacheable", False) and len(part) > 0:
            part[0]
            part.cached_loss_mask.fill_(1)


def _loaders_with_own_generators() -> contextlib.AbstractContextManager[None]:
    from megatron.training import training

    build = with_own_generator(training.build_pretraining_data_loader)
    return replaced(training, build_pretraining_data_loader=build)


def _loaders_may_be_empty() -> contextlib.AbstractContextManager[None]:
    """While the block runs, give a data set whose samples have all been read a loader without
    batches.

    Megatron's sampler refuses to begin after the last sample (data_samplers.py). A run is there
    after its last iteration and its last evaluation: a blend has exactly as many samples as it
    needs.
    """
    from megatron.training import get_args, training

    build = training.build_pretraining_data_loader

    def build_unless_read(dataset: Any, consumed_samples: int) -> Any:
        is_cyclic = get_args().dataloader_type != "single"
        is_unread = dataset is None or is_cyclic or consumed_samples < len(dataset)
        return build(dataset, consumed_samples) if is_unread else []

    return replaced(training, build_pretraining_data_loader=build_unless_read)


def _assume_data(exists: bool) -> None:
    """Set whether there is data to train and evaluate on, which
    build_train_valid_test_data_loaders() takes from rank 0 if there are peers."""
    from megatron.training import get_args

    args = get_args()
    evaluates = exists and bool(args.full_validation or args.eval_iters)
    args.do_train, args.do_valid, args.do_test = exists, evaluates, evaluates


def _keep(datasets: Any) -> Handler:
    return lambda original, *args, **kwargs: datasets


def _with_failpoints(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes iterators, so that each passes a failpoint before every batch."""

    def hit(batch: Any) -> Any:
        failpoints.hit("data.next")
        return batch

    def wrapper(provider: Any) -> Any:
        iterators = make(provider)
        for rerunnable in filter(None, iterators):
            rerunnable.iterable = map(hit, rerunnable.iterable)
        return iterators

    return wrapper


def _not_reached(**arguments: Any) -> NoReturn:
    raise RuntimeError(f"train() was not reached, and is called with {sorted(arguments)}")
