"""The command line: its help, what it prints, and what its options come to."""

import dataclasses
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import ROOT, error_of, final_weights, start, tiny_config, tiny_options

from quintic.cli import main
from quintic.commands.options import EvalOptions, ExportOptions, ReportOptions, SampleOptions
from quintic.data.dataset import Dataset
from quintic.data.loader import validation_rows
from quintic.eval.baselines import reference_scores
from quintic.report.history import METRICS_FILE, RunHistory, read_metrics
from quintic.simulate.options import RatesOptions
from quintic.train.checkpoint import checkpoints
from quintic.train.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig
from quintic.train.saved_config import changed_options, load_config, to_dict, values_of, with_options

TRAINING = [DataConfig, ModelConfig, OptimConfig, ScheduleConfig, RunConfig]
COMMANDS: dict[str, list[Any]] = {
    "train": TRAINING,
    "compare": TRAINING,
    "plan": TRAINING,
    "prepare": [DataConfig],
    "sample": [SampleOptions],
    "eval": [EvalOptions],
    "report": [ReportOptions],
    "export": [ExportOptions],
    "rates": [RatesOptions],
}

pytestmark = pytest.mark.usefixtures("same_threads", "elsewhere")


# -- help -------------------------------------------------------------------------------------------------------------


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (([], 2), (["--help"], 0), (["-h"], 0)):
        assert main(arguments) == code
        listed = re.findall(r"^  (\w+)  +\w", capsys.readouterr().out, re.MULTILINE)
        assert set(listed) == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_option_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    text = " ".join(re.sub(r"[│─╭╮╰╯]", " ", printed).split())
    for section in COMMANDS[command]:
        for f in dataclasses.fields(section):
            option = "--" + f.name.replace("_", "-")
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                assert re.search(rf" {option}[ ,][^(]*\(required\)", text), option
                continue
            entry = re.search(rf" {option}[ ,].*?\(default: ([^)]*)\)", text)
            assert entry, option
            default = f.default
            if isinstance(default, tuple):
                shown = " ".join(repr(item) if item == "" else str(item) for item in default)
                assert entry[1].strip() in (shown, "")
            else:
                assert entry[1].strip() == str(default), option
    if section in TRAINING and command != "prepare":
        assert " --config {None}|PATH " in text
        assert " --preset {None}|STR " in text
        assert " --resume, --no-resume " in text


@pytest.mark.parametrize("wrong", ["--depht 3", "--depth few", "--preset tpu", "--resume-step -1", "--config missing"])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_is_printed_beside_a_wrong_option(command: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *wrong.split(), "--help"]) == 0
    printed = capsys.readouterr()
    assert "--weight-decay" in printed.out
    assert "of --preset cpu" in " ".join(printed.out.split())
    assert not printed.err


@pytest.mark.parametrize("wrong", ["--depth 3", "--resume", "--stepz 3"])
def test_the_help_of_a_speedrun_is_printed_beside_a_mistake(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "speedrun", *wrong.split(), "--help"]) == 0
    printed = capsys.readouterr()
    assert "--pass-tokens" in printed.out
    assert not printed.err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintic.__version__", "1.2.3")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "quintic 1.2.3\n"


# -- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_saved_configuration_starts_the_same_run_again(tiny_dataset: Dataset, trained: Path, elsewhere: Path) -> None:
    saved = trained / "config.json"
    options = ["--config", str(saved), "--steps", "7", "--run=other", "--runs-dir", str(elsewhere)]
    assert main(["train", *options]) == 0
    expected = tiny_config(tiny_dataset, trained.parent, run="run", threads=1)
    assert load_config(saved) == expected
    again = load_config(elsewhere / "other" / "config.json")
    assert again == with_options(expected, steps=7, run="other", runs_dir=elsewhere)
    assert checkpoints(elsewhere / "other")[0].name == "step-000007"


