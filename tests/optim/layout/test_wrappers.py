"""Weights that wrap tensors of another format: stepped as they are, by way of a copy, or refused by name."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import quintic
from quintic.kernels import dispatch


class Wrapped(torch.Tensor):
    """Holds an ordinary tensor, and computes with it; subclasses break single operations."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        opened = tree_map(lambda value: cls.opened(func, value), args)
        result = func(*opened, **tree_map(lambda value: cls.opened(func, value), kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.clone):
            return cls(result)
        return args[0] if result is not None and func._schema.name.endswith("_") else result

    @classmethod
    def opened(cls, func, value):
        return value.inner if isinstance(value, Wrapped) else value


class WithoutProducts(Wrapped):
    @classmethod
    def opened(cls, func, value):
        if func.overloadpacket is torch.ops.aten.mul_:
            raise NotImplementedError(f"{cls.__name__} has no {func}\nand more lines of help")
        return super().opened(func, value)


class WithCopies(Wrapped):
    """Views are made of a copy, as those of a quantised weight are."""

    @classmethod
    def opened(cls, func, value):
        value, is_wrapped = super().opened(func, value), isinstance(value, Wrapped)
        return (
            value.clone()
            if is_wrapped and func.overloadpacket in (torch.ops.aten.unsqueeze, torch.ops.aten.view)
            else value
        )


class Rounded(Wrapped):
    """Keeps single bits only, whatever is written."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(args[0], Rounded) and func._schema.name.endswith("_"):
            args[0].inner.sign_()
        return result


def parameter(kind, seed=0):
    torch.manual_seed(seed)
    values = torch.randn(6, 4)
    param = nn.Parameter(kind(values.clone()) if kind is not None else values)
    param.grad = torch.randn(6, 4)
    return param


class WithoutWriting(WithoutProducts):
    @classmethod
    def opened(cls, func, value):
        if func.overloadpacket is torch.ops.aten.copy_:
            raise RuntimeError("is read-only")
        return super().opened(func, value)


@pytest.mark.parametrize("release_gradients", [False, True])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("kind", [Wrapped, WithoutProducts, WithCopies])
def test_wrappers_are_stepped_like_what_they_wrap(kind, algorithm, release_gradients):
    params = [parameter(kind) for kind in (None, kind)]
    states = []
    for param in params:
        groups = [{"params": [("w", param)], "algorithm": algorithm}]
        optimizer = quintic.Muon(groups, lr=0.1, weight_decay=0.1, release_gradients=release_gradients)
        for seed in range(3):
            param.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
            assert (param.grad is None) == release_gradients
        states.append(optimizer.state_dict()["state"][0])
        optimizer.load_state_dict(optimizer.state_dict())
    plain, wrapped = params
    assert torch.equal(plain, wrapped.inner)
    assert not torch.equal(plain, parameter(None))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("kind", [WithoutProducts, WithCopies])
def test_an_opened_wrapper_follows_what_is_written_to_it_between_steps(kind):
    results = []
    for one in (None, kind):
        param = parameter(one)
        optimizer = quintic.Muon([param], lr=0.1)
        optimizer.step()
        inner = param if one is None else param.inner
        with torch.no_grad():
            inner.fill_(1.0)
        optimizer.step()
        results.append(inner.detach().clone())
        kept, param.grad = inner.detach().clone(), None
        version = inner._version
        optimizer.step()
        assert torch.equal(inner, kept)
        assert inner._version == version  # rounding once more would change it
    assert torch.equal(*results)


REFUSED = [
    (Rounded, {"algorithm": "muon"}, r"values written to it are not the values read from it\).*\(values written"),
    (Rounded, {"algorithm": "adamw"}, r"values written to it are not the values read from it\).*\(values written"),
    (
        WithoutWriting,
        {"algorithm": "muon"},
        r"NotImplementedError: WithoutWriting has no aten\.mul_\.Tensor\).*read-only",
    ),
    (WithoutProducts, {"algorithm": "adamw", "master": "fp32"}, r"no aten\.mul_\.Tensor\).*master='fp32' completes"),
    (WithoutProducts, {"algorithm": "muon", "comms": "averaged"}, r"no aten\.mul_.*comms='averaged' sends its memory"),
    (WithCopies, {"algorithm": "muon", "master": "fp32"}, "its views do not share its memory.*master='fp32'"),
]


@pytest.mark.parametrize(("kind", "options", "problem"), REFUSED)
def test_other_wrappers_are_refused_by_name_before_anything_is_stepped(kind, options, problem):
    param = parameter(kind)
    before = param.inner.clone()
    optimizer = quintic.Muon([parameter(None)])
    message = rf"layer\.weight is a .*test_wrappers\.{kind.__name__}, .*{problem}.* convert it in the forward pass"
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": [("layer.weight", param)], **options})
    assert torch.equal(param.inner, before)
    assert len(optimizer.param_groups) == 1


def test_kernels_that_read_memory_leave_wrappers_to_pytorch(monkeypatch):
    monkeypatch.setattr(dispatch, "obstacle_to_triton", lambda device, what: None)
    assert dispatch.obstacle_to_kernels(parameter(None)) is None
    assert dispatch.obstacle_to_kernels(parameter(Wrapped)) == "a Wrapped keeps its memory in tensors of its own"


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("convert", ["int8_weight_only_quantized_training", "int8_mixed_precision_training"])
def test_weights_of_torchao_are_stepped_like_plain_ones(convert, algorithm):
    torchao = pytest.importorskip("torchao")
    training = pytest.importorskip("torchao.prototype.quantized_training")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    torchao.quantize_(model, getattr(training, convert)())

    def values():
        return torch.empty(64, 64).copy_(model[0].weight.detach())

    start = values()
    plain = nn.Parameter(start.clone())
    plain.grad = model[0].weight.grad = torch.randn(64, 64)
    for named in ([("0.weight", plain)], list(model.named_parameters())):
        quintic.Muon([{"params": named, "algorithm": algorithm}], lr=0.5, adamw_lr=0.1).step()
    # Eight bits round to one of 254 steps, up or down by chance.
    step = plain.detach().abs().amax(1, keepdim=True) / 127 if "weight_only" in convert else torch.zeros(64, 1)
    assert bool(((values() - plain.detach()).abs() <= 1.01 * step).all())
    assert float((values() - start).norm()) > 0.9 * float((plain.detach() - start).norm()) > 0
