"""The choice of hardware: the rules, with the facts of other machines put in."""

import json
import os
import platform
import subprocess
import sys
from typing import Literal

import pytest
import torch

from quintic.errors import ConfigError
from quintic.kernels import dispatch
from quintic.train import hardware
from quintic.train.config import RunConfig
from quintic.train.hardware import (
    check_memory,
    choose_hardware,
    machine_facts,
    matrix_rate,
    peak_memory_bytes,
)
from quintic.train.source import package_versions


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(hardware, "multiplies_fp8", lambda device, recipe: False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu(has_bfloat16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_multiplies_bfloat16", lambda: has_bfloat16)
    chosen = choose_hardware(RunConfig())
    assert (chosen.device.type, chosen.dtype, chosen.attention, chosen.compile) == ("cpu", dtype, "sdpa", False)
    assert str(dtype).removeprefix("torch.") in str(chosen)


@pytest.mark.usefixtures("gpu")
def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose_hardware(RunConfig())
    assert (chosen.device.type, chosen.dtype, chosen.compile) == ("cuda", torch.bfloat16, True)
    assert str(chosen).startswith("NVIDIA Test, bfloat16, compiled, attention by ")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    old = choose_hardware(RunConfig())
    assert (old.dtype, old.attention) == (torch.float32, "sdpa")  # varlen attention needs half precision


@pytest.mark.usefixtures("gpu")
def test_what_is_asked_for_wins() -> None:
    chosen = choose_hardware(RunConfig(device="cpu", dtype="bfloat16", compile=True))
    assert (chosen.device.type, chosen.dtype, chosen.compile) == ("cpu", torch.bfloat16, True)
    chosen = choose_hardware(RunConfig(device="cuda", dtype="float32", compile=False, attention="flex"))
    assert (chosen.device.type, chosen.dtype, chosen.attention) == ("cuda", torch.float32, "flex")
    assert not chosen.compile


@pytest.mark.usefixtures("no_gpu")
def test_what_the_machine_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^--device cuda: PyTorch finds no CUDA GPU here; use --device cpu$"):
        choose_hardware(RunConfig(device="cuda"))
    for name in ("flex", "varlen"):
        with pytest.raises(ConfigError, match=f"^--attention {name} needs a CUDA device"):
            choose_hardware(RunConfig(attention=name))


@pytest.mark.usefixtures("no_gpu", "same_threads")
def test_the_number_of_threads() -> None:
    choose_hardware(RunConfig(threads=1))
    assert torch.get_num_threads() == 1
    choose_hardware(RunConfig())  # PyTorch's choice is not touched
    assert torch.get_num_threads() == 1
    choose_hardware(RunConfig(threads=2))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("gpu")
def test_every_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--nproc-per-node 3: this host has 2 GPUs, and each process needs one"):
        choose_hardware(RunConfig(), local_ranks=3)
    run = RunConfig(attention="sdpa")
    assert choose_hardware(run, local_ranks=2).device.type == "cuda"
    assert choose_hardware(RunConfig(device="cpu"), local_ranks=3).device.type == "cpu"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t: fpu avx512_bf16 sse", True),
        ("flags\t: amx_bf16", True),
        ("flags\t: fpu avx2", False),
        (None, False),
    ],
)
def test_bfloat16_is_read_from_the_flags_of_the_processor(
    cpuinfo: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(self: object, encoding: str) -> str:
        if cpuinfo is None:
            raise FileNotFoundError
        return cpuinfo

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(dispatch.Path, "read_text", read_text)
    assert dispatch.cpu_multiplies_bfloat16.__wrapped__() is expected


@pytest.mark.usefixtures("no_gpu")
def test_the_facts_can_be_logged() -> None:
    facts = machine_facts(choose_hardware(RunConfig(dtype="float32")))
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["device"], facts["dtype"], facts["attention"], facts["compiled"]) == ("CPU", "float32", "sdpa", False)
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert package_versions()["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("AVX512_CORE", False), ("avx2", False), ("AVX512_CORE_BF16", True), ("ALL", True), ("avx10_1_512_amx", True)],
)
def test_instructions_that_products_may_not_use_do_not_count(
    limit: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(dispatch.Path, "read_text", lambda path, encoding: "flags\t: avx512_bf16")
    assert dispatch.cpu_multiplies_bfloat16.__wrapped__() is expected


@pytest.mark.parametrize(("recipe", "needed"), [("tensorwise", "8.9"), ("rowwise", "9.0")])
def test_without_8_bit_products_one_line_says_so(recipe: Literal["tensorwise", "rowwise"], needed: str) -> None:
    chosen = choose_hardware(RunConfig(device="cpu", dtype="float32", fp8=True, fp8_recipe=recipe))
    assert chosen.fp8 is None
    assert f"float32 (--fp8 has no effect: it needs a GPU of compute capability {needed})" in str(chosen)
    assert "fp8" not in str(choose_hardware(RunConfig(device="cpu", fp8_recipe=recipe)))


@pytest.mark.parametrize(
    ("capability", "tensorwise", "rowwise"), [((8, 0), False, False), ((8, 9), True, False), ((9, 0), True, True)]
)
def test_which_gpus_have_8_bit_products(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], tensorwise: bool, rowwise: bool
) -> None:
    from quintic.kernels.linear import fp8_quantize

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(fp8_quantize, "obstacle_to_triton", lambda device, what: None)
    fp8_quantize._has_fp8.cache_clear()
    assert hardware.multiplies_fp8(torch.device("cuda"), "tensorwise") == tensorwise
    assert hardware.multiplies_fp8(torch.device("cuda"), "rowwise") == rowwise
    fp8_quantize._has_fp8.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_8_bit_products_are_not_divided_among_ranks() -> None:
    with pytest.raises(ConfigError, match="--fp8 does not work with --parallel tp: leave --fp8 out"):
        choose_hardware(RunConfig(device="cpu", fp8=True, parallel="tp"))