def test_every_field_can_be_set_by_its_option(
    monkeypatch: pytest.MonkeyPatch, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    from quintic.commands.options import training_options

    wanted = tiny_config(
        tiny_dataset, Path("r"), run="x", val_data="v", text_field="body", tokenizer="t.json", max_bytes=10**9,
        verify=True, kv_ratio=2,
        window_pattern="L", optimizer="adamw", muon_lr=0.01, adamw_lr=0.01, embedding_lr=0.01, head_lr=0.01,
        adamw_head_lr=0.02, scalar_lr=0.01, momentum=0.5, momentum_start=0.4, orthogonalizer="svd", normalize="neuron",
        update_rule="muoneq", state_dtype="bf16", weights="mantissa", weight_decay=0.01, adamw_weight_decay=0.01,
        cautious=False, beta1=0.1, beta2=0.2, steps=None, tokens_per_param=1.5, warmup_frac=0.1, warmdown_frac=0.2,
        final_lr_frac=0.3, seed=3, attention="sdpa", parallel="hsdp", shard_ranks=2, compile=False, threads=3,
        sample_every=9, prompts=("a b", "c"), keep=9, tensorboard=True, wandb="w", l3_layers="0",
        l3_embeddings=400, l3_d_up=8, l3_k_max=9, l3_tied=False,
        aspect_ratio=32, short_window=0.5, variant="nanochat", recipe="seed", scale_rates=True,
        on_spike="skip", spike_sigmas=4.0, momentum_end=0.3, decay_shape="cosine", target_flops=1e9, warmup_steps=2,
        fp8=True, fp8_recipe="rowwise", clip_norm=0.5, core="c", core_every=5, core_items=6, init_from=str(tmp_path),
        capture=False,
    )  # fmt: skip
    assert changed_options(Config(), wanted).keys() == values_of(wanted).keys()
    # A model to start from, of these sizes.
    (tmp_path / "config.json").write_text(json.dumps(to_dict(wanted)), encoding="utf-8")
    (tmp_path / "tokenizer.json").touch()
    changes = {name: value for name, value in values_of(wanted).items() if name != "runs_dir"}
    options = tiny_options(tiny_dataset, Path("r"), **changes)
    start = training_options(options, command="train")
    assert start.config == wanted
    assert start.resumed is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", (False, None)),
        ("--fp8", (True, None)),
        ("--no-fp8 --steps 3", (False, None)),
        ("--fp8 --compile", (True, True)),
        ("--no_compile --fp8 --seed 1", (True, False)),
        ("--compile --seed 1", (False, True)),
        ("--no-compile", (False, False)),
        ("--compile None --fp8", (True, None)),
        ("--compile=True", (False, True)),
    ],
)
def test_switches_need_no_value(options: str, expected: tuple[bool, bool | None]) -> None:
    from quintic.commands.options import training_options

    run = training_options(options.split(), command="train").config.run
    assert (run.fp8, run.compile) == expected


def test_paths_of_text_are_kept_whole(elsewhere: Path) -> None:
    from quintic.commands.options import training_options

    (elsewhere / "notes.txt").write_text("text")
    (elsewhere / "t.json").write_text("{}")
    options = ["--data", "notes.txt", "--data-dir", "../shards", "--tokenizer", "t.json"]
    data = training_options(options, command="train").config.data
    assert data.data == str(elsewhere / "notes.txt")
    assert data.tokenizer == str(elsewhere / "t.json")
    assert data.data_dir == elsewhere.parent / "shards"
    for kept in (["--data", "hf:owner/name", "--tokenizer", "gpt2"], ["--data", "missing.txt"], []):
        data = training_options(kept, command="train").config.data
        assert data.data == (kept[1] if kept else "python")


