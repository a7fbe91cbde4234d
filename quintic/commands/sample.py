"""`quintic sample`: lets a trained model write, printing each token as soon as it is drawn."""

import contextlib
import io
import sys
from collections.abc import Iterator

from quintic.commands.inputs import trained_model
from quintic.commands.options import SampleOptions
from quintic.errors import ConfigError
from quintic.eval.generate import sample_text
from quintic.limits import in_options
from quintic.train.config import check_prompts

__all__ = ["run"]


def run(options: SampleOptions) -> int:
    """Run the command; return its exit code."""
    trained = trained_model(options, threads=options.threads)

    def write(prompts: tuple[str, ...], seed: int) -> None:
        try:
            sample_text(
                trained.model,
                trained.tokenizer,
                prompts,
                max_tokens=options.tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=seed,
                write=lambda text: print(text, end="", flush=True),
            )
        except ValueError as error:
            raise ConfigError(in_options(error)) from None

    write((), options.seed)  # no text yet: reports options out of range first, and once for all lines
    trained.say_origin()
    if not options.interactive:
        write(options.prompts, options.seed)
        return 0
    for number, line in enumerate(_lines()):
        try:
            check_prompts((line,))
            # Another seed for each line, so that the same beginning typed twice continues differently.
            write((line,), (options.seed + number) % 2**63)
        except ConfigError as error:
            print(f"quintic: error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n", flush=True)
    return 0


def _lines() -> Iterator[str]:
    """Yield the lines of standard input until it ends; Ctrl-C while waiting for a line does not end it."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):  # gives `input` line editing and a history, where the system has it
            import readline  # noqa: F401
        print("Type the beginning of a text; Ctrl-C stops a text, Ctrl-D ends.", file=sys.stderr)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `check_prompts` reports lines that are not UTF-8
    while True:
        try:
            line = f"{input('> ')}\n" if is_typed else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)", file=sys.stderr)
            continue
        if not line:
            return
        yield line.removesuffix("\n").removesuffix("\r")
