"""An embedding that is a copy of the output head: gradients add up, one is stepped, both have its weights."""

import re

import numpy as np
import oracle
import pytest
import torch
from host_graphs import capture_on_hosts
from newer import needs_torch
from torch import nn

import quintic
from quintic import Muon

EXACT = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.3}


def pair(dtype=torch.float64, shape=(6, 10), **options):
    """A head, an embedding stored as its transpose with other weights, and their optimizer."""
    head, embedding = nn.Parameter(torch.randn(shape).to(dtype)), nn.Parameter(torch.randn(shape[::-1]).to(dtype))
    groups = [
        {"params": [("head", head)], "algorithm": "adamw", **EXACT},
        {"params": [("embed", embedding)], "algorithm": "adamw", **EXACT},
    ]
    return head, embedding, Muon(groups, **options)


def reached(head, embedding, gradients):
    head.grad, embedding.grad = (None if g is None else g.clone() for g in gradients)


@pytest.mark.parametrize("step_every", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_tied_then_untied_is_one_weight_then_two(set_to_none, step_every):
    """Against one float64 matrix that gets both gradients; from the fifth step on against two with its state."""
    head, embedding, optimizer = pair(step_every=step_every)
    optimizer.tie("head", "embed", transposed=True)
    assert torch.equal(embedding, head.T)
    twin = oracle.AdamWTensor(head.detach().numpy())
    other, total, other_total = twin, np.zeros(head.shape), np.zeros(head.shape)
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-8, "wd": 0.3}
    for step in range(1, 13):
        if step == 7:
            optimizer.untie(embedding)
            other = oracle.AdamWTensor(twin.w)
            other.m, other.v, other.t = twin.m.copy(), twin.v.copy(), twin.t
        gradients = torch.randn(head.shape).double(), torch.randn(embedding.shape).double()
        for param, gradient in zip((head, embedding), gradients, strict=True):
            param.grad = gradient.clone() if param.grad is None else param.grad + gradient
        total += gradients[0].numpy()
        (total if step < 7 else other_total)[:] += gradients[1].T.numpy()
        optimizer.step()
        if step % step_every == 0:
            twin.step(total, **options)
            if step > 6:
                other.step(other_total, **options)
            total, other_total = np.zeros(head.shape), np.zeros(head.shape)
        optimizer.zero_grad(set_to_none)
        np.testing.assert_allclose(head.detach().numpy(), twin.w, rtol=1e-9)
        np.testing.assert_allclose(embedding.detach().T.numpy(), other.w, rtol=1e-9)
    assert not torch.equal(head.T, embedding)


@pytest.mark.parametrize("missing", [0, 1])
def test_one_gradient_is_enough(missing):
    head, embedding, optimizer = pair()
    optimizer.tie(head, embedding, transposed=True)
    twin = oracle.AdamWTensor(head.detach().numpy())
    for _ in range(3):
        gradients = [torch.randn(head.shape).double(), torch.randn(embedding.shape).double()]
        gradients[missing] = None
        reached(head, embedding, gradients)
        optimizer.step()
        found = gradients[0] if missing else gradients[1].T
        twin.step(found.numpy(), lr=0.05, betas=(0.8, 0.95), eps=1e-8, wd=0.3)
        np.testing.assert_allclose(head.detach().numpy(), twin.w, rtol=1e-9)
        assert torch.equal(embedding, head.T)
    assert float(optimizer.state[embedding]["step"]) == 0
    assert not optimizer.state[embedding]["exp_avg"].any()


def test_gradients_of_equal_shapes_and_of_matrices():
    head, embedding = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 4))
    twin = nn.Parameter(head.detach().clone())
    options = {"view": quintic.Rows(4), "lr": 0.1}
    optimizer = Muon([{"params": [("a", head)], **options}, {"params": [("b", embedding)], **options}])
    optimizer.tie("a", "b")
    alone = Muon([{"params": [twin], **options}])
    for _ in range(2):
        reached(head, embedding, [torch.randn(8, 4), torch.randn(8, 4)])
        twin.grad = head.grad + embedding.grad
        optimizer.step()
        alone.step()
        assert torch.equal(head, twin)
        assert torch.equal(embedding, twin)


