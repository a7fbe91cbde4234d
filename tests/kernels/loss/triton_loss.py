"""Cases of test_triton.py: the loss by its kernels, in Triton's interpreter or on a CUDA device."""

import pytest
import torch
import torch.nn.functional as F
from on_device import DEVICE, DTYPES, poison_new_tensors

from quintic.kernels.loss import chunks, rows
from quintic.kernels.loss.loss import Fp8Scales, SigmoidCap, softcap_cross_entropy

HAS_FP8 = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9)

needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="8-bit products, and rounding to 8 bits, need a recent CUDA device")

# Tokens, width, rows of the weight, vocabulary: one block of a row and several, ragged ones, with padding and without.
SIZES = [(1, 1, 1, 1), (12, 5, 17, 9), (7, 24, 528, 515), (5, 8, 513, 513), (4, 8, 512, 512)]
if DEVICE == "cuda":
    SIZES += [(70, 16, 300, 300), (2049, 200, 50304, 50257), (300, 768, 50257, 50257)]

# Of both forms, logits close enough to each other for one pass, and too far apart; and no cap.
CAPS = [15.0, 50.0, SigmoidCap(23.0, 5.0, 7.5), SigmoidCap(70.0, -3.0, 20.0), None]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_new_tensors(monkeypatch)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Rows of several blocks, and of less than one, also in small problems."""
    if DEVICE == "cpu":
        monkeypatch.setattr(rows, "_ROW_BLOCK", 256)


def error(found, exact):
    """Relative, and absolute where the exact values are zeros."""
    norm = exact.double().norm()
    return float((found.double() - exact.double()).norm() / torch.where(norm == 0, 1.0, norm))


def make(sizes, dtype, num_targets=None, transposed=False, spread=1.0):
    tokens, d, stored, vocab = sizes
    x = (torch.randn(tokens, d) * spread).to(DEVICE, dtype).requires_grad_()
    weight = (torch.randn(stored, d) / d**0.5 * 4).to(DEVICE, dtype)
    weight = (weight.mT.contiguous() if transposed else weight).requires_grad_()
    several = () if num_targets is None else (num_targets,)
    targets = torch.randint(vocab, (tokens, *several)).to(DEVICE)
    if tokens > 1:
        targets[tokens // 2] = -100
    return x, weight, targets


def run(leaves, targets, upstream, **options):
    loss = softcap_cross_entropy(*leaves, targets, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))]


def usual_loss(
    x, weight, targets, *, softcap, reduction="mean", target_weights=None, vocab_size=None, transposed=False
):
    """The loss in PyTorch's usual operations and the dtype of x."""
    logits = F.linear(x, (weight.mT if transposed else weight)[:vocab_size]).float()
    if isinstance(softcap, SigmoidCap):
        logits = softcap.height * torch.sigmoid((logits + softcap.shift) / softcap.width)
    elif softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    each = targets.unsqueeze(-1) if targets.ndim == 1 else targets
    terms = [F.cross_entropy(logits, target, reduction="none") for target in each.unbind(-1)]
    losses = (torch.stack(terms, -1) * (1 if target_weights is None else target_weights)).sum(-1)
    if reduction == "mean":
        return losses.sum() / (each != -100).any(-1).sum().clamp(min=1)
    return losses.sum() if reduction == "sum" else losses


def compare(x, weight, targets, **options):
    """Check values and gradients against the twin in float64, with the error of PyTorch in this dtype as a measure."""
    shape = targets.shape[:1] if options.get("reduction") == "none" else ()
    upstream = torch.rand(shape).to(DEVICE) + 0.5
    found = run((x, weight), targets, upstream, kernels="triton", **options)
    loss = usual_loss(x, weight, targets, **options)
    usual = [loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream)]
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    exact = run(leaves, targets, upstream, kernels="torch", **options)
    # On a device exponentials and reciprocals are approximate, to some 22 bits each.
    allowed = 2e-6 if DEVICE == "cuda" else 1e-6
    for ours, theirs, true in zip(found, usual, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, true) <= 2 * error(theirs, true) + allowed
    if DEVICE == "cuda":
        again = run((x, weight), targets, upstream, kernels="triton", **options)
        for ours, second in zip(found, again, strict=True):
            assert torch.equal(ours, second)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_target_is_as_exact_as_pytorch(sizes, dtype, softcap, reduction):
    x, weight, targets = make(sizes, dtype)
    found = compare(x, weight, targets, softcap=softcap, vocab_size=sizes[3], reduction=reduction)
    assert not found[2][sizes[3] :].any()


