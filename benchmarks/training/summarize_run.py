"""Summarise a training run: speed, share of each part of a step, validation curve.

    python -m benchmarks.training.summarize_run runs/NAME --out benchmarks/results/NAME --peak-tflops 989

Reads the metrics.jsonl of the run; writes NAME.json and NAME.md. The first `--skip` steps (compilation) are left out.
Model FLOPs utilisation is measured against `--peak-tflops`, the vendor's dense peak of the device in the run's dtype.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common.results import percentiles, table, write_result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, help="result files, without ending")
    parser.add_argument("--skip", type=int, default=20, help="first steps to leave out")
    parser.add_argument("--peak-tflops", type=float, help="dense peak of the device, for the utilisation")
    parser.add_argument("--note", default="", help="a sentence about the text or the machine")
    options = parser.parse_args()
    records = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text("utf-8").splitlines()]
    run = next(record for record in records if record["kind"] == "run")
    steps = [record for record in records if record["kind"] == "train"]
    counted = steps[options.skip :]
    result = {
        "command": run["command"],
        "note": options.note,
        "machine": run["machine"],
        "versions": run["versions"],
        "parameters": run["model"]["parameters"],
        "flops_per_token": run["model"]["flops_per_token"],
        "num_steps": len(counted),
        "first_step_seconds": sum(steps[0]["times_ms"].values()) / 1000,
        "tokens_per_second": percentiles([step["tokens_per_second"] for step in counted]),
        "step_ms": {name: percentiles([s["times_ms"][name] for s in counted]) for name in counted[0]["times_ms"]},
        "evaluations": [
            {key: record[key] for key in ("step", "tokens", "loss", "bpb")}
            for record in records
            if record["kind"] == "eval"
        ],
        "baselines": [record["baselines"] for record in records if record["kind"] == "final"],
    }
    if options.peak_tflops:
        rate = result["tokens_per_second"]["median"] * result["flops_per_token"]
        result["utilisation"] = rate / (options.peak_tflops * 1e12)
    write_result(options.out, result, _page(result))
    print(_page(result))
    return 0


def _page(result: dict[str, object]) -> str:
    machine, versions = result["machine"], result["versions"]
    found = {"tokens per second": (result["tokens_per_second"], 0)}
    found |= {f"{name.replace('_', ' + ')} (ms)": (spread, 1) for name, spread in result["step_ms"].items()}
    cells = [
        [label, *(f"{spread[name]:,.{digits}f}" for name in ("median", "p10", "p90"))]
        for label, (spread, digits) in found.items()
    ]
    lines = [
        f"# Training on {machine['device']}",
        "",
        f"`{result['command']}`. {result['note']} {result['parameters'] / 1e6:.0f}M parameters, {machine['dtype']}, "
        f"attention by {machine['attention']}, {'compiled' if machine['compiled'] else 'not compiled'}; "
        f"Python {versions['python']}, torch {versions['torch']}; n = {result['num_steps']} steps.",
        "",
        *table(("per step", "median", "10 %", "90 %"), cells),
    ]
    lines += ["", f"First step, compilation included: {result['first_step_seconds']:.0f} s."]
    if "utilisation" in result:
        lines[-1] += f" Model FLOPs utilisation: {result['utilisation']:.1%}."
    evaluations = [
        [str(row["step"]), f"{row['tokens']:,}", f"{row['loss']:.3f}", f"{row['bpb']:.4f}"]
        for row in result["evaluations"]
    ]
    lines += ["", *table(("step", "tokens", "loss (nats per token)", "bits per byte"), evaluations)]
    for baselines in result["baselines"]:
        lines += ["", f"On the same text: xz -9 {baselines['xz_bpb']:.3f}, byte-bigram {baselines['bigram_bpb']:.3f}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
