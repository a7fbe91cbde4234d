"""One step, one evaluation, one record: what they compute and what they say."""

import gc
import importlib.util
import json
import math
import time
import weakref
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from host_passes import capture_on_the_host
from tiny_runs import tiny_config

from quintic.data.dataset import Dataset
from quintic.data.loader import Loader, Prefetcher, validation_rows
from quintic.errors import ConfigError, DataError
from quintic.eval.baselines import reference_scores
from quintic.eval.generate import GENERAL_PROMPTS, sample_text
from quintic.eval.score import document_sums, score_from_sums
from quintic.kernels.graphs import CapturedPasses
from quintic.report.history import METRICS_FILE, RunHistory, read_metrics
from quintic.train.config import Config, RunConfig
from quintic.train.distributed import SINGLE_PROCESS, Parallelism, Ranks
from quintic.train.hardware import Hardware, choose_hardware, peak_memory_bytes
from quintic.train.loop import train
from quintic.train.metrics import check_trackers
from quintic.train.runs import create_run
from quintic.train.trainer import Trainer, captures

CPU = torch.device("cpu")


def make(dataset: Dataset, run_dir: Path, **changes: Any) -> Trainer:
    config = tiny_config(dataset, run_dir, **changes)
    return Trainer(config, dataset, run_dir, choose_hardware(config.run))


def test_a_step_is_the_mean_over_its_passes(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """The gradient and the records of two passes of 4 rows are those of 8 rows at once."""
    trainer = make(tiny_dataset, tmp_path, rows=4, batch_tokens=256, rms_every=1)
    assert trainer.micro_steps == 2
    with Loader(tiny_dataset, "train", rows=4, seq_len=32, seed=trainer.config.run.seed) as loader:
        batches = list(islice(loader, 2))
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    mean = trainer.model(inputs, targets)
    mean.backward()
    loss = mean.item()
    expected = {name: param.grad.clone() for name, param in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    seen: dict[str, torch.Tensor] = {}

    def keep(optimizer: Any, *args: Any) -> None:
        seen.update({name: param.grad.clone() for name, param in trainer.model.named_parameters()})

    trainer.optimizer.register_step_pre_hook(keep)
    embedding = trainer.model.embedding.weight.detach().clone()
    with trainer.loader:
        record = trainer.train_step()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6)
    assert record["loss"] == pytest.approx(loss, rel=1e-6)
    num_bytes = int(tiny_dataset.tokenizer.token_bytes()[targets.numpy()].sum())
    assert record["bpb"] == pytest.approx(loss * targets.numel() / math.log(2) / num_bytes, rel=1e-6)
    assert (record["step"], record["tokens"]) == (1, 256)
    assert record["seconds"] == pytest.approx(sum(record["times_ms"].values()) / 1000)
    assert record["tokens_per_second"] == pytest.approx(256 / record["seconds"])
    assert record["lr"] == {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
    head = seen["head.weight"].double()
    assert record["grad_rms"]["head"] == pytest.approx(float(head.square().mean().sqrt()), rel=1e-5)
    change = (trainer.model.embedding.weight.detach() - embedding).double()
    assert record["update_rms"]["embedding"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-5)
    assert record["update_rms"]["embedding"] > 0
    assert all(param.grad is None for param in trainer.model.parameters())


def test_waiting_for_data_is_no_part_of_a_pass(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tiny_dataset, tmp_path, rows=4, batch_tokens=256)
    quick = Prefetcher.get

    def slow(prefetcher: Prefetcher[Any]) -> Any:
        time.sleep(0.2)
        return quick(prefetcher)

    monkeypatch.setattr(Prefetcher, "get", slow)
    with trainer.loader:
        first, second = (trainer.train_step()["times_ms"] for _ in range(2))
    assert first["data"] >= 600  # two batches of its own and the next step's first
    assert 400 <= second["data"] < 600
    assert second["forward_backward"] < 200


@pytest.mark.gpu
def test_the_device_does_not_wait_for_a_batch_that_is_made_while_it_works(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tiny_dataset, tmp_path, rows=4, batch_tokens=256, device="cuda", compile=False)
    quick, matrix = Prefetcher.get, torch.randn(8192, 8192, device="cuda")

    def slow(prefetcher: Prefetcher[Any]) -> Any:
        time.sleep(0.02)
        return quick(prefetcher)

    def long_pass(*args: Any) -> None:
        for _ in range(20):  # hundreds of milliseconds
            matrix @ matrix

    trainer.model.register_forward_hook(long_pass)
    monkeypatch.setattr(Prefetcher, "get", slow)
    with trainer.loader:
        trainer.train_step()
        times = trainer.train_step()["times_ms"]
    assert times["forward_backward"] > 100
    assert times["data"] < 5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_clipping_is_a_step_with_gradients_scaled_by_hand(
    optimizer: str, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    """The norm is that of all weights together, whichever optimizer they have; smaller gradients are not touched."""
    bound = 0.8 if optimizer == "adamw" else 0.98
    shared: dict[str, Any] = {"optimizer": optimizer, "adamw_lr": 0.02, "rms_every": 2}
    clipped = make(tiny_dataset, tmp_path, clip_norm=bound, **shared)
    by_hand, unclipped = (make(tiny_dataset, tmp_path, **shared) for _ in range(2))
    norms: list[float] = []

    def scale(*args: Any) -> None:
        gradients = [param.grad for param in by_hand.model.parameters() if param.grad is not None]
        norms.append(math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients)))
        for gradient in gradients:
            gradient.copy_(gradient.double() * min(1.0, bound / norms[-1]))

    by_hand.optimizer.register_step_pre_hook(scale)
    records = []
    with clipped.loader, by_hand.loader, unclipped.loader:
        for _ in range(6):
            records.append(clipped.train_step())
            by_hand.train_step()
            unclipped.train_step()
    assert min(norms) < 0.95 * bound < 1.05 * bound < max(norms)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-4)
    weights, expected, others = (
        torch.cat([param.detach().flatten() for param in trainer.model.parameters()])
        for trainer in (clipped, by_hand, unclipped)
    )
    assert float((weights - expected).norm()) < 0.005 * float((weights - others).norm())


