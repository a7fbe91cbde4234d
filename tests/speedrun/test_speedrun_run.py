"""The smallest speedrun through every transition: the same on one and on two ranks, with and without warm-up."""

import functools
import gc
import itertools
import json
import math
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from harness import ON_GPUS, run
from host_passes import capture_on_the_host

from quintic.cli import main
from quintic.errors import ConfigError, DataError, DivergedError
from quintic.kernels.attention import flash
from quintic.kernels.graphs import CapturedPasses
from quintic.report.history import METRICS_FILE, read_metrics
from quintic.speedrun.presets import BYTES_BOS, PRESETS, SpeedrunOptions, preset, switches, without
from quintic.speedrun.race import Race
from quintic.speedrun.recipe import build_optimizer, set_rates
from quintic.speedrun.run import train
from quintic.speedrun.shards import open_data, write_shard
from quintic.speedrun.stream import chunk_stream
from quintic.train.config import RunConfig
from quintic.train.distributed import SINGLE_PROCESS, Ranks
from quintic.train.hardware import Hardware, choose_hardware

TINY = preset("speedrun-tiny")
# Scoring the whole validation text takes as long as the steps between.
TRACK = replace(TINY.track, validation_tokens=2 * TINY.track.validation_chunk)
# Two lengths of training and one of validation, with whatever windows.
NUM_GRAPHS = 3
HARDWARE = choose_hardware(RunConfig(device="cpu", dtype="float32", attention="sdpa"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training shards and one for validation, of words in random order, as bytes."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    words = [b"model ", b"weight ", b"step ", b"loss.\n", b"of ", b"the "]
    for number, name in enumerate(("a_train_1", "a_train_2", "a_val_0")):
        tokens: list[int] = []
        while len(tokens) < (7000, 9000, 5000)[number]:
            tokens.append(BYTES_BOS)
            for word in rng.choice(words, size=rng.integers(3, 60)):
                tokens += word
        write_shard(folder / f"{name}.bin", tokens)
    return folder


def race_of(shards: Path, ranks: Ranks = SINGLE_PROCESS, hardware: Hardware = HARDWARE, **options: Any) -> Race:
    data = open_data(SpeedrunOptions(data=str(shards), tokenizer=None), TINY.model)
    return Race(TRACK, TINY.model, data, hardware, ranks=ranks, seed=3, **options)


def losses_of(folder: Path) -> list[tuple[str, int, float]]:
    records = read_metrics(folder / METRICS_FILE)
    return [(r["kind"], r["step"], r["loss"]) for r in records if r["kind"] in ("train", "eval", "final")]


def course(rank: int, world_size: int, shards: Path, run_dir: Path, warm_up: bool) -> tuple[float, float]:
    """Train, several ranks on GPUs if tests run there; return the validation loss and a sum of all weights."""
    ranks = SINGLE_PROCESS
    if world_size > 1:
        ranks = Ranks(rank=rank, size=world_size, local_rank=rank, local_size=world_size, group=dist.group.WORLD)
    hardware = choose_hardware(RunConfig(device="cuda", compile=False)) if ON_GPUS and world_size > 1 else HARDWARE
    race = race_of(shards, ranks, hardware, capture=hardware is not HARDWARE)
    result = train(race, run_dir, facts={}, warm_up=warm_up)
    return result["loss"], sum_of_weights(race)


def sum_of_weights(race: Race) -> float:
    return float(sum(param.detach().double().abs().sum() for param in race.model.parameters()))


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float]]:
    """The folder of a run without warm-up on one rank, and what `course` returned."""
    folder = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return folder, course(0, 1, shards, folder, warm_up=False)
    finally:
        torch.set_num_threads(threads)


