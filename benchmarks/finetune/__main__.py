"""Does Muon help fine-tuning, of all weights or of LoRA adapters? Muon and AdamW, each at its best rate, several seeds.

    python -m benchmarks.finetune --out FOLDER --pretrain english.parquet --finetune python

A small Llama of Hugging Face's is pretrained on one text, with Muon and with AdamW at two rates. The better of each is
fine-tuned on another text with both optimizers, all weights or adapters of rank 8: every rate with the search's seeds,
then the best one of each with other seeds. Under one seed all have the same batches and the same new adapters.

Muon has adjust_lr="match_rms_adamw" and one rate for everything, as AdamW has; neither decays weights. The rate rises
over 5 % of the steps and falls to zero. Every run is a line of FOLDER/NAME.jsonl; a second call trains what is missing
there. FOLDER/NAME.md and .json have the tables. Needs transformers and peft.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import add_options, git_commit, recorded_command, write_result
from benchmarks.finetune.page import OPTIMIZERS, best_base, cases, page, search_means
from benchmarks.training.quality_page import best_rate
from benchmarks.training.workers import Pool, Runs, key_of
from quintic.commands.text import prepared
from quintic.data.dataset import Dataset
from quintic.train.config import DataConfig

MODULE = "benchmarks.finetune"
_RATES = {
    "pretrain-muon": (0.004, 0.012),
    "pretrain-adamw": (0.004, 0.012),
    "full": (0.001, 0.002, 0.004, 0.008, 0.016),
    "lora": (0.005, 0.01, 0.02, 0.04),
}

# Option -> its default and meaning.
_SIZES = {
    "width": (96, "channels"),
    "depth": (3, "layers"),
    "heads": (3, "of attention"),
    "seq-len": (64, "tokens of a row"),
    "rows": (8, "of a step"),
    "eval-tokens": (16_384, "held-out tokens, at most"),
    "pretrain-steps": (2000, "of the base models"),
    "steps": (100, "of fine-tuning"),
}

# ---------------------------------------------------------------------------------------------------------- all of them


class Study:
    """All runs: what each is called, what it does, and how a best rate is chosen."""

    def __init__(self, options: argparse.Namespace, texts: Mapping[str, Path], runs: Runs, pool: Any, end: float):
        self.options, self.texts, self.runs, self.pool, self.end = options, texts, runs, pool, end

    def weights(self, pretrained: str, rate: float) -> Path:
        """Return the file of the weights that an optimizer pretrained."""
        return Path(self.options.out / f"{self.options.name}-{pretrained}-{rate:g}.pt")

    def job(self, **changed: Any) -> dict[str, Any]:
        """Return a job with what all have in common."""
        options = self.options
        common = {
            "sizes": {
                "width": options.width,
                "depth": options.depth,
                "heads": options.heads,
                "seq_len": options.seq_len,
            },
            "device": "cuda" if options.devices[0].startswith("cuda") else "cpu",
            **{name: getattr(options, name) for name in ("threads", "rows", "eval_tokens")},
            **{"deadline": self.end, "start_by": self.end},
        }
        return {**common, **changed}

    def pretrain(self) -> None:
        """Train the base models, several rates of each optimizer."""
        jobs = []
        for name in OPTIMIZERS:
            for rate in getattr(self.options, f"pretrain_{name}_rates"):
                cell = {"part": "pretrain", "pretrained": name, "rate": rate}
                file = self.weights(name, rate)
                if not file.exists():
                    self.runs.rows.pop(key_of(cell), None)
                given = {"optimizer": name, "rate": rate, "seed": 1, "mode": "full"}
                files = {"weights": None, "save": str(file)}
                data = {"data": self.texts["pretrain"], "other": self.texts["finetune"]}
                jobs.append((cell, self.job(steps=self.options.pretrain_steps, **given, **files, **data)))
        self.runs.train(self.pool, jobs)

    def tune(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Fine-tune the best base models; each cell says which one, mode, optimizer, rate and seed."""
        jobs = []
        for cell in cells:
            base = best_base(self.runs.rows.values(), cell["pretrained"])
            if base is not None:
                given = {name: cell[name] for name in ("mode", "optimizer", "rate", "seed")}
                files = {"weights": str(self.weights(cell["pretrained"], base["cell"]["rate"])), "save": None}
                data = {"data": self.texts["finetune"], "other": self.texts["pretrain"]}
                jobs.append((cell, self.job(steps=self.options.steps, **given, **files, **data)))
        self.runs.train(self.pool, jobs)

    def search_cells(self) -> Iterator[dict[str, Any]]:
        """Return the runs that the best rates are chosen by."""
        for seed in self.options.search_seeds:
            for case in cases():
                for rate in getattr(self.options, f"{case['mode']}_rates"):
                    yield {"part": "search", **case, "rate": rate, "seed": seed}

    def final_cells(self) -> Iterator[dict[str, Any]]:
        """Return the runs of the tables, seed by seed."""
        for seed in self.options.seeds:
            for case in cases():
                means = search_means(self.runs.rows.values(), case)
                if means:
                    yield {"part": "final", **case, "rate": best_rate(means), "seed": seed}


