"""Models that speedruns save: whole, with the weights of the race, and usable by the commands on a CPU."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from durability import disk_events, durable_names
from safetensors.torch import load_file
from tiny_runs import error_of
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from harness import run as run_ranks

from quintic.cli import main
from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object
from quintic.errors import CheckpointError
from quintic.eval.row_models import BatchedSpeedrun
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT
from quintic.report.history import METRICS_FILE, SOURCE_FILE, read_metrics
from quintic.speedrun.presets import BYTES_BOS, SpeedrunOptions, preset
from quintic.speedrun.race import Race
from quintic.speedrun.run import train
from quintic.speedrun.shards import open_data, write_shard
from quintic.train.checkpoint import (
    checkpoints,
    load_model_weights,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    step_of,
)
from quintic.train.config import RunConfig
from quintic.train.distributed import SINGLE_PROCESS, Ranks
from quintic.train.hardware import choose_hardware
from quintic.train.runs import TOKENIZER_FILE

TINY = preset("speedrun-tiny")
TRACK = TINY.track.scaled(10).validated(256)
SENTENCE = b"the model of the step of the weight of the loss. "


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name, documents in (("train", 300), ("val", 20)):
        write_shard(folder / f"{name}.bin", [BYTES_BOS, *SENTENCE * 2] * documents)
    return folder


def race_of(shards: Path, ranks: Ranks = SINGLE_PROCESS) -> Race:
    data = open_data(SpeedrunOptions(data=str(shards), tokenizer=None), TINY.model)
    hardware = choose_hardware(RunConfig(device="cpu", dtype="float32", attention="sdpa"))
    return Race(TRACK, TINY.model, data, hardware, ranks=ranks, seed=3)


@pytest.fixture(scope="module")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run made by the command, with saves on the way."""
    runs_dir = tmp_path_factory.mktemp("runs")
    options = ["--steps", "40", "--val-tokens", "256", "--save-every", "10", "--device", "cpu", "--no-warm-up"]
    command = ["train", "--preset", "speedrun-tiny", "--data", str(shards), "--run", "race", "--eval-every", "20"]
    threads = torch.get_num_threads()
    assert main([*command, *options, "--runs-dir", str(runs_dir), "--threads", "1"]) == 0
    torch.set_num_threads(threads)
    return runs_dir / "race"


def test_a_run_keeps_its_models_its_tokenizer_and_its_source(finished: Path) -> None:
    assert json_object(finished / SOURCE_FILE)["code"] == read_metrics(finished / METRICS_FILE)[0]["code"]
    assert [step_of(path) for path in checkpoints(finished)] == [40, 30, 20, 10]
    for path in checkpoints(finished):
        assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "model.safetensors", "state.json"]
    tokenizer = Tokenizer.load(finished / TOKENIZER_FILE)
    text = "naïve \N{SLIGHTLY SMILING FACE}\n\t<|bos|> x"
    assert tokenizer.encode(text) == list(text.encode())
    assert (tokenizer.decode(tokenizer.encode(text)), tokenizer.bos_id) == (text, BYTES_BOS)


