import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from quintic.kernels.loss import loss as loss_module
from quintic.kernels.loss.chunks import loss_twin
from quintic.kernels.loss.loss import Fp8Scales, SigmoidCap, softcap_cross_entropy


def test_extreme_logits_stay_finite():
    x = torch.full((2, 4), 1e4, requires_grad=True)
    loss = softcap_cross_entropy(x, torch.randn(9, 4).requires_grad_(), torch.tensor([0, 8]), softcap=15.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()


def oracle(x, weight, targets, softcap, target_weights=None, ignore_index=-100, vocab_size=None, transposed=False):
    """Losses per token in float64 by the definition, target by target; differentiable."""
    head = (weight.mT if transposed else weight).double()[:vocab_size]
    logits = x.double() @ head.mT
    if isinstance(softcap, SigmoidCap):
        logits = softcap.height / (1 + torch.exp(-(logits + softcap.shift) / softcap.width))
    elif softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if targets.ndim < x.ndim:
        targets = targets.unsqueeze(-1)
    if target_weights is None:
        target_weights = torch.ones(targets.shape[-1])
    target_weights = target_weights.expand(targets.shape).double()
    losses = torch.zeros(x.shape[:-1], dtype=torch.float64)
    normalizer = torch.logsumexp(logits, dim=-1)
    for k in range(targets.shape[-1]):
        target = targets[..., k]
        counted = target != ignore_index
        picked = logits.gather(-1, target.where(counted, 0).unsqueeze(-1)).squeeze(-1)
        losses = losses + torch.where(counted, target_weights[..., k] * (normalizer - picked), 0)
    return losses


def test_a_sigmoid_cap_compiles():
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6)
    targets, cap = torch.randint(9, (4,)), SigmoidCap(23.0, 5.0, 7.5)

    def loss(x):
        return softcap_cross_entropy(x, weight, targets, softcap=cap)

    found = torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, oracle(x, weight, targets, cap).mean().float())


@pytest.mark.parametrize("cap", [(0.0, 1.0, 1.0), (1.0, 1.0, -1.0), (1.0, float("inf"), 1.0), (1.0, 1.0, float("nan"))])
def test_a_sigmoid_cap_out_of_range_is_said(cap):
    with pytest.raises(ValueError, match=r"softcap=SigmoidCap\(.*: need height and width > 0"):
        softcap_cross_entropy(torch.ones(1, 2), torch.ones(3, 2), torch.tensor([0]), softcap=SigmoidCap(*cap))


def reduced(losses, targets, reduction, ignore_index=-100):
    if reduction == "none":
        return losses
    if targets.ndim > losses.ndim:
        counted = (targets != ignore_index).any(-1)
    else:
        counted = targets != ignore_index
    return losses.sum() / (counted.sum().clamp(min=1) if reduction == "mean" else 1)


def plain(x, weight, targets, softcap, target_weights=None, ignore_index=-100, vocab_size=None, transposed=False):
    """The same in PyTorch's usual operations and the dtype of x."""
    head = (weight.mT if transposed else weight)[:vocab_size].to(x.dtype)
    logits = F.linear(x, head).float().flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    targets = targets.unsqueeze(-1) if targets.ndim < x.ndim else targets
    weights = torch.ones(targets.shape) if target_weights is None else target_weights.expand(targets.shape)
    targets = targets.flatten(0, -2)
    terms = [F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none") for target in targets.T]
    return (torch.stack(terms, dim=1) * weights.flatten(0, -2)).sum(1).view(x.shape[:-1])


def gradients(loss, upstream, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))]


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def spread_out(x):
    """The same values in a memory of twice the size, dimensions in another order."""
    wide = x.new_empty((*x.shape[::-1], 2))
    view = wide[..., 1].permute(tuple(range(x.ndim))[::-1])
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


