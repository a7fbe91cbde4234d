"""Time what a newcomer does: a fresh clone, `make train`, `make train` again, `make test`, `make compare`.

    python -m benchmarks.training.quickstart --out benchmarks/results/NAME --repeats 3 --compare

Each repeat clones this repository's HEAD into a temporary folder and starts with no environment. Writes NAME.json
(everything measured) and NAME.md (the table). Nothing else should run on the machine meanwhile.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.results import REPOSITORY, git_commit, processor, recorded_command, table, write_result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result files, without ending")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare", action="store_true", help="also run `make compare`, once")
    options = parser.parse_args()
    repeats = []
    comparison: dict[str, object] = {}
    for number in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder, "quintic")
            subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
            repeats.append(_repeat(clone))
            print(json.dumps(repeats[-1], indent=1), flush=True)
            if options.compare and number == options.repeats - 1:
                comparison = _compare(clone)
                print(json.dumps(comparison, indent=1), flush=True)
    result = {
        "command": recorded_command("benchmarks.training.quickstart", sys.argv[1:], {}),
        "commit": git_commit(),
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": repeats[0]["versions"],
        "repeats": repeats,
        "compare": comparison,
    }
    write_result(options.out, result, _page(result))
    print(_page(result))
    return 0


def _repeat(clone: Path) -> dict[str, object]:
    setup, _ = _timed(["make", "train", "ARGS=--help"], clone)
    train, _ = _timed(["make", "train", "ARGS=--run first"], clone)
    again, _ = _timed(["make", "train", "ARGS=--help"], clone)
    prepared_again, _ = _timed([".venv/bin/quintic", "prepare", "--val-frac", _val_frac(clone)], clone)
    test, output = _timed(["make", "test"], clone)
    summary = re.findall(r"^=*\s*(.*\b(?:passed|failed)\b.*?)\s*=*$", output, flags=re.MULTILINE)[-1]
    records = [json.loads(line) for line in (clone / "runs/first/metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [record["times_ms"] for record in records if record["kind"] == "train"][10:]
    final = next(record for record in records if record["kind"] == "final")
    sample = next(record for record in reversed(records) if record["kind"] == "sample")
    return {
        "setup_seconds": setup,
        "train_seconds": train,
        "second_setup_seconds": again,
        "second_prepare_seconds": prepared_again,
        "test_seconds_with_setup": test,
        "test_summary": summary,
        "bpb": final["bpb"],
        "baselines": final["baselines"],
        "evaluations": [[r["step"], r["bpb"]] for r in records if r["kind"] == "eval"],
        "step_ms": {name: statistics.median(step[name] for step in steps) for name in steps[0]},
        "breakdown": final["breakdown"],
        "samples": sample["samples"],
        "versions": records[0]["versions"],
    }


def _compare(clone: Path) -> dict[str, object]:
    seconds, output = _timed(["make", "compare", "ARGS=--run compare"], clone)
    sentence = next(line for line in output.splitlines() if line.startswith("Muon reached"))
    return {"seconds": seconds, "sentence": sentence, "command": "make compare"}


def _timed(command: list[str], folder: Path) -> tuple[float, str]:
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    seconds = round(time.monotonic() - start, 1)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return seconds, done.stdout


def _val_frac(clone: Path) -> str:
    config = json.loads((clone / "runs/first/config.json").read_text(encoding="utf-8"))
    return str(config["data"]["val_frac"])


def _page(result: dict[str, object]) -> str:
    repeats = result["repeats"]
    machine, versions = result["machine"], result["versions"]
    lines = [
        "# Quick start, measured",
        "",
        f"`{result['command']}` at commit {result['commit']}; {machine['cores']} cores of {machine['cpu']}, no GPU; "
        f"Python {versions['python']}, torch {versions['torch']}; n = {len(repeats)}, each a fresh clone with a fresh "
        "environment.",
        "",
    ]
    rows = [
        ("set up for training (seconds)", lambda r: r["setup_seconds"], 1),
        (
            "`make train` after that: prepare, train, evaluate, sample, report (seconds)",
            lambda r: r["train_seconds"],
            1,
        ),
        ("setup check of a second `make train` (seconds, with `--help`)", lambda r: r["second_setup_seconds"], 1),
        ("data preparation of a second run (seconds, whole command)", lambda r: r["second_prepare_seconds"], 1),
        ("`make test`, its own setup included (seconds)", lambda r: r["test_seconds_with_setup"], 1),
        ("validation bits per byte", lambda r: r["bpb"], 4),
        ("- `xz -9` on the same text", lambda r: r["baselines"]["xz_bpb"], 4),
        ("- byte-bigram model on the same text", lambda r: r["baselines"]["bigram_bpb"], 4),
        ("step: forward + backward (ms)", lambda r: r["step_ms"]["forward_backward"], 1),
        ("step: optimizer (ms)", lambda r: r["step_ms"]["optimizer"], 1),
        ("step: waiting for data (ms)", lambda r: r["step_ms"]["data"], 3),
        ("share of the optimizer (%)", lambda r: 100 * r["breakdown"]["optimizer_frac"], 2),
        ("share of waiting for data (%)", lambda r: 100 * r["breakdown"]["data_frac"], 3),
    ]
    cells = []
    for label, read, digits in rows:
        values = [read(repeat) for repeat in repeats]
        spread = (statistics.median(values), min(values), max(values))
        cells.append([label, *(f"{value:.{digits}f}" for value in spread)])
    lines += table(("what", "median", "least", "most"), cells)
    curve = ", ".join(f"{bpb:.3f} (step {step})" for step, bpb in repeats[0]["evaluations"])
    lines += ["", f"Validation bits per byte on the way: {curve}.", "", f"Tests: {repeats[0]['test_summary']}."]
    if result["compare"]:
        lines += ["", f"`{result['compare']['command']}`, {result['compare']['seconds']:.0f} seconds:", ""]
        lines += [f"> {result['compare']['sentence']}"]
    for sample in repeats[0]["samples"]:
        lines += ["", "```text", f"{sample['prompt']}{sample['text']}".rstrip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
