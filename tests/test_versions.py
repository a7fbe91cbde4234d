"""What differs between versions of PyTorch and Triton, and what the command line says where PyTorch is too old."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_runs import error_of

import quintic.cli
from quintic import versions
from quintic.versions import (
    HARNESS_NEEDS,
    OPTIMIZER_NEEDS,
    all_gather_single,
    can_forbid_splits,
    gluon_names,
    moves_strided_shards,
    release,
    torch_version,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.8.0+cu128", (2, 8)),
        ("2.13.0", (2, 13)),
        ("2.14", (2, 14)),
        ("2.11.0a0+gitabc1234", (2, 11)),
        ("3.4.0", (3, 4)),
        ("unknown", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_versions_are_numbers(version: str, numbers: tuple[int, int]) -> None:
    assert release(version) == numbers


def test_the_version_is_known_before_and_after_pytorch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_version() == torch.__version__
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_version() == importlib.metadata.version("torch")

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert torch_version() is None


def test_pip_is_told_the_same_as_the_command_line() -> None:
    needs = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    of_torch = {extra: need for extra, all_needs in needs.items() for need in all_needs if re.match(r"torch\b", need)}
    assert of_torch == {"": f"torch>={OPTIMIZER_NEEDS}", "train": f"torch>={HARNESS_NEEDS}"}


def test_names_that_moved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = SimpleNamespace(all_gather_into_tensor=1), SimpleNamespace(all_gather_into_tensor=1, all_gather_single=2)
    for found, expected in ((old, 1), (new, 2)):
        monkeypatch.setattr(torch, "distributed", found)
        monkeypatch.setitem(sys.modules, "torch.distributed", found)
        assert all_gather_single() == expected
    for settings, expected in (({}, False), ({"allow_bf16_reduced_precision_reduction_split_k": True}, True)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**settings))
        assert can_forbid_splits() is expected


def test_names_of_gluon_are_the_newest_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def gluon(memory: dict[str, str], copies: dict[str, str], waits: dict[str, str]) -> None:
        tma = SimpleNamespace(**copies)
        modules = {
            "triton.experimental.gluon.language": SimpleNamespace(
                shared_memory_descriptor=SimpleNamespace(**memory), **waits
            ),
            "triton.experimental.gluon.language.nvidia.hopper": SimpleNamespace(tma=tma),
        }
        monkeypatch.setattr(versions.importlib, "import_module", modules.__getitem__)

    gluon(
        {"_reinterpret": "view"},
        {"async_copy_global_to_shared": "load", "async_copy_shared_to_global": "store"},
        {"thread_barrier": "wait"},
    )
    assert gluon_names() == ("load", "store", "view", "wait")
    gluon({"reinterpret": "view"}, {"async_load": "load", "async_store": "store"}, {"barrier": "wait"})
    assert gluon_names() == ("load", "store", "view", "wait")


@pytest.mark.parametrize(("version", "right"), [("2.8.0", False), ("2.9.1+cu128", False), ("2.11.0", True)])
def test_strided_shards_are_moved_by_newer_versions_only(
    version: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "torch_version", lambda: version)
    assert moves_strided_shards() is right


# ---------- the command line


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command line, with commands that say that they were run."""
    module = SimpleNamespace(run=lambda options: 7)
    monkeypatch.setattr(quintic.cli, "importlib", SimpleNamespace(import_module=lambda name: module))
    return quintic.cli


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("arguments", [["train"], ["compare", "--depth", "2"], ["plan"], ["report"], ["sample"]])
def test_an_older_pytorch_is_one_message(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(quintic.cli, "torch_version", lambda: "2.8.0+cu128")
    message = error_of(capsys, *arguments)
    assert re.fullmatch(
        rf"quintic {arguments[0]} needs PyTorch 2\.11 or newer, but 2\.8\.0\+cu128 is installed: "
        r"run \S+ -m pip install --editable \S+ \(the optimizer by itself needs 2\.8\)",
        message,
    )


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+nv26.2", "2.14.1+cu130", "3.0.0", None])
def test_a_pytorch_that_is_new_enough_or_unknown_is_not_mentioned(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quintic.cli, "torch_version", lambda: version)
    assert quintic.cli.main(["report"]) == 7


@pytest.mark.usefixtures("command")
def test_one_rank_of_each_host_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quintic.cli, "torch_version", lambda: "2.9.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert quintic.cli.main(["train"]) == 2
        assert capsys.readouterr().err.count("\n") == lines


def test_help_is_given_all_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quintic.cli, "torch_version", lambda: "2.8.0")
    assert quintic.cli.main(["train", "--help"]) == 0
    assert "--depth" in capsys.readouterr().out
