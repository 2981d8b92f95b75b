"""The ``deadpool`` command. Each group of sub-commands has a module, which is imported on use.

Each module has ``add_arguments(parser)`` and ``run(args) -> int``, and its docstring describes the
sub-command. ``args.subcommand`` is the name of the sub-command, ``args.command`` the part after the
first ``--``, ``args.options`` the part before it. For a user's error, and for an error of the
system before a process is started, the command prints a line on standard error and exits with 2.
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
from deadpool_megatron.observe.narration import printable

# Topic -> sub-command -> its module and its help, in the order of the help text. A sub-command
# without help is internal.
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
        "simulate": ("prepare.simulate", "before a run: months of failures, and ways to recover"),
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
# Launchers: programs that start other programs, as the first word of a command or after -m.
_LAUNCHER = re.compile(
    r"torchrun|ft_launcher|srun|mpirun|mpiexec|accelerate|python[\d.]*"
    r"|(torch\.distributed|accelerate\.commands)\.\w+"
)
# Sub-commands whose files are private to the run's user, unless UMASK_VARIABLE changes the mask.
_WRITERS = {"run", "demo", "check", "agent", "standby"}
# Sub-commands that a run depends on. They report errors of the system as a line only until they
# have started a process; later a traceback is more useful.
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
    """A standard stream that drops failed writes: after its terminal has closed or ``head`` has
    exited, or when the disk of ``> run.log`` is full. ``failed``: the error of the last failed
    write, except after the end of the reader."""

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
    """Run a sub-command; return the exit status. With ``argv`` None, take the arguments of this
    process, and make its standard streams survive the end of their readers."""
    if argv is not None:
        return _carry_out(list(argv))
    output = _open_streams()
    status = _carry_out(sys.argv[1:])
    sys.stdout.flush()
    # After a failed write, the result of a command that only prints is lost.
    if output.failed is not None and sys.argv[1] not in _PARTS_OF_A_RUN:
        text = f"its output could not be written: {output.failed.strerror}"
        print(f"deadpool {sys.argv[1]}: {text}", file=sys.stderr)
        return ExitStatus.BAD_INPUT
    return status


def _open_streams() -> _Output:
    """Create the standard streams, on the null device if closed; return standard output."""
    # Open all closed streams, so that no socket gets a number up to 2.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    output, errors = (_Output(number, "w", closefd=False) for number in (1, 2))
    sys.stdout, sys.stderr = (
        # Escape characters that the terminal's encoding lacks.
        io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=by_line)
        for raw, by_line in ((output, output.isatty()), (errors, True))
    )
    return output


def _without_launcher(tokens: list[str]) -> list[str]:
    """Return a command that starts with a launcher from its script, or ``-m MODULE``, on; return
    any other command unchanged."""
    launchers = [n for n, token in enumerate(tokens) if _LAUNCHER.fullmatch(Path(token).name)]
    # The command starts with a launcher, or with "-m" and a launcher.
    if not launchers or launchers[0] != (tokens[0] == "-m"):
        return tokens
    starts = [n for n, token in enumerate(tokens) if token == "-m" or token.endswith(".py")]
    # The "-m" before a launcher's module does not start the user's command.
    start = next((n for n in starts if n + 1 not in launchers), 0)
    if start:
        prefix = " ".join(tokens[:start])
        print(f"deadpool: '{prefix}' is left out: deadpool starts the processes", file=sys.stderr)
    return tokens[start:]


def _carry_out(argv: list[str]) -> int:
    """Parse the arguments and run the sub-command; return the exit status."""
    # The part after the first "--" is the user's command and is not parsed here.
    options, command = argv, []
    if "--" in argv:
        cut = argv.index("--")
        options, command = argv[:cut], argv[cut + 1 :]
    tokens = ["--help" if token == "--help-all" else token for token in options]
    args = _parser(options).parse_args(tokens)
    args.options, args.command = options, _without_launcher(command)
    # Parts of a run report later errors of the system with a traceback.
    is_part = args.subcommand in _PARTS_OF_A_RUN
    try:
        if args.subcommand in _WRITERS:
            os.umask(_umask())
        with contextlib.nullcontext() if is_part else refusing_system_errors():
            return int(_module(COMMANDS[args.subcommand]).run(args))
    except UserError as error:
        flag = _flag_of(error.__cause__, args)
        print(printable(f"deadpool {args.subcommand}: {flag}{error}"), file=sys.stderr)
        return ExitStatus.BAD_INPUT
    except KeyboardInterrupt:
        return 130


def _flag_of(cause: BaseException | None, args: argparse.Namespace) -> str:
    """Return the user's option that names the file of a system error, with a space; empty if none
    does."""
    if (file := getattr(cause, "filename", None)) is None:
        return ""  # "None" would match an option without a value
    values = vars(args).items()
    names = [name.replace("_", "-") for name, value in values if str(value) == str(file)]
    for word in filter(None, args.options):
        if any(f"--{name}".startswith(word) for name in names):
            return f"{word} "
    return ""


def _umask() -> int:
    """Return the file mode mask. Raises CommandError for an invalid variable."""
    text = os.environ.get(UMASK_VARIABLE, "077")
    if not re.fullmatch("0*[0-7]{1,3}", text):
        raise CommandError(f"{UMASK_VARIABLE}={text} is no umask: give three digits, like 027")
    return int(text, 8)


class _HelpParser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of descriptions and examples, and omits the settings of a
    run from the help unless ``shows_all``. It prints an error as a line, and for an unknown option
    suggests the closest known option."""

    def __init__(self, *, shows_all: bool = False, description: str = "", **options: Any) -> None:
        # The help shows the description's examples and exit statuses after the options.
        head, *rest = re.split(r"\n(?=examples:|[Ee]xit status:)", description, maxsplit=1)
        shown = {"description": head, "epilog": "".join(rest), **options}
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **shown)
        self._shows_all = shows_all

    def format_help(self) -> str:
        """See the base class."""
        groups = self._action_groups
        visible = [group for group in groups if not str(group.title).startswith(arguments.TITLE)]
        if self._shows_all or len(visible) == len(groups):
            return super().format_help()
        self._action_groups = visible
        text = super().format_help()
        self._action_groups = groups
        return f"{text}\n'--help-all' shows the settings (--deadpool-...) as well, by topic.\n"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See the base class."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if option := next((token for token in unknown if token.startswith("-")), ""):
            matches = difflib.get_close_matches(option, self._option_string_actions, 1)
            hint = f"do you mean {matches[0]}?" if matches else _ADVICE
            self.error(f"there is no option {option}: {arguments.advice_for_old(option) or hint}")
        if unknown:
            self.error(f"unexpected {unknown[0]!r}: {_ADVICE}")
        return parsed, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Refuse an empty path. It comes from an unset variable, and would mean the current
        directory."""
        if action.type is Path and not arg_string:
            raise argparse.ArgumentError(action, "the path is empty")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """See the base class."""
        self.exit(ExitStatus.BAD_INPUT, f"{self.prog}: {message}\n")


def _parser(options: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; import only the module of the sub-command in ``options``."""
    parser = _HelpParser(
        prog="deadpool",
        description="Train with Megatron; lose nodes; keep training.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"deadpool {__version__}")
    kind: Any = functools.partial(_HelpParser, shows_all="--help-all" in options)
    subparsers = parser.add_subparsers(
        dest="subcommand", metavar="COMMAND", required=True, parser_class=kind
    )
    subcommand = options[0] if options else ""
    if subcommand in COMMANDS:
        module = _module(COMMANDS[subcommand])
        module.add_arguments(subparsers.add_parser(subcommand, description=module.__doc__))
    for topic, commands in TOPICS.items() if subcommand not in COMMANDS else ():
        heading: Any = subparsers._ChoicesPseudoAction(f"{topic}:", (), None)
        subparsers._choices_actions.append(heading)
        for name, (_, text) in commands.items():
            if text:
                subparsers.add_parser(name, help=text)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"deadpool_megatron.cli.{name}")
