"""Mistakes that other implementations made, each a test here. The issue it was reported in stands beside it.

What is not here has its test where the subject is: skipped steps in test_non_finite.py, fused layouts in test_views.py,
tied and unmatched parameters in test_groups.py, graphs, memory and large offsets in test_device.py.
"""

import itertools
import subprocess
import sys
import textwrap

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from newer import torch_muon
from torch import nn

import quintic
from quintic import Flatten, Muon

FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def stepped(optimizer, *params, seed=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    memory=st.sampled_from(["contiguous", "transposed", "strided", "offset"]),
    neuron=st.booleans(),
    cautious=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(m=1, n=8, memory="contiguous", neuron=True, cautious=False, seed=3880)  # an entry of next to nothing
def test_every_shape_and_memory_layout_follows_the_reference(m, n, memory, neuron, cautious, seed):
    """Rank one, single rows and columns, odd strides (vllm-project/speculators#821, Emerging-Optimizers#245)."""
    torch.manual_seed(seed)
    # Everything in float64: NorMuon and cautious decay turn on the sign of entries that may be all but zero.
    if memory == "contiguous":
        data = torch.randn(m, n, dtype=torch.float64)
    elif memory == "transposed":
        data = torch.randn(n, m, dtype=torch.float64).T
    elif memory == "strided":
        data = torch.randn(2 * m, 3 * n, dtype=torch.float64)[::2, ::3]
    else:
        data = torch.randn(m * n + 1, dtype=torch.float64)[1:].view(m, n)
    param = nn.Parameter(data)
    twin = oracle.MuonMatrix(data.numpy(), neuron=neuron)
    optimizer = Muon(
        [param],
        lr=0.05,
        momentum=0.8,
        weight_decay=0.2,
        adamw_weight_decay=0.2,
        cautious=cautious,
        normalize="neuron" if neuron else None,
        compute_dtype=torch.float64,
    )
    for _ in range(3):
        stepped(optimizer, param)
        twin.step(param.grad.numpy(), lr=0.05, mu=0.8, wd=0.2, cautious=cautious)
    np.testing.assert_allclose(param.detach().numpy(), twin.w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
# Not bfloat16 without Nesterov: there PyTorch's orthogonalisation normalises its own momentum (pytorch#194664).
@pytest.mark.parametrize(("dtype", "nesterov"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_twenty_steps_equal_torch_muon_with_its_conventions(adjust, nesterov, dtype):
    # Small weights, so that what bfloat16 rounds off is small beside a step.
    ours = [nn.Parameter((0.01 * torch.randn(shape)).to(dtype)) for shape in ((24, 16), (16, 24), (20, 20))]
    theirs = [nn.Parameter(param.detach().clone()) for param in ours]
    scale = "spectral" if adjust == "original" else adjust
    lr = 0.02 if adjust == "original" else 0.01
    first = Muon(ours, lr=lr, weight_decay=0.1, orthogonalizer="newton_schulz", adjust_lr=scale, nesterov=nesterov)
    second = torch_muon()(theirs, lr=lr, weight_decay=0.1, adjust_lr_fn=adjust, nesterov=nesterov)
    start = [param.detach().clone() for param in ours]
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.clone()
        first.step()
        second.step()
    for p, q, before in zip(ours, theirs, start, strict=True):
        moved = (q - before).float().norm()
        # Both compute in bfloat16; theirs normalises in it too, and keeps a bfloat16 momentum for bfloat16 weights.
        assert (p - q).float().norm() < (0.02 if dtype == torch.float32 else 0.1) * moved


@pytest.mark.parametrize("fused", [True, False])
def test_twenty_steps_equal_torch_adamw(fused):
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((9, 5), (7,), ())]
    theirs = [nn.Parameter(param.detach().clone()) for param in ours]
    options = {"betas": (0.8, 0.95), "eps": 1e-9, "weight_decay": 0.1}
    first = Muon([{"params": ours, "algorithm": "adamw", **options}], adamw_lr=0.01)
    second = torch.optim.AdamW(theirs, lr=0.01, fused=fused, **options)
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        first.step()
        second.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0 if fused else 1e-6, atol=0 if fused else 1e-6)


@pytest.mark.parametrize("before", FLOAT_DTYPES)
@pytest.mark.parametrize("after", FLOAT_DTYPES)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_state_of_one_dtype_continues_with_weights_of_another(before, after, algorithm):
    """Restored float32 momentum met bfloat16 gradients (DeepSpeed#7746, #8433, nanochat#527, NorMuon#7)."""
    first, second = nn.Parameter(torch.randn(6, 4).to(before)), nn.Parameter(torch.randn(6, 4).to(after))
    optimizer = Muon([{"params": [first], "algorithm": algorithm}], normalize="neuron")
    stepped(optimizer, first)
    resumed = Muon([{"params": [second], "algorithm": algorithm}], normalize="neuron")
    resumed.load_state_dict(optimizer.state_dict())
    for key, value in resumed.state[second].items():
        assert value.dtype == (torch.float64 if after == torch.float64 and key != "step" else torch.float32)
        assert torch.equal(value, optimizer.state[first][key].to(value.dtype))
    stepped(resumed, second)
    assert torch.isfinite(second).all()


def test_weights_of_several_dtypes_in_one_group():
    """nanochat#512, muon-clip#9."""
    params = [nn.Parameter(torch.randn(6, 4).to(dtype)) for dtype in FLOAT_DTYPES]
    vectors = [nn.Parameter(torch.randn(4).to(dtype)) for dtype in FLOAT_DTYPES]
    groups = [{"params": params}, {"params": vectors, "algorithm": "adamw"}]
    optimizer = Muon(groups, lr=0.1, adamw_lr=0.1, weight_decay=0.1, adamw_weight_decay=0.1, cautious=True)
    before = [param.detach().clone() for param in (*params, *vectors)]
    for _ in range(2):
        stepped(optimizer, *params, *vectors)
    assert all(not torch.equal(p, b) for p, b in zip((*params, *vectors), before, strict=True))


@pytest.mark.slow
def test_a_fresh_process_resumes_to_the_bit(tmp_path):
    """Keys of the dead process restored nothing (modded-nanogpt), half was not saved (gram-newton-schulz)."""
    script = textwrap.dedent(
        """
        import sys, torch, quintic
        from torch import nn
        begin, end, load, save = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
        torch.manual_seed(7)
        junk = [nn.Linear(3, 3) for _ in range(begin)]  # other objects at other addresses
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)).bfloat16()
        options = {"normalize": "neuron", "master": "mantissa", "weight_decay": 0.1, "cautious": True}
        options["adamw_weight_decay"] = 0.1
        optimizer = quintic.Muon(quintic.param_groups(model), **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        if load != "-":
            saved = torch.load(load, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(state_dict=saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        for step in range(begin, end):
            torch.manual_seed(100 + step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape).bfloat16()
            optimizer.step()
            scheduler.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state, save)
        """
    )

    def run(begin, end, load, save):
        arguments = [str(begin), str(end), str(load), str(save)]
        subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=100)

    run(0, 6, "-", tmp_path / "whole")
    run(0, 3, "-", tmp_path / "half")
    run(3, 6, tmp_path / "half", tmp_path / "resumed")
    whole, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "resumed"))
    for name, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][name])
    for key, state in whole["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, resumed["optimizer"]["state"][key][name])
            assert value.dtype == resumed["optimizer"]["state"][key][name].dtype
    assert [g["lr"] for g in whole["optimizer"]["param_groups"]] == [
        g["lr"] for g in resumed["optimizer"]["param_groups"]
    ]


def test_state_of_groups_added_later_is_saved_and_loaded():
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]

    def optimizer_of(values):
        optimizer = Muon([("a", values[0])])
        optimizer.add_param_group({"params": [("b", values[1])], "lr": 0.5, "normalize": "neuron"})
        optimizer.add_param_group({"params": [("c", values[2])], "algorithm": "adamw"})
        return optimizer

    optimizer = optimizer_of(params)
    stepped(optimizer, *params)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = optimizer_of(twins)
    twin.load_state_dict(optimizer.state_dict())
    stepped(optimizer, *params, seed=1)
    stepped(twin, *twins, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    assert twin.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("shape", [(64, 64), (256, 32), (32, 256), (8, 8, 3, 3), (16, 4, 5)])
def test_the_size_of_the_step_is_what_the_scale_promises(shape):
    """Scales made from kernel sizes, or from the clipped update (timm#2791, DeepSpeed#8439, Megatron-LM#7236)."""
    view = {"view": Flatten()} if len(shape) > 2 else {}
    m, n = shape[0], int(np.prod(shape[1:]))
    expected = {
        "match_rms_adamw": 0.2 * np.sqrt(max(m, n)),
        "spectral": np.sqrt(max(1, m / n)),
        "unit_rms": np.sqrt(m / n),
        None: 1.0,
    }
    for scale, factor in expected.items():
        param = nn.Parameter(torch.zeros(shape))
        optimizer = Muon([{"params": [param], **view}], lr=1.0, adjust_lr=scale, orthogonalizer="svd")
        stepped(optimizer, param)
        rms = param.detach().square().mean().sqrt()
        # A polar factor has min(m, n) singular values of one.
        assert float(rms) == pytest.approx(factor / np.sqrt(max(m, n)), rel=1e-3)


@pytest.mark.parametrize("method", ["auto", "polar_express", "newton_schulz", "gram", "svd"])
def test_every_method_named_is_the_method_run(method):
    """Orthogonalisation that never ran (DeepSpeed#8441, #8442, #8526): the step says what it did."""
    params = [nn.Parameter(torch.zeros(12, 8)) for _ in range(3)]
    optimizer = Muon(params, lr=1.0, adjust_lr=None, orthogonalizer=method)
    stepped(optimizer, *params)
    report = optimizer.last_step()
    assert report.num_matrices == 3
    (name,) = report.matrices
    assert name.split()[0] == ("polar_express" if method == "auto" else method)
    for param in params:
        sigma = torch.linalg.svdvals(param.detach().float())
        assert ((sigma > 0.6) & (sigma < 1.3)).all()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1, "weight_decay": 1, "momentum": 0},
        {"lr": torch.tensor(0.02), "momentum": 0.9},
        {"lr": np.float64(0.02), "weight_decay": np.float32(0.1)},
    ],
    ids=["int", "tensor", "numpy"],
)
def test_hyperparameters_of_any_number_type(options):
    """Integers crashed compiled steps (dion, e6c5fe2)."""
    matrix, vector = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}], **options)
    stepped(optimizer, matrix, vector)
    assert torch.isfinite(matrix).all()


