"""The ``deadpool`` command: one module per group of sub-commands, imported when it is asked for.

Each module offers ``add_arguments(parser)`` and ``run(args) -> int``, and its text describes the
sub-command. The sub-command's name is ``args.subcommand``; what follows the first ``--`` is
``args.command``, what comes before it ``args.options``. Whatever a user can get wrong, or the
system refuses before anything is started, ends in one clear line on standard error and exit
status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from deadpool_megatron import UserError, __version__, arguments
from deadpool_megatron.cli.common import CommandError, refusing_system_errors
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.observe.narration import shown

# Sub-command -> its module and its help, by topic; the order is that of the help text.
TOPICS = {
    "train": {
        "run": ("start.run", "train, and keep training when nodes die"),
        "demo": ("demo", "kill a node of a small training run, and compare the results"),
        "agent": ("start.node_agent", "one node of a run (clusters)"),
        "standby": ("start.agent_process", ""),
    },
    "look at a run": {
        "status": ("control.status", "what a run does right now"),
        "watch": ("watch", "the lines of a run, from any host"),
        "serve": ("serve", "a run on one page in the browser"),
        "metrics": ("metrics", "a run as metrics, for Prometheus"),
        "report": ("report", "report on a run and each failure in it"),
        "explain": ("explain", "explain the code of a failure, with your response"),
        "compare": ("compare", "compare two runs: bit-identical, or where they first differ"),
        "verify": ("storage.verify", "check the checksums of all state, in memory and on disk"),
    },
    "steer a run": {
        "drain": ("control.client", "move a node's roles to a spare"),
        "protect": ("control.client", "change the protection of a running job"),
        "kill": ("control.client", "inject a failure"),
        "stop": ("control.client", "shut a run down cleanly (exit status 130)"),
        "persist": ("control.client", "write a standard checkpoint in the background"),
        "follow-slurm": ("slurm", "drain the nodes that Slurm drains"),
    },
    "prepare, and clean up": {
        "plan": ("prepare.plan", "before a run: nodes, memory and traffic from a file"),
        "check": ("prepare.check", "check before a run whether this host is fit to train"),
        "support": ("prepare.support", "judge a command line of Megatron-LM"),
        "patch": ("prepare.patch", "patch a checkout of Megatron-LM, or revert the patch"),
        "examples": ("examples", "print the folder of example configs and batch scripts"),
        "bad-nodes": ("prepare.bad_nodes", "show the hosts that earlier runs have quarantined"),
        "gpu-health": ("prepare.gpu_health", "health command: search the kernel log for Xids"),
        "clean": ("storage.clean", "remove the shared memory and processes of dead runs"),
    },
}
COMMANDS = {name: module for topic in TOPICS.values() for name, (module, _) in topic.items()}
# What these write is for the run's user alone, unless the variable says otherwise.
# Programs that start others, as the first words of a command or behind -m.
_LAUNCHER = re.compile(
    r"torchrun|srun|mpirun|accelerate|python[\d.]*|(torch\.distributed|accelerate\.commands)\.\w+"
)
_WRITERS = {"run", "demo", "check", "agent", "standby"}
# On these a run depends, for as long as it lasts. Where the system refuses them something they look
# at themselves until they have started a process; later a traceback tells more than a line.
_PARTS_OF_A_RUN = {"run", "agent", "standby"}
_ADVICE = "see --help; a command follows '--'"
UMASK_VARIABLE = "DEADPOOL_UMASK"
_EXAMPLES = """\
examples:
  deadpool run --nodes 2 --spares 1 --nproc-per-node 2 --run-dir runs/first \\
      -- -m deadpool_megatron.trainer @configs/tiny.args --train-iters 500
  deadpool status runs/first            what each role is doing
  deadpool kill runs/first --node 1     as if its power cord were pulled
  deadpool drain runs/first --node 0    move its roles to a spare, without losing a step
  deadpool verify runs/first            check every checksum, in memory and on disk
  deadpool protect runs/first --every 4 protect each fourth iteration only
  deadpool persist runs/first           write a checkpoint during training
  deadpool clean                        remove the memory of dead runs
"""


class _Output(io.FileIO):
    """Standard output or error of a command that outlives who reads it: a terminal goes away,
    ``head`` has seen enough, the disk behind ``> run.log`` is full. What cannot be written is lost;
    ``failed``: for what reason, but that nobody reads any more."""

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        """See ``io.FileIO``; raises nothing."""
        try:
            return super().write(data) or len(data)
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.failed = error
            return len(data)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status. ``argv``: None for that of this process, whose
    standard streams are then such as outlive their readers."""
    if argv is not None:
        return _carry_out(list(argv))
    output = _open_streams()
    status = _carry_out(sys.argv[1:])
    sys.stdout.flush()
    # Of a command that prints what it has found, nobody has the answer then.
    if output.failed is not None and sys.argv[1] not in _PARTS_OF_A_RUN:
        why = f"its output could not be written: {output.failed.strerror}"
        print(f"deadpool {sys.argv[1]}: {why}", file=sys.stderr)
        return ExitStatus.BAD_INPUT
    return status


