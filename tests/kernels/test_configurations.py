"""Launch configurations: what is shipped, and the file that keeps what a search found."""

import contextlib
import json
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from durability import disk_events, durable_names

from quintic.errors import ConfigError
from quintic.kernels import configurations
from quintic.kernels.configuration_cache import (
    DeviceKey,
    cache_file,
    check_writable,
    device_key,
    read_configurations,
    write_configurations,
)
from quintic.kernels.configurations import SYMMETRIC, TUNABLES, Configuration, Tunable, candidates_by_name
from quintic.kernels.dispatch import cache_folder, triton_is_installed

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
KEY = DeviceKey("NVIDIA A100-SXM4-80GB", "8.0", "2.13.0", "3.9.0", "0123456789abcdef")

needs_triton = pytest.mark.skipif(not triton_is_installed(), reason="Triton is not installed")

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def gpu(monkeypatch):
    """An A100, as far as names and versions go."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: KEY.device)
    return device_key(GPU)


# -- configurations ---------------------------------------------------------------------------------------------------


def test_what_is_shipped():
    relu2 = {"num_warps": 8, "num_stages": 3, "block_m": 128, "group": 8}
    assert {name: asdict(tunable.shipped(CPU)) for name, tunable in TUNABLES.items()} == {
        "symmetric": {"num_warps": 8, "num_stages": 5, "block_k": 32},
        "relu2_large": relu2 | {"block_n": 256, "inner_bytes": 128},
        "relu2_small": relu2 | {"block_n": 128, "inner_bytes": 128},
        "relu2_pointers": relu2 | {"block_n": 128, "inner_bytes": 64},
        "momentum": {"num_warps": 8, "block": 2048},
        "weights": {"num_warps": 8, "block": 2048},
        "adamw": {"num_warps": 8},
    }


@needs_triton
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tunable", TUNABLES.values(), ids=list(TUNABLES))
def test_without_a_search_the_shipped_one_runs(tunable):
    for device in (CPU, GPU):
        assert tunable.on(device) == tunable.known[0]
        assert not tunable.is_tuned(device)


@pytest.mark.parametrize("tunable", TUNABLES.values(), ids=list(TUNABLES))
def test_candidates_are_few_and_their_tile_is_the_shipped_one(tunable):
    assert 3 <= len(tunable.candidates(CPU)) <= 10
    assert tunable.shipped(CPU) not in tunable.candidates(CPU)
    for name in ("block_m", "block_n"):
        assert len({asdict(known).get(name) for known in tunable.known}) == 1


@needs_triton
@pytest.mark.usefixtures("gpu")
def test_an_architecture_may_ship_its_own():
    shipped = Configuration(num_warps=8)
    known = [Configuration(num_warps=number) for number in (8, 2, 4)]
    here = Tunable("toy", shipped, [{"num_warps": 4}], {(8, 0): {"num_warps": 2}})
    elsewhere = Tunable("toy", shipped, [{"num_warps": 4}], {(9, 0): {"num_warps": 2}})
    assert (here.on(GPU), elsewhere.on(GPU), here.on(CPU)) == (known[1], known[0], known[0])
    assert here.candidates(GPU) == [known[0], known[2]]


def test_a_configuration_is_in_use_until_the_block_ends():
    before, other = SYMMETRIC.on(CPU), SYMMETRIC.known[2]
    with contextlib.suppress(KeyError), SYMMETRIC.using(other, CPU):
        assert SYMMETRIC.on(CPU) == other
        assert SYMMETRIC.candidates(CPU)[0] == other
        raise KeyError
    assert SYMMETRIC.on(CPU) == before


# -- the file ---------------------------------------------------------------------------------------------------------


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("QUINTIC_CACHE", "somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == Path("somewhere")
    assert cache_file(KEY) == Path("somewhere/kernels-nvidia-a100-sxm4-80gb-sm8-0.json")
    monkeypatch.setenv("QUINTIC_CACHE", "")
    assert cache_folder() == tmp_path / "quintic"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == tmp_path / "home/.cache/quintic"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_folder() is None
    assert read_configurations(KEY, {}) == {}
    with pytest.raises(ConfigError, match="QUINTIC_CACHE"):
        check_writable(KEY)


def test_what_was_written_is_read_beside_what_was_there(own_cache):
    known = candidates_by_name()
    assert read_configurations(KEY, known) == {}
    written = {name: known[name][1] for name in ("symmetric", "adamw")}
    assert write_configurations(KEY, written, known) == cache_file(KEY)
    assert read_configurations(KEY, known) == written
    written = written | {name: known[name][2] for name in ("adamw", "weights")}
    write_configurations(KEY, {name: written[name] for name in ("adamw", "weights")}, known)
    assert read_configurations(KEY, known) == written
    assert list(own_cache.iterdir()) == [cache_file(KEY)]


@needs_triton
def test_launches_use_what_was_written_once_they_look_again(gpu):
    best = SYMMETRIC.known[3]
    write_configurations(gpu, {"symmetric": asdict(best)}, candidates_by_name())
    assert SYMMETRIC.on(GPU) == best
    assert SYMMETRIC.is_tuned(GPU)
    assert SYMMETRIC.candidates(GPU)[0] == best
    assert SYMMETRIC.on(CPU) == SYMMETRIC.known[0]
    write_configurations(gpu, {"symmetric": asdict(SYMMETRIC.known[0])}, candidates_by_name())
    assert SYMMETRIC.on(GPU) == best
    configurations.forget_tuned()
    assert SYMMETRIC.on(GPU) == SYMMETRIC.known[0]


def file_with(**changes):
    known = candidates_by_name()
    content = {"format": 1, "made_with": KEY._asdict(), "configurations": {"adamw": known["adamw"][1]}}
    return json.dumps(content | changes)


def key_with(**changes):
    return {"made_with": KEY._replace(**changes)._asdict()}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not readable as JSON"),
        (file_with()[:-20], "not readable as JSON"),
        ("\udcff", "not readable as JSON"),
        ("[" * 100_000, "recursion"),
        ("[1, 2]", "not a file of kernel configurations"),
        ("{}", "not a file of kernel configurations"),
        (file_with(format=0), "its format is 0, and not 1"),
        (file_with(format="2"), "its format is '2', and not 1"),
        (file_with(made_with=None), "parts of it are missing"),
        (file_with(configurations=[]), "parts of it are missing"),
        (file_with(**key_with(device="NVIDIA A10")), "made with device 'NVIDIA A10', and not 'NVIDIA A100-SXM4-80GB'"),
        (file_with(**key_with(triton="3.8.0")), "made with triton '3.8.0', and not '3.9.0'"),
        (file_with(**key_with(kernels="f")), "made with kernels 'f', and not '0123456789abcdef'"),
        (file_with(made_with={}), "made with device None"),
        (file_with(configurations={"adamw": {"num_warps": 7}}), "adamw: {'num_warps': 7} is no configuration"),
        (file_with(configurations={"adamw": 8}), "adamw: 8 is no configuration"),
        (file_with(configurations={"other": {"num_warps": 8}}), "other: {'num_warps': 8} is no configuration"),
    ],
)
def test_a_file_that_does_not_count_is_ignored_with_a_warning(text, reason):
    path = check_writable(KEY)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    known = candidates_by_name()
    with pytest.warns(UserWarning, match="delete it, or run quintic.kernels.tune") as caught:
        assert read_configurations(KEY, known) == {}
    assert str(caught[0].message).startswith(f"{path}: ")
    assert reason in str(caught[0].message)
    # The next search writes over it.
    write_configurations(KEY, {"adamw": known["adamw"][2]}, known)
    assert read_configurations(KEY, known) == {"adamw": known["adamw"][2]}


@needs_triton
def test_the_warning_comes_once(gpu):
    check_writable(gpu).write_text("damaged")
    with pytest.warns(UserWarning, match="damaged|not readable") as caught:
        assert [tunable.on(device) for tunable in TUNABLES.values() for device in (GPU, torch.device("cuda", 1))]
    assert len(caught) == 1
    assert not SYMMETRIC.is_tuned(GPU)


def test_other_devices_have_files_of_their_own():
    known = candidates_by_name()
    write_configurations(KEY, {"adamw": known["adamw"][1]}, known)
    assert read_configurations(KEY._replace(device="NVIDIA A10"), known) == {}
    assert read_configurations(KEY._replace(capability="8.6"), known) == {}


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUINTIC_CACHE", str(tmp_path / "file" / "folder"))
    assert read_configurations(KEY, {}) == {}
    with pytest.raises(
        ConfigError, match=r"file/folder/kernels-.* cannot be written \(Not a directory\): name another"
    ):
        check_writable(KEY)


def test_what_was_found_survives_a_crash(own_cache, monkeypatch):
    known = candidates_by_name()
    events = disk_events(monkeypatch)
    path = write_configurations(KEY, {"adamw": known["adamw"][1]}, known)
    assert durable_names(events) == [path.name]


def test_an_unfinished_write_leaves_the_old_file(own_cache, monkeypatch):
    known = candidates_by_name()
    write_configurations(KEY, {"adamw": known["adamw"][1]}, known)

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_configurations(KEY, {"adamw": known["adamw"][2]}, known)
    assert read_configurations(KEY, known) == {"adamw": known["adamw"][1]}
    assert len(list(own_cache.iterdir())) == 1


def test_writers_at_the_same_time_leave_a_whole_file():
    known = candidates_by_name()
    found = []

    def work(name):
        for number in range(20):
            write_configurations(KEY, {name: known[name][number % 3]}, known)
            found.append(read_configurations(KEY, known))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("symmetric", "adamw", "weights")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(found)