@st.composite
def problems(draw):
    shape = draw(st.sampled_from([(), (1,), (7,), (2, 5), (3, 1, 4), (0,)]))
    d, stored = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    num_targets = draw(st.sampled_from([None, 1, 2, 3]))
    return {
        "shape": shape,
        "d": d,
        "stored": stored,
        "vocab_size": draw(st.one_of(st.none(), st.integers(1, stored))),
        "num_targets": num_targets,
        "weighted": "no" if num_targets is None else draw(st.sampled_from(["no", "shared", "each"])),
        "ignored": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "ignore_index": draw(st.sampled_from([-100, -1, 0, 10**12])),
        "softcap": draw(
            st.sampled_from([None, 0.5, 15.0, 100.0, SigmoidCap(23.0, 5.0, 7.5), SigmoidCap(2.0, -3.0, 0.5)])
        ),
        "transposed": draw(st.booleans()),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "strided": draw(st.booleans()),
        "chunk": draw(st.sampled_from([1, 300, 2**22])),
        "seed": draw(st.integers(0, 10**6)),
    }


def make(problem, dtype):
    """Return x, weight, targets and options of a drawn problem."""
    torch.manual_seed(problem["seed"])
    shape, stored = problem["shape"], problem["stored"]
    vocab = problem["vocab_size"] or stored
    x = (torch.randn(*shape, problem["d"], dtype=torch.float64) * 2).to(dtype).requires_grad_()
    weight = torch.randn(stored, problem["d"], dtype=torch.float64).to(dtype)
    weight = (weight.mT.contiguous() if problem["transposed"] else weight).requires_grad_()
    several = () if problem["num_targets"] is None else (problem["num_targets"],)
    targets = torch.randint(vocab, (*shape, *several))
    targets[torch.rand(targets.shape) < problem["ignored"]] = problem["ignore_index"]
    options = {key: problem[key] for key in ("softcap", "vocab_size", "transposed", "ignore_index")}
    if problem["weighted"] != "no":
        options["target_weights"] = torch.randn(several if problem["weighted"] == "shared" else targets.shape)
    if problem["strided"]:
        x, weight, targets = spread_out(x), spread_out(weight), spread_out(targets)
    return x, weight, targets, options