def test_the_first_loss_is_that_of_a_uniform_guess(tiny_dataset: Dataset, tmp_path: Path) -> None:
    trainer = make(tiny_dataset, tmp_path)
    with trainer.loader:
        assert trainer.train_step()["loss"] == pytest.approx(math.log(tiny_dataset.vocab_size), rel=1e-3)


def test_training_learns(tiny_dataset: Dataset, tmp_path: Path) -> None:
    trainer = make(tiny_dataset, tmp_path, steps=30, muon_lr=0.03)
    before = trainer.evaluate()["bpb"]
    with trainer.loader:
        for _ in range(30):
            trainer.train_step()
    assert trainer.evaluate()["bpb"] < 0.75 * before


def test_an_evaluation_scores_the_validation_rows(tiny_dataset: Dataset, tmp_path: Path) -> None:
    trainer = make(tiny_dataset, tmp_path, eval_tokens=640)
    record = trainer.evaluate()
    batches = list(validation_rows(tiny_dataset, rows=4, seq_len=32, max_tokens=640))
    assert len(batches) == 5
    expected = score_from_sums(document_sums(trainer.model, batches, tiny_dataset.tokenizer.token_bytes(), CPU))
    assert (record["loss"], record["bpb"]) == (expected.loss, expected.bpb)
    assert trainer.score == expected
    final = trainer.finish()
    assert final["baselines"] == reference_scores(tiny_dataset, batches)
    assert final["baselines"]["bytes"] == expected.num_bytes
    assert (final["bpb"], final["step"]) == (expected.bpb, 0)
    assert record["bpb_stderr"] == expected.bpb_stderr
    drawn = sample_text(trainer.model, tiny_dataset.tokenizer, ("", ""), max_tokens=8, temperature=0.8, seed=1337)
    assert trainer.sample() == drawn
    assert drawn[0]["text"] != drawn[1]["text"]


def test_samples_of_general_text_are_what_the_model_holds_for_likeliest(tiny_dataset: Dataset, tmp_path: Path) -> None:
    trainer = make(tiny_dataset, tmp_path)
    data = replace(trainer.config.data, data="hf:owner/name")
    trainer.config = replace(trainer.config, data=data)
    greedy = sample_text(trainer.model, tiny_dataset.tokenizer, GENERAL_PROMPTS, max_tokens=8, temperature=0)
    assert trainer.sample() == greedy


