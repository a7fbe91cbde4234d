"""Checkpoints are written while training goes on: each is that of its step, and no failure stays unsaid."""

import errno
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_loop import kinds, run, saved_steps, spoil
from test_resume import after_step
from test_trainer import make
from tiny_runs import course, error_of, final_weights, tiny_config, tiny_options

from quintic.data.dataset import Dataset
from quintic.errors import CheckpointError, DivergedError
from quintic.train.checkpoint import Background, _copy_to_host, save_checkpoint
from quintic.train.distributed import SINGLE_PROCESS
from quintic.train.trainer import Trainer

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


# -- the thread -------------------------------------------------------------------------------------------------------


def test_work_is_done_beside_and_one_piece_at_a_time() -> None:
    done: list[str] = []
    may_end = threading.Event()

    def first() -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert may_end.wait(60)
        done.append("first")

    background = Background(SINGLE_PROCESS)
    background.wait()  # nothing to wait for
    background.start(first)
    assert done == []
    threading.Timer(0.05, may_end.set).start()
    background.start(lambda: done.append("second"))
    assert done[0] == "first"
    background.wait()
    assert done == ["first", "second"]


@pytest.mark.parametrize("contact", ["wait", "start"])
def test_what_goes_wrong_beside_is_raised_once(contact: str) -> None:
    def fail() -> None:
        raise CheckpointError("no room")

    more: list[int] = []
    background = Background(SINGLE_PROCESS)
    background.start(fail)
    assert background._work is not None
    assert isinstance(background._work.exception(), CheckpointError)  # waits
    assert background.has_failed
    contacts = {
        "wait": background.wait,
        "start": lambda: background.start(lambda: more.append(1)),
    }
    with pytest.raises(CheckpointError, match=r"^no room$"):
        contacts[contact]()
    assert not background.has_failed
    background.wait()
    assert more == []


def test_what_goes_wrong_beside_another_exception_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    may_end = threading.Event()

    def fail() -> None:
        assert may_end.wait(60)
        raise CheckpointError("no room")

    background = Background(SINGLE_PROCESS)
    background.start(fail)
    threading.Timer(0.05, may_end.set).start()
    background.close()
    assert capsys.readouterr().err == "quintic: error: no room\n"


# -- the copies -------------------------------------------------------------------------------------------------------


def test_copies_are_whole_and_nothing_is_held_twice() -> None:
    base = torch.randn(6, 4)
    tensors = {
        "plain": base,
        "transposed": base.T,
        "part": base[1:3, ::2],
        "parameter": torch.nn.Parameter(torch.randn(3).bfloat16()),
        "count": torch.tensor(7, dtype=torch.int64),
        "mantissa": torch.arange(5, dtype=torch.int32).to(torch.uint16),
    }
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    copies = _copy_to_host(tensors, SINGLE_PROCESS)
    assert tensors == {}
    base.zero_()
    assert list(copies) == list(expected)
    for name, copy in copies.items():
        assert torch.equal(copy, expected[name])
        assert copy.dtype == expected[name].dtype
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.numel() * copy.element_size()
        assert not copy.requires_grad