def text_sizes(text: Dataset) -> dict[str, Any]:
    """Return the summary of a text without its place."""
    return {name: value for name, value in text.summary().items() if name not in ("path", "source")}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train everything and return it."""
    start = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"data_dir": options.data_dir or options.out / "data", "max_bytes": options.max_bytes}
    first = prepared(DataConfig(data=options.pretrain, vocab_size=options.vocab_size, **data))
    tokenizer = str(first.path / "tokenizer.json")
    second = prepared(DataConfig(data=options.finetune, tokenizer=tokenizer, **data))
    texts = {"pretrain": first, "finetune": second}
    kept = ("out", "name", "commit", "page", "devices", "at_once", "threads", "budget_seconds", "data_dir")
    sizes = {name: value for name, value in vars(options).items() if name not in kept}
    # The best base depends on the rates of pretraining, so all that follows does.
    fixed = ("pretrain", "finetune", "seeds", "search_seeds", "full_rates", "lora_rates")
    shared = {name: value for name, value in sizes.items() if name not in fixed}
    runs = Runs(options.out / f"{options.name}.jsonl", shared | {name: text.key for name, text in texts.items()})
    pool = Pool(options.devices, options.at_once, options.threads, f"{MODULE}.run")
    try:
        paths = {name: str(text.path.resolve()) for name, text in texts.items()}
        study = Study(options, paths, runs, pool, start + options.budget_seconds)
        study.pretrain()
        study.tune(list(study.search_cells()))
        study.tune(list(study.final_cells()))
    finally:
        pool.close()
    names = {str(options.out): "FOLDER", options.pretrain: "PRETRAIN-TEXT", options.finetune: "FINETUNE-TEXT"}
    names = {path: name for path, name in names.items() if "/" in path}
    return {
        "command": recorded_command(MODULE, sys.argv[1:], names | {str(options.data_dir): "DATA"}),
        "commit": options.commit or git_commit(),
        "seconds": time.time() - start,
        "devices": options.devices,
        "at_once": options.at_once,
        "sizes": {name: value for name, value in sizes.items() if name not in ("pretrain", "finetune")},
        "texts": {name: text_sizes(text) for name, text in texts.items()},
        **runs.computing,
        "failures": runs.failures,
        "rows": [{k: row[k] for k in ("cell", "loss", "before", "other", "trained")} for row in runs.rows.values()],
    }  # fmt: skip


def main() -> int:
    options = arguments()
    if options.page is None:
        result, path = measure(options), options.out / options.name
    else:
        result, path = json.loads(options.page.read_text(encoding="utf-8")), options.page.with_suffix("")
    text = page(result)
    write_result(path, result, text)
    print("\n" + text)
    return 1 if result["failures"] or "were not trained" in text else 0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "finetune")
    parser.add_argument("--page", type=Path, help="train nothing: write the page of this .json beside it")
    parser.add_argument("--pretrain", default="python", help="text, as --data of quintic train")
    parser.add_argument("--finetune", default="python", help="the other text")
    parser.add_argument("--data-dir", type=Path, help="where prepared text is kept; by default in --out")
    parser.add_argument("--max-bytes", type=int, help="of each text")
    parser.add_argument("--vocab-size", type=int, default=1024, help="of the tokenizer, made from the first text")
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="cpu, or cuda:0 cuda:1 ...")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time on each device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="of all of it; runs beyond it are cut")
    for name, (value, text) in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=text)
    for name, rates in _RATES.items():
        parser.add_argument(f"--{name}-rates", nargs="+", type=float, default=list(rates))
    parser.add_argument("--search-seeds", nargs="+", type=int, default=[11, 12])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
