"""Trains the model of `--preset cpu` with AdamW and with Muon, some seeds each, for the chart of the README.

Muon has the preset's rates and AdamW those that a search found, both for this model and text. A seed has the same
initial weights and the same batches under both. On each device one run follows another, so that their seconds can be
compared; the first run of each optimizer there only compiles, and its seconds are left out.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import table
from benchmarks.readme.chart import LABELS, Curves, curves_of, shares
from benchmarks.training.workers import Pool, with_values
from quintic.commands.presets import preset
from quintic.commands.text import prepared
from quintic.train.saved_config import to_dict

__all__ = ["curves_in", "measure_curves", "page"]

# What each optimizer has in place of the preset's options. AdamW's were found by `benchmarks.training.baseline`,
# see benchmarks/results/2026-11-23-h200-adamw-baseline.md.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {
        "adamw_lr": 0.00405,
        "embedding_lr": 0.332,
        "adamw_head_lr": 0.012,
        "warmup_frac": 0.02,
        "beta1": 0.8,
        "beta2": 0.95,
        "clip_norm": 2.0,
        "adamw_weight_decay": 0.1,
    },
    "muon": {},
}


def measure_curves(
    folder: Path, devices: Sequence[str], seeds: Sequence[int], changed: Mapping[str, Any]
) -> dict[str, Any]:
    """Train all runs, and return their curves with what made them.

    Args:
        folder: where the prepared text is kept.
        devices: `cpu`, or `cuda:0 cuda:1 ...`; each trains one run at a time.
        seeds: of weights and batches.
        changed: options of `quintic train` that all runs have in place of the preset's.

    Raises:
        SystemExit: a run failed.
    """
    fixed = {"device": devices[0].partition(":")[0], "rms_every": 0, "save_every": 0, "data_dir": str(folder / "data")}
    base = with_values(preset("cpu"), {"eval_every": 20, **fixed, **changed})
    dataset = prepared(base.data)
    pool = Pool(list(devices), 1, 1 if fixed["device"] == "cuda" else 2)

    def job(optimizer: str, seed: int) -> dict[str, Any]:
        config = with_values(base, {**OPTIMIZERS[optimizer], "optimizer": optimizer, "seed": seed, **changed})
        never = time.time() + 86_400
        return {"config": to_dict(config), "data": str(dataset.path.resolve()), "deadline": never, "start_by": never}

    # Each device compiles both models in runs that nobody times.
    order = [(name, seed, True) for name in OPTIMIZERS for seed in [seeds[0]] * len(devices)]
    order += [(name, seed, False) for seed in seeds for name in OPTIMIZERS]
    if fixed["device"] == "cpu":
        order = [one for one in order if not one[2]]
    futures = [pool.submit(lambda name=name, seed=seed: job(name, seed)) for name, seed, _ in order]
    runs = []
    for (name, seed, is_warm_up), future in zip(order, futures, strict=True):
        result = future.result()
        if "curve" not in result:
            pool.close()
            raise SystemExit(f"{name}, seed {seed}: {result.get('failed') or result.get('cut')}")
        print(f"{name} seed {seed}: {result['bpb']:.4f} bits per byte, {result['training_seconds']:.1f} s", flush=True)
        if not is_warm_up:
            runs.append({"optimizer": name, "seed": seed, **result})
    pool.close()
    computing = {name: runs[0][name] for name in ("machine", "versions")}
    return {
        **computing,
        "preset": "cpu",
        "settings": {name: dict(values) for name, values in OPTIMIZERS.items()},
        "changed": dict(changed),
        "data": {name: value for name, value in dataset.summary().items() if name != "path"},
        "runs": [{key: value for key, value in run.items() if key not in computing} for run in runs],
    }


def curves_in(result: Mapping[str, Any]) -> dict[str, Curves]:
    """Return the curves of each optimizer in what `measure_curves` returned."""
    return {name: curves_of([run for run in result["runs"] if run["optimizer"] == name]) for name in OPTIMIZERS}


def page(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a page about the runs."""
    curves = curves_in(result)
    rows = []
    for name, one in curves.items():
        last = [values[-1] for values in one.values]
        rows.append(
            (
                LABELS[name],
                str(len(last)),
                f"{one.medians[-1]:.4f}",
                f"{min(last):.4f}",
                f"{max(last):.4f}",
                f"{one.seconds[-1]:.1f}" if one.seconds else "-",
            )
        )
    heads = ("optimizer", "seeds", "bits per byte at the end: median", "least", "most", "seconds of training")
    lines = table(heads, rows)
    for name in ("steps", "seconds"):
        if name == "seconds" and not all(one.seconds for one in curves.values()):
            continue
        found = sorted(shares(curves, name))
        if found:
            each = ", ".join(f"{100 * share:.1f}" for share in found)
            lines += ["", f"Muon has AdamW's last median after this share (%) of AdamW's {name}, each seed: {each}."]
    return lines
