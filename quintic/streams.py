"""Standard streams of a command: made usable before it writes, dropped when the reader has closed them."""

import io
import os
import shutil
import sys
import textwrap

__all__ = ["complete_streams", "drop_output", "say", "say_waiting"]


def complete_streams() -> None:
    """Open closed streams to nowhere, and escape characters that an output stream cannot encode."""
    for name, mode in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        stream = getattr(sys, name)
        if stream is None:
            # Otherwise a file of the run could get descriptor 1 or 2, to which libraries print.
            text_mode = "r" if mode == os.O_RDONLY else "w"
            setattr(sys, name, os.fdopen(os.open(os.devnull, mode), text_mode, encoding="utf-8"))
        elif mode == os.O_WRONLY and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def say(text: str = "") -> None:
    """Print lines for the user; on a terminal they are wrapped between words, with indented continuation lines."""
    lines = text.split("\n")
    if sys.stdout.isatty():
        width = max(20, shutil.get_terminal_size().columns)
        lines = [
            textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for line in lines
        ]
    print("\n".join(lines), flush=True)


def say_waiting(text: str) -> None:
    """Print a progress message if standard error is a terminal; redirected output only holds results."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def drop_output() -> None:
    """Discard buffered output, so that the interpreter's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