def test_the_run_goes_through_every_stage_and_learns(alone) -> None:
    folder, (loss, _) = alone
    records = read_metrics(folder / METRICS_FILE)
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["stage"] for record in steps] == [0] * 7 + [1] * 7 + [2] * 7 + [3] * 3
    assert steps[-1]["tokens"] == 7 * 256 + 7 * 512 + 10 * 768
    assert [record["step"] for record in records if record["kind"] == "eval"] == [0, 8, 16, 24]
    assert records[-1]["kind"] == "final"
    assert records[-1]["loss"] == loss
    assert loss < 0.65 * records[1]["loss"]
    assert records[-1]["bpb"] == pytest.approx(loss / np.log(2), rel=0.05)  # of bytes, and few document starts
    assert steps[-1]["epoch"] > 0  # the shards came again
    assert steps[13]["lr"]["vo_bank"] == pytest.approx(0.023 * TINY.track.at(13).rate)
    assert steps[13]["momentum"] == pytest.approx(TINY.track.at(13).momentum)
    run_record = records[0]
    assert len(run_record["code"]) == 64
    assert run_record["versions"]["torch"] == torch.__version__
    assert run_record["model"]["prefix_tokens"] is False  # no byte begins with another
    page = " ".join((folder / "report.html").read_text(encoding="utf-8").split())
    assert (
        "a speedrun's training loss also counts, with weights of their own, the tokens after the next one: it" in page
    )
    assert TINY.options.tokenizer is None


def test_the_log_has_the_fields_that_are_documented(alone) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    table = page.read_text("utf-8").split("```")[1]
    rows = re.findall(r"^(\w+) +(.+(?:\n {4}.+)*)", table.removeprefix("text\n"), re.MULTILINE)
    documented = {kind: set(re.findall(r"\w+", fields)) for kind, fields in rows}
    assert documented.keys() == {"run", "train", "eval", "core", "sample", "resume", "rollback", "final"}
    for record in read_metrics(alone[0] / METRICS_FILE):
        assert record.keys() - {"kind", *documented[record["kind"]]} == set()


@pytest.mark.slow
def test_windows_rotary_and_ties_are_those_of_the_last_stage(shards: Path, tmp_path: Path) -> None:
    race = race_of(shards)
    before = race.model.rotary.frequencies.clone()
    embedding_head = []
    for number in range(TINY.track.steps):
        race.train_step(number, race.stream)
        embedding_head.append(bool((race.model.inputs.embedding == race.model.head.mT).all()))
    race.stream.close()
    # Step 15 is the first odd one of the third stage: after it they part, and AdamW's next step is the 17th.
    assert embedding_head == [True] * 17 + [False] * 7
    assert race.model.rotary.windows == (48, 104)
    grown = race.model.rotary.frequencies.clone()
    assert not torch.equal(before, grown)
    race.evaluate(TINY.track.steps)
    assert race.model.rotary.windows == (48, 160)
    assert torch.equal(race.model.rotary.frequencies, grown)


@pytest.mark.parametrize(("untie_at", "parted"), [(2, 5), pytest.param(8, 8, marks=pytest.mark.slow)])
def test_head_and_embedding_part_where_they_are_told_to(untie_at: int, parted: int, shards: Path) -> None:
    """Untied after step 3, with AdamW's next step the fifth; or not within the eight steps."""
    data = open_data(SpeedrunOptions(data=str(shards), tokenizer=None), TINY.model)
    track = replace(TRACK.scaled(8), untie_at=untie_at)
    with closing(Race(track, TINY.model, data, HARDWARE, seed=3)) as race:
        race.warm_up()
        same = []
        for number in range(8):
            race.train_step(number, race.stream)
            same.append(torch.equal(race.model.inputs.embedding, race.model.head.mT))
    assert same == [number < parted for number in range(8)]


