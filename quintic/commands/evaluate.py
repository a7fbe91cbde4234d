"""`quintic eval`: score a trained model in bits per byte, and on the tasks of CORE."""

from collections.abc import Iterator
from itertools import islice

from quintic.commands.inputs import trained_model
from quintic.commands.options import eval_options
from quintic.commands.text import verify
from quintic.data.loader import Batch, validation_rows
from quintic.data.sources import open_source
from quintic.data.tokenizer import Tokenizer
from quintic.errors import DataError
from quintic.eval.baselines import reference_scores
from quintic.eval.core import core_lines, core_score, core_sums
from quintic.eval.core_tasks import load_core
from quintic.eval.score import document_sums, score_from_sums
from quintic.eval.text import text_batches
from quintic.streams import say_waiting
from quintic.train.config import Config

__all__ = ["run"]

_DOCUMENTS_AT_ONCE = 64


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = eval_options(arguments)
    suite = None if options.core is None else load_core(options.core)
    model, trained_on, config = trained_model(options.runs_dir, options.run, options.device)
    verify(trained_on, again=options.verify)  # its training text makes the bigram model
    device, rows, seq_len = model.head.weight.device, config.schedule.rows, config.model.seq_len
    if options.data is None:
        batches = validation_rows(trained_on, rows=rows, seq_len=seq_len, max_tokens=options.tokens)
    else:
        batches = _batches_of(options.data, trained_on.tokenizer, config, options.tokens)
    say_waiting(f"Scoring {'validation text' if options.data is None else options.data}")
    sums = document_sums(model, batches, trained_on.tokenizer.token_bytes(), device)
    result = score_from_sums(sums)
    reference = reference_scores(trained_on, batches)
    error = "" if result.bpb_stderr is None else f"standard error over documents {result.bpb_stderr:.4f}, "
    print(
        f"{result.bpb:.4f} bits per byte ({error}{result.loss:.4f} nats per token) over {result.num_bytes:,} bytes of "
        "text"
    )
    print(f"for comparison: xz -9 {reference['xz_bpb']:.4f}, byte-bigram model {reference['bigram_bpb']:.4f}")
    if suite is not None:
        say_waiting("Answering the tasks of CORE")
        sums = core_sums(
            model,
            trained_on.tokenizer,
            suite,
            device,
            max_tokens=seq_len,
            max_items=options.core_items,
            rows=rows,
        )
        print("\n".join(["", *core_lines(core_score(suite, sums))]))
    return 0


def _batches_of(data: str, tokenizer: Tokenizer, config: Config, max_tokens: int | None) -> list[Batch]:
    """Read text to score, all of it; nothing is kept on disk."""
    source = open_source(data, cache_dir=config.data.data_dir / "cache")

    def documents() -> Iterator[list[int]]:
        texts = source.documents()
        while some := list(islice(texts, _DOCUMENTS_AT_ONCE)):
            yield from tokenizer.encode_batch(some)

    rows, seq_len = config.schedule.rows, config.model.seq_len
    batches = list(
        text_batches(documents(), bos_id=tokenizer.bos_id, rows=rows, seq_len=seq_len, max_tokens=max_tokens)
    )
    if not batches:
        raise DataError(f"{data}: holds no text to score; name a file or folder with text in --data")
    return batches
