"""Text for models that outgrow the standard library's: the Python files of the installed PyTorch."""

import json
from pathlib import Path

PYTORCH = "pytorch"
_LEAST_BYTES = 200


def text_of(name: str, folder: Path) -> str:
    """Return the source for `--data`: the name, or for `pytorch` a JSONL file that is written to a folder."""
    if name != PYTORCH:
        return name
    import torch

    root = Path(torch.__file__).parent
    path = folder / f"pytorch-{torch.__version__}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            for source in sorted(root.rglob("*.py")):
                text = source.read_text(encoding="utf-8", errors="ignore")
                if len(text) >= _LEAST_BYTES:
                    file.write(json.dumps({"text": text}) + "\n")
        part.rename(path)
    return str(path)