def test_a_gradient_is_moved_once():
    """Clipping moves it before the step; a second step with the same gradients finds it moved."""
    head, embedding, optimizer = pair()
    optimizer.tie(head, embedding, transposed=True)
    reached(head, embedding, [torch.randn(head.shape).double(), torch.randn(embedding.shape).double()])
    whole = head.grad + embedding.grad.T
    norm = quintic.clip_grad_norm_(optimizer, max_norm=0.5)
    torch.testing.assert_close(norm.double(), whole.norm())
    clipped = whole * (0.5 / (norm + 1e-6))
    for _ in range(2):
        optimizer.step()
        torch.testing.assert_close(head.grad, clipped, rtol=1e-6, atol=1e-9)
        assert not embedding.grad.any()
    embedding.grad += 1.0
    optimizer.step()
    torch.testing.assert_close(head.grad, clipped + 1.0, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize(("step_every", "overwrites"), [(1, False), (1, True), (2, False)])
def test_gradients_are_moved_also_where_a_cuda_graph_writes_them(
    monkeypatch, step_every, overwrites, is_clipped, is_captured
):
    """Replayed passes write to the same tensors and change no version, as `data` does; some add, some overwrite."""
    head, embedding, optimizer = pair(step_every=step_every)
    twin = nn.Parameter(head.detach().clone())
    alone = Muon([{"params": [twin], "algorithm": "adamw", **EXACT}], step_every=step_every)
    optimizer.tie("head", "embed", transposed=True)
    for param in (head, embedding, twin):
        param.grad = torch.zeros_like(param)
    step_once = optimizer.step
    if is_captured:
        capture_on_hosts(monkeypatch, optimizer)
        step_once = quintic.CapturedStep(optimizer)
    for _ in range(10):
        gradients = torch.randn(head.shape).double(), torch.randn(embedding.shape).double()
        for param, gradient in zip((head, embedding), gradients, strict=True):
            param.grad.data.mul_(not overwrites).add_(gradient)
        twin.grad.mul_(not overwrites).add_(gradients[0] + gradients[1].T)
        for one, step in ((optimizer, step_once), (alone, alone.step)):
            if is_clipped:
                quintic.clip_grad_norm_(one, max_norm=0.5)
            step()
            if not overwrites:
                one.zero_grad(set_to_none=False)
        torch.testing.assert_close(head, twin, rtol=1e-6 if is_clipped else 1e-12, atol=1e-12)
        assert torch.equal(embedding, head.T)


def test_the_tie_is_saved_and_the_reference_knows_it():
    head, embedding, optimizer = pair(torch.float32)
    optimizer.tie(head, embedding, transposed=True)
    reached(head, embedding, [torch.randn(head.shape), torch.randn(embedding.shape)])
    report = quintic.verify(nn.ParameterDict({"head": head, "embed": embedding}), optimizer)
    assert report.ok, report
    optimizer.step()
    second = pair(torch.float32)
    second[2].load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        second[0].copy_(head)
    for one in ((head, embedding, optimizer), second):
        generator = torch.Generator().manual_seed(1)
        reached(*one[:2], [torch.randn(param.shape, generator=generator) for param in one[:2]])
        one[2].step()
    assert torch.equal(second[0], head)
    assert torch.equal(second[1], head.T)
    second[2].untie("embed")
    assert torch.equal(second[2].state[second[1]]["exp_avg"].T, second[2].state[second[0]]["exp_avg"])
    with pytest.raises(ValueError, match="embed is not tied to another parameter"):
        second[2].untie("embed")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"dtype": torch.float32}, r"embed cannot be tied to head: one is torch\.float32 .*float64"),
        ({"names": ("output", "input")}, "input is tied to 'head', which is no parameter of the optimizer"),
        ({"comms": "sharded_sparse"}, r"embed cannot be tied to head: .*not 'sharded_sparse'"),
    ],
    ids=["dtype", "names", "comms"],
)
def test_a_saved_tie_that_cannot_hold_is_found_when_it_is_loaded(others, message):
    """It was found at the next step, when weights and state had long been replaced."""
    head, embedding, optimizer = pair()
    optimizer.tie("head", "embed", transposed=True)
    reached(head, embedding, [torch.ones_like(head), torch.ones_like(embedding)])
    optimizer.step()
    saved = optimizer.state_dict()
    head, embedding = nn.Parameter(torch.zeros_like(head)), nn.Parameter(torch.zeros_like(embedding))
    embedding.data = embedding.data.to(others.get("dtype", torch.float64))
    rows = zip(others.get("names", ("head", "embed")), (head, embedding), strict=True)
    groups = [{"params": [row], "algorithm": "adamw"} for row in rows]
    twin = Muon(groups, comms=others.get("comms", "none"))
    if "names" in others:  # then parameters are matched by their places
        for group in saved["param_groups"]:
            del group["param_names"]
    before = str(twin.state_dict())
    with pytest.raises(ValueError, match=f"the saved options do not fit: {message}"):
        twin.load_state_dict(saved)
    assert str(twin.state_dict()) == before
    twin.plan()