@pytest.mark.slow
def test_a_warm_up_leaves_no_trace(alone, shards: Path, tmp_path: Path, same_threads: None) -> None:
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    assert course(0, 1, shards, tmp_path, warm_up=True) == alone[1]
    assert losses_of(tmp_path) == losses_of(alone[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_two_ranks_have_the_losses_of_one_after_a_warm_up(alone, shards: Path, tmp_path: Path) -> None:
    found = run(course, 2, shards, tmp_path, True, timeout=240)
    assert found[0] == found[1]  # the same weights everywhere
    for one, two in zip(losses_of(alone[0]), losses_of(tmp_path), strict=True):
        assert one[:2] == two[:2]
        assert two[2] == pytest.approx(one[2], abs=0.1 if ON_GPUS else 5e-5)  # GPUs compute in bfloat16


@torch.library.custom_op("quintic_test::values", mutates_args=())
def values_of_a_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, window: int
) -> torch.Tensor:
    assert 0 < window <= int(starts[-1])
    return v.clone()


@values_of_a_window.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(q)


values_of_a_window.register_autograd(
    lambda ctx, grad: (torch.zeros_like(grad), torch.zeros_like(grad), grad.clone(), None, None, None)
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
def test_the_warm_up_compiles_what_all_stages_need_and_little_twice(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is traced is in question here, not the code that is made of it, nor what attention computes. On a GPU it is
    # an operator that takes its window as a number.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flash, "_attend_varlen", values_of_a_window)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    race = race_of(shards, hardware=replace(HARDWARE, attention="varlen", compile=True))
    race.warm_up()
    assert counters["stats"]["unique_graphs"] == NUM_GRAPHS
    steps = {step for start in TINY.track.starts for step in (start - 1, start, start + 1)}
    for number in sorted(steps & set(range(TINY.track.steps))):
        race.train_step(number, race.stream)
        race.evaluate(number, batches=1)
    race.evaluate(TINY.track.steps, batches=1)
    race.close()
    assert counters["stats"]["unique_graphs"] == NUM_GRAPHS
    assert not counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)  # compiles four stages, perhaps beside fifteen other workers
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler about itself
@pytest.mark.parametrize("captures", [False, True])
def test_it_learns_compiled_on_a_gpu(captures: bool, alone, shards: Path, tmp_path: Path) -> None:
    hardware = choose_hardware(RunConfig(device="cuda"))
    assert hardware.compile
    race = race_of(shards, hardware=hardware, capture=captures)
    result = train(race, tmp_path, facts={})
    assert result["loss"] == pytest.approx(alone[1][0], abs=0.1)  # of float32 on the CPU


@pytest.mark.slow
def test_captured_passes_have_the_weights_of_others(
    alone, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_threads: None
) -> None:
    torch.set_num_threads(1)
    captured = capture_on_the_host(monkeypatch)
    race = race_of(shards)
    race.passes = CapturedPasses(race._make_pass)
    tables = {race.model.rotary.tables(1, torch.float32)[0].data_ptr()}
    race.warm_up()
    assert len(captured) == 4  # one for each stage, whose windows differ
    result = train(race, tmp_path, facts={}, warm_up=False)
    assert len(captured) == 4
    assert tables == {race.model.rotary.tables(1, torch.float32)[0].data_ptr()}
    assert [graph.make for graph in captured] == [None] * 4  # closed
    assert (result["loss"], sum_of_weights(race)) == alone[1]
    assert losses_of(tmp_path) == losses_of(alone[0])


def test_the_optimizer_has_the_races_rates() -> None:
    from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT

    with torch.device("meta"):
        model = SpeedrunGPT(SpeedrunConfig(), attention="sdpa", dtype=torch.bfloat16)
    groups = {group["name"]: group for group in build_optimizer(model).param_groups}
    names = [name for group in groups.values() for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    # role: (rate, decay, betas), as products of the race's defaults and multipliers
    expected = {
        "head": (0.008, 0.75, (0.5, 0.95)),
        "embedding": (0.008, 0.75, (0.5, 0.95)),
        "bigram": (0.6, 0.025, (0.75, 0.95)),
        "value_embedding": (0.6, 0.025, (0.75, 0.95)),
        "value_gates": (0.008, 0.005, (0.9, 0.99)),
        "scalars": (0.04, 0.0, (0.9, 0.99)),
        "smear_gate": (0.00008, 0.0, (0.9, 0.99)),
        "residual_scales": (0.04, 0.0, (0.9, 0.95)),
        "output_scales": (0.008, 0.0, (0.9, 0.95)),
        "connection_weights": (0.002, 0.005, (0.9, 0.99)),
        "connection_bias": (0.002, 0.0, (0.9, 0.99)),
        "gate_weights": (0.0008, 0.005, (0.9, 0.99)),
        "gate_bias": (0.0008, 0.0, (0.9, 0.99)),
    }
    for role, (lr, decay, betas) in expected.items():
        group = groups.pop(role)
        assert (group["lr"], group["weight_decay"]) == pytest.approx((lr, decay)), role
        found = [group[name] for name in ("algorithm", "betas", "step_every", "cautious", "eps", "master")]
        assert found == ["adamw", betas, 2, "strict", 1e-10, None], role
        assert group["decay_coupling"] == "lr_squared", role
    shapes = {"qk_bank": (256, 60), "vo_bank": (768, 20), "mlp_bank": (3072, 22)}
    for role, (rows, matrices) in shapes.items():
        group = groups.pop(role)
        assert (group["lr"], group["weight_decay"], group["normalize_beta"]) == (0.023, 1.2, 0.9)
        names = ("scale_decay", "cautious", "master", "decay_coupling", "normalize", "adjust_lr")
        assert [group[name] for name in names] == [True, True, "mantissa", "lr_squared", "neuron", "spectral"]
        assert group["view"].num_rows == rows
        assert group["params"][0].shape == (rows * matrices, 768)
    assert not groups
    # 4 on what goes out of the hidden layer, 2 on what goes in: the shape's factor and the matrix' own
    optimizer = build_optimizer(model)
    mlp = next(group for group in optimizer.param_groups if group["name"] == "mlp_bank")
    assert mlp["lr_multipliers"] == (1.0, 2.0) * 11
    set_rates(optimizer, PRESETS["speedrun"].track.at(500))
    head = next(group for group in optimizer.param_groups if group["name"] == "head")
    assert head["lr"] == pytest.approx(0.008 * 1.52)
    assert mlp["momentum"] == 0.95


def test_the_gradient_is_that_of_the_sum_over_the_chunks(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = race_of(shards)
    settings, count = TINY.track.at(0), TINY.track.chunks
    with closing(chunk_stream(race.data, replace(TINY.track, pass_tokens=1), itertools.count())) as stream:
        chunks = [next(stream) for _ in range(count)]
    race.model.rotary.set_windows(*settings.windows)
    total = sum(
        race.model(chunk.inputs, chunk.targets, loss_weights=torch.tensor(settings.loss_weights)) for chunk in chunks
    )
    (expected,) = torch.autograd.grad(total / TINY.track.chunks, [race.model.qk_bank])
    found = []
    monkeypatch.setattr(race.optimizer, "step", lambda: found.append(race.model.qk_bank.grad.clone()))
    assert TINY.track.passes(settings, 1) == 1  # both chunks together
    loss, _ = race.train_step(0, race.stream)
    race.stream.close()
    torch.testing.assert_close(found[0], expected)
    tokens = sum(len(chunk.inputs) for chunk in chunks)
    assert float(loss) == pytest.approx(float(total.detach()) / tokens)


def test_a_race_that_nobody_closed_ends_with_its_last_reference(shards: Path) -> None:
    race, others = race_of(shards), {*threading.enumerate()}
    next(race.stream)
    threads, alive = {*threading.enumerate()} - others, weakref.ref(race.stream)
    assert len(threads) == 2
    del race
    gc.collect()
    assert alive() is None
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_the_clock_runs_in_steps_alone(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race, now = race_of(shards), 0.0

    def lasting(seconds: float, result: object) -> Callable[..., object]:
        def work(*_: object) -> object:
            nonlocal now
            now += seconds
            return result

        return work

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(race, "warm_up", lasting(1000.0, None))
    monkeypatch.setattr(race, "evaluate", lasting(100.0, (1.0, None)))
    monkeypatch.setattr(race, "train_step", lasting(2.0, (torch.tensor(1.0), 0)))
    result = train(race, tmp_path, facts={})
    assert result["seconds"] == 48.0
    records = read_metrics(tmp_path / METRICS_FILE)
    assert records[0]["warmup_seconds"] == 1000.0
    assert [record["seconds"] for record in records if record["kind"] == "train"] == [*range(2, 50, 2)]
    assert [record["seconds"] for record in records if record["kind"] == "eval"] == [0.0, 16.0, 32.0, 48.0]
    assert {record["times_ms"]["step"] for record in records if record["kind"] == "train"} == {2000.0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_has_logged_its_steps(
    number: signal.Signals, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those since its last validation were lost."""
    race, handlers = race_of(shards), [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]

    def train_step(step: int, stream: object) -> tuple[Tensor, int]:
        if step == 10:  # the eleventh
            signal.raise_signal(number)
        return torch.tensor(float(step)), 0

    monkeypatch.setattr(race, "evaluate", lambda *_: (1.0, None))
    monkeypatch.setattr(race, "train_step", train_step)
    with pytest.raises(KeyboardInterrupt):
        train(race, tmp_path, facts={}, warm_up=False)
    assert [step for kind, step, _ in losses_of(tmp_path) if kind == "eval"] == [0, 8]
    trained = [(step, loss) for kind, step, loss in losses_of(tmp_path) if kind == "train"]
    assert trained == [(step + 1, float(step)) for step in range(11)]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_loss_that_is_not_finite_ends_the_run(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = race_of(shards)
    monkeypatch.setattr(race, "evaluate", lambda number: (math.nan, None))
    with pytest.raises(DivergedError, match="the validation loss of step 0 is nan: it diverged"):
        train(race, tmp_path, facts={}, warm_up=False)


# -------------------------------------------------------------------------------------------------- the command line


def options_for(shards: Path, runs_dir: Path, *more: str) -> list[str]:
    fixed = [f"--data={shards}", f"--runs-dir={runs_dir}", "--device=cpu", "--dtype=float32", "--threads=1"]
    return ["train", "--preset", "speedrun-tiny", *fixed, "--no-warm-up", *more]


@pytest.mark.slow
@pytest.mark.usefixtures("same_threads", "elsewhere")
def test_the_command_runs_the_preset_without_features(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_8_bits = replace(TINY.model, fp8_head=True, fp8_mlp=True)
    monkeypatch.setitem(PRESETS, "speedrun-tiny", replace(TINY, model=in_8_bits))
    more = ["--steps", "8", "--without", "smear", "bigram-hash", "tied", "--run", "x", "--val-tokens", "1024"]
    more += ["--pass-tokens", "128"]
    assert main(options_for(shards, tmp_path / "runs", *more)) == 0
    printed = capsys.readouterr().out
    assert "; without 8-bit products, which need a GPU of compute capability 8.9; 8 steps" in printed
    assert "step 8/8  validation " in printed
    assert "step 3/8  train time " in printed
    record = read_metrics(tmp_path / "runs" / "x" / METRICS_FILE)[0]
    assert record["model"]["fp8_head"] is record["model"]["fp8_mlp"] is False
    assert record["model"]["smear"] is record["model"]["bigram_hash"] is record["model"]["tied"] is False
    assert record["config"]["without"] == ["smear", "bigram-hash", "tied"]
    assert record["track"]["validation_tokens"] == 1024
    assert record["track"]["pass_tokens"] == 128
    assert "--preset speedrun-tiny" in record["command"]
    assert main(["report", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert "0.0" in json.dumps(record["config"]) or record["config"]["seed"] == 1337
    capsys.readouterr()
    assert main(options_for(shards, tmp_path / "runs", *more)) == 2
    assert "x exists: choose another --run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--depth", "3"], "--depth does not work with --preset speedrun-tiny, whose model and schedule are fixed"),
        (["--resume"], "--resume does not work with --preset speedrun-tiny"),
        (["--muon-lr=1"], "--muon-lr does not work with --preset speedrun-tiny"),
        (["--without", "smears"], "--without smears: not a feature of the model; choose from attention-free-layer,"),
        (["--steps", "3"], "--steps 3: must be at least 8, for the 4 stages"),
        (["--val-tokens", "1001"], "--val-tokens 1001: must be a multiple of 500 tokens x 1 ranks, such as 1000"),
        (["--tokenizer", "nope"], "--tokenizer does not work with --preset speedrun-tiny, whose tokens are bytes"),
        (["--stepz", "3"], "unknown option --stepz: did you mean --steps?"),
        (["--shards", "0"], "--shards 0: must be at least 1"),
        (["--pass-tokens", "0"], "--pass-tokens 0: must be at least 1"),
        (["--steps", "1000001"], "--steps 1000001: must be at most 1,000,000"),
    ],
)
@pytest.mark.usefixtures("same_threads", "elsewhere")
def test_wrong_options_are_refused_by_name(
    more: list[str], message: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options_for(shards, tmp_path / "runs", *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("same_threads", "elsewhere")
def test_a_run_that_fails_in_the_warm_up_leaves_no_folder(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shard(tmp_path / "train.bin", [BYTES_BOS, 1, 2])
    (tmp_path / "val.bin").write_bytes((shards / "a_val_0.bin").read_bytes())
    options = options_for(tmp_path, tmp_path / "runs", "--val-tokens", "1024")
    options.remove("--no-warm-up")
    assert main(options) == 2
    assert (
        "no training shard fills a chunk of 128 tokens with documents of at most 56 tokens" in capsys.readouterr().err
    )
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.usefixtures("same_threads", "elsewhere")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--run", "x"], "x exists: choose another --run"),
        (["--runs-dir", "file"], "file is not a writable folder; choose another"),
    ],
)
def test_a_run_that_cannot_be_made_is_refused_before_its_text_is_sought(
    more: list[str], message: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / METRICS_FILE).touch()
    (tmp_path / "file").touch()
    assert main(options_for(shards / "none", tmp_path / "runs", *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("elsewhere")
def test_an_unknown_speedrun_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "speedruns"]) == 2
    assert "--preset speedruns: unknown; choose speedrun or speedrun-tiny" in capsys.readouterr().err


def test_every_feature_can_be_left_out() -> None:
    whole = preset("speedrun").model
    for name in switches():
        changed = without(whole, [name])
        assert getattr(changed, name.replace("-", "_")) in (False, 0)
        assert changed != whole
    assert {"fp8-head", "fp8-mlp"} <= set(switches())
    with pytest.raises(ConfigError, match="--without heads: not a feature"):
        without(whole, ["heads"])


def test_a_race_without_vocabulary_says_what_to_do(shards: Path) -> None:
    sizes = replace(TINY.model, bos_id=255, prefix_tokens=True)
    data = open_data(SpeedrunOptions(data=str(shards), tokenizer=None), sizes)
    with pytest.raises(ConfigError, match=r"--tokenizer: needed for .* leave the feature out \(--without prefix-tok"):
        Race(TINY.track, sizes, data, HARDWARE)
    with pytest.raises(DataError, match="3 ranks do not divide the 2 chunks"):
        Race(TINY.track, sizes, data, HARDWARE, ranks=Ranks(size=3))