@pytest.mark.usefixtures("same_threads")
def test_eval_scores_the_saved_model_as_the_race_did(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final = read_metrics(finished / METRICS_FILE)[-1]
    assert main(["eval", "--runs-dir", str(finished.parent), "--device", "cpu"]) == 0
    assert f"{final['bpb']:.4f} bits per byte ({final['loss']:.4f} nats per token)" in capsys.readouterr().out


@pytest.mark.usefixtures("same_threads")
def test_eval_takes_the_save_of_a_step(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = {r["step"]: r for r in read_metrics(finished / METRICS_FILE) if r["kind"] == "eval"}
    assert main(["eval", "--runs-dir", str(finished.parent), "--device", "cpu", "--step", "20"]) == 0
    assert f"{records[20]['bpb']:.4f} bits per byte" in capsys.readouterr().out


@pytest.mark.usefixtures("same_threads")
def test_eval_scores_other_text(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = []
    for name, text in (("known", SENTENCE.decode() * 20), ("unknown", "QXZJ{}#@0192837465" * 50)):
        (tmp_path / f"{name}.txt").write_text(text)
        options = ["--run", "race", "--runs-dir", str(finished.parent), "--data", f"{tmp_path}/{name}.txt"]
        assert main(["eval", *options]) == 0
        out = capsys.readouterr().out
        assert f"over {len(text)} bytes of text" in out or f"over {len(text):,} bytes of text" in out
        scores.append(float(out.split()[0]))
    assert scores[0] < 0.7 * scores[1]


def test_export_writes_a_folder_for_transformers(finished: Path, tmp_path: Path) -> None:
    """What transformers makes of it: tests/eval/test_export_speedrun.py."""
    assert main(["export", "race", "--runs-dir", str(finished.parent), "--out", str(tmp_path / "model")]) == 0
    weights = load_file(tmp_path / "model" / "model.safetensors")
    model, _ = loaded(finished)
    assert torch.equal(weights["head.weight"], model.head.mT[: BYTES_BOS + 1])
    assert torch.equal(weights["mlp_bank"], model.mlp_bank)
    assert json_object(tmp_path / "model" / "config.json")["windows"] == [48, 160]


@pytest.mark.usefixtures("same_threads")
def test_sample_writes_what_the_model_finds_likeliest(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--runs-dir", str(finished.parent), "--temperature", "0", "--tokens", "12"]
    assert main(["sample", *options, "--prompts", "the model of", "loss."]) == 0
    out = capsys.readouterr().out
    model, state = loaded(finished)
    expected = ""
    for prompt in ("the model of", "loss."):
        tokens = [BYTES_BOS, *prompt.encode()]
        for _ in range(12):  # token by token from the whole text, without the head's padding
            logits = model.logits(torch.tensor(tokens), torch.tensor([len(tokens) - 1]))[0, : BYTES_BOS + 1]
            if (token := int(logits.argmax())) == BYTES_BOS:
                break
            tokens.append(token)
        expected += bytes(tokens[1:]).decode(errors="replace") + "\n\n"
    assert out == expected
    assert state["step"] == 40


@pytest.mark.slow
@pytest.mark.usefixtures("same_threads")
def test_a_vocabulary_of_more_than_bytes_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the race's own shards: the tokens of a tokenizer, which starts documents with a token of its own."""
    torch.set_num_threads(1)
    texts = ["the model of the step", "the weight of the loss of the model"] * 400
    tokenizer = Tokenizer.train(texts, 280)
    for name, some in (("train", texts), ("val", texts[:60])):
        tokens = [token for text in some for token in (tokenizer.bos_id, *tokenizer.encode(text))]
        (tmp_path / "shards").mkdir(exist_ok=True)
        write_shard(tmp_path / "shards" / f"{name}.bin", tokens)
    tokenizer.save(tmp_path / "tokenizer.json")
    sizes = replace(TINY.model, vocab_size=288, bos_id=tokenizer.bos_id, prefix_tokens=True)
    options = SpeedrunOptions(data=str(tmp_path / "shards"), tokenizer=str(tmp_path / "tokenizer.json"))
    hardware = choose_hardware(RunConfig(device="cpu", dtype="float32"))
    race = Race(TRACK, sizes, open_data(options, sizes), hardware, seed=3)
    run_dir = tmp_path / "runs" / "race"
    result = train(race, run_dir, facts={}, warm_up=False)
    tokenizer.save(run_dir / TOKENIZER_FILE)
    assert main(["eval", "--runs-dir", str(run_dir.parent)]) == 0
    assert f"{result['bpb']:.4f} bits per byte ({result['loss']:.4f} nats per token)" in capsys.readouterr().out
    prompt = "the model of"
    assert main(["sample", "--runs-dir", str(run_dir.parent), "--prompts", prompt, "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith(prompt)


def loaded(run_dir: Path) -> tuple[SpeedrunGPT, dict[str, Any]]:
    checkpoint = newest_checkpoint(run_dir, message=lambda text: None)
    model = SpeedrunGPT(SpeedrunConfig(**read_state(checkpoint)["speedrun"]))
    load_model_weights(checkpoint, model)
    return model.eval(), read_state(checkpoint)


@pytest.mark.slow
@pytest.mark.usefixtures("same_threads")
def test_a_save_on_the_way_changes_nothing_and_has_the_weights_of_its_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    weights, made = [], Race.train_step

    def step(self: Race, number: int, *given: Any) -> Any:
        result = made(self, number, *given)
        if number == 5:
            after_six.update({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        return result

    monkeypatch.setattr(Race, "train_step", step)
    for name, save_every in (("saving", 3), ("plain", 0)):
        race, after_six = race_of(shards), {}
        train(race, tmp_path / name, facts={}, warm_up=False, save_every=save_every)
        weights.append({name: tensor.clone() for name, tensor in race.model.state_dict().items()})
    assert [step_of(path) for path in checkpoints(tmp_path / "saving")] == [10, 9, 6, 3]
    assert [step_of(path) for path in checkpoints(tmp_path / "plain")] == [10]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    model, _ = loaded(tmp_path / "saving")
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in model.state_dict().items())
    assert model.rotary.windows == (48, 160)  # of the last validation
    for step in (10, 9):
        shutil.rmtree(tmp_path / "saving" / "checkpoints" / f"step-{step:06d}")
    model, state = loaded(tmp_path / "saving")
    assert state["step"] == 6
    assert all(torch.equal(tensor, after_six[name]) for name, tensor in model.state_dict().items())


def test_a_save_survives_a_crash_at_any_moment(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = race_of(shards)
    race.model.rotary.set_windows(8, 24)
    race.save(tmp_path, 5)
    before = {path: path.read_bytes() for path in checkpoints(tmp_path)[0].iterdir()}
    events = disk_events(monkeypatch)
    race.save(tmp_path, 7)
    assert durable_names(events) == ["step-000007"]
    assert {path: path.read_bytes() for path in before} == before


def test_a_disk_that_is_full_leaves_nothing_half_written(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quintic.train.checkpoint.save_tensors", full)
    match = r"step-000010: cannot be written \(No space left on device\); free \d+ MiB, then repeat the run, or choose"
    with pytest.raises(CheckpointError, match=match):
        train(race_of(shards), tmp_path, facts={}, warm_up=False)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert read_metrics(tmp_path / METRICS_FILE)[-1]["kind"] == "final"  # the race itself is not lost
    assert (tmp_path / "report.html").is_file()


def test_the_clock_does_not_count_saves(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("quintic.speedrun.run.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Race, "save", lambda *_: now.__setitem__(0, now[0] + 1000.0))
    made = Race.train_step

    def step(self: Race, *given: Any) -> Any:
        now[0] += 1.0
        return made(self, *given)

    monkeypatch.setattr(Race, "train_step", step)
    result = train(race_of(shards), tmp_path, facts={}, warm_up=False, save_every=2)
    assert (result["seconds"], now[0]) == (10.0, 5010.0)


def course(rank: int, size: int, shards: Path, run_dir: Path) -> tuple[list[int], float]:
    ranks = Ranks(rank=rank, size=size, local_rank=rank, local_size=size, group=dist.group.WORLD)
    race = race_of(shards, ranks)
    train(race, run_dir, facts={}, warm_up=False, save_every=4)
    model, _ = loaded(run_dir)
    same = all(torch.equal(tensor, race.model.state_dict()[name]) for name, tensor in model.state_dict().items())
    return [step_of(path) for path in checkpoints(run_dir)], same


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_two_ranks_save_one_model_that_each_of_them_has(shards: Path, tmp_path: Path) -> None:
    assert run_ranks(course, 2, shards, tmp_path, timeout=240) == [([10, 8, 4], True)] * 2


def test_a_batch_has_the_losses_and_logits_of_its_rows(finished: Path) -> None:
    model, _ = loaded(finished)
    batched = BatchedSpeedrun(model, vocab_size=257)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 257, (3, 25), generator=generator)
    rows[1, 9] = BYTES_BOS
    inputs, targets = rows[:, :-1], rows[:, 1:]
    losses = batched(inputs, targets, reduction="none")
    for row in range(3):
        assert losses[row].sum() == pytest.approx(model(inputs[row], targets[row]).item(), rel=1e-5)
        assert losses[row, 5:6] == pytest.approx(
            (model(inputs[row, :6], targets[row, :6]) - model(inputs[row, :5], targets[row, :5])).item(), rel=1e-3
        )
    logits = batched(inputs)
    assert logits.shape == (3, 24, 257)
    torch.testing.assert_close(batched(inputs, positions=torch.tensor([47, 2, 23])), logits.view(-1, 257)[[47, 2, 23]])
    whole = model.logits(inputs[1], torch.arange(24))
    torch.testing.assert_close(logits[1], whole[:, :257])
    nats = torch.nn.functional.cross_entropy(whole, targets[1], reduction="none")  # with the head's padding
    torch.testing.assert_close(losses[1], nats, rtol=1e-4, atol=1e-4)

    for row in range(3):
        cache = batched.new_cache(100)
        first = batched(inputs[row : row + 1, :10], cache=cache, positions=torch.tensor([4]))
        torch.testing.assert_close(first[0], logits[row, 4])
        following = batched(inputs[row : row + 1, 10:11], cache=cache)
        torch.testing.assert_close(following[:, -1], logits[row, 10:11])


def test_mistakes_are_named(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "train", "--resume", "--run", "race", "--runs-dir", str(finished.parent))
    assert "race is a speedrun, or a run whose config.json is lost, which cannot be resumed or repeated" in message

    copy = tmp_path / "runs" / "race"
    shutil.copytree(finished, copy)
    options = ["--runs-dir", str(copy.parent)]
    state = loaded(finished)[1]
    state["speedrun"]["telepathy"] = True
    save_checkpoint(copy, step=50, model=nn.Linear(1, 1), optimizer=None, state=state, keep=9)
    assert "step-000050: is not a speedrun's model of this version" in error_of(capsys, "sample", *options)
    shutil.rmtree(copy / "checkpoints")
    assert "race: has no checkpoint yet; one is written every --save-every steps, and when the run ends" in error_of(
        capsys, "sample", *options
    )
    shutil.copytree(finished / "checkpoints", copy / "checkpoints")
    (copy / TOKENIZER_FILE).unlink()
    assert "race: was trained without a tokenizer, so its tokens cannot be turned into text" in error_of(
        capsys, "sample", *options
    )
    Tokenizer.train(["one two three"], 258).save(copy / TOKENIZER_FILE)
    assert "starts documents with token 0, but the run's shards start them with 256" in error_of(
        capsys, "eval", *options
    )
