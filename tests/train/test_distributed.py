"""Several ranks train one run: the same curve in every layout, one log, one checkpoint that any layout goes on from.

The reference is one process that was never stopped. Real processes talk through gloo.
"""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from tiny_runs import course, start, tiny_config, tiny_options
from torch import Tensor
from torch.distributed.run import get_args_parser

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from harness import DEVICE, run

import quintic
import quintic.train.start
import quintic.train.trainer
from quintic.commands.options import StartOptions
from quintic.commands.parsing import options_of
from quintic.commands.train import run as run_command
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError, DataError, DivergedError, OtherRankError, QuinticError
from quintic.launch import Launch, launched
from quintic.model.gpt import GPTConfig
from quintic.report.history import METRICS_FILE, read_metrics
from quintic.train.checkpoint import (
    Background,
    checkpoints,
    load_model_weights,
    newest_checkpoint,
    read_state,
    save_checkpoint,
)
from quintic.train.config import Config, ParallelName
from quintic.train.distributed import SINGLE_PROCESS, Parallelism, Ranks, _agree_on_attempt, micro_batch_rows
from quintic.train.loop import Interrupted, train
from quintic.train.recipe import build_model, build_optimizer, model_config
from quintic.train.runs import create_run
from quintic.train.saved_config import load_config
from quintic.train.trainer import Trainer

pytestmark = pytest.mark.distributed

ON_MAC = sys.platform == "darwin"

# 24 rows a step: 2 at once on 1, 2, 3, 4 or 6 ranks.
SIZES = {"batch_tokens": 768, "rows": 2, "depth": 2, "save_every": 0, "eval_every": 3, "rms_every": 2}


def ranks_of(rank: int, world_size: int) -> Ranks:
    """The ranks of the harness, as if on hosts of two."""
    local = min(2, world_size)
    group = dist.group.WORLD
    return Ranks(rank=rank, size=world_size, local_rank=rank % local, local_size=local, group=group)


def segment(rank: int, world_size: int, config: Config, text: Path, run_dir: Path, stop_after: int | None) -> str:
    """Train until a stop request, which the last rank alone gets, or to the end; returns how it ended."""
    make_step = Trainer.train_step

    def train_step(self: Trainer) -> dict[str, Any]:
        record = make_step(self)
        if self.step == stop_after and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return record

    Trainer.train_step = train_step  # type: ignore[method-assign]  # in this process alone
    ranks = SINGLE_PROCESS if world_size == 1 else ranks_of(rank, world_size)
    try:
        train(
            config,
            Dataset.open(text),
            run_dir,
            resume=bool(checkpoints(run_dir)),
            command="test",
            ranks=ranks,
        )
    except Interrupted:
        return "stopped"
    return "finished"


def assert_same_course(found: Path, expected: Path, *, rel: float = 1e-5) -> None:
    """Compare what two runs logged: every number to the rounding of sums."""
    pairs = list(zip(course(found), course(expected), strict=True))
    assert len(pairs) > 5
    for record, other in pairs:
        assert record.keys() == other.keys()
        for name, value in other.items():
            if value is None:
                assert record[name] is None
            elif name not in ("kind", "samples"):
                is_rms = name in ("grad_rms", "update_rms")
                tolerance = {"rel": 200 * rel} if is_rms else {"rel": rel, "abs": 1e-8}
                assert record[name] == pytest.approx(value, **tolerance), (record["kind"], record.get("step"), name)


def chain(layouts: list[tuple[str, int]], dataset: Dataset, folder: Path, *, rel: float = 1e-5, **changes: Any) -> Path:
    """Train two steps in each layout, in the last one to the end, and compare with one process; return its folder."""
    steps = 2 * len(layouts)
    config = tiny_config(dataset, folder, run="whole", steps=steps, **SIZES, **changes)
    whole = create_run(config)
    train(config, dataset, whole, resume=False, command="test")
    run_dir = None
    for number, (parallel, world_size) in enumerate(layouts, start=1):
        options = {"run": "moved", "steps": steps, "parallel": parallel, "shard_ranks": 2, **SIZES, **changes}
        config = tiny_config(dataset, folder, **options)
        run_dir = create_run(config) if run_dir is None else run_dir
        stop_after = 2 * number if number < len(layouts) else None
        ends = run(segment, world_size, config, dataset.path, run_dir, stop_after, timeout=100)
        assert ends == ["finished" if stop_after is None else "stopped"] * world_size
        assert checkpoints(run_dir)[0].name == f"step-{2 * number:06d}"
        assert sorted(path.name for path in (run_dir / "checkpoints").glob(".*")) == []
    assert run_dir is not None
    assert_same_course(run_dir, whole, rel=rel)
    records = read_metrics(run_dir / METRICS_FILE)
    kinds = [record["kind"] for record in records]
    assert records[0]["ranks"] == layouts[0][1]
    assert (kinds.count("run"), kinds.count("resume"), kinds.count("final")) == (1, len(layouts) - 1, 1)
    return whole