def test_the_order_of_parameters_does_not_matter():
    """State of a shape group on its first parameter (nanochat)."""
    values = [torch.randn(shape) for shape in ((4, 3), (4, 3), (3, 4), (4, 3))]
    results = []
    for order in itertools.permutations(range(4), 4):
        params = [nn.Parameter(value.clone()) for value in values]
        optimizer = Muon([params[index] for index in order], normalize="neuron", compute_dtype=torch.float64)
        for step in range(2):
            for index, param in enumerate(params):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + index))
            optimizer.step()
        results.append(params)
    for params in results[1:]:
        for p, q in zip(params, results[0], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_gradients_may_be_summed_or_averaged_over_accumulation():
    """modded-nanogpt, 2025-10-27: a mean over ranks met a sum over steps."""
    params = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    gradients = torch.randn(5, 6, 4)
    for param, gradient in zip(params, (gradients.sum(0), gradients.mean(0)), strict=True):
        param.grad = gradient
        Muon([param], compute_dtype=torch.float64).step()
    torch.testing.assert_close(*params, rtol=1e-6, atol=1e-7)


def test_meta_and_real_models_are_divided_alike():
    """Shapes known only later made every parameter one-dimensional (DeepSpeed#8438)."""

    def build():
        return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Conv2d(3, 8, 3), nn.LayerNorm(16))

    real = build()
    with torch.device("meta"):
        meta = build()
    described = [
        [(group["algorithm"], group["param_names"], group["view"]) for group in quintic.param_groups(model)]
        for model in (real, meta)
    ]
    assert described[0] == described[1]
