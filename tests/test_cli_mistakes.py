"""Mistakes at the command line: one line on standard error, exit code 2, and nothing left behind."""

import errno
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import error_of, tiny_options

from quintic import cli
from quintic.cli import main
from quintic.data.dataset import Dataset
from quintic.launch import install_command
from quintic.report.history import RunHistory
from quintic.train.checkpoint import checkpoints
from quintic.train.metrics import MetricsLog

pytestmark = pytest.mark.usefixtures("same_threads", "elsewhere")


def test_a_current_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", [str(Path(cli.__file__).with_name("__main__.py"))])  # as in python -m quintic
    for arguments in (["plan"], ["report"], ["--help"], ["plan", "--model", "gpt2"]):
        message = error_of(capsys, *arguments)
        assert message == "the current folder has been deleted: change to another one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tarin", "unknown command 'tarin': did you mean 'train'?"),
        ("xyz", "unknown command 'xyz': choose one of train, compare, prepare, sample, eval, report, plan"),
        ("train --depht 3", "unknown option --depht: did you mean --depth?"),
        ("train --depht=3", "unknown option --depht: did you mean --depth?"),
        ("train --zzz", "unknown option --zzz: quintic train --help lists the options"),
        ("train --preset speedrun-tiny --dept 3", "unknown option --dept: quintic train --preset speedrun-tiny --help"),
        ("train --muon-lr 1e308", "--muon-lr 1e+308: must be at most 1,000,000"),
        ("train --weight-decay 1e308", "--weight-decay 1e+308: must be at most 1,000,000"),
        ("plan --model gpt2 --mesh 1000000", "--mesh 1000000: 1,000,000 ranks; must be at most 16,384"),
        ("train --nonsense", "unknown option --nonsense: quintic train --help lists the options"),
        ("train --depth", "--depth needs a value: a whole number"),
        ("train --depth --steps 3", "--depth needs a value: a whole number"),
        ("train --depth three", "--depth three: give a whole number"),
        ("train --depth 2.5", "--depth 2.5: give a whole number"),
        ("train --depth 2 3", "--depth takes one value, but '3' follows it; quote a value that has spaces"),
        ("train --steps few", "--steps few: give a whole number or None"),
        ("train --muon-lr fast", "--muon-lr fast: give a number"),
        ("train --optimizer sgd", "--optimizer sgd: give muon or adamw"),
        ("train --device tpu", "--device tpu: give auto or cpu or cuda"),
        ("train --normalize row", "--normalize row: give neuron or element or None"),
        ("train --compile maybe", "--compile maybe: give True or False or None"),
        ("train --no-compile True", "--no-compile takes no value, but 'True' follows it"),
        ("train --no-comple", "unknown option --no-comple: did you mean --no-compile?"),
        ("train --tensorboard yes", "--tensorboard takes no value, but 'yes' follows it"),
        ("train 12", "'12' is not an option; options begin with -- (see quintic train --help)"),
        ("train -d 3", "'-d' is not an option; options begin with -- (see quintic train --help)"),
        ("train --depth 0", "--depth 0: must be at least 1"),
        ("train --depth -1", "--depth -1: must be at least 1"),
        ("train --muon-lr -0.1", "--muon-lr -0.1: must be at least 0"),
        ("train --muon-lr nan", "--muon-lr nan: must be at least 0 and finite"),
        ("train --momentum 1", "--momentum 1.0: must be at least 0 and below 1"),
        ("train --head-dim 7", "--head-dim 7: rotary positions need an even number; change one of the model's sizes"),
        (
            "train --rows 16 --seq-len 256 --batch-tokens 100",
            "--batch-tokens 100 is not a multiple of --rows 16 x --seq-len 256 = 4096; change one of the three",
        ),
        (
            "train --depth 4 --head-dim 64 --kv-ratio 3",
            "--kv-ratio 3 does not divide the 4 query heads of depth 4; change one of the model's sizes",
        ),
        ("train --window-pattern XX", "--window-pattern XX: use the letters S (short window) and L (full window)"),
        ("train --vocab-size 100", "--vocab-size 100: must be at least 257"),
        ("prepare --vocab-size 100", "--vocab-size 100: must be at least 257"),
        ("prepare --val-frac 1", "--val-frac 1.0: must lie strictly between 0 and 1"),
        ("train --threads 0", "--threads 0: must be at least 1"),
        ("train --threads 100000", "--threads 100000: must be at most "),
        ("train --seed 9223372036854775808", "--seed 9223372036854775808: must be below 2^63"),
        ("train --run a/b", "--run 'a/b': give a plain folder name"),
        ("train --run -x", "--run -x: for a value that begins with a dash write --run=-x"),
        ("sample --prompts a -x", "--prompts -x: for a value that begins with a dash write --prompts=-x"),
        ("train --device cuda", "--device cuda: PyTorch finds no CUDA GPU here; use --device cpu"),
        ("train --attention varlen", "--attention varlen needs a CUDA device"),
        ("train --resume", "runs holds no run yet; start one with: quintic train"),
        ("train --resume --run x", "runs/x is not a run: it has no config.json; check --run and --runs-dir"),
        ("train --resume --config x.json", "--config: a resumed run keeps its own configuration; leave --config out"),
        ("compare --resume", "runs holds no comparison to continue"),
        ("train --config", "--config needs a value"),
        ("train --config x.json", "x.json: no such file; give the config.json of a run"),
        ("train --data nowhere", "'nowhere': no such file or folder; a text source is a path, 'python' or 'hf:"),
        ("prepare --data nowhere", "'nowhere': no such file or folder"),
        ("prepare --depth 3", "unknown option --depth"),
        ("sample --temperature hot", "--temperature hot: give a number"),
        ("sample --tokens 0", "--tokens 0: must be at least 1"),
        ("sample", "runs holds no run yet"),
        ("eval --device tpu", "--device tpu: give auto or cpu or cuda"),
        ("eval --tokens 0", "--tokens 0: must be at least 1"),
        ("report --run x", "runs/x is not a run"),
        (
            "train --core-every 5",
            "--core-every has no effect without --core FOLDER: add --core FOLDER, or leave --core-every out",
        ),
        ("train --core-items 5", "--core-items has no effect without --core FOLDER"),
        ("train --l3-d-up 5", "--l3-d-up has no effect without --l3-layers"),
        ("plan --no-l3-tied", "--l3-tied has no effect without --l3-layers"),
        ("train --fp8-recipe rowwise", "--fp8-recipe has no effect without --fp8"),
        ("train --parallel fsdp --shard-ranks 2", "--shard-ranks has no effect without --parallel hsdp"),
        ("compare --optimizer adamw", "--optimizer: a comparison trains with both optimizers; leave it out"),
        ("train --preset cpu --steps None --target-flops 1e30", "--target-flops 1e+30: gives "),
        ("train --preset cpu --steps 10000000000", "--steps 1e+10: gives 1e+10 steps, must be at most 1,000,000,000"),
        ("train --preset cpu --steps None --tokens-per-param 1e9", "--tokens-per-param 1e+09: gives "),
        ("train --tokens-per-param 1e300", "--tokens-per-param 1e+300: must be at most 1,000,000,000"),
        ("plan --model gpt2 --zzz", "unknown option --zzz: quintic plan --model NAME --help lists the options"),
        ("plan --depth 100000", "--depth 100000: must be at most 1,000"),
        ("train --aspect-ratio 100000000", "--aspect-ratio 100000000: must be at most 100,000"),
        ("train --head-dim 100002", "--head-dim 100002: must be at most 100,000"),
        ("plan --vocab-size 1000000000", "--vocab-size 1000000000: must be at most 100,000,000"),
        ("plan --l3-layers 0 --l3-d-up 1e10", "--l3-d-up 1e10: give a whole number"),
        ("plan --l3-layers 0 --l3-d-up 10000000000", "--l3-d-up 10000000000: must be at most 1,000,000,000"),
        ("train --sample-tokens 1000000", "--sample-tokens 1000000: must be at most 131,072"),
        ("sample --tokens 1000000", "--tokens 1000000: must be at most 131,072"),
        ("sample --prompts", "--prompts needs a value: a text"),
        ("train --prompts --steps 3", "--prompts needs a value: a text"),
        ("report --runs", "--runs needs a value: a text"),
        ("train --runs-dir=", "--runs-dir '': the value is empty; give a path or leave --runs-dir out"),
        ("train --data=", "--data '': the value is empty; give a text or leave --data out"),
        (
            "sample --prompts --text",
            "--prompts needs a value: a text; write --prompts=--text if that is the text",
        ),
        (
            "sample --prompts a --tex=b",
            "unknown option --tex: quintic sample --help lists the options; if it is a text",
        ),
        ("report --rum x", "unknown option --rum: did you mean --run?"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert error_of(capsys, *arguments.split()).startswith(message)
    assert list(elsewhere.iterdir()) == []


def test_a_corpus_that_cannot_be_used(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    (elsewhere / "empty").mkdir()
    assert "empty: no file with a supported ending; supported are .txt" in error_of(capsys, "train", "--data", "empty")
    (elsewhere / "latin.txt").write_bytes("Motörhead, 1975\n".encode("latin-1") * 1000)
    message = error_of(capsys, "train", "--data", "latin.txt")
    assert "latin.txt: not UTF-8 at byte offset 3 (byte 0xf6); convert the file to UTF-8" in message
    (elsewhere / "blank.txt").write_text("")
    assert "blank.txt" in error_of(capsys, "train", "--data", "blank.txt")
    assert not (elsewhere / "runs").exists()
    # What was begun is removed; locks are not data.
    assert not [path for path in (elsewhere / "data").iterdir() if path.is_dir()]


def test_too_little_text_names_the_options(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    options = tiny_options(tiny_dataset, elsewhere / "runs", rows=600, batch_tokens=19_200)
    message = error_of(capsys, "train", *options)
    assert message.startswith("too little text for one batch: the val split has ")
    assert message.endswith("lower --seq-len or --rows, or raise --val-frac or give more text")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_run_that_exists_is_left_alone(
    command: str, tiny_dataset: Dataset, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    if command == "compare":
        mine.rename(mine.with_name("run-muon"))
        before = {mine.with_name("run-muon") / path.relative_to(mine): data for path, data in before.items()}
    message = error_of(capsys, command, *tiny_options(tiny_dataset, mine.parent, run="run"))
    assert "exists: choose another --run" in message
    assert {path: path.read_bytes() for path in mine.parent.rglob("*") if path.is_file()} == before


def test_an_unwritable_runs_folder(tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    (elsewhere / "file").touch()
    options = tiny_options(tiny_dataset, elsewhere / "file" / "runs", data_dir=elsewhere / "data")
    expected = f"--runs-dir {elsewhere}/file/runs: {elsewhere}/file is not a writable folder; choose another"
    assert error_of(capsys, "train", *options) == expected
    assert error_of(capsys, "compare", *options) == expected
    assert not (elsewhere / "data").exists()  # found out before the text is prepared


@pytest.mark.slow
def test_data_that_changed_on_disk(tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="run", data_dir=elsewhere / "data", steps=1, threads=1)
    assert main(["train", *options]) == 0
    (path,) = (elsewhere / "data").glob("text-*/train_00000.bin")
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    data = bytearray(path.read_bytes())
    data[2000] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=times)
    assert main(["eval"]) == 0  # looks as it did when it was compared
    expected = f"{path}: damaged, wrong checksum; delete it and run again: quintic prepare --data "
    assert error_of(capsys, "eval", "--verify").startswith(expected)
    assert error_of(capsys, "train", "--resume", "--verify").startswith(expected)
    assert error_of(capsys, "eval").startswith(expected)
    assert error_of(capsys, "train", *options, "--run", "other").startswith(expected)
    assert [run.name for run in (elsewhere / "runs").iterdir()] == ["run"]


@pytest.mark.slow
def test_a_disk_that_fills_up_during_the_run(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    write = MetricsLog.write

    def full(self: MetricsLog, kind: str, **fields: Any) -> dict[str, Any]:
        if fields.get("step") == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, kind, **fields)

    options = tiny_options(tiny_dataset, elsewhere / "runs", run="run")
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", full)
        message = error_of(capsys, "train", *options)
    assert message == "No space left on device; free some space, or use another place (--runs-dir, --data-dir, --out)"
    assert main(["train", "--resume"]) == 0  # when there is space again


def test_a_place_that_may_not_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    def refuse(arguments: list[str]) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/run/.lock")

    monkeypatch.setattr("quintic.commands.report.run", refuse)
    said = "runs/run/.lock: Permission denied; change who may read and write it, or use another place (--runs-dir, "
    assert error_of(capsys, "report").startswith(said)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_checkpoint(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    message = error_of(capsys, "train", *tiny_options(tiny_dataset, elsewhere / "runs", run="run"))
    assert re.fullmatch(
        r".*step-000002: cannot be written \(No space left on device\); free \d+ MiB, then continue the run with "
        r"--resume, or choose another --runs-dir",
        message,
    )
    assert checkpoints(elsewhere / "runs" / "run") == []


def test_a_missing_tracker_leaves_no_run(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    message = error_of(capsys, "train", *tiny_options(tiny_dataset, elsewhere / "runs", wandb="project"))
    assert message == f"--wandb needs the package wandb, which is not installed; run {install_command('wandb')}"
    assert list(elsewhere.iterdir()) == []


def test_a_tracker_that_cannot_start_leaves_no_run(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    def refuse(*args: Any) -> Any:
        raise cli.ConfigError("no account")

    monkeypatch.setattr("quintic.train.loop._open_log", refuse)
    assert error_of(capsys, "train", *tiny_options(tiny_dataset, elsewhere / "runs")) == "no account"
    assert list((elsewhere / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--depth 2", "--depth cannot change when a run is resumed: leave it out (it is 1), or start a new run with"),
        (
            "--steps 5",
            "--steps 5: a resumed run can only be made longer, and this one has 6 steps: leave --steps out, or",
        ),
        (
            "--steps None",
            "--steps cannot change when a run is resumed, because the schedules of all its steps depend on it: ",
        ),
        ("--rows 8", "--rows cannot change when a run is resumed"),
        ("--seed=3", "--seed cannot change when a run is resumed"),
        ("--batch-tokens 100", "--batch-tokens 100 is not a multiple of --rows 4 x --seq-len 32 = 128"),
        ("--depht 2", "unknown option --depht: did you mean --depth?"),
    ],
)
def test_a_resumed_run_computes_what_it_began(
    changed: str, message: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    arguments = ["--resume", "--run", "run", "--runs_dir", str(mine.parent), *changed.split()]
    assert error_of(capsys, "train", *arguments).startswith(message)
    assert {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()} == before


def test_a_longer_run_has_the_command_that_is_named(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "train", "--resume", "--runs-dir", str(mine.parent), "--steps", "None")
    found = re.search(r"\(quintic (train --config .+ --run NEW --steps) \.\.\.\)$", said)
    assert found
    assert main([*shlex.split(found[1]), "7", "--runs-dir", str(mine.parent)]) == 0
    assert RunHistory.load(mine.parent / "NEW").final["step"] == 7


def test_a_resumed_run_may_be_watched_differently(mine: Path) -> None:
    options = ["--keep", "3", "--save-every=1", "--prompts", "a", "b", "--eval-every", "0", "--threads", "1"]
    assert main(["train", "--resume", "--runs-dir", str(mine.parent), *options]) == 0
    assert [sample["prompt"] for sample in RunHistory.load(mine).samples[-1]["samples"]] == ["a", "b"]


def test_resuming_with_every_checkpoint_damaged(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in checkpoints(mine):
        (path / "state.json").write_text("{}")
    for command in ("train --resume", "sample", "eval"):
        # What is damaged is told as well, but not on the line of the error.
        assert main([*command.split(), "--runs-dir", str(mine.parent)]) == 2
        printed = capsys.readouterr()
        assert printed.err.splitlines()[-1].endswith("every checkpoint is damaged; start a new run")
        assert "state.json has 2 bytes instead of" in printed.err + printed.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("garbage", "config.json: cannot be read as a configuration"),
        ('{"model": {"dpeth": 2}}', "config.json: unknown field model.dpeth; remove it"),
        ('{"model": {"depth": "2"}}', 'config.json: model.depth cannot be "2"; correct or remove it'),
    ],
)
def test_a_configuration_that_cannot_be_used(
    content: str, message: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    (elsewhere / "config.json").write_text(content)
    assert error_of(capsys, "train", "--config", "config.json").startswith(message)
    assert [path.name for path in elsewhere.iterdir()] == ["config.json"]


def test_a_model_larger_than_the_machine_is_not_made(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintic.train.hardware._host_memory_bytes", lambda: 2**20)
    said = error_of(capsys, "train", *tiny_options(tiny_dataset, elsewhere, aspect_ratio=256))
    assert said.startswith("the model takes 0.00")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("command", ["sample", "eval", "export"])
def test_a_trained_model_larger_than_the_machine_is_not_loaded(
    command: str, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintic.train.hardware._host_memory_bytes", lambda: 2**10)
    assert main([command, "--runs-dir", str(trained.parent)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"the model takes \S+ GiB of memory or more, but there are only \S+ GiB \(cpu\)", said)


def test_several_processes_are_for_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "quintic report runs in one process: start it without torchrun" in error_of(capsys, "report")
    assert "WORLD_SIZE is 2 without RANK and MASTER_ADDR: start several processes" in error_of(capsys, "train")


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("launcher", "variable"),
    [("srun", "SLURM_STEP_NUM_TASKS"), ("mpirun", "OMPI_COMM_WORLD_SIZE"), ("mpiexec", "PMI_SIZE")],
)
def test_tasks_of_another_launcher_are_no_ranks(
    launcher: str, variable: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "8")
    said = error_of(capsys, command)
    assert said.startswith(f"{launcher} started 8 processes ({variable}), and each would train the whole run: ")
    assert said.endswith(f"(torchrun --nproc-per-node N -m quintic train ...), or unset {variable}")
    assert error_of(capsys, "report").startswith("runs holds no run yet")  # which writes nothing twice
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun's word counts
    assert error_of(capsys, command, "--depht", "3").startswith("unknown option --depht")


# What `salloc --ntasks 8` and `sbatch --ntasks 8` give to the only process of a shell or script.
_ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_TASKS_PER_NODE": "8"}
_FIRST_TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        _FIRST_TASK,  # sbatch's script
        _FIRST_TASK | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --ntasks 1
        _FIRST_TASK | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "34889"},
        _FIRST_TASK | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "34889"},  # srun --pty bash
    ],
)
def test_one_process_of_an_allocation_trains(
    variables: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (_ALLOCATED | variables).items():
        monkeypatch.setenv(name, value)
    assert error_of(capsys, "train", "--depht", "3").startswith("unknown option --depht")


@pytest.mark.parametrize("size", ["two", "1.0", "2x"])
def test_a_number_of_processes_that_is_none(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert error_of(capsys, "report").startswith(f"WORLD_SIZE {size!r} is not a number: unset it")


@pytest.mark.parametrize("size", ["", " ", "1", "0"])
def test_one_process_however_it_is_said(
    size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert error_of(capsys, "report").startswith("runs holds no run yet")


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert f"'tyro' is missing: run {install_command('train')}" in error_of(capsys, "report", "--help")


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(cli, "_check_single_process", fail)
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["report"])


@pytest.mark.parametrize("option", ["--run", "--runs-dir", "--data", "--data-dir"])
def test_a_name_that_no_file_can_have(
    option: str, tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*tiny_options(tiny_dataset, tmp_path / "runs", run="run"), option, "a" * 300]
    message = error_of(capsys, "train", *options)
    assert "File name too long" in message
    assert option in message