@given(problem=problems(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_values_and_gradients_are_those_of_the_definition(problem, dtype):
    x, weight, targets, options = make(problem, dtype)
    reduction = problem["reduction"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "_CHUNK_BYTES", problem["chunk"])
        loss = softcap_cross_entropy(x, weight, targets, reduction=reduction, **options)
        with torch.no_grad():
            without = softcap_cross_entropy(x, weight, targets, reduction=reduction, **options)
        assert torch.equal(loss, without)
        exact = reduced(oracle(x, weight, targets, **options), targets, reduction, options["ignore_index"])
        assert loss.shape == exact.shape
        assert loss.dtype == dtype
        upstream = torch.randn(loss.shape, dtype=torch.float64)
        found = gradients(loss, upstream, x, weight)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for ours, theirs in zip(found, gradients(exact, upstream, x, weight), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)
    if problem["vocab_size"] is not None:
        grad = found[2].mT if problem["transposed"] else found[2]
        assert not grad[problem["vocab_size"] :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("num_targets", [None, 3])
def test_accuracy_is_that_of_pytorch(dtype, weight_dtype, reduction, num_targets):
    x = (torch.randn(4, 50, 32) * 2).to(dtype).requires_grad_()
    weight = torch.randn(301, 32).to(weight_dtype or dtype).requires_grad_()
    several = () if num_targets is None else (num_targets,)
    targets = torch.randint(301, (4, 50, *several))
    targets[0, :7] = -100
    options = {"softcap": 10.0}
    if num_targets is not None:
        options["target_weights"] = torch.tensor([1.0, 0.5, 0.25])
    upstream = torch.randn(4, 50) if reduction == "none" else torch.tensor(3.0)
    ours = gradients(softcap_cross_entropy(x, weight, targets, reduction=reduction, **options), upstream, x, weight)
    theirs = gradients(reduced(plain(x, weight, targets, **options), targets, reduction), upstream, x, weight)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    if dtype != torch.float32:
        # What both compute from, so that only their own errors count.
        leaves[1] = weight.detach().to(dtype).double().requires_grad_()
    exact = gradients(reduced(oracle(*leaves, targets, **options), targets, reduction), upstream, *leaves)
    for found, usual, true in zip(ours, theirs, exact, strict=True):
        assert error(found, true) <= 2 * error(usual, true) + 1e-6
    assert [grad.dtype for grad in ours[1:]] == [dtype, weight.dtype]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_target_per_token_is_what_pytorch_means(reduction):
    x, weight = torch.randn(40, 8), torch.randn(30, 8)
    targets = torch.randint(30, (40,))
    targets[::3] = 29
    options = {"ignore_index": 29, "reduction": reduction}
    expected = F.cross_entropy(F.linear(x, weight), targets, **options)
    torch.testing.assert_close(softcap_cross_entropy(x, weight, targets, softcap=None, **options), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_are_computed_only_for_what_requires_them(reduction):
    x, weight, targets = torch.randn(6, 8), torch.randn(30, 8), torch.randint(30, (6,))
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    softcap_cross_entropy(*leaves, targets, softcap=5.0, reduction=reduction).sum().backward()
    for alone in range(2):
        operands = [x.clone(), weight.clone()]
        operands[alone].requires_grad_()
        softcap_cross_entropy(*operands, targets, softcap=5.0, reduction=reduction).sum().backward()
        assert torch.equal(operands[alone].grad, leaves[alone].grad)
        assert operands[1 - alone].grad is None


def test_without_gradients_none_are_computed(monkeypatch):
    asked = []

    def spy(problem, wanted, chunk):
        asked.append(wanted)
        return loss_twin(problem, wanted, chunk)

    monkeypatch.setattr(loss_module, "loss_twin", spy)
    x, weight, targets = torch.randn(6, 8), torch.randn(30, 8, requires_grad=True), torch.randint(30, (6,))
    softcap_cross_entropy(x, weight.detach(), targets, softcap=5.0)
    with torch.no_grad():
        softcap_cross_entropy(x, weight, targets, softcap=5.0)
    assert asked == [None, None]
    softcap_cross_entropy(x, weight, targets, softcap=5.0)
    assert (asked[2].for_x, asked[2].for_weight) == (False, True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_gives_the_same_and_second_derivatives_are_refused(reduction):
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    loss = softcap_cross_entropy(x, weight, torch.randint(30, (6,)), softcap=5.0, reduction=reduction).square().sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(loss, (x, weight), retain_graph=True), strict=True):
        assert torch.equal(one, two)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.sum().backward()


@pytest.mark.slow
def test_small_gradients_survive_float16():
    """Divided by the number of tokens before its product, a gradient of these logits would be zero."""
    x = torch.randn(20_000, 8).half().requires_grad_()
    weight = (torch.randn(2000, 8) / 8).half().requires_grad_()
    targets = torch.randint(2000, (20_000,))
    scale = torch.tensor(2.0**14)
    ours = gradients(softcap_cross_entropy(x, weight, targets, softcap=5.0), scale, x, weight)
    exact = gradients(oracle(x, weight, targets, 5.0).mean(), scale, x, weight)
    for found, true in zip(ours, exact, strict=True):
        assert error(found, true) < 2e-3


def test_autocast_changes_nothing():
    x, weight, targets = torch.randn(6, 8), torch.randn(30, 8), torch.randint(30, (6,))
    expected = softcap_cross_entropy(x, weight, targets, softcap=5.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(softcap_cross_entropy(x, weight, targets, softcap=5.0), expected)


# ------------------------------------------------------------------------------------------------------------- 8 bits


def fp8_problem(dtype=torch.float32, transposed=False):
    """Values that e4m3 has, so that all error is that of the gradient's rounding."""
    x = (torch.randn(40, 32) * 2).round().clamp(-8, 8).to(dtype).requires_grad_()
    weight = ((torch.randn(64, 32) * 4).round().clamp(-15, 15) / 16).to(dtype)
    weight = (weight.mT.contiguous() if transposed else weight).requires_grad_()
    scales = Fp8Scales(torch.tensor(0.5), torch.tensor(2.0**-8), torch.tensor(2.0**-14))
    return x, weight, torch.randint(64, (40,)), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_8_bits_are_close_to_the_definition(dtype, transposed, reduction):
    x, weight, targets, scales = fp8_problem(dtype, transposed)
    options = {"softcap": 15.0, "transposed": transposed}
    loss = softcap_cross_entropy(x, weight, targets, reduction=reduction, fp8=scales, **options)
    exact = reduced(oracle(x, weight, targets, **options), targets, reduction)
    upstream = torch.rand(loss.shape) + 0.5
    found, true = gradients(loss, upstream, x, weight), gradients(exact, upstream, x, weight)
    assert error(found[0], true[0]) < (1e-6 if dtype == torch.float32 else 1e-2)
    for grad, other in zip(found[1:], true[1:], strict=True):
        # Two bits of mantissa: an eighth at most, a fifteenth on average.
        assert 1e-4 < error(grad, other) < 0.08
        assert grad.dtype == dtype


def test_8_bits_round_what_they_should():
    x, weight, targets, scales = fp8_problem()
    exact = softcap_cross_entropy(x, weight, targets, softcap=None)
    coarse_x = softcap_cross_entropy(x, weight, targets, softcap=None, fp8=scales._replace(x=torch.tensor(0.3)))
    coarse_weight = softcap_cross_entropy(
        x, weight, targets, softcap=None, fp8=scales._replace(weight=torch.tensor(0.1))
    )
    fine = softcap_cross_entropy(x, weight, targets, softcap=None, fp8=scales)
    torch.testing.assert_close(fine, exact)
    for coarse in (coarse_x, coarse_weight):
        assert 1e-4 < float((abs(coarse - exact) / exact).detach()) < 0.2
    # One unit above the largest gradient: every one of them is rounded to zero, or to the unit.
    loss = softcap_cross_entropy(x, weight, targets, softcap=None, fp8=scales._replace(grad=torch.tensor(1e6)))
    assert not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.tensor([1.0])}, r"fp8\.x is torch.float32 of shape \(1,\)"),
        ({"grad": torch.tensor(1.0, dtype=torch.float64)}, r"fp8\.grad is torch.float64"),
    ],
    ids=["shape", "dtype"],
)
def test_scales_that_do_not_fit(change, match):
    x, weight, targets, scales = fp8_problem()
    with pytest.raises(ValueError, match=match):
        softcap_cross_entropy(x, weight, targets, softcap=None, fp8=scales._replace(**change))


def test_8_bits_need_multiples_of_16():
    x, weight, targets, scales = fp8_problem()
    with pytest.raises(ValueError, match=r"weight has shape \(63, 32\).*pad it to \(64, 32\)"):
        softcap_cross_entropy(x, weight[:63], targets, softcap=None, fp8=scales)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        softcap_cross_entropy(x.double(), weight, targets, softcap=None, fp8=scales)


# ----------------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("several", [False, True])
def test_compiled_in_one_graph(reduction, several):
    def loss(x, weight, targets, target_weights):
        return 2 * softcap_cross_entropy(
            2 * x, weight, targets, softcap=4.0, reduction=reduction, target_weights=target_weights, vocab_size=19
        )

    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    targets = torch.randint(19, (3, 5, 2) if several else (3, 5))
    target_weights = torch.rand(2) if several else None
    expected = loss(x, weight, targets, target_weights)
    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, weight, targets, target_weights)
    torch.testing.assert_close(found, expected)
    upstream = torch.rand(expected.shape)
    for ours, theirs in zip(
        gradients(found, upstream, x, weight), gradients(expected, upstream, x, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_compiled_for_any_number_of_tokens():
    counts = []

    def backend(graph, inputs):
        counts.append(len(inputs))
        return graph

    compiled = torch.compile(softcap_cross_entropy, fullgraph=True, backend=backend, dynamic=True)
    weight = torch.randn(24, 8)
    for tokens in (5, 9, 30):
        x, targets = torch.randn(tokens, 8), torch.randint(24, (tokens,))
        expected = softcap_cross_entropy(x, weight, targets, softcap=4.0)
        torch.testing.assert_close(compiled(x, weight, targets, softcap=4.0), expected)
    assert len(counts) == 1


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_operators_keep_their_promises(fp8, transposed):
    x, weight, targets, scales = fp8_problem(torch.float32, transposed)
    options = (*(scales if fp8 else (None, None, None)), [4.0], -100, 60, transposed, "auto")
    targets = (targets % 60).view(20, 2)
    arguments = (x[:20].detach().requires_grad_(), weight, targets, torch.rand(20, 2), *options)
    torch.library.opcheck(torch.ops.quintic.softcap_cross_entropy, arguments)
    for scale in (torch.tensor(0.5), torch.rand(20)):
        for wanted in ((True, True), (False, True)):
            torch.library.opcheck(
                torch.ops.quintic.softcap_cross_entropy_with_gradients,
                (*arguments, scale, *wanted),
                test_utils=("test_schema", "test_faketensor"),
            )


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": torch.zeros(6, 8, dtype=torch.int64)}, TypeError, "x is torch.int64"),
        ({"weight": torch.zeros(30, 8).to(torch.float8_e4m3fn)}, TypeError, "weight is torch.float8_e4m3fn"),
        ({"weight": torch.zeros(8, 30)}, ValueError, r"weight \(8, 30\): need \(..., d\) and \(vocabulary, d\)"),
        ({"transposed": True}, ValueError, r"need \(..., d\) and \(d, vocabulary\) for transposed=True"),
        ({"targets": torch.zeros(6, dtype=torch.int32)}, TypeError, r"targets are torch.int32; need int64"),
        (
            {"targets": torch.zeros(5, dtype=torch.int64)},
            ValueError,
            r"targets have shape \(5,\); x \(6, 8\) needs \(6,\)",
        ),
        ({"targets": torch.zeros(6, 2, 1, dtype=torch.int64)}, ValueError, r"targets have shape \(6, 2, 1\)"),
        ({"targets": torch.zeros(6, 0, dtype=torch.int64)}, ValueError, "no target per token"),
        ({"target_weights": torch.ones(1)}, ValueError, r"use targets.unsqueeze\(-1\)"),
        (
            {"targets": torch.zeros(6, 2, dtype=torch.int64), "target_weights": torch.ones(3)},
            ValueError,
            r"target_weights have shape \(3,\); need \(2,\) or \(6, 2\)",
        ),
        (
            {"targets": torch.zeros(6, 2, dtype=torch.int64), "target_weights": torch.ones(2).long()},
            TypeError,
            "target_weights are torch.int64",
        ),
        ({"weight": torch.zeros(30, 8, device="meta")}, ValueError, "x is on 'cpu' and weight on 'meta'"),
        ({"softcap": 0.0}, ValueError, r"softcap=0.0: need a number > 0, or None"),
        ({"softcap": float("inf")}, ValueError, r"softcap=inf"),
        ({"vocab_size": 31}, ValueError, r"vocab_size=31: weight has 30 rows of the vocabulary; need 1 to 30"),
        ({"vocab_size": 0}, ValueError, r"vocab_size=0"),
        ({"reduction": "median"}, ValueError, "reduction='median': choose"),
        ({"kernels": "cuda"}, ValueError, "kernels='cuda': choose"),
        ({"kernels": "triton"}, ValueError, "kernels='triton': x is on 'cpu', Triton needs a CUDA device"),
        (
            {"targets": torch.tensor([0, 1, 2, 30, -5, 1])},
            ValueError,
            "targets: 30 is not a token of a vocabulary of 30",
        ),
        (
            {"targets": torch.tensor([0, 1, 2, 3, -5, 1])},
            ValueError,
            "targets: -5 is not a token .* nor ignore_index=-100",
        ),
        (
            {"vocab_size": 3, "targets": torch.full((6,), 3)},
            ValueError,
            "targets: 3 is not a token of a vocabulary of 3",
        ),
    ],
)
def test_mistakes_are_named(change, error, match):
    arguments = {
        "x": torch.randn(6, 8),
        "weight": torch.randn(30, 8),
        "targets": torch.randint(30, (6,)),
        "softcap": 5.0,
    }
    with pytest.raises(error, match=match):
        softcap_cross_entropy(**(arguments | change))
