"""Standard streams of a command: made usable before it writes, given up where the reader is gone."""

import io
import os
import shutil
import sys
import textwrap

__all__ = ["complete_streams", "drop_output", "say", "say_waiting"]


def complete_streams() -> None:
    """Make all output possible: nowhere where a stream is closed, escaped where it has no such characters."""
    for name, mode in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        stream = getattr(sys, name)
        if stream is None:
            # Also so that no file of the run gets the number that libraries write their messages to.
            text_mode = "r" if mode == os.O_RDONLY else "w"
            setattr(sys, name, os.fdopen(os.open(os.devnull, mode), text_mode, encoding="utf-8"))
        elif mode == os.O_WRONLY and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def say(text: str = "") -> None:
    """Print lines for people; on a terminal they are wrapped between words, and continuation lines are indented."""
    lines = text.split("\n")
    if sys.stdout.isatty():
        width = max(20, shutil.get_terminal_size().columns)
        lines = [
            textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for line in lines
        ]
    print("\n".join(lines), flush=True)


def say_waiting(text: str) -> None:
    """Print on a terminal what the program is busy with; elsewhere the output consists of the results alone."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def drop_output() -> None:
    """Discard buffered output: the interpreter must not complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
