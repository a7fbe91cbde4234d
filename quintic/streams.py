"""Standard streams of a command: made usable before it writes, given up where nobody reads."""

import io
import os
import sys

__all__ = ["complete_streams", "drop_output"]


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


def drop_output() -> None:
    """Let what is still in the buffer go nowhere: the interpreter must not complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
