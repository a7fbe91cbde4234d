"""The command line: `quintic train | compare | prepare | sample | eval | report | plan | rates | export`.

The commands are in `quintic/commands`. Errors that a user can fix are printed as one line on standard error, with exit
code 2; Ctrl-C, SIGTERM and SIGHUP during training save the run and exit with 130.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from quintic.durable import DISK_FULL
from quintic.errors import ConfigError, OtherRankError, QuinticError
from quintic.launch import check_launcher, environment_number, install_command, with_program
from quintic.streams import complete_streams, drop_output
from quintic.versions import HARNESS_NEEDS, OPTIMIZER_NEEDS, release, torch_version

__all__ = ["OPTION_ALIASES", "main"]

# Errors of the system that come from disk, permissions or paths rather than from this program -> advice.
_DISK_ERRORS = {
    **dict.fromkeys(DISK_FULL, "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change who may read and write it"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), "correct the path"),
}

_USAGE = """\
usage: quintic COMMAND [OPTIONS]

Train a GPT with the Muon optimizer, on a laptop or a GPU.

commands:
  train      prepare data if needed, train, evaluate, sample and write a report
  compare    train the same model with AdamW and with Muon, and draw both curves in one report
  prepare    only turn text into tokens
  sample     let a trained model write
  eval       score a trained model in bits per byte, and on the tasks of CORE
  report     write report.html of a run again
  plan       show what the optimizer does to each kind of weight, without training
  rates      say which learning rates, decay and batch to begin with for a model of a size
  export     write a trained model as a folder for other libraries

Begin with `quintic train`.
`quintic COMMAND --help` lists the options of a command with their defaults.
"""

# The module of each command, imported only when the command is run, so that `quintic --help` answers quickly.
_COMMANDS = {
    "train": "quintic.commands.train",
    "compare": "quintic.commands.compare",
    "prepare": "quintic.commands.text",
    "sample": "quintic.commands.sample",
    "eval": "quintic.commands.evaluate",
    "report": "quintic.commands.report",
    "plan": "quintic.commands.plan",
    "rates": "quintic.commands.rates",
    "export": "quintic.commands.export",
}

# torchrun takes --run for an abbreviation of its own option --run-path, so runs under torchrun are named with --name.
OPTION_ALIASES = {"--name": "--run"}

# Commands that torchrun may start in several processes.
_COMMANDS_OF_RANKS = frozenset({"train"})

_COMMANDS_THAT_TRAIN = frozenset({"train", "compare"})

# Written as a number because Windows lacks the signal. The exit code is the same there.
_SIGPIPE = 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success; 2: an error that the user can fix; 130: stopped by Ctrl-C or a signal; 141: the reader of the output has
    closed it (as by SIGPIPE).
    """
    complete_streams()
    if not _has_current_folder():  # without one, relative paths cannot be resolved, not even for messages
        print("quintic: error: the current folder has been deleted: change to another one", file=sys.stderr)
        return 2
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # raises BrokenPipeError here rather than at the interpreter's exit
        return code
    except OtherRankError:
        return 2
    except QuinticError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        return _fail(f"the package {error.name!r} is missing: run {install_command('train')}")
    except KeyboardInterrupt:
        print("\nquintic: stopped", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch.OutOfMemoryError, without importing PyTorch
            raise
        reason = ". ".join(str(error).split(". ")[:2])
        return _fail(f"{reason}; lower --rows (quintic plan --memory names more options that save memory)")
    except BrokenPipeError:
        drop_output()
        return 128 + _SIGPIPE
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        place = f"{error.filename}: " if error.filename is not None else ""
        advice = f"{_DISK_ERRORS[error.errno]}, or use another place (--runs-dir, --data-dir, --out)"
        code = _fail(f"{place}{error.strerror}; {advice}")
        try:
            sys.stdout.flush()
        except OSError:  # standard output itself cannot be written
            drop_output()
        return code


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        usage, _, rest = _USAGE.partition("\n")
        print(f"{usage}\n{with_program(rest)}", end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        import quintic

        print(f"quintic {quintic.__version__}")
        return 0
    name = arguments[0]
    if name not in _COMMANDS:
        import difflib

        nearest = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(_COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}: {hint}")
    words = [_unaliased(text) for text in arguments[1:]]
    if name not in _COMMANDS_OF_RANKS:
        _check_single_process(name)
    if name in _COMMANDS_THAT_TRAIN:
        check_launcher()
    if name in _COMMANDS_THAT_TRAIN and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Must be set before PyTorch is imported. Freed memory can then be reused for other sizes, between batches,
        # evaluations and samples.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        options: Any = None
        if environment_number("WORLD_SIZE", 1) <= 1:  # several ranks first agree on the one that reports mistakes
            from quintic.commands.options import read_command

            options = read_command(name, words)  # before PyTorch is imported, which takes seconds
        _check_torch(name)
        run = importlib.import_module(_COMMANDS[name]).run
        return int(run(words if name in _COMMANDS_OF_RANKS else options))
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)


def _unaliased(argument: str) -> str:
    option, equals, value = argument.partition("=")
    return f"{OPTION_ALIASES.get(option, option)}{equals}{value}"


def _check_single_process(name: str) -> None:
    if environment_number("WORLD_SIZE", 1) > 1:
        raise ConfigError(f"quintic {name} runs in one process: start it without torchrun (WORLD_SIZE is above 1)")


def _check_torch(name: str) -> None:
    """Check that PyTorch is new enough for the commands; only the optimizer supports older versions."""
    installed = torch_version()
    if installed is None or release(installed) >= release(HARNESS_NEEDS):
        return
    if environment_number("LOCAL_RANK", 0):
        raise OtherRankError("the first rank of this host reports the error")
    raise ConfigError(
        f"quintic {name} needs PyTorch {HARNESS_NEEDS} or newer, but {installed} is installed: "
        f"run {install_command('train')} (the optimizer by itself needs {OPTIMIZER_NEEDS})"
    )


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _fail(message: str) -> int:
    print(f"quintic: error: {with_program(' '.join(message.split()))}", file=sys.stderr)
    return 2