def _open_streams() -> _Output:
    """Make them, and have those that were closed lead nowhere; returns standard output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a socket would get its number
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    output, errors = (_Output(number, "w", closefd=False) for number in (1, 2))
    sys.stdout, sys.stderr = (
        # Letters that a terminal does not have are written in others.
        io.TextIOWrapper(io.BufferedWriter(one), errors="backslashreplace", line_buffering=at_once)
        for one, at_once in ((output, output.isatty()), (errors, True))
    )
    return output


def _without_launcher(words: list[str]) -> list[str]:
    """Return the script, or ``-m MODULE``, of a command that was pasted with a launcher, and what
    follows it; any other command as it is."""
    heads = [n for n, word in enumerate(words) if _LAUNCHER.fullmatch(Path(word).name)]
    if not heads or heads[0] != (words[0] == "-m"):
        return words
    begins = [n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")]
    at = next((n for n in begins if n + 1 not in heads), 0)
    if at:
        left = " ".join(words[:at])
        print(f"deadpool: '{left}' is left out: deadpool starts the processes", file=sys.stderr)
    return words[at:]


def _carry_out(given: list[str]) -> int:
    # Everything behind the first "--" is the user's command and not to be parsed here.
    options, command = given, []
    if "--" in given:
        cut = given.index("--")
        options, command = given[:cut], given[cut + 1 :]
    words = ["--help" if word == "--help-all" else word for word in options]
    args = _parser(options).parse_args(words)
    args.options, args.command = options, _without_launcher(command)
    # Of a part of a run other errors of the system are told with where they happened.
    is_part = args.subcommand in _PARTS_OF_A_RUN
    try:
        if args.subcommand in _WRITERS:
            os.umask(_umask())
        with contextlib.nullcontext() if is_part else refusing_system_errors():
            return int(_module(COMMANDS[args.subcommand]).run(args))
    except UserError as error:
        flag = _flag_of(error.__cause__, args)
        print(shown(f"deadpool {args.subcommand}: {flag}{error}"), file=sys.stderr)
        return ExitStatus.BAD_INPUT
    except KeyboardInterrupt:
        return 130


def _flag_of(cause: BaseException | None, args: argparse.Namespace) -> str:
    """Return the option that names the file of which the system complains; empty for none."""
    file = str(getattr(cause, "filename", None))
    names = [name.replace("_", "-") for name, value in vars(args).items() if str(value) == file]
    for word in filter(None, args.options):
        if any(f"--{name}".startswith(word) for name in names):
            return f"{word} "
    return ""


def _umask() -> int:
    """Raises CommandError for a variable that is no mask."""
    text = os.environ.get(UMASK_VARIABLE, "077")
    if not re.fullmatch("0*[0-7]{1,3}", text):
        raise CommandError(f"{UMASK_VARIABLE}={text} is no umask: give three digits, like 027")
    return int(text, 8)


class _HelpParser(argparse.ArgumentParser):
    """Keeps the line breaks of descriptions and examples, as do those of its sub-commands, and
    leaves the settings of a run out of the help unless it ``shows_all``. Its errors are one line,
    with the option that a wrong one is near to."""

    def __init__(self, *, shows_all: bool = False, description: str = "", **options: Any) -> None:
        # Of one text, examples and exit statuses come after the options.
        head, *rest = re.split(r"\n(?=examples:|[Ee]xit status:)", description, maxsplit=1)
        shown = {"description": head, "epilog": "".join(rest), **options}
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **shown)
        self._shows_all = shows_all

    def format_help(self) -> str:
        """See the base class."""
        groups = self._action_groups
        shown = [one for one in groups if not str(one.title).startswith(arguments.TITLE)]
        if self._shows_all or len(shown) == len(groups):
            return super().format_help()
        self._action_groups = shown
        text = super().format_help()
        self._action_groups = groups
        return f"{text}\n'--help-all' shows the settings (--deadpool-...) as well, by topic.\n"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See the base class."""
        found, unknown = super().parse_known_args(args, namespace)
        if wrong := next((word for word in unknown if word.startswith("-")), ""):
            near = difflib.get_close_matches(wrong, self._option_string_actions, 1)
            hint = f"do you mean {near[0]}?" if near else _ADVICE
            self.error(f"there is no option {wrong}: {arguments.successor(wrong) or hint}")
        if unknown:
            self.error(f"unexpected {unknown[0]!r}: {_ADVICE}")
        return found, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """An empty path, as from a variable that is not set, would be the current directory."""
        if action.type is Path and not arg_string:
            raise argparse.ArgumentError(action, "the path is empty")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """See the base class."""
        self.exit(ExitStatus.BAD_INPUT, f"{self.prog}: {message}\n")


def _parser(options: Sequence[str]) -> argparse.ArgumentParser:
    """With one sub-command named, its module is imported, else none."""
    parser = _HelpParser(
        prog="deadpool",
        description="Train with Megatron; lose nodes; keep training.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"deadpool {__version__}")
    each: Any = functools.partial(_HelpParser, shows_all="--help-all" in options)
    subparsers = parser.add_subparsers(
        dest="subcommand", metavar="COMMAND", required=True, parser_class=each
    )
    named = options[0] if options else ""
    if named in COMMANDS:
        module = _module(COMMANDS[named])
        module.add_arguments(subparsers.add_parser(named, description=module.__doc__))
    for topic, commands in TOPICS.items() if named not in COMMANDS else ():
        heading: Any = subparsers._ChoicesPseudoAction(f"{topic}:", (), None)
        subparsers._choices_actions.append(heading)
        for name, (_, text) in commands.items():
            if text:
                subparsers.add_parser(name, help=text)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"deadpool_megatron.cli.{name}")