@pytest.mark.slow
def test_a_run_goes_on_with_more_ranks_and_fewer(tiny_dataset: Dataset, tmp_path: Path) -> None:
    chain([("sharded", 1), ("sharded", 2), ("fsdp", 2), ("sharded", 1)], tiny_dataset, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([("sharded", 2)], id="two"),
        pytest.param([("ddp", 2), ("fsdp", 2), ("tp", 2), ("hsdp", 4)], id="all"),
    ],
)
def test_ranks_clip_by_the_norm_of_all(layouts: list[tuple[str, int]], tiny_dataset: Dataset, tmp_path: Path) -> None:
    whole = chain(layouts, tiny_dataset, tmp_path, optimizer="adamw", clip_norm=0.25)
    norms = [record["grad_norm"] for record in course(whole) if record["kind"] == "train"]
    assert len(norms) == 2 * len(layouts)
    assert min(norms) > 0.26  # all of them are clipped


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bfloat16_weights_go_on_in_every_layout(tiny_dataset: Dataset, tmp_path: Path) -> None:
    # Gradients are rounded to bfloat16 before ranks add them up.
    layouts = [("sharded", 2), ("fsdp", 2), ("tp", 2), ("ddp", 2)]
    chain(layouts, tiny_dataset, tmp_path, rel=1e-3, weights="mantissa", dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layouts",
    [
        [("ddp", 2), ("tp", 2), ("sharded", 3), ("ddp", 3)],
        [("hsdp", 4), ("sharded", 4), ("tp", 4), ("fsdp", 3), ("hsdp", 2)],
    ],
)
def test_a_run_goes_on_in_every_layout(layouts: list[tuple[str, int]], tiny_dataset: Dataset, tmp_path: Path) -> None:
    chain(layouts, tiny_dataset, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "size"), [("tp", 2), ("tp", 4), ("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_a_run_ends_with_the_samples_of_one_process(
    parallel: str, size: int, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    whole = chain([(parallel, size)], tiny_dataset, tmp_path)
    samples = [course(run_dir)[-1]["samples"] for run_dir in (tmp_path / "moved", whole)]
    assert samples[0] == samples[1]
    assert any(sample["text"] for sample in samples[0])


# -- through torchrun -------------------------------------------------------------------------------------------------


def torchrun(*arguments: str, folder: Path, size: int = 2, launcher: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """Start torchrun in a folder, its own options first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if ON_MAC else "lo"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *launcher, "-m", "quintic"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *arguments], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process: "subprocess.Popen[str]", code: int = 0) -> tuple[str, str]:
    """Wait for a process; return what it printed."""
    try:
        out, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == code, errors
    return out, errors


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return the weights of a run's newest checkpoint, read by one process."""
    config = load_config(run_dir / "config.json")
    checkpoint = newest_checkpoint(run_dir, message=print)
    dataset = Dataset.open(read_state(checkpoint)["dataset"]["path"])
    sizes = model_config(config, vocab_size=dataset.vocab_size, bos_id=dataset.bos_id)
    model = build_model(sizes, device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=5)
    load_model_weights(checkpoint, model)
    return model.state_dict()


def ranks_under(launcher: int) -> list[int]:
    """Return the processes that torchrun has started, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in children:
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks |= {int(text[5:]): int(child) for text in variables if text.startswith(b"RANK=")}
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_steps(run_dir: Path, steps: int, process: "subprocess.Popen[str]") -> None:
    """Wait until a run has logged so many steps."""
    deadline = time.monotonic() + 100
    path = run_dir / METRICS_FILE
    while not path.exists() or sum(record["kind"] == "train" for record in read_metrics(path)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)


def test_every_option_of_training_survives_torchrun() -> None:
    parser = get_args_parser()
    for option in [*options_of(Config, StartOptions), "--name"]:
        if option == "--run":
            continue  # what --name is for
        arguments = ["-m", "quintic", "train", option, "x", f"{option}=x"]
        parsed = parser.parse_args(["--nproc-per-node", "2", *arguments])
        assert parsed.training_script_args == arguments[2:], option


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_then_one_then_three(tiny_dataset: Dataset, tmp_path: Path) -> None:
    options = tiny_options(tiny_dataset, tmp_path, steps=20, batch_tokens=768, rows=4, depth=2, save_every=6, keep=9)
    out, errors = ended(torchrun("train", *options, "--name", "run", folder=tmp_path))
    assert out.count("step 20/20 (100.0 %)") == 1
    assert "Computing on 2 ranks (sharded)" in out
    assert "quintic" not in errors
    run_dir = tmp_path / "run"
    whole = course(run_dir)
    assert [path.name for path in checkpoints(run_dir)] == [f"step-{step:06d}" for step in (20, 18, 12, 6)]
    resume = ["train", "--resume", "--runs-dir", str(tmp_path)]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert ended(start([*resume, "--run", "run", "--resume-step", "12"], elsewhere))
    for found, expected in zip(course(run_dir), whole, strict=True):
        if "loss" in found:
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    ended(torchrun(*resume, "--name=run", "--resume-step=6", "--parallel=fsdp", folder=elsewhere, size=3))
    for found, expected in zip(course(run_dir), whole, strict=True):
        if "loss" in found:
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert ended(start(["eval", "--run", "run", "--runs-dir", str(tmp_path)], elsewhere))[0].count("bits per byte") > 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_captured_passes_of_two_gpus_train_alike(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """Graphs add to the gradients that they were captured with, whatever clipping and averaging do in between."""
    losses: dict[bool, list[float]] = {}
    for capture in (False, True):
        options = tiny_options(
            tiny_dataset, tmp_path, steps=12, device="cuda", dtype="bfloat16", compile=False, head_dim=64,
            clip_norm=0.5, rms_every=2, on_spike="skip", capture=capture,
        )  # fmt: skip
        ended(torchrun("train", *options, "--name", str(capture), folder=tmp_path))
        records = read_metrics(tmp_path / str(capture) / METRICS_FILE)
        losses[capture] = [record["loss"] for record in records if record["kind"] in ("train", "eval")]
    assert losses[True] == pytest.approx(losses[False], rel=2e-3)
    assert losses[True][-1] < losses[True][0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find the ranks")
def test_a_rank_that_is_killed_in_a_step_costs_no_bit(tiny_dataset: Dataset, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 60, "save_every": 7, "eval_every": 0, "depth": 2}
    options = tiny_options(tiny_dataset, tmp_path, **changes)
    launcher = ("--max-restarts", "2", "--monitor-interval", "0.1")
    ended(torchrun("train", *options, "--name", "whole", folder=tmp_path, launcher=launcher))
    # Without a name, the run is called after torchrun's id.
    launcher += ("--rdzv-id", "job 7", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    killed = torchrun("train", *options, folder=tmp_path, launcher=launcher)
    run_dir = tmp_path / "torchrun-job-7"
    for steps, rank in ((10, 1), (30, 0)):
        wait_for_steps(run_dir, steps, killed)
        os.kill(ranks_under(killed.pid)[rank], signal.SIGKILL)
        deadline = time.monotonic() + 100
        while sum(record["kind"] == "resume" for record in read_metrics(run_dir / METRICS_FILE)) < (1 if rank else 2):
            assert time.monotonic() < deadline
            select.select([], [], [], 0.05)
    ended(killed)
    assert course(run_dir) == course(tmp_path / "whole")
    found, expected = weights(run_dir), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find the ranks")
def test_ctrl_c_among_the_last_tasks_of_core_ends_all_ranks(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """Each rank stops at once, wherever it is among its tasks, and none waits for the others."""
    (tmp_path / "core").mkdir()
    item = {"query": "def", "choices": ["model", "zyx zyx"], "gold": 1}
    (tmp_path / "core" / "copa.jsonl").write_text((json.dumps(item) + "\n") * 20_000)
    core = ("--core", str(tmp_path / "core"), "--core-items", "20000")
    process = torchrun("train", *tiny_options(tiny_dataset, tmp_path), *core, "--name", "run", folder=tmp_path)
    log = tmp_path / "run" / METRICS_FILE
    while not log.exists() or [one["kind"] for one in read_metrics(log)][-1:] != ["sample"]:
        assert process.poll() is None, process.communicate()
        select.select([], [], [], 0.05)
    for rank in ranks_under(process.pid):
        os.kill(rank, signal.SIGINT)
    process.communicate(timeout=20)
    assert read_metrics(log)[-1]["kind"] == "sample"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hosts_train_one_run(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """Two agents that find each other through torchrun's rendezvous, the text prepared by the first that comes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"localhost:{port}")
    options = tiny_options(tiny_dataset, tmp_path, data_dir=tmp_path / "data", parallel="hsdp", **SIZES)
    agents = [torchrun("train", *options, "--name", "run", folder=tmp_path, launcher=launcher) for _ in range(2)]
    outs = [ended(agent)[0] for agent in agents]
    assert sorted(out.count("Computing on 4 ranks (hsdp)") for out in outs) == [0, 1]
    assert checkpoints(tmp_path / "run")[0].name == "step-000006"
    one = tiny_config(tiny_dataset, tmp_path, run="one", **SIZES)
    train(one, tiny_dataset, create_run(one), resume=False, command="")
    assert_same_course(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_error_is_told_once_and_ends_all_ranks(tiny_dataset: Dataset, tmp_path: Path) -> None:
    options = tiny_options(tiny_dataset, tmp_path, batch_tokens=320, rows=2, run=None)
    out, errors = ended(torchrun("train", *options, "--name", "run", folder=tmp_path, size=3), code=1)
    assert "step" not in out.replace("--steps", "").replace("6 steps", "")
    assert errors.count("quintic: error: ") == 1
    assert "--batch-tokens 320 cannot be split among 3 ranks" in errors
    assert not (tmp_path / "run").exists()


# -- small things, in this process ------------------------------------------------------------------------------------


def test_a_batch_is_dealt_out_in_equal_passes(tiny_dataset: Dataset, tmp_path: Path) -> None:
    config = tiny_config(tiny_dataset, tmp_path, batch_tokens=768, rows=4)  # 24 rows of 32 tokens
    assert [micro_batch_rows(config, ranks) for ranks in (1, 2, 3, 6, 8, 12, 24)] == [4, 4, 4, 4, 3, 2, 1]
    for ranks in (4, 5, 7, 25):
        with pytest.raises(ConfigError, match=rf"--batch-tokens 768 cannot be split among {ranks} ranks: .* change"):
            micro_batch_rows(config, ranks)


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == Launch()
    said = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert launched() == Launch(rank=5, size=6, local_rank=1, local_size=2, restarts=3)
    monkeypatch.setenv("RANK", "6")
    with pytest.raises(ConfigError, match=r"RANK 6 of WORLD_SIZE 6 .* do not fit each other: start with torchrun"):
        launched()
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ConfigError, match="RANK 'x' is not a number: unset it, or start with torchrun"):
        launched()


def test_ranks_agree_on_a_new_name_for_each_attempt() -> None:
    """The store still has what the processes of the attempts before have written."""
    store, names = dist.HashStore(), []
    for _ in range(3):
        with ThreadPoolExecutor(4) as ranks:
            agreed = {*ranks.map(lambda rank: _agree_on_attempt(store, rank, 4), range(4))}
        assert len(agreed) == 1
        names.append(agreed.pop())
    assert len({*names}) == 3


def test_copies_of_a_model_need_a_number_of_ranks_that_divides(tiny_dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--shard-ranks 4 does not divide the 6 ranks"):
        Parallelism("hsdp", Ranks(size=6), shard_ranks=4)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "kind"), [(0, DivergedError), (1, OtherRankError)])
def test_one_rank_says_that_the_run_diverged(
    rank: int, kind: type[QuinticError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*_: object) -> int:
        raise DivergedError("the same on all ranks")

    ranks = Ranks(rank=rank)
    monkeypatch.setattr("quintic.commands.train.connected", lambda launch: contextlib.nullcontext(ranks))
    monkeypatch.setattr("quintic.commands.train._run", diverge)
    with pytest.raises(kind):
        run_command([])


def save_to_a_full_disk(rank: int, world_size: int, run_dir: Path, beside: bool) -> list[str]:
    """Save twice; the second time the disk is full."""
    ranks = ranks_of(rank, world_size)
    background = Background(ranks) if beside else None
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = quintic.Muon(quintic.param_groups(model), comms="sharded")
    ended = []
    for step in (1, 2):
        if step == 2:

            def full(*args: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            safetensors.torch.save_file = full
        try:
            path = save_checkpoint(
                run_dir,
                step=step,
                model=model,
                optimizer=optimizer,
                state={},
                keep=2,
                ranks=ranks,
                background=background,
            )
            if background is not None:
                background.wait()
            ended.append(path.name)
        except QuinticError as error:
            ended.append(str(error))
    return ended


@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_leaves_the_checkpoint_before_and_is_told_once(beside: bool, tmp_path: Path) -> None:
    first, second = run(save_to_a_full_disk, 2, tmp_path, beside)
    assert first[0] == second[0] == "step-000001"
    assert "step-000002: cannot be written (No space left on device); free 1 MiB" in first[1]
    assert second[1] == "another rank has failed"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert newest_checkpoint(tmp_path, message=print).name == "step-000001"


def save_beside_steps(rank: int, world_size: int, parallel: ParallelName, folder: Path) -> None:
    """Save at once and in the background, where writing waits until two more steps are made."""
    ranks = ranks_of(rank, world_size)
    background = Background(ranks)
    parallelism = Parallelism(parallel, ranks)
    sizes = GPTConfig(vocab_size=64, depth=2, width=32, head_dim=16, num_kv_heads=2, seq_len=16, bos_id=0)
    model = build_model(
        sizes, device=torch.device(DEVICE), dtype=torch.float32, attention="sdpa", seed=0, parallelism=parallelism
    )
    wrapped = parallelism.wrapped(model)
    optimizer = build_optimizer(model, Config(), comms=parallelism.comms)

    def step() -> None:
        tokens = torch.randint(64, (2, 17)).to(DEVICE)
        with parallelism.micro_step(wrapped, last=True):
            wrapped(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    trained_on = threading.Event()
    save_file = safetensors.torch.save_file

    def late(*args: Any) -> None:
        assert trained_on.wait(60)
        save_file(*args)

    step()
    own: dict[str, Any] = {"step": 1, "model": model, "optimizer": optimizer, "state": {}, "keep": 1, "ranks": ranks}
    save_checkpoint(folder / "at once", **own)
    safetensors.torch.save_file = late
    save_checkpoint(folder / "beside", **own, background=background)
    step()
    step()
    assert checkpoints(folder / "beside") == []
    trained_on.set()
    background.wait()
    safetensors.torch.save_file = save_file
    save_checkpoint(folder / "later", **own)


@pytest.mark.parametrize(
    "parallel", ["sharded", "fsdp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "hsdp", "tp"))]
)
def test_a_save_of_several_ranks_is_of_its_step(parallel: str, tmp_path: Path) -> None:
    run(save_beside_steps, 2, parallel, tmp_path)

    def saved(name: str) -> dict[str, Tensor]:
        checkpoint = newest_checkpoint(tmp_path / name, message=print)
        parts = {
            part: safetensors.torch.load_file(checkpoint / f"{part}.safetensors") for part in ("model", "optimizer")
        }
        return {f"{part}/{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()}

    at_once, beside, later = saved("at once"), saved("beside"), saved("later")
    assert at_once.keys() == beside.keys()
    assert any(key.endswith("momentum_buffer") for key in beside)
    assert all(torch.equal(value, beside[key]) for key, value in at_once.items())
    assert not torch.equal(beside["model/head.weight"], later["model/head.weight"])


def fail_alone(rank: int, world_size: int, config: Config, text: Path, run_dir: Path, name: str) -> str:
    """Train, where the text fails on the last rank alone while a `Trainer` is made; return the error."""

    def fail(*_: Any, **__: Any) -> None:
        raise DataError("damaged")

    if rank == world_size - 1:
        setattr(quintic.train.trainer, name, fail)
    options: dict[str, Any] = {"resume": False, "command": "test"}
    with pytest.raises(QuinticError) as caught:
        train(config, Dataset.open(text), run_dir, ranks=ranks_of(rank, world_size), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "name"),
    [("ddp", "validation_rows"), *(pytest.param(kind, "Loader", marks=pytest.mark.slow) for kind in ("fsdp", "tp"))],
)
def test_no_rank_waits_for_one_that_cannot_begin(
    parallel: ParallelName, name: str, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run", parallel=parallel)
    errors = run(fail_alone, 2, config, tiny_dataset.path, create_run(config), name)
    assert errors == ["another rank has failed", "damaged"]


def fail_at_the_end(rank: int, world_size: int, config: Config, text: Path, run_dir: Path, failing: list[int]) -> None:
    """Train, where the last evaluation fails on some ranks."""
    evaluate = Trainer.evaluate

    def broken(self: Trainer) -> dict[str, Any]:
        if rank in failing and self.step == self.total:
            raise RuntimeError("out of memory")
        return evaluate(self)

    Trainer.evaluate = broken  # type: ignore[method-assign]
    segment(rank, world_size, config, text, run_dir, None)


@pytest.mark.parametrize("failing", [[1], [0, 1]])
def test_ranks_that_cannot_evaluate_have_saved_and_do_not_wait(
    failing: list[int], tiny_dataset: Dataset, tmp_path: Path
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run", steps=1, eval_every=0, parallel="fsdp")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2(?s:.*)RuntimeError: out of memory"):
        run(fail_at_the_end, 2, config, tiny_dataset.path, run_dir := create_run(config), failing)
    assert [checkpoint.name for checkpoint in checkpoints(run_dir)] == ["step-000001"]


def lengthen_late(rank: int, world_size: int, config: Config, text: Path, run_dir: Path) -> str:
    """Continue with more steps, where the last rank reads the run's configuration after the first has changed it."""
    read = quintic.train.start.load_config

    def late(path: Path) -> Config:
        if rank:
            time.sleep(0.3)
        return read(path)

    quintic.train.start.load_config = late
    return segment(rank, world_size, config, text, run_dir, None)


def test_ranks_that_read_a_longer_configuration_late_go_on(tiny_dataset: Dataset, tmp_path: Path) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run", steps=1, eval_every=0)
    run_dir = create_run(config)
    train(config, tiny_dataset, run_dir, resume=False, command="test")
    longer = tiny_config(tiny_dataset, tmp_path, run="run", steps=2, eval_every=0)
    assert run(lengthen_late, 2, longer, tiny_dataset.path, run_dir) == ["finished"] * 2
    assert load_config(run_dir / "config.json") == longer


def fail_together(rank: int, world_size: int) -> list[str]:
    """Return what `run_on_all` returns or raises where no rank fails, where one does, and where several do."""
    ranks = ranks_of(rank, world_size)
    ended = []

    def fail_on(*failing: int) -> str:
        if rank in failing:
            raise ConfigError(f"rank {rank}") if rank < 2 else OSError(f"rank {rank}")
        return "fine"

    for failing in [(), (1,), (1, 2), (0, 1, 2), (2,)]:
        try:
            ended.append(ranks.run_on_all(lambda failing=failing: fail_on(*failing)))
        except (QuinticError, OSError) as error:
            ended.append(str(error))
    for failing in (0, 1):  # one call for all ranks contains another
        try:
            ranks.run_on_all(lambda failing=failing: ranks.run_on_all(lambda: fail_on(failing)))
        except (QuinticError, OSError) as error:
            ended.append(str(error))
    ended.append(str(ranks.from_rank0(lambda: rank + 7)))
    ended.append(str(ranks.any(rank == 2)) + str(ranks.any(False)))
    return ended


def test_ranks_agree_about_errors() -> None:
    other, rest = "another rank has failed", ["7", "TrueFalse"]
    first, second, third = run(fail_together, 3)
    assert first == ["fine", other, other, "rank 0", other, "rank 0", other, *rest]
    assert second == ["fine", "rank 1", "rank 1", other, other, other, "rank 1", *rest]
    assert third == ["fine", other, other, other, "rank 2", other, other, *rest]