def test_the_preset_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintic.commands.options import training_options
    from quintic.commands.presets import preset

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    here = dataclasses.replace(Config().data, data_dir=Path.cwd() / "data")
    gpu, small = (
        dataclasses.replace(config, data=dataclasses.replace(config.data, data_dir=here.data_dir))
        for config in (preset("gpu"), preset("gpu-small"))
    )
    on_text = dataclasses.replace(gpu, data=dataclasses.replace(gpu.data, data="texts"))
    on_cpu = Config(data=here, run=RunConfig(device="cpu"))
    for arguments, expected in (([], small), (["--data", "texts"], on_text), (["--device=cpu"], on_cpu)):
        assert training_options(arguments, command="train").config == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_options(["--preset", "gpu"], command="plan").config == gpu
    assert training_options(["--preset=cpu", "--depth=3"], command="plan").config.model.depth == 3
    recipe = training_options(["--preset", "gpu", "--recipe", "nanochat", "--head-lr", "0.5"], command="train").config
    assert (recipe.model.depth, recipe.optim.weight_decay, recipe.optim.head_lr) == (12, 0.28, 0.5)
    assert (recipe.optim.recipe, recipe.schedule.warmup_steps) == ("nanochat", 40)


def test_the_last_of_several_presets_counts() -> None:
    from quintic.commands.options import speedrun_options, training_options

    assert speedrun_options(["--preset=speedrun", "--preset", "cpu"]) is None
    assert training_options(["--preset", "speedrun", "--preset=cpu"], command="train").preset == "cpu"
    race = speedrun_options(["--preset", "cpu", "--preset=speedrun", "--preset", "speedrun-tiny"])
    assert race is not None
    assert race[0] == "speedrun-tiny"


def test_a_checkpoint_that_is_asked_for_as_none_is_the_newest(trained: Path) -> None:
    from quintic.commands.options import training_options

    start = training_options(["--resume-step", "None", "--runs-dir", str(trained.parent)], command="train")
    assert start.resumed == trained
    assert start.given["resume_step"] is None