def test_code_is_compiled_once_for_any_number_of_documents(tiny_dataset: Dataset, tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    varlen = Hardware(device=CPU, dtype=torch.float32, attention="varlen", compile=False)
    trainer = Trainer(tiny_config(tiny_dataset, tmp_path), tiny_dataset, tmp_path, varlen)
    counter = CompileCounter()
    successor = torch.compile(lambda starts: starts + 1, backend=counter, dynamic=False)
    with trainer.loader as loader:
        batch = next(loader)
        for number in (9, 12, 40):
            starts = torch.arange(number, dtype=torch.int32)
            found = trainer._starts(replace(batch, document_starts=starts))
            assert successor(found).tolist() == list(range(1, number + 1))
    assert counter.frame_count == 1


def steps_of(trainer: Trainer, number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    with trainer.loader:
        losses = [trainer.train_step()["loss"] for _ in range(number)]
    return losses, {name: weight.cpu().clone() for name, weight in trainer.model.state_dict().items()}


def test_captured_passes_train_alike(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_threads: None
) -> None:
    torch.set_num_threads(1)
    changes = {"rows": 4, "batch_tokens": 256, "rms_every": 2, "on_spike": "skip", "clip_norm": 0.5}
    losses, weights = steps_of(make(tiny_dataset, tmp_path, **changes), 4)
    captured = capture_on_the_host(monkeypatch)
    trainer = make(tiny_dataset, tmp_path, **changes)
    trainer.passes = CapturedPasses(trainer._make_pass)
    found, others = steps_of(trainer, 4)
    assert len(captured) == 1
    assert found == losses
    for name, weight in weights.items():
        assert torch.equal(others[name], weight), name
    # Three of the pool's four MiB are held by no tensor.
    assert trainer.passes.idle_bytes == 3 << 20
    trainer.passes.close()
    assert captured[0].make is None
    assert trainer.passes.idle_bytes == 0


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("ends", [True, False])
def test_a_pass_that_cannot_be_captured_is_told(
    error: type[RuntimeError], ends: bool, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the first error, and not the one of ending the capture; a full GPU has a message of its own."""

    def fail(make: Any, pool: Any) -> None:
        try:
            raise error("operation not permitted when stream is capturing\nMore.")
        finally:
            if not ends:
                raise RuntimeError("the capture is not valid")

    capture_on_the_host(monkeypatch)
    monkeypatch.setattr("quintic.kernels.graphs.capture", fail)
    trainer = make(tiny_dataset, tmp_path)
    trainer.passes = CapturedPasses(trainer._make_pass)
    told = torch.OutOfMemoryError if error is torch.OutOfMemoryError else ConfigError
    with trainer.loader, pytest.raises(told, match="operation not permitted when stream is capturing") as raised:
        trainer.train_step()  # of two passes, the second of which is captured
    if told is ConfigError:
        assert str(raised.value).endswith("is capturing); give --no-capture")


def test_captured_passes_end_with_their_trainer(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that follow each other in one process need the memory of the graphs before them."""
    captured = capture_on_the_host(monkeypatch)
    trainer = make(tiny_dataset, tmp_path)
    trainer.passes = CapturedPasses(trainer._make_pass)
    steps_of(trainer, 3)
    for graph in captured:
        graph.reset()  # unlike CUDA graphs, these hold the code
    passes = weakref.ref(trainer.passes)
    gc.disable()
    try:
        del trainer
        assert passes() is None
    finally:
        gc.enable()


def test_captured_passes_have_few_numbers_of_documents(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_on_the_host(monkeypatch)
    trainer = make(tiny_dataset, tmp_path)
    with trainer.loader as loader:
        batch = next(loader)
    starts = batch.document_starts
    assert trainer._starts(batch) is starts
    trainer.passes = CapturedPasses(trainer._make_pass)
    padded = trainer._starts(batch)
    assert len(padded) == 16
    assert padded.dtype == torch.int32
    assert padded.tolist() == starts.tolist() + [batch.inputs.numel()] * (len(padded) - len(starts))
    full = replace(batch, document_starts=padded)
    assert torch.equal(trainer._starts(full), padded)


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (True, {}),
        (True, {"compile": False}),
        (False, {"capture": False}),
        (False, {"attention": "sdpa"}),
        (False, {"device": CPU}),
        (False, {"parallel": "ddp"}),
        (False, {"parallel": "fsdp"}),
        (False, {"parallel": "tp"}),
        (True, {"parallel": "sharded"}),
    ],
    ids=str,
)
def test_passes_are_captured_where_they_can_be(expected: bool, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    parallel, capture = changes.pop("parallel", None), changes.pop("capture", True)
    given = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "attention": "varlen", "compile": True, **changes}
    ranks = SINGLE_PROCESS if parallel is None else Ranks(rank=0, size=2, local_rank=0, local_size=2, group=None)
    config = Config(run=RunConfig(capture=capture))
    assert captures(config, Hardware(**given), Parallelism(parallel or "sharded", ranks)) == expected


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_captured_passes_train_alike_on_a_gpu(tiny_dataset: Dataset, tmp_path: Path) -> None:
    trainers = [
        make(tiny_dataset, tmp_path, device="cuda", dtype="bfloat16", compile=False, capture=capture, head_dim=64)
        for capture in (False, True)
    ]
    assert [trainer.passes is not None for trainer in trainers] == [False, True]
    losses, peaks = [], []
    for trainer in trainers:
        torch.cuda.reset_peak_memory_stats()
        losses.append(steps_of(trainer, 6)[0])
        peaks.append(peak_memory_bytes(torch.device("cuda"), trainer.passes))
    plain, captured = losses
    # The gradients of queries are added up in any order.
    assert captured == pytest.approx(plain, rel=1e-3)
    # Replays use what an eager pass does, which the allocator does not see.
    assert trainers[1].passes.idle_bytes > 0
    assert peaks[1] >= 0.9 * peaks[0]
    assert captured[-1] < captured[0]


def test_the_log_of_a_run_is_complete(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="run", sample_every=3, eval_every=4, prompts=("def",))
    run_dir = create_run(config)
    result = train(config, tiny_dataset, run_dir, resume=False, command="quintic train")
    said = capsys.readouterr().out.splitlines()
    records = read_metrics(run_dir / METRICS_FILE)
    assert [(record["kind"], record.get("step")) for record in records] == [
        ("run", None), ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("sample", 3), ("train", 4), ("eval", 4),
        ("train", 5), ("train", 6), ("eval", 6), ("final", 6), ("sample", 6),
    ]  # fmt: skip
    history = RunHistory.load(run_dir)
    assert history.run["command"] == "quintic train"
    assert history.run["config"]["model"]["depth"] == 1
    assert history.run["total_steps"] == 6
    assert history.run["ranks"] == 1
    assert history.run["data"]["key"] == tiny_dataset.key
    parts = {name: value for name, value in history.run["model"].items() if name.startswith("parameters_")}
    assert sum(parts.values()) == history.run["model"]["parameters"]
    assert [("grad_rms" in record) for record in history.train] == [False, False, True] * 2
    assert history.train[-1]["tokens"] == 6 * 256
    assert history.final["bpb"] == result.final["bpb"] == history.evals[-1]["bpb"]
    assert sum(history.final["breakdown"].values()) == pytest.approx(1)
    assert result.report == run_dir / "report.html"
    assert f"{result.final['bpb']:.3f}" in result.report.read_text(encoding="utf-8")
    assert result.samples[0]["prompt"] == "def"
    assert any(line.startswith("Length: 6 steps, 1,536 tokens") for line in said)
    assert any(line.startswith("Batch: 256 tokens (given), in 2 passes of 4 x 32") for line in said)


def test_tasks_of_core_are_answered_on_the_way_and_at_the_end(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "core").mkdir()
    item = {"query": "def", "choices": ["model", "zyx zyx"], "gold": 1}
    (tmp_path / "core" / "copa.jsonl").write_text((json.dumps(item) + "\n") * 6)
    core = str(tmp_path / "core")
    config = tiny_config(tiny_dataset, tmp_path, run="run", core=core, core_every=4, core_items=3)
    run_dir = create_run(config)
    train(config, tiny_dataset, run_dir, resume=False, command="quintic train")
    records = [record for record in read_metrics(run_dir / METRICS_FILE) if record["kind"] == "core"]
    assert [record["step"] for record in records] == [4, 6]
    for record in records:
        # Of two choices always the likelier one, which is wrong.
        assert record["core"] == record["centred"]["copa"] == -1
        assert record["accuracy"] == {"copa": 0}
        assert len(record["missing"]) == 21
    assert "step 6/6  mean over 1 of the 22 tasks of CORE: -1.0000" in capsys.readouterr().out
    assert "What it can answer" in (run_dir / "report.html").read_text(encoding="utf-8")
    with pytest.raises(DataError, match="holds no task of CORE"):
        make(tiny_dataset, tmp_path, core=str(tmp_path))


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_tracker_is_found_before_the_run(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = RunConfig(tensorboard=package == "tensorboard", wandb="project" if package == "wandb" else None)
    with pytest.raises(ConfigError, match=rf"^--{package} needs the package .* pip install .*\[{package}\]"):
        check_trackers(run)
    check_trackers(RunConfig())


def test_tensorboard_gets_the_run(tiny_dataset: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = tiny_config(tiny_dataset, tmp_path, run="run", tensorboard=True)
    train(config, tiny_dataset, create_run(config), resume=False, command="")
    events = list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert b"eval/bpb" in events[0].read_bytes()


def test_people_and_log_are_told_what_is_in_8_bits(tiny_dataset: Dataset, tmp_path: Path) -> None:
    config = tiny_config(tiny_dataset, tmp_path)
    hardware = replace(choose_hardware(config.run), fp8="tensorwise")
    trainer = Trainer(config, tiny_dataset, tmp_path, hardware)
    lines = [
        line for line in trainer.describe() if line.startswith("--fp8 changes nothing in this model: none, because")
    ]
    assert lines == trainer.facts()["model"]["fp8_layers"]
    assert lines
    plain = make(tiny_dataset, tmp_path)
    assert not any("8" in line and "bit" in line for line in plain.describe())
    assert "fp8_layers" not in plain.facts()["model"]