@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else DTYPES[:1], ids=str)
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("num_targets", [1, 2, 5])
@pytest.mark.parametrize("weighted", ["no", "shared", "each"])
def test_several_targets_are_as_exact_as_pytorch(dtype, softcap, num_targets, weighted):
    x, weight, targets = make((10, 16, 520, 515), dtype, num_targets)
    # One target twice in a token, and tokens with some targets ignored.
    targets[::3] = targets[::3, :1]
    targets[1::5, 0] = -100
    weights = None
    if weighted != "no":
        # Of both signs: what belongs to the target may cancel, in one token it does.
        weights = (torch.randn(num_targets) if weighted == "shared" else torch.randn(targets.shape)).to(DEVICE)
        if weighted == "each" and num_targets > 1:
            weights[7] = 0.0
            weights[8] = 0.0
            weights[8, 0], weights[8, 1] = 1.0, -1.0
    compare(x, weight, targets, softcap=softcap, target_weights=weights, vocab_size=515, reduction="sum")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_and_subchunks_do_not_show(dtype, transposed, reduction, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(chunks, "_TOKEN_MULTIPLE", 4)
    multiple = chunks._TOKEN_MULTIPLE
    tokens = 2 * multiple + multiple // 2
    sizes = (tokens, 16, 96, 90)
    x, weight, targets = make(sizes, dtype, transposed=transposed)
    options = {"softcap": 15.0, "transposed": transposed, "vocab_size": 90, "reduction": reduction}
    upstream = torch.rand(() if reduction == "mean" else (tokens,)).to(DEVICE)
    whole = run((x, weight), targets, upstream, kernels="triton", **options)
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", multiple * 96 * x.element_size())
    monkeypatch.setattr(chunks, "_LOSS_BYTES", multiple * 96 * x.element_size())
    monkeypatch.setattr(chunks, "_SUBCHUNK_TOKENS", 3)
    compare(x, weight, targets, **options)
    for one, other in zip(run((x, weight), targets, upstream, kernels="triton", **options), whole, strict=True):
        assert error(one, other) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("transposed", [False, True])
def test_any_strides_and_mixed_dtypes(transposed):
    dtype = DTYPES[-1]
    x, weight, targets = make((8, 16, 64, 64), dtype, 2, transposed)
    wide = torch.zeros(16, 8, 2, device=DEVICE, dtype=dtype)
    wide[..., 1] = x.detach().mT
    strided_x = wide[..., 1].mT.requires_grad_()
    wide = torch.zeros(*weight.shape, 3, device=DEVICE)
    wide[..., 2] = weight.detach()
    strided_weight = wide[..., 2].requires_grad_()
    strided_targets = targets.mT.contiguous().mT
    options = {"softcap": 15.0, "transposed": transposed, "kernels": "triton"}
    one = torch.ones((), device=DEVICE)
    expected = run((x, weight), targets, one, **options)
    found = run((strided_x, strided_weight), strided_targets, one, **options)
    assert found[2].dtype == torch.float32
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-2, atol=1e-4)
    for alone in range(2):
        loss = softcap_cross_entropy(
            *(leaf if place == alone else leaf.detach() for place, leaf in enumerate((x, weight))), targets, **options
        )
        assert torch.equal(torch.autograd.grad(loss, (x, weight)[alone])[0], expected[1 + alone])