def test_a_wrong_preset_or_recipe_is_named(capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    choices = "cpu, gpu-small or gpu (for train also speedrun, speedrun-tiny)"
    assert error_of(capsys, "plan", "--preset", "tpu") == f"--preset tpu: unknown; choose {choices}"
    assert error_of(capsys, "plan", "--recipe", "mine") == "--recipe mine: give quintic or seed or nanochat"
    saved = ["--config", str(trained / "config.json"), "--preset", "cpu"]
    assert error_of(capsys, "plan", *saved) == "--preset cpu: the options come from --config; give one of the two"
    resumed = ["--resume", "--runs-dir", str(trained.parent), "--preset", "cpu"]
    assert (
        error_of(capsys, "train", *resumed) == "--preset: a resumed run keeps its own configuration; leave --preset out"
    )


# -- what the commands print ------------------------------------------------------------------------------------------


def test_train_prints_the_result(tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    assert main(["train", *tiny_options(tiny_dataset, elsewhere / "runs", run="run", prompts=("def model",))]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    final = RunHistory.load(elsewhere / "runs" / "run").final
    assert f"validation: {final['bpb']:.4f} bits per byte" in printed.out
    assert f"xz -9 needs {final['baselines']['xz_bpb']:.3f} for the same text" in printed.out
    assert f"byte-bigram model {final['baselines']['bigram_bpb']:.3f}" in printed.out
    assert f"report:     {elsewhere / 'runs' / 'run' / 'report.html'}" in printed.out
    assert "--- sample ---" in printed.out
    assert "\ndef model" in printed.out


def test_eval_repeats_the_score_of_the_run(
    tiny_dataset: Dataset, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = RunHistory.load(trained).final
    assert main(["eval", "--runs-dir", str(trained.parent), "--tokens", "512"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    baselines = final["baselines"]
    assert first == (  # of one document
        f"{final['bpb']:.4f} bits per byte ({final['loss']:.4f} nats per token) over {baselines['bytes']:,} bytes of "
        "text"
    )
    assert second == (
        f"for comparison: xz -9 {baselines['xz_bpb']:.4f}, byte-bigram model {baselines['bigram_bpb']:.4f}"
    )
    assert main(["eval", "--run", "run", "--runs-dir", str(trained.parent)]) == 0
    everything = list(validation_rows(tiny_dataset, rows=4, seq_len=32))
    num_bytes = int(reference_scores(tiny_dataset, everything)["bytes"])
    assert num_bytes > baselines["bytes"]
    printed = capsys.readouterr().out
    assert f"over {num_bytes:,} bytes of text" in printed
    assert re.search(r"\(standard error over documents 0\.\d{4}, ", printed)


def test_eval_scores_every_byte_of_other_text(
    trained: Path, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    before = sorted(path.name for path in load_config(trained / "config.json").data.data_dir.iterdir())
    (elsewhere / "other").mkdir()
    texts = ["Number 7, a line that no model has seen.\n", "é", "", "Some lines more\n" * 40]
    for number, text in enumerate(texts):
        (elsewhere / "other" / f"{number}.txt").write_text(text)
    for data, text in (("other/1.txt", "é"), ("other", "".join(texts))):  # one character is text enough
        assert main(["eval", "--runs-dir", str(trained.parent), "--data", data]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert f"over {len(text.encode()):,} bytes of text" in first
        assert ("standard error over documents" in first) == (data == "other")
        assert float(first.split()[0]) > RunHistory.load(trained).final["bpb"]
        xz = 8 * len(lzma.compress(text.encode(), preset=9)) / len(text.encode())
        assert f"xz -9 {xz:.4f}" in second or data == "other"
    # It is read where it is: nothing is prepared, and nothing held back.
    assert sorted(path.name for path in load_config(trained / "config.json").data.data_dir.iterdir()) == before
    assert main(["eval", "--runs-dir", str(trained.parent), "--data", "other", "--tokens", "5"]) == 0
    assert int(re.findall(r"over (\d+) bytes", capsys.readouterr().out)[0]) < 40
    assert error_of(capsys, "eval", "--runs-dir", str(trained.parent), "--data", "other/2.txt") == (
        "--data other/2.txt: holds no text to score; give a file or folder with text"
    )


def test_sample_continues_prompts(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["sample", "--runs-dir", str(trained.parent), "--prompts", "def model", "return", "--tokens", "20"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("def model")
    assert "\nreturn" in printed
    assert main([*options, "--seed", "0"]) == 0
    assert capsys.readouterr().out == printed
    assert main([*options, "--seed", "1"]) == 0
    assert capsys.readouterr().out != printed
    greedy = [*options, "--temperature", "0"]
    outputs = []
    for seed in ("0", "5"):
        assert main([*greedy, "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("command", ["sample", "eval", "export run --to hf"])
def test_a_run_without_a_checkpoint_is_not_told_to_resume(
    command: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_bytes((trained / "config.json").read_bytes())
    message = error_of(capsys, *command.split(), "--runs-dir", str(tmp_path))
    assert message == (
        f"{run}: has no checkpoint yet; one is written every --save-every steps, and when the run ends or is "
        "stopped; wait for it, or choose another --run"
    )


@pytest.mark.parametrize("command", ["sample", "eval", "export run --to hf"])
def test_a_run_that_has_lost_its_tokenizer_is_told_where_another_is(
    command: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "tokenizer.json").unlink()
    message = error_of(capsys, *command.split(), "--runs-dir", str(tmp_path))
    assert message == f"{run}: has no tokenizer.json; copy it there, its prepared text has the same"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--temperature -1", "--temperature -1.0: must be at least 0"),
        ("--top-k 0", "--top-k 0: must be at least 1"),
        ("--seed -1", "--seed -1: must be at least 0"),
        ("--prompts a\udcff", "--prompts 'a\\udcff': not UTF-8"),
        (f"--prompts {'ab' * 10_000}", "--prompts 'abababababababababab'...: 20,000 bytes; must be at most 16,384"),
    ],
)
def test_sample_options_out_of_range(
    option: str, message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sample", "--runs-dir", str(trained.parent), *option.split()]
    assert error_of(capsys, *arguments).startswith(message)


def test_a_trained_model_is_used_without_the_gpu_it_was_trained_on(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mine / "config.json"
    content = json.loads(path.read_text())
    content["run"] |= {"device": "cuda", "attention": "varlen"}
    path.write_text(json.dumps(content))
    assert main(["eval", "--runs-dir", str(mine.parent), "--tokens", "512"]) == 0
    assert f"{RunHistory.load(mine).final['bpb']:.4f} bits" in capsys.readouterr().out
    message = error_of(capsys, "eval", "--runs-dir", str(mine.parent), "--device", "cuda")
    assert message == "--device cuda: PyTorch finds no CUDA GPU here; use --device cpu"


def test_a_damaged_checkpoint_is_passed_over_and_told(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoints(mine)[0] / "model.safetensors").unlink()
    assert main(["sample", "--runs-dir", str(mine.parent), "--tokens", "3"]) == 0
    assert "step-000006: model.safetensors is missing; using the checkpoint before it" in capsys.readouterr().err


def test_runs_and_data_that_moved_together(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    shutil.copytree(tiny_dataset.path.parent, elsewhere / "old" / "data")
    options = tiny_options(tiny_dataset, elsewhere / "old" / "runs", run="run", steps=1)
    assert main(["train", *options, "--data-dir", str(elsewhere / "old" / "data")]) == 0
    (elsewhere / "old").rename(elsewhere / "new")
    assert main(["sample", "--runs-dir", "new/runs", "--tokens", "3"]) == 0
    (elsewhere / "new" / "data").rename(elsewhere / "lost")
    message = error_of(capsys, "eval", "--runs-dir", "new/runs", "--tokens", "3")
    assert re.search(
        r"the text of run does not exist any more; if its source has not changed, prepare it again with: "
        r".*prepare --data \S+ --data-dir .* 300",
        message,
    )


def test_report_is_written_again(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = mine / "report.html"
    before = report.read_text(encoding="utf-8")
    report.unlink()
    assert main(["report", "--runs-dir", str(mine.parent)]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert report.read_text(encoding="utf-8") == before
    other = mine.parent / "pages" / "page.html"  # also of a run whose folder cannot be written
    assert main(["report", "--runs-dir", str(mine.parent), "--out", str(other)]) == 0
    assert other.read_text(encoding="utf-8") == before
    message = error_of(capsys, "report", "--runs-dir", str(mine.parent), "--out", str(mine))
    assert message.startswith(f"{mine}: cannot be written (Is a directory); free some space, or give another file")


@pytest.mark.slow
def test_report_compares_any_runs(
    mine: Path, tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    runs_dir = mine.parent
    options = tiny_options(tiny_dataset, runs_dir, run="other", muon_lr=0.01, steps=4)
    assert main(["train", *options]) == 0
    capsys.readouterr()
    assert main(["report", "--runs", mine.name, "other", "--runs-dir", str(runs_dir)]) == 0
    sentence, doubt, page = capsys.readouterr().out.splitlines()
    assert sentence.startswith("other ")
    assert "how sure that is, is not known" in doubt
    assert page == str(runs_dir / "comparison.html")
    assert "optim.muon_lr" in Path(page).read_text(encoding="utf-8").replace("<wbr>", "")
    wanted = ["--runs", "other", mine.name, "--runs-dir", str(runs_dir), "--out", str(elsewhere / "x.html")]
    assert main(["report", *wanted]) == 0
    assert (elsewhere / "x.html").is_file()
    capsys.readouterr()
    assert main(["train", *tiny_options(tiny_dataset, runs_dir, run="again", muon_lr=0.01, steps=4, seed=7)]) == 0
    capsys.readouterr()
    assert main(["report", "--runs", mine.name, "slow=other,again", "--runs-dir", str(runs_dir)]) == 0
    assert capsys.readouterr().out.startswith("slow ")
    assert "slow (median and range of 2 runs)" in Path(page).read_text(encoding="utf-8")
    for arguments, message in (
        (["--runs", "other"], "--runs other: give at least two groups of runs, and no run twice"),
        (["--runs", "A=", "other"], "--runs A= other: a name or label is empty; write RUN, or LABEL=RUN,RUN,..."),
        (["--runs", "=one", "other"], "--runs =one other: a name or label is empty; write RUN, or LABEL=RUN,RUN,..."),
        (["--runs", "other", "other"], "--runs other other: give at least two groups of runs, and no run twice"),
        (["--runs", "a", "b=a,c"], "--runs a b=a,c: give at least two groups of runs, and no run twice"),
        (["--run", "x", "--runs", "a", "b"], "--run x: cannot be combined with --runs; list the run first in --runs"),
        (["--runs", "other", "again", "--out", str(mine)], f"{mine}: cannot be written (Is a directory); free some"),
    ):
        assert error_of(capsys, "report", "--runs-dir", str(runs_dir), *arguments).startswith(message)


@pytest.mark.slow
def test_the_command_on_the_page_repeats_the_run(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch and a length that are chosen, a precision and threads that are the machine's.
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="first", steps=None, tokens_per_param=0.02)
    options[options.index("--dtype") + 1] = "auto"
    assert main(["train", *options]) == 0
    record = read_metrics(elsewhere / "runs" / "first" / "metrics.jsonl")[0]
    repeat = shlex.split(record["repeat"])
    assert repeat[:4] == ["quintic", "train", "--preset", "cpu"]
    assert {"--depth", "--dtype", "--steps", "--batch-tokens", "--threads", "--attention"} <= set(repeat)
    assert not {"--run", "--runs-dir"} & set(repeat)
    page = (elsewhere / "runs" / "first" / "report.html").read_text(encoding="utf-8")
    [printed] = [text for text in re.findall("<pre>([^<]*)</pre>", page) if "--preset" in text]
    assert unescape(printed) == record["repeat"]
    other = elsewhere / "other folder"
    other.mkdir()
    monkeypatch.chdir(other)
    assert main([*repeat[1:], "--run", "second"]) == 0
    assert final_weights(other / "runs" / "second") == final_weights(elsewhere / "runs" / "first")
    losses = [
        RunHistory.load(folder / "runs" / name).final["loss"]
        for folder, name in ((elsewhere, "first"), (other, "second"))
    ]
    assert losses[0] == losses[1]
    assert f"ended with a validation loss of {losses[1]:.6f} nats per token" in page
    again = read_metrics(other / "runs" / "second" / "metrics.jsonl")[0]
    assert shlex.split(again["repeat"]) == repeat


def test_plan_lists_groups_and_costs(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    options = tiny_options(tiny_dataset, elsewhere / "runs", depth=2)
    assert main(["plan", *options]) == 0
    output = capsys.readouterr().out
    # Width 128: queries, keys, values and outputs of 128 x 128, and an MLP of 2 x 128 x 512, in each of two layers.
    matrices = 2 * (4 * 128 * 128 + 2 * 128 * 512)
    assert re.search(rf"^matrices +muon +lr 0\.02 +{matrices:,} parameters  blocks\.0", output, re.MULTILINE)
    assert re.search(rf"^embedding +adamw +lr 0\.28284 +{300 * 128:,} parameters", output, re.MULTILINE)
    parameters = sum(int(found.replace(",", "")) for found in re.findall(r" ([\d,]+) parameters  ", output))
    assert f"Model: depth 2, width 128, 4 heads, {parameters:,} parameters: " in output
    assert "Length: 6 steps, 1,536 tokens" in output
    assert float(re.search(r"([\d.e+]+) in all", output)[1]) > 6 * 6 * 256 * matrices
    assert f"Vocabulary: 300 tokens, read from {tiny_dataset.path}\n" in output
    assert "Precision: float32 activations, float32 weights\n" in output
    assert list(elsewhere.iterdir()) == []


def test_prepare_says_what_there_is(tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    options = tiny_options(tiny_dataset, Path("unused"))
    position = options.index("--depth")
    assert main(["prepare", *options[:position]]) == 0
    output = capsys.readouterr().out
    for name in ("train", "val"):
        split = tiny_dataset.split(name)
        assert re.search(rf"{name} +{split.num_documents} documents +{split.num_tokens:,} tokens", output)
    assert output.endswith(f"ready: {tiny_dataset.path}\n")


@pytest.mark.slow
def test_compare_prints_what_it_found(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert main(["compare", *tiny_options(tiny_dataset, elsewhere / "runs", run="c", steps=3)]) == 0
    output = capsys.readouterr().out
    assert output.endswith(f"report: {elsewhere / 'runs' / 'c.html'}\n")
    # The last paragraph begins with the verdict; on a machine that slowed one run it says so, too.
    assert "Muon" in output.rsplit("\n\n", 1)[1].splitlines()[0]


def test_ctrl_c_stops_a_comparison(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    from quintic.train.loop import Interrupted

    def stop(*args: Any, **options: Any) -> None:
        raise Interrupted("stopped after step 2 of 3, which is saved")

    monkeypatch.setattr("quintic.commands.compare.train", stop)
    assert main(["compare", *tiny_options(tiny_dataset, elsewhere / "runs", run="c")]) == 130
    printed = capsys.readouterr()
    assert "stopped after step 2 of 3, which is saved; continue with:\n    " in printed.out
    assert printed.out.endswith(f"compare --resume --run c --runs-dir {elsewhere / 'runs'}\n")
    assert printed.err == ""


# -- real processes ---------------------------------------------------------------------------------------------------


def test_the_module_is_the_command(elsewhere: Path) -> None:
    process = start(["train", "--depth", "0"], elsewhere)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (2, "", "quintic: error: --depth 0: must be at least 1\n")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(trained: Path, elsewhere: Path) -> None:
    sample = f"{sys.executable} -m quintic sample --runs-dir {trained.parent} --tokens 5 | true"
    wide_help = f"{sys.executable} -m quintic train --help | true"
    result = subprocess.run(
        ["bash", "-c", f"{sample}; echo ${{PIPESTATUS[0]}}; {wide_help}; echo ${{PIPESTATUS[0]}}"],
        cwd=elsewhere,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # 128 + SIGPIPE, as the shell reports it for other programs.
    assert result.stdout == "141\n141\n"
    assert result.stderr == f"Model: {trained} after step 6 of 6 (the run is finished)\n"


def test_a_full_gpu_is_told_in_one_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error: type[Exception] = torch.OutOfMemoryError

    def fail(*args: Any) -> int:
        raise error("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB.\nMore.")

    monkeypatch.setattr("quintic.commands.report.run", fail)
    assert main(["report", "--run", str(trained)]) == 2
    assert capsys.readouterr().err == (
        "quintic: error: CUDA out of memory. Tried to allocate 2.00 GiB; lower --rows (quintic plan --memory names "
        "more options that save memory)\n"
    )
    error = RuntimeError
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["report", "--run", str(trained)])


def test_the_log_holds_the_command(trained: Path) -> None:
    command = read_metrics(trained / METRICS_FILE)[0]["command"]
    assert command.startswith("quintic train --data ")
    assert f"--run run --runs-dir {trained.parent} " in command


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("train", {}, "expandable_segments:True"),
        ("compare", {}, "expandable_segments:True"),
        ("plan", {}, None),
        ("train", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("train", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_training_lets_pytorch_grow_its_segments_unless_told_otherwise(
    command: str, given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main([command, "--help"]) == 0
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
