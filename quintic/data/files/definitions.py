"""`read_definition` finds the definition of a tokenizer, a `tokenizer.json`, or makes one from GPT-2's files."""

from pathlib import Path

from quintic.errors import DataError

__all__ = ["read_definition"]

_GPT2_REPO = "openai-community/gpt2"
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


def read_definition(name: str, *, cache_dir: Path | None = None) -> str:
    """Return the content of a `tokenizer.json` for a path or the name `gpt2`.

    Args:
        name: a file, a folder (see `Tokenizer.load`), or `gpt2` unless a file or folder has that name.
        cache_dir: folder for the download; None for the Hub client's cache.

    Raises:
        DataError: the file does not exist, cannot be read, or cannot be downloaded.
    """
    path = Path(name).expanduser()
    if name == "gpt2" and not path.exists():
        from quintic.data.hub import download

        path = download(_GPT2_REPO, "tokenizer.json", repo_type="model", cache_dir=cache_dir)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            return _from_gpt2_files(path)
        path = path / "tokenizer.json"
    if path.name.endswith((".tiktoken", ".model", ".bpe")):
        raise DataError(
            f"{name}: cannot be read alone, it holds no complete byte-level BPE; give a tokenizer.json, or a folder "
            "with encoder.json and vocab.bpe"
        )
    if not path.exists():
        raise DataError(f"{name}: no such tokenizer; give a tokenizer.json, a folder with one, or 'gpt2'")
    # Opening a pipe would wait for a writer.
    if not path.is_file():
        raise DataError(f"{name}: a pipe or a device, not a file; give a tokenizer.json")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not a tokenizer.json (not UTF-8 at byte offset {error.start})") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error


def _from_gpt2_files(folder: Path) -> str:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    for vocab_name, merges_name in _GPT2_FILES:
        vocab_file, merges_file = folder / vocab_name, folder / merges_name
        if vocab_file.is_file() and merges_file.is_file():
            try:
                backend = Backend(models.BPE.from_file(str(vocab_file), str(merges_file)))
            # The library raises a plain `Exception` for any bad file.
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise DataError(f"{folder}: {vocab_name} and {merges_name} do not fit together ({reason})") from error
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            return str(backend.to_str())
    raise DataError(f"{folder}: no tokenizer.json in it, and no encoder.json with vocab.bpe")