@pytest.mark.parametrize("softcap", CAPS)
def test_nothing_to_learn_is_zero(softcap):
    for tokens in (0, 6):
        x, weight, targets = make((tokens, 8, 30, 30), torch.float32)
        targets.fill_(-100)
        found = run((x, weight), targets, torch.ones((), device=DEVICE), softcap=softcap, kernels="triton")
        assert not any(result.any() for result in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", CAPS)
def test_evaluation_is_the_training_loss(dtype, softcap):
    x, weight, targets = make((8, 16, 520, 520), dtype)
    options = {"softcap": softcap, "kernels": "triton"}
    trained = softcap_cross_entropy(x, weight, targets, **options)
    with torch.no_grad():
        each = softcap_cross_entropy(x, weight, targets, reduction="none", **options)
        torch.testing.assert_close(softcap_cross_entropy(x, weight, targets, **options), trained, rtol=1e-5, atol=0)
    torch.testing.assert_close(each.sum() / 7, trained, rtol=1e-5, atol=0)
    assert each[4] == 0


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:divide by zero")  # NumPy, in the interpreter
@pytest.mark.parametrize("softcap", [15.0, 30.0, 50.0])
def test_extreme_logits_stay_exact(softcap):
    x, weight, targets = make((10, 16, 300, 300), torch.float32, spread=1e4)
    compare(x, weight, targets, softcap=softcap)
    # Every logit at the negative end of the cap but one: nothing underflows.
    x = torch.full((4, 8), -1e4, device=DEVICE, requires_grad=True)
    weight = torch.ones(300, 8, device=DEVICE)
    compare(x, weight.requires_grad_(), torch.zeros(4, dtype=torch.int64, device=DEVICE), softcap=softcap)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_target_that_does_not_exist_is_not_a_number():
    x, weight, targets = make((6, 8, 32, 30), torch.float32)
    targets[1], targets[2], targets[4] = 30, -7, 10**12
    options = {"softcap": 15.0, "kernels": "triton", "vocab_size": 30}
    losses = softcap_cross_entropy(x, weight, targets, reduction="none", **options)
    assert losses.isnan().nonzero().flatten().tolist() == [1, 2, 4]
    losses.sum().backward()
    assert x.grad.isnan().any(1).nonzero().flatten().tolist() == [1, 2, 4]
    assert softcap_cross_entropy(x, weight, targets, **options).isnan()


def test_second_derivatives_are_refused():
    x, weight, targets = make((6, 8, 30, 30), torch.float32)
    loss = softcap_cross_entropy(x, weight, targets, softcap=15.0, kernels="triton")
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.sum().backward()
    with pytest.raises(ValueError, match=r"kernels='triton': torch\.float64 has no kernel"):
        softcap_cross_entropy(x.double(), weight, targets, softcap=15.0, kernels="triton")


@pytest.mark.skipif(DEVICE == "cpu", reason="compiling for a device")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it compiles
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_and_recorded(reduction, monkeypatch):
    # Poison would become a part of what is compiled.
    monkeypatch.undo()
    x, weight, targets = make((300, 64, 1024, 1000), torch.bfloat16)

    def loss(x, weight, targets):
        return softcap_cross_entropy(x * 2, weight, targets, softcap=15.0, vocab_size=1000, reduction=reduction).sum()

    expected = torch.autograd.grad(loss(x, weight, targets), (x, weight))
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x, weight, targets), (x, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = torch.autograd.grad(loss(x, weight, targets), (x, weight))
    graph.replay()
    for ours, theirs, replayed in zip(found, expected, recorded, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(replayed, theirs)


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("num_targets", [None, 3])
@pytest.mark.parametrize("kept", [True, False])
def test_8_bits_agree_with_the_twin(dtype, softcap, transposed, reduction, num_targets, kept, monkeypatch):
    keep_rows(monkeypatch, kept)
    monkeypatch.setattr(chunks, "_chunk_bytes_in_8_bits", lambda device: 256 * 512 * 2)
    x, weight, targets = make((603, 64, 512, 509), dtype, num_targets, transposed)
    scales = [torch.tensor(value, device=DEVICE) for value in (4 / 448, 8 / 448, 4 / 57344)]
    options = {"softcap": softcap, "transposed": transposed, "vocab_size": 509, "reduction": reduction}
    if num_targets is not None:
        options["target_weights"] = torch.tensor([1.0, 0.5, -0.25], device=DEVICE)
    upstream = torch.rand((603,) if reduction == "none" else ()).to(DEVICE) + 0.5
    found = run((x, weight), targets, upstream, kernels="triton", fp8=Fp8Scales(*scales), **options)
    twin = run((x, weight), targets, upstream, kernels="torch", fp8=Fp8Scales(*scales), **options)
    assert error(found[0], twin[0]) < 1e-2
    # Sums in another order round some logits, and then some gradients, to the other side: 8 bits are far apart.
    for ours, theirs in zip(found[1:], twin[1:], strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, theirs) < 0.05
    again = run((x, weight), targets, upstream, kernels="triton", fp8=Fp8Scales(*scales), **options)
    for ours, second in zip(found, again, strict=True):
        assert torch.equal(ours, second)
    with torch.no_grad():
        alone = softcap_cross_entropy(x, weight, targets, kernels="triton", fp8=Fp8Scales(*scales), **options)
    # Another kernel computes losses alone, with an exact tanh.
    assert error(alone, found[0]) < 1e-3


def keep_rows(monkeypatch, kept):
    """Let rows wait in shared memory, or let there be none."""
    from quintic.kernels.loss import fp8_rows

    if not kept:
        monkeypatch.setattr(fp8_rows, "_shared_memory", lambda device: 0)


@needs_fp8
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
# A block of the kernel less one, one, several with a rest, GPT-2's, and one that does not fit into shared memory.
@pytest.mark.parametrize(
    "sizes", [(16, 3), (4080, 4080), (4096, 4095), (12304, 12303), (50304, 50257), (151936, 151669)]
)
def test_gradients_of_rows_in_8_bits_are_close(sizes, dtype, softcap, kept, monkeypatch):
    from quintic.kernels.loss import fp8_rows
    from quintic.kernels.loss.problem import Problem

    keep_rows(monkeypatch, kept)
    columns, vocab = sizes
    torch.manual_seed(0)
    logits = torch.randn(9, columns).mul(3).to(DEVICE, dtype)
    targets = torch.randint(0, vocab, (9, 3)).to(DEVICE)
    targets[1, 2] = targets[1, 0]  # the same twice
    targets[2, 1] = -100
    targets[3] = -100
    weights = torch.tensor([1.0, 0.5, -0.25], device=DEVICE).expand(9, 3)
    scale = torch.linspace(0.5, 2, 9, device=DEVICE) * 57344 / 4
    cap = None if softcap is None else tuple(softcap) if isinstance(softcap, SigmoidCap) else (softcap,)
    # x and weight are only read by products.
    problem = Problem(logits, logits, targets, weights, None, cap, -100, vocab, False)
    losses = torch.full((9,), float("nan"), device=DEVICE)
    found = fp8_rows.launch_rows_fp8(problem, slice(0, 9), logits, losses, scale).double()

    exact = logits[:, :vocab].double().requires_grad_()
    counted = targets != -100
    capped = exact
    if isinstance(softcap, SigmoidCap):
        capped = softcap.height * torch.sigmoid((exact + softcap.shift) / softcap.width)
    elif softcap is not None:
        capped = softcap * torch.tanh(exact / softcap)
    picked = capped.log_softmax(-1).gather(1, targets.masked_fill(~counted, 0))
    expected = -(picked * weights * counted).sum(1)
    # A cap's tanh is right to 2^-11, the losses without a cap are exact.
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5 if softcap is None else 0.02)
    (grad,) = torch.autograd.grad(expected, exact, scale.double())
    assert not found[:, vocab:].any()
    # An eighth is half the distance of two neighbours in e5m2; below 2^-14 they are 2^-16 apart. Before that, a row
    # which waits is rounded to bfloat16, and tanh is an approximation.
    torch.testing.assert_close(found[:, :vocab], grad, rtol=0.145, atol=2**-16)
    assert error(found[:, :vocab], grad) < 0.08


@needs_fp8
def test_a_target_that_does_not_exist_in_8_bits():
    x, weight, targets = make((40, 32, 64, 64), torch.bfloat16)
    targets[3] = 64
    scales = Fp8Scales(*(torch.tensor(value, device=DEVICE) for value in (4 / 448, 8 / 448, 4 / 57344)))
    losses = softcap_cross_entropy(x, weight, targets, softcap=15.0, fp8=scales, reduction="none", kernels="triton")
    grads = torch.autograd.grad(losses.sum(), (x, weight))
    assert grads[0][3].isnan().all()
    assert grads[0][4].isfinite().all()
