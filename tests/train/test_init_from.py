"""A run that starts from the weights of another run, or of an exported model."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_runs import error_of, final_weights, tiny_config, write_text_folder

from quintic.cli import main
from quintic.commands.options import training_options
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.report.history import RunHistory
from quintic.train.checkpoint import checkpoints
from quintic.train.config import ModelConfig
from quintic.train.loop import train
from quintic.train.runs import create_run
from quintic.train.saved_config import load_config

pytestmark = pytest.mark.usefixtures("same_threads")

# Options of runs that take no time; sizes and tokenizer come from the weights.
SHORT = [
    *("--steps", "2", "--batch-tokens", "256", "--rows", "4", "--eval-tokens", "512"),
    *("--sample-tokens", "1", "--eval-every", "2", "--no-compile"),
]


@pytest.fixture
def exported(trained: Path, tmp_path: Path) -> Path:
    assert main(["export", "run", "--runs-dir", str(trained.parent), "--out", str(tmp_path / "export")]) == 0
    return tmp_path / "export"


def options_of(trained: Path, tmp_path: Path, source: str, *others: str) -> list[str]:
    data = load_config(trained / "config.json").data
    text = ["--data", str(data.data), "--data-dir", str(data.data_dir), "--val-frac", str(data.val_frac)]
    device = ["--preset", "cpu", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    return [*text, *device, *SHORT, "--runs-dir", str(tmp_path / "runs"), "--init-from", source, *others]


@pytest.mark.parametrize("kind", ["run", "export"])
def test_it_begins_where_the_weights_were(
    kind: str, trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"run": trained, "export": exported}[kind]
    capsys.readouterr()
    assert main(["train", *options_of(trained, tmp_path, str(source), "--run", "new", "--seed", "5")]) == 0
    said = capsys.readouterr().out.replace("\n    ", " ")
    words = f"the weights of {source} after step 6" if kind == "run" else f"the weights of the exported model {source}"
    assert f"Starting from {words}" in said
    new, old = RunHistory.load(tmp_path / "runs" / "new"), RunHistory.load(trained)
    # Scored before the first step: what the other run ended with, and not what random weights give.
    assert new.evals[0]["step"] == 0
    assert new.evals[0]["bpb"] == pytest.approx(old.final["bpb"], rel=1e-6)
    assert new.evals[0]["bpb"] < old.evals[0]["bpb"] - 0.1
    assert new.final["step"] == 2
    saved = load_config(tmp_path / "runs" / "new" / "config.json")
    assert saved.run.init_from == str(source)
    assert dataclasses.replace(saved.model, aspect_ratio=64, window_pattern="SSSL", short_window=0.25) == ModelConfig(
        depth=1, head_dim=32, seq_len=32
    )
    assert f"--init-from {source}" in (new.repeat or "")
    page = (tmp_path / "runs" / "new" / "report.html").read_text(encoding="utf-8")
    assert f"from the weights of {source}; finished after 2 steps" in page


def test_optimizer_and_schedule_are_new(trained: Path, tmp_path: Path) -> None:
    # With rates of nothing the weights stay what they were, and only the optimizer has moved.
    still = [f"--{name}-lr=0" for name in ("muon", "embedding", "head", "scalar")]
    options = options_of(trained, tmp_path, str(trained), "--run", "still", "--weight-decay", "0", *still)
    assert main(["train", *options]) == 0
    assert final_weights(tmp_path / "runs" / "still")[0] == final_weights(trained)[0]
    steps = [
        tensor
        for name, tensor in load_file(checkpoints(tmp_path / "runs" / "still")[0] / "optimizer.safetensors").items()
        if name.endswith("/step")
    ]
    assert steps
    assert all(int(step.max()) == 2 for step in steps)


def test_a_name_is_one_of_a_run_first(trained: Path, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "runs" / "base")
    for source, folder in (("base", tmp_path / "runs" / "base"), (str(exported), exported)):
        start = training_options(options_of(trained, tmp_path, source), "train")
        assert start.config.run.init_from == str(folder)
        assert start.config.data.tokenizer == str(folder / "tokenizer.json")
    # The length of rows and windows are no sizes of weights.
    given = ["--seq-len", "64", "--window-pattern", "L", "--short-window", "0.5"]
    model = training_options(options_of(trained, tmp_path, "base", *given), "train").config.model
    assert (model.seq_len, model.window_pattern, model.short_window) == (64, "L", 0.5)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize(("aspect_ratio", "head_dim", "kv_ratio"), [(64, 32, 1), (40, 16, 1), (64, 64, 2), (7, 16, 1)])
def test_sizes_of_an_export_become_options(
    depth: int, aspect_ratio: int, head_dim: int, kv_ratio: int, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    from quintic.eval.export import export_hf
    from quintic.model.gpt import GPT
    from quintic.train.recipe import model_config

    config = tiny_config(
        tiny_dataset, tmp_path, depth=depth, aspect_ratio=aspect_ratio, head_dim=head_dim, seq_len=64,
        window_pattern="SL", short_window=0.5, variant="nanochat" if depth == 2 else "quintic",
    )  # fmt: skip
    vocabulary = {"vocab_size": tiny_dataset.vocab_size, "bos_id": tiny_dataset.bos_id}
    sizes = model_config(config, **vocabulary)
    if sizes.num_heads % kv_ratio:
        return
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, kv_ratio=kv_ratio))
    sizes = model_config(config, **vocabulary)
    folder = export_hf(GPT(sizes), tiny_dataset.tokenizer, tmp_path / "export")
    found = training_options(["--preset", "cpu", "--init-from", str(folder), "--rows", "1"], "train").config
    again = model_config(found, **vocabulary)
    assert again.windows == sizes.windows
    names = ("depth", "width", "head_dim", "num_kv_heads", "seq_len", "variant")
    assert [getattr(again, name) for name in names] == [getattr(sizes, name) for name in names]


def test_other_sizes_and_tokenizers_are_refused(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (trained, exported):
        message = error_of(capsys, "train", *options_of(trained, tmp_path, str(source), "--depth", "3"))
        assert message == (f"--depth 3: the weights of --init-from {source} need --depth 1; leave it out")
    message = error_of(capsys, "train", *options_of(trained, tmp_path, str(trained), "--head-dim", "16"))
    assert message.startswith("--head-dim 16: the weights of")
    write_text_folder(tmp_path / "text", documents=30)
    assert (
        main(["prepare", "--data", str(tmp_path / "text"), "--data-dir", str(tmp_path / "d"), "--vocab-size", "280"])
        == 0
    )
    (other,) = (tmp_path / "d").glob("*/tokenizer.json")
    message = error_of(capsys, "train", *options_of(trained, tmp_path, str(trained), "--tokenizer", str(other)))
    assert message == (
        f"--tokenizer: the weights of --init-from {trained} were trained with another one; leave --tokenizer out"
    )
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def test_what_is_no_model_is_refused(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(source: Path | str) -> str:
        return error_of(capsys, "train", *options_of(trained, tmp_path, str(source)))

    assert refused("absent") == (
        f"--init-from absent: is neither a run in {tmp_path / 'runs'} nor the folder of a run or of an exported model; "
        "check the name, and --runs-dir"
    )
    (tmp_path / "runs" / "race").mkdir(parents=True)
    (tmp_path / "runs" / "race" / "metrics.jsonl").touch()
    why = "its weights fit no other model; give a run of another --preset, or the export of one"
    for name in ("race", str(tmp_path / "runs" / "race")):
        assert refused(name) == f"--init-from {name}: is a speedrun, and {why}"
    (exported / "config.json").write_text('{"model_type": "quintic_speedrun"}')
    assert refused(exported) == f"--init-from {exported}: is a model of the kind 'quintic_speedrun', but {why}"
    (exported / "config.json").write_text('{"model_type": "gpt2"}')
    assert refused(exported) == (
        f"--init-from {exported}: is a model of the kind 'gpt2', but only runs of quintic train and their "
        "exports can be used"
    )
    (exported / "config.json").write_text('{"model_type": "quintic", "lookup_layers": [0]}')
    assert refused(exported) == (
        f"--init-from {exported}: lookup layers cannot be trained further from an export; give the run instead"
    )
    (exported / "config.json").write_text('{"model_type": "quintic"}')
    assert (
        refused(exported)
        == f"--init-from {exported}: its config.json is not from an export (KeyError('num_hidden_layers'))"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(trained / "config.json", empty)
    assert refused(empty) == f"--init-from {empty}: has no tokenizer.json; export the run, and give the exported folder"
    shutil.copy(trained / "tokenizer.json", empty)
    assert refused(empty) == f"--init-from {empty}: {empty}: has no checkpoint yet"


def test_weights_that_are_damaged_are_refused(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = exported / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    message = error_of(capsys, "train", *options_of(trained, tmp_path, str(exported)))
    assert message.startswith(f"--init-from {exported}: model.safetensors cannot be read (")
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_that_was_killed_at_once_starts_from_them_again(
    trained: Path, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(trained, tmp_path / "source"))
    config = tiny_config(
        tiny_dataset, tmp_path / "runs", run="new", steps=2, init_from=str(source),
        tokenizer=str(source / "tokenizer.json"), sample_tokens=1,
    )  # fmt: skip
    folder = create_run(config)
    options: dict[str, Any] = {"command": "test"}
    train(config, tiny_dataset, folder, resume=True, **options)  # without a checkpoint: from the beginning
    assert RunHistory.load(folder).evals[0]["bpb"] == RunHistory.load(trained).final["bpb"]
    shutil.rmtree(source)
    train(config, tiny_dataset, folder, resume=True, **options)  # from its own checkpoint, without the source
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="does not exist any more; restore it, or start a new run"):
        train(config, tiny_dataset, folder, resume=True, **options)