def test_the_rate_of_products_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def mm(first: torch.Tensor, second: torch.Tensor) -> None:
        assert first.dtype == torch.float32
        assert first.shape == second.shape == (1024, 1024)
        products.append(first)
        now[0] += 0.02 if len(products) == 3 else 0.05  # beside another process all but one are slow

    products: list[torch.Tensor] = []
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", mm)
    state = torch.random.get_rng_state()
    rate = matrix_rate(choose_hardware(RunConfig(device="cpu", dtype="float32")))
    assert rate == pytest.approx(2 * 1024**3 / 0.02)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_peak_of_memory_never_falls() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    assert before is not None
    large = torch.ones(100 * 2**20, dtype=torch.uint8)
    after = peak_memory_bytes(torch.device("cpu"))
    assert after is not None
    assert after >= max(before, large.numel())
    del large
    assert peak_memory_bytes(torch.device("cpu")) >= after


_FAULTS = """
import resource, sys, torch
from quintic.train.config import RunConfig
from quintic.train.hardware import choose_hardware

def layer():
    tensors = [torch.ones(2 * 2**20) for _ in range(6)]  # 8 MiB each
    return [x * 2 for x in tensors]

if sys.argv[1] == "keep":
    choose_hardware(RunConfig(device="cpu"))
for number in range(9):
    layer()
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_freed_memory_is_kept_on_a_cpu() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", _FAULTS, word], check=True, capture_output=True, text=True).stdout)
        for word in ("keep", "give back")
    )
    assert kept <= given_back / 4  # pages that the system had to clear


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**18}.__getitem__)
    check_memory(2**30, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"^the model takes 1\.5 GiB of memory or more, but there are only 1 GiB \(cpu\); .*--depth"
    ):
        check_memory(3 * 2**29, torch.device("cpu"))
    monkeypatch.delattr(os, "sysconf")
    check_memory(2**62, torch.device("cpu"))  # unknown


def test_a_stopwatch_tells_what_lies_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(clock))
    stopwatch = hardware.Stopwatch(torch.device("cpu"))
    for _ in range(3):
        stopwatch.mark()
    assert stopwatch.seconds() == [0.5, 2.0]


@pytest.mark.gpu
def test_a_stopwatch_counts_the_devices_time_not_the_hosts() -> None:
    stopwatch = hardware.Stopwatch(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    matrix @ matrix
    stopwatch.mark()
    for _ in range(50):
        matrix @ matrix
    stopwatch.mark()
    assert stopwatch.seconds()[0] > 0.01
