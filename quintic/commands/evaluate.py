"""`quintic eval`: scores a trained model in bits per byte, and on the tasks of CORE.

If the run's prepared text is missing, other text (`--data`) and tasks (`--core`) can still be scored.
"""

import sys
from collections.abc import Iterator
from itertools import chain

from quintic.commands.inputs import RaceText, TrainedModel, trained_model
from quintic.commands.options import EvalOptions
from quintic.commands.text import verify
from quintic.data.dataset import Dataset
from quintic.data.loader import Batch, validation_rows
from quintic.data.open_source import open_source
from quintic.errors import DataError
from quintic.eval.baselines import MAX_XZ_BYTES, ScoredText, training_text
from quintic.eval.core import core_lines, core_score, core_sums
from quintic.eval.core_tasks import load_core
from quintic.eval.row_models import BatchedSpeedrun
from quintic.eval.score import bits_per_byte, document_sums, score_from_sums
from quintic.eval.text import encoded, text_batches
from quintic.speedrun.race import bytes_of_targets, score_batches
from quintic.speedrun.shards import RaceData
from quintic.speedrun.stream import validation_batches
from quintic.streams import say_waiting

__all__ = ["run"]


def run(options: EvalOptions) -> int:
    """Run the command; return its exit code."""
    # Tasks and model first: they may be missing, and that should not show only after scoring.
    suite = None if options.core is None else load_core(options.core)
    trained = trained_model(options, options.device, options.threads)
    text = trained.dataset
    if isinstance(text, Dataset):
        verify(text, again=options.verify)  # all of it: the bigram model reads the training text
    if options.data is not None or isinstance(text, Dataset):
        _score_text(trained, options.data, options.text_field, options.tokens)
    elif isinstance(text, RaceText):
        _score_race(trained, text, options.tokens)
    elif suite is not None:
        trained.say_origin()
        print(f"The validation text is not scored: {text}", file=sys.stderr)
    else:
        raise DataError(f"{text}; or score other text with --data, or tasks with --core")
    if suite is not None:
        say_waiting("Answering the tasks of CORE")
        config = trained.config
        sums = core_sums(
            trained.model,
            trained.tokenizer,
            suite,
            trained.model.head.weight.device,
            max_tokens=config.model.seq_len,
            max_items=options.core_items,
            rows=config.schedule.rows,
        )
        print("\n".join(["", *core_lines(core_score(suite, sums))]))
    return 0


def _score_text(trained: TrainedModel, data: str | None, text_field: str, max_tokens: int | None) -> None:
    """Print the bits per byte of `data`, or of the run's validation text if `data` is None."""
    rows, seq_len = trained.config.schedule.rows, trained.config.model.seq_len
    if data is not None:
        batches = _batches_of(data, text_field, trained, max_tokens)
    else:
        assert isinstance(trained.dataset, Dataset)
        batches = validation_rows(trained.dataset, rows=rows, seq_len=seq_len, max_tokens=max_tokens)
    say_waiting(f"Scoring {'validation text' if data is None else data}")
    device = trained.model.head.weight.device
    # `text` collects the scored text on the way, for the compressors' figures.
    text = ScoredText()
    watched = text.watched(trained.tokenizer, batches)
    result = score_from_sums(document_sums(trained.model, watched, trained.tokenizer.token_bytes(), device))
    trained.say_origin()
    error = "" if result.bpb_stderr is None else f"standard error over documents {result.bpb_stderr:.4f}, "
    print(
        f"{result.bpb:.4f} bits per byte ({error}{result.loss:.4f} nats per token) over {result.num_bytes:,} bytes of "
        "text"
    )
    beginning = f" (of the first {MAX_XZ_BYTES >> 20} MiB)" if text.num_bytes > MAX_XZ_BYTES else ""
    bigram = " (no byte-bigram model: the run's training text is missing)"
    if isinstance(trained.dataset, Dataset):
        bigram = f", byte-bigram model {text.bigram_bpb(training_text(trained.dataset)):.4f}"
    print(f"for comparison: xz -9 {text.xz_bpb():.4f}{beginning}{bigram}")


def _score_race(trained: TrainedModel, text: RaceText, max_tokens: int | None) -> None:
    """Print the score of a speedrun's validation shard, in chunks of the size that the race used."""
    assert isinstance(trained.model, BatchedSpeedrun)
    model, tokens = trained.model.model, min(text.tokens, max_tokens or text.tokens)
    chunk = min(text.chunk, tokens)
    tokens -= tokens % chunk  # only whole chunks
    data = RaceData("", (), text.path, model.config.vocab_size, model.config.bos_id, trained.tokenizer)
    say_waiting(f"Scoring {text.path}")
    token_bytes = bytes_of_targets(model, trained.tokenizer)
    nats, num_bytes = score_batches(model, validation_batches(data, tokens, chunk), token_bytes).tolist()
    trained.say_origin()
    print(
        f"{bits_per_byte(nats, num_bytes):.4f} bits per byte ({nats / tokens:.4f} nats per token) over "
        f"{int(num_bytes):,} bytes of text, with document starts, as the race counts"
    )


def _batches_of(data: str, text_field: str, trained: TrainedModel, max_tokens: int | None) -> Iterator[Batch]:
    """Yield batches of a text to score, reading it as they are requested, without writing to disk."""
    config, tokenizer = trained.config, trained.tokenizer
    source = open_source(data, cache_dir=config.data.data_dir / "cache", text_field=text_field)
    for note in source.notes:
        print(note, file=sys.stderr)
    batches = text_batches(
        encoded(tokenizer, source.documents()),
        bos_id=tokenizer.bos_id,
        rows=config.schedule.rows,
        seq_len=config.model.seq_len,
        max_tokens=max_tokens,
    )
    # Read the first batch now, so that an empty text is an error before scoring begins.
    first = next(batches, None)
    if first is None:
        raise DataError(f"--data {data}: holds no text to score; give a file or folder with text")
    return chain([first], batches)