def test_a_step_that_is_skipped_leaves_both():
    head, embedding, optimizer = pair(on_nonfinite="skip")
    optimizer.tie(head, embedding, transposed=True)
    before = head.detach().clone()
    reached(head, embedding, [torch.randn(head.shape).double(), torch.full(embedding.shape, float("nan")).double()])
    optimizer.step()
    assert torch.equal(head, before)
    assert torch.equal(embedding, before.T)
    assert optimizer.last_step().skipped


@pytest.mark.parametrize(
    ("shapes", "options", "transposed", "message"),
    [
        ([(3, 4), (3, 4)], {}, True, r"b cannot be tied to a transposed: the shapes are \(3, 4\) and \(3, 4\)"),
        ([(3, 4), (4, 3)], {}, False, r"b cannot be tied to a: the shapes"),
        ([(2, 3, 2), (2, 3, 2)], {}, True, "it has 3 dimensions, and must have two"),
        ([(3, 4), (4, 3)], {"comms": "replicated"}, True, "comms='replicated' and 'none', and must have the same"),
        ([(3, 4), (4, 3)], {"comms": "sharded_sparse"}, True, "use comms='sharded', not 'sharded_sparse'"),
        ([(3, 4), (4, 3)], {"step_every": 2}, True, "step_every=2 and 1"),
        ([(3, 4), (4, 3)], {"dtype": torch.float64}, True, r"one is torch.float64 on cpu, the other torch.float32"),
        ([(3, 4), (4, 3)], {"further": [nn.Parameter(torch.ones(2))]}, True, "b: its group has 2 parameters"),
    ],
    ids=str,
)
def test_what_cannot_be_tied(shapes, options, transposed, message):
    dtype, further = options.pop("dtype", torch.float32), options.pop("further", [])
    params = [("a", nn.Parameter(torch.randn(shapes[0])))], [("b", nn.Parameter(torch.randn(shapes[1]).to(dtype)))]
    params[1].extend((f"more{number}", param) for number, param in enumerate(further))
    groups = [{"params": list(found), "algorithm": "adamw"} for found in params]
    optimizer = Muon([groups[0], {**groups[1], **options}])
    before = params[1][0][1].detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.tie("a", "b", transposed=transposed)
    assert torch.equal(params[1][0][1], before)
    optimizer.plan()


@pytest.mark.parametrize("wrong", [None, 3, ["head"]])
def test_what_is_no_parameter_is_named(wrong):
    _, _, optimizer = pair()
    with pytest.raises(ValueError, match=rf"tie was given {re.escape(repr(wrong))}, which is no parameter of the opt"):
        optimizer.tie(wrong, "embed")
    with pytest.raises(ValueError, match=r"copy_state was given .*, which is no parameter of the optimizer"):
        optimizer.copy_state("head", wrong)


def test_copies_of_copies_are_refused():
    params = {name: nn.Parameter(torch.randn(3, 4)) for name in "abc"}
    optimizer = Muon([{"params": [pair], "algorithm": "adamw"} for pair in params.items()])
    optimizer.tie("a", "b")
    for pair_of in (("b", "c"), ("c", "c"), ("c", "a")):
        with pytest.raises(ValueError, match="tied itself"):
            optimizer.tie(*pair_of)
    with pytest.raises(ValueError, match="tie was given 'd', which is no parameter"):
        optimizer.tie("d", "c")
    with pytest.raises(ValueError, match="tied_to='a' must be None, or the name"):
        Muon([{"params": [params["c"]], "tied_to": "a"}])


@needs_torch("2.10", "a gradient of another dtype")
@pytest.mark.parametrize("missing", [0, 1])
def test_gradients_wider_than_their_parameters(missing):
    """The one that gets the gradient alone has the dtype that `grad_dtype` asks for."""
    head, embedding, optimizer = pair(torch.bfloat16, master="fp32")
    optimizer.tie("head", "embed", transposed=True)
    head.grad_dtype = embedding.grad_dtype = torch.float32
    twin = oracle.AdamWTensor(head.detach().float().numpy())
    gradients = [torch.randn(head.shape), torch.randn(embedding.shape)]
    gradients[missing] = None
    reached(head, embedding, gradients)
    optimizer.step()
    twin.step((gradients[0] if missing else gradients[1].T).numpy(), lr=0.05, betas=(0.8, 0.95), eps=1e-8, wd=0.3)
    assert head.grad.dtype == torch.float32
    np.testing.assert_allclose(optimizer.state[head]["master"].numpy(), twin.w, rtol=1e-5, atol=1e-6)
