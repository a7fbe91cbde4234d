"""Run folders: where a run lives and which one is meant.

<runs-dir>/<run>/config.json, metrics.jsonl, checkpoints/, report.html
"""

import json
from datetime import datetime
from pathlib import Path

from quintic.errors import ConfigError
from quintic.train.config import Config, load_config, to_dict

__all__ = ["CONFIG_FILE", "create_run", "find_run"]

CONFIG_FILE = "config.json"


def create_run(config: Config) -> Path:
    """Make the folder of a new run, with its configuration in it, and return it.

    Raises:
        ConfigError: a run of that name exists, or the folder cannot be made.
    """
    name = config.run.run or f"{datetime.now():%Y%m%d-%H%M%S}-d{config.model.depth}"
    folder = config.run.runs_dir / name
    try:
        folder.mkdir(parents=True)
        # A config without its closing brace is never seen: the folder is only a run once this file is whole.
        temporary = folder / f".{CONFIG_FILE}.tmp"
        temporary.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder / CONFIG_FILE)
    except FileExistsError:
        raise ConfigError(f"{folder} exists: choose another --run, or continue it with --resume --run {name}") from None
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}); choose another --runs-dir") from None
    return folder


def find_run(runs_dir: Path, name: str | None) -> Path:
    """Return the folder of a named run, or of the one started last.

    Raises:
        ConfigError: there is none.
    """
    if name is not None:
        folder = runs_dir / name
        if not (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"{folder} is not a run: it has no {CONFIG_FILE}; check --run and --runs-dir")
        load_config(folder / CONFIG_FILE)
        return folder
    configs = list(runs_dir.glob(f"*/{CONFIG_FILE}"))
    if not configs:
        raise ConfigError(f"{runs_dir} holds no run yet; start one with: quintic train")
    return max(configs, key=lambda path: path.stat().st_mtime_ns).parent
