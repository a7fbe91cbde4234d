"""Token shards of English text for the speedrun: from text files, with GPT-2's tokenizer.

    python -m benchmarks.speedrun.shards --train train.parquet --val val.parquet --tokenizer FOLDER --out SHARDS

FOLDER has a tokenizer.json or GPT-2's two files (encoder.json, vocab.bpe); SHARDS gets a tokenizer.json, too.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quintic.data.files.documents import read_documents
from quintic.data.tokenizer import Tokenizer
from quintic.speedrun.shards import write_shard

DOCUMENTS_AT_ONCE = 256


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="file of text, in any format of quintic prepare")
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or folder with GPT-2's two files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--max-tokens", type=int, help="of the training shard, at most")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(options.tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(options.out / "tokenizer.json")
    for split, limit in (("train", options.max_tokens), ("val", None)):
        tokens = np.concatenate(list(documents(tokenizer, getattr(options, split), limit)))[:limit]
        write_shard(options.out / f"{split}_000001.bin", tokens)
        print(f"{split}: {len(tokens):,} tokens", flush=True)
    return 0


def documents(tokenizer: Tokenizer, path: Path, max_tokens: int | None) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield the tokens of each document, which begin with that of a document's start, until there are enough."""
    texts, count = (text.decode() for text in read_documents(path)), 0
    while batch := list(islice(texts, DOCUMENTS_AT_ONCE)):
        for ids in tokenizer.encode_batch(batch):
            yield np.array([tokenizer.bos_id, *ids], dtype=np.uint16)
            count += len(ids) + 1
            if max_tokens is not None and count >= max_tokens:
                return


if __name__ == "__main__":
    raise SystemExit(main())
