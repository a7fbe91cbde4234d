"""Data sets of the Hugging Face Hub as text sources; each file is downloaded when it is read.

Only Parquet, JSON and CSV files are used (`quintic.data.files` reads them); loading scripts are never run. The list of
files is stored with the downloads, so that a machine without a network can use the files that it has.
"""

import json
import multiprocessing
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from quintic.data.files.documents import RECORD_ENDINGS, TEXT_FIELD, format_of, read_documents
from quintic.data.source import Source, SourceFile, slug
from quintic.durable import DISK_FULL, json_object, write_atomically
from quintic.errors import DataError

__all__ = ["download", "open_hub"]

# Seconds in which the Hub must begin to answer, and longest pause within a long answer. The client itself would wait
# without end for an answer, and minutes for every address and attempt.
_PATIENCE = 10.0
_ANSWER_SECONDS = 60.0
# Seconds between attempts.
_WAITS = (1.0, 2.0, 4.0)

_STATISTICS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def open_hub(spec: str, *, cache_dir: Path, text_field: str = TEXT_FIELD) -> Source:
    """Return a data set of the Hub as a source; requests its list of files, but downloads none.

    The configuration in `hf:owner/name/config` is looked up in the data set's card (`configs`); if the card does not
    list it, it is taken as a folder. Without a configuration the card's default is used, or else every file. If file
    names contain a split, only training files are used.

    Raises:
        DataError: the spec is malformed, the data set does not exist or may not be read, it has no usable file, or
            the Hub cannot be reached and there is no stored list.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:/(.+?))?/?", spec)
    malformed = f"{spec}: not a data set name; write hf:owner/name or hf:owner/name/config"
    if match is None:
        raise DataError(malformed)
    repo, config = match.group(1), match.group(2)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise DataError(f"{malformed} ({_first_line(error)})") from error
    listing = _listing(repo, cache_dir)
    revision = str(listing["revision"])
    sizes: dict[str, int] = listing["files"]
    names = _select(sorted(sizes), config, listing["configs"], spec)

    def read(name: str) -> Iterator[bytes]:
        path = download(repo, name, repo_type="dataset", revision=revision, cache_dir=cache_dir / "hub")
        yield from read_documents(path, text_field)

    return Source(
        name=slug("-".join(filter(None, [repo.split("/")[1], config]))),
        spec=spec,
        # Files need no identity: the source's contains the revision, which determines the content of every file.
        files=tuple(
            SourceFile(name=name, size_bytes=sizes[name], identity=str, read=partial(read, name)) for name in names
        ),
        identity=f"hub {repo} {revision}" + ("" if text_field == TEXT_FIELD else f", field {text_field}"),
        is_remote=True,
    )


def download(
    repo: str, name: str, *, repo_type: str, revision: str | None = None, cache_dir: Path | None = None
) -> Path:
    """Return the local path of one file of the Hub, which is downloaded if it is not in the cache.

    `repo_type` is `model` or `dataset`, `revision` a commit or branch; None stands for the main branch, and for the
    client's own cache.

    Raises:
        DataError: the file cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    where = {"repo_type": repo_type, "revision": revision, "cache_dir": cache_dir}
    try:
        # The cache first, since the Hub may not answer.
        try:
            return Path(hf_hub_download(repo, name, local_files_only=True, **where))
        except LocalEntryNotFoundError:
            _reach(waits=_WAITS)
            return Path(hf_hub_download(repo, name, **where))
    # The client raises exceptions of its HTTP library, which differs between versions of the client.
    except Exception as error:
        raise DataError(f"hf:{repo}: {name} cannot be downloaded ({_first_line(error)}); {_advice(error)}") from error


def _reach(waits: Sequence[float] = ()) -> None:
    """Wait until the Hub gives any answer, for at most `_PATIENCE` seconds; failed attempts are repeated after `waits`.

    Raises:
        Exception: the Hub does not answer: an exception of the client, or a TimeoutError.
    """
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    def ask() -> None:
        for wait in (*waits, None):
            try:
                get_session().head(ENDPOINT, timeout=_PATIENCE)
                return
            except Exception as error:
                if wait is None or isinstance(error, OfflineModeIsEnabled):
                    raise
                time.sleep(wait)

    # In a thread, which may be left running: the client's timeout applies to each address of a host name separately.
    with ThreadPool(1) as pool:
        try:
            pool.apply_async(ask).get(_PATIENCE)
        except multiprocessing.TimeoutError:
            raise TimeoutError(f"nothing from {ENDPOINT} within {_PATIENCE:g} seconds") from None


