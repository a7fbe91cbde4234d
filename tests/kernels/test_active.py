"""`quintic.kernels.active` says what the operations themselves would choose."""

import subprocess
import sys

import pytest
import torch
from newer import check_gluon, needs_torch
from torch._subclasses import fake_tensor

import quintic
from quintic.kernels import active, dispatch
from quintic.kernels.attention import flash

OPERATIONS = [
    "momentum_and_weights",
    "adamw",
    "normalize",
    "orthogonalize",
    "mlp_relu2",
    "fp8_linear",
    "softcap_cross_entropy",
    "transpose",
    "lookup",
    "attention",
    "max_logits",
]
WITH_KERNELS = OPERATIONS[:-2]


@pytest.fixture
def on_hopper(monkeypatch):
    """A machine with an H200, as far as choices can see: tensors have no memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash, "_obstacle_to_import", lambda package: None)
    monkeypatch.setattr(dispatch, "triton_is_installed", lambda: True)
    # PyTorch 2.11 would make a real tensor on the device before the first fake one.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
    with fake_tensor.FakeTensorMode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cpu_runs_plain_pytorch_for_no_other_reason(dtype):
    found = active("cpu", dtype)
    assert list(found) == OPERATIONS
    assert found == dict.fromkeys(WITH_KERNELS, "torch") | {"attention": "sdpa", "max_logits": "chunked"}


def test_the_device_is_the_one_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quintic.kernels.active() == active("cpu")
    with pytest.raises(ValueError, match="device='cuda:77'"):
        active("cuda:77")


@needs_torch("2.9", "row maxima of FlexAttention")
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hopper_with_everything_installed(dtype):
    check_gluon()
    others = {"orthogonalize": "triton (hopper)", "attention": "fa3", "max_logits": "flex"}
    assert active(dtype=dtype) == dict.fromkeys(WITH_KERNELS, "triton") | others


@pytest.mark.usefixtures("on_hopper")
def test_other_gpus_have_the_symmetric_kernel(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert active()["orthogonalize"] == "triton (symmetric)"


@pytest.mark.usefixtures("on_hopper")
def test_without_triton_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_is_installed", lambda: False)
    found = active()
    assert {found[name] for name in WITH_KERNELS} == {"torch (Triton is not installed)"}
    assert found["attention"] == "fa3"


@pytest.mark.usefixtures("on_hopper")
def test_without_flash_attention_the_reasons_are_said(monkeypatch):
    pytest.importorskip("triton")
    absent = "needs a package that is not installed: it"
    monkeypatch.setattr(flash, "_obstacle_to_import", lambda package: None if "torch" in package.module else absent)
    assert active()["attention"] == f"varlen (fa3 {absent}; fa4 {absent})"
    found = active(dtype=torch.float32)["attention"]
    reason = "needs a CUDA device and bfloat16 or float16; this run has cuda and float32"
    assert found == f"sdpa (fa3 {reason}; fa4 {reason}; varlen {reason})"


@pytest.mark.usefixtures("on_hopper")
def test_dtypes_without_kernels():
    pytest.importorskip("triton")
    single = active(dtype=torch.float32)
    assert (single["momentum_and_weights"], single["normalize"], single["transpose"]) == ("triton",) * 3
    assert single["orthogonalize"] == "torch (torch.float32 has no kernel)"
    double = active(dtype=torch.float64)
    for name in ("momentum_and_weights", "adamw", "normalize", "orthogonalize"):
        assert double[name] == "torch (torch.float64 has no kernel)"
    assert double["max_logits"] == "chunked"


@pytest.mark.usefixtures("on_hopper")
def test_an_older_device(monkeypatch):
    pytest.importorskip("triton")
    from quintic.kernels.linear import fp8_quantize

    fp8_quantize._has_fp8.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    found = active()
    fp8_quantize._has_fp8.cache_clear()
    assert found["fp8_linear"].startswith("torch (cuda:0 has no 8-bit floats")
    assert found["attention"].startswith("varlen (fa3 needs a device of compute capability 9.x; this one has 8.0; fa4")
    assert found["mlp_relu2"] == "triton"


@pytest.mark.slow
def test_it_is_there_after_import_quintic_and_loads_nothing_before_it_is_called():
    code = """
import sys, torch
before = set(sys.modules)
import quintic
loaded = {name for name in set(sys.modules) - before if name.startswith("quintic.kernels.")}
products = "quintic.kernels.products"
assert loaded <= {"quintic.kernels.dispatch", products, f"{products}.choose_products"}, loaded
assert "triton" not in set(sys.modules) - before
assert quintic.kernels.active("cpu")["adamw"] == "torch"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_device_it_says_what_the_plan_says(dtype):
    param = torch.nn.Parameter(torch.zeros(32, 16, device="cuda", dtype=dtype))
    plan = quintic.Muon([{"params": [param]}]).plan()
    assert active("cuda", dtype)["momentum_and_weights"].split(" ")[0] == plan.buckets[0].kernels