@pytest.mark.gpu
def test_copies_of_a_gpu_are_page_locked_and_those_of_the_moment() -> None:
    weight = torch.randn(4096, 4096, device="cuda")
    expected = weight.cpu()
    copies = _copy_to_host({"weight": weight}, SINGLE_PROCESS)
    weight.zero_()
    assert torch.equal(copies["weight"], expected)
    assert copies["weight"].is_pinned()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_save_is_of_its_step_while_training_goes_on(
    optimizer: Any, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tiny_dataset, tmp_path, optimizer=optimizer, normalize="neuron")
    save_file, trained_on = safetensors.torch.save_file, threading.Event()

    def late(*args: Any) -> None:
        assert trained_on.wait(60)
        save_file(*args)

    with trainer.loader:
        for _ in range(2):
            trainer.train_step()
        state = {
            "tokens": trainer.tokens,
            "seconds": trainer.seconds,
            "score": None,
            "loader": trainer.loader.state_dict(),
            "watch": vars(trainer.watch),
        }
        own = {"step": 2, "model": trainer.model, "optimizer": trainer.optimizer, "keep": 1}
        at_once = save_checkpoint(tmp_path / "at once", state=state, **own)
        expected = [(at_once / name).read_bytes() for name in FILES]
        with monkeypatch.context() as patch:
            patch.setattr(safetensors.torch, "save_file", late)
            trainer.save()
            for _ in range(2):
                trainer.train_step()
            assert saved_steps(tmp_path) == []
            trained_on.set()
            trainer.background.wait()
        assert saved_steps(tmp_path) == ["step-000002"]
        written = [(tmp_path / "checkpoints" / "step-000002" / name).read_bytes() for name in FILES]
        assert written[:2] == expected[:2]
        saved = json.loads(written[2])
        assert {name: saved[name] for name in json.loads(expected[2])} == json.loads(expected[2])
        trainer.save()
        trainer.background.wait()
    assert saved_steps(tmp_path)[0] == "step-000004"
    model = (tmp_path / "checkpoints" / "step-000004" / "model.safetensors").read_bytes()
    assert model != written[0]


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def late_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing begins as late as it can: when it is waited for."""
    start, wait = Background.start, Background.wait
    waited: list[threading.Event] = []

    def start_late(self: Background, work: Any) -> None:
        mine = threading.Event()

        def late() -> None:
            assert mine.wait(60)
            work()

        start(self, late)  # which waits for the one before
        waited.append(mine)

    def wait_for_it(self: Background) -> None:
        for event in waited:
            event.set()
        wait(self)

    monkeypatch.setattr(Background, "start", start_late)
    monkeypatch.setattr(Background, "wait", wait_for_it)


@pytest.mark.usefixtures("late_writes")
def test_a_diverged_run_names_the_checkpoint_that_was_being_written(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 5, float("nan"), before=True)
    config = tiny_config(tiny_dataset, tmp_path, run="run", keep=1)
    with pytest.raises(DivergedError, match=r"step 5 is nan.* \(step-000004 is kept\)"):
        run(config, tiny_dataset)
    assert saved_steps(tmp_path / "run") == ["step-000004"]


def fail_writing(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the disk be full from the checkpoint of a step on, which is told before the next step ends."""
    save_file, make_step = safetensors.torch.save_file, Trainer.train_step

    def full(tensors: Any, path: Path, *more: Any) -> None:
        if int(path.parent.name.split(".")[1].removeprefix("step-")) >= step:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, *more)

    def train_step(self: Trainer) -> dict[str, Any]:
        record = make_step(self)
        if self.background._work is not None:
            self.background._work.exception()  # waits
        return record

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    monkeypatch.setattr(Trainer, "train_step", train_step)


def test_a_full_disk_stops_the_run_after_the_next_step(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny_options(tiny_dataset, tmp_path, run="run", save_every=2, steps=9, eval_every=0)
    with monkeypatch.context() as patch:
        fail_writing(patch, 4)
        error = error_of(capsys, "train", *options)
    place = tmp_path / "run" / "checkpoints" / "step-000004"
    assert error.startswith(f"{place}: cannot be written (No space left on device); free 2 MiB")
    assert kinds(tmp_path / "run") == [("train", step) for step in range(1, 6)]
    assert [path.name for path in place.parent.iterdir()] == ["step-000002"]
    assert "not finished: step 5 of 9" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    whole = run(tiny_config(tiny_dataset, tmp_path, run="whole", steps=9, eval_every=0), tiny_dataset)
    again = run(tiny_config(tiny_dataset, tmp_path, run="run", steps=9, eval_every=0), tiny_dataset, resume=True)
    assert final_weights(again.run_dir) == final_weights(whole.run_dir)
    assert course(again.run_dir) == course(whole.run_dir)


def test_a_full_disk_at_the_end_is_no_finished_run(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_writing(monkeypatch, 6)
    assert "step-000006: cannot be written (" in error_of(
        capsys, "train", *tiny_options(tiny_dataset, tmp_path, run="run")
    )
    assert kinds(tmp_path / "run")[-1] == ("eval", 6)
    assert saved_steps(tmp_path / "run")[0] == "step-000004"


def test_a_full_disk_at_a_stop_is_no_saved_step(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_writing(monkeypatch, 3)
    after_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    assert "step-000003: cannot be written (" in error_of(
        capsys, "train", *tiny_options(tiny_dataset, tmp_path, run="run")
    )
    assert "is saved" not in capsys.readouterr().out
    assert saved_steps(tmp_path / "run") == ["step-000002"]


def test_a_thread_that_cannot_start_is_an_error_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    background = Background(SINGLE_PROCESS)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        background.start(lambda: None)
    background.close()