def _listing(repo: str, cache_dir: Path) -> dict[str, Any]:
    """Return `revision`, `files` (name -> bytes) and `configs` of a data set; without a network, the stored copy."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    kept = cache_dir / "hub-listings" / f"{slug(repo)}.json"
    try:
        _reach()
        info = HfApi().dataset_info(repo, files_metadata=True, timeout=_ANSWER_SECONDS)
    # Without an answer the client raises exceptions of its HTTP library, which differs between versions of the client.
    except Exception as error:
        response = error.response if isinstance(error, HfHubHTTPError) else None
        if response is not None and 400 <= response.status_code < 500:
            raise DataError(f"hf:{repo}: {_first_line(error)}; {_advice(error)}") from error
        listing = json_object(kept)
        if listing.get("repo") != repo:
            raise DataError(
                f"hf:{repo}: no answer from the Hub ({_first_line(error)}); {_advice(error)}, or the --data-dir of a "
                "machine that has prepared the text"
            ) from error
        return listing
    card: dict[str, Any] = info.card_data.to_dict() if info.card_data is not None else {}
    listing = {
        "repo": repo,
        "revision": info.sha,
        "files": {file.rfilename: file.size or 0 for file in info.siblings or []},
        "configs": [entry for entry in card.get("configs") or [] if isinstance(entry, dict)],
    }
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(listing))
    except OSError as error:
        raise DataError(f"{kept}: cannot be written ({error.strerror or error}); use another --data-dir") from error
    return listing


def _select(names: list[str], config: str | None, configs: list[dict[str, Any]], spec: str) -> list[str]:
    """Return the names of the training files of a configuration."""
    records = [name for name in names if format_of(name) in RECORD_ENDINGS]
    every = [name for name in records if name.rpartition("/")[2].lower() not in _STATISTICS]
    of_config = [entry for entry in configs if entry.get("config_name") == (config or "default")]
    if config is None:
        of_config = [entry for entry in configs if entry.get("default") or entry in of_config]
    if of_config and of_config[0].get("data_files"):
        patterns = _train_patterns(of_config[0]["data_files"])
        chosen = [name for name in every if any(pattern.fullmatch(name) for pattern in patterns)]
    else:
        folder = f"/{config}/" if config else "/"
        inside = [name for name in every if folder in f"/{name}"]
        # JSON and CSV may be settings or statistics of the data set.
        chosen = [name for name in inside if format_of(name) not in (".json", ".csv")] or inside
        train = [name for name in chosen if re.search(r"(?:^|[/._-])train(?:[/._-]|$)", name)]
        chosen = train or chosen
    if not chosen:
        listed = ", ".join(sorted(str(entry["config_name"]) for entry in configs if "config_name" in entry))
        hint = f"its configurations are {listed}" if listed else f"readable are {', '.join(RECORD_ENDINGS)}"
        raise DataError(f"{spec}: no file to read there among {len(names)}; {hint}")
    return chosen


def _train_patterns(data_files: Any) -> list[re.Pattern[str]]:
    """Return the patterns of training files in a card's `data_files`: a glob, a list of globs, or of {split, path}."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    train = [entry for entry in entries if isinstance(entry, dict) and entry.get("split") == "train"]
    globs: list[str] = []
    for entry in train or entries:
        paths = entry.get("path", []) if isinstance(entry, dict) else entry
        globs += paths if isinstance(paths, list) else [paths]
    return [_glob_pattern(str(glob)) for glob in globs]


def _glob_pattern(glob: str) -> re.Pattern[str]:
    """Return a glob of the Hub as a regular expression; of `*`, `**` and `?` only `**` matches across folders."""
    pieces = []
    for piece in re.split(r"(\*\*/|\*\*|\*|\?)", glob.removeprefix("./")):
        pieces.append({"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(piece) or re.escape(piece))
    return re.compile("".join(pieces))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _advice(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "accept its terms on the Hub and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "check the name, or log in with `hf auth login` if it is private"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return "free some space, or use another --data-dir"
    return "check the network, or give local files"
