"""Weights that wrap tensors of another format: those that compute like ordinary ones are stepped, others refused."""

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


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_wrapper_with_all_operations_is_stepped_like_what_it_wraps(algorithm):
    params = [parameter(kind) for kind in (None, Wrapped)]
    for param in params:
        optimizer = quintic.Muon([{"params": [param], "algorithm": algorithm}], lr=0.1, weight_decay=0.1)
        for _ in range(3):
            optimizer.step()
    plain, wrapped = params
    assert torch.equal(plain, wrapped.inner)
    assert not torch.equal(plain, parameter(None))


REFUSED = [
    (WithoutProducts, "muon", r"NotImplementedError: WithoutProducts has no aten\.mul_\.Tensor\)"),
    (WithoutProducts, "adamw", r"NotImplementedError: WithoutProducts has no aten\.mul_\.Tensor\)"),
    (WithCopies, "muon", "its views do not share its memory"),
    (Rounded, "muon", "what is written to it is not what is read"),
    (Rounded, "adamw", "what is written to it is not what is read"),
]


@pytest.mark.parametrize(("kind", "algorithm", "problem"), REFUSED)
def test_other_wrappers_are_refused_by_name_before_anything_is_stepped(kind, algorithm, problem):
    param = parameter(kind)
    before = param.inner.clone()
    optimizer = quintic.Muon([parameter(None)])
    message = rf"layer\.weight is a .*test_wrappers\.{kind.__name__}, .*{problem}.* convert it in the forward pass"
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": [("layer.weight", param)], "algorithm": algorithm})
    assert torch.equal(param.inner, before)
    assert len(optimizer.param_groups) == 1


def test_kernels_that_read_memory_leave_wrappers_to_pytorch(monkeypatch):
    monkeypatch.setattr(dispatch, "obstacle_to_triton", lambda device, what: None)
    assert dispatch.obstacle_to_kernels(parameter(None)) is None
    assert dispatch.obstacle_to_kernels(parameter(Wrapped)) == "a Wrapped keeps its memory in tensors of its own"


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_weights_of_torchao(algorithm):
    """Those of 8 bits are refused; those that only multiply in 8 bits are stepped like plain ones."""
    torchao = pytest.importorskip("torchao")
    training = pytest.importorskip("torchao.prototype.quantized_training")

    def groups(convert):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        values = model[0].weight.detach().clone()
        if convert is not None:
            torchao.quantize_(model, convert())
        model[0].weight.grad = torch.ones(64, 64)
        return model[0].weight, values, [{"params": list(model.named_parameters()), "algorithm": algorithm}]

    _, _, eight_bits = groups(training.int8_weight_only_quantized_training)
    with pytest.raises(TypeError, match=r"0\.weight is a torchao\..*Int8QuantizedTrainingLinearWeight, which has not"):
        quintic.Muon(eight_bits)
    results = []
    for convert in (None, training.int8_mixed_precision_training):
        weight, values, mixed = groups(convert)
        quintic.Muon(mixed, lr=0.1).step()
        results.append(torch.empty(64, 64).copy_(weight.detach()))
        assert not torch.equal(results[-1], values)
    assert torch.equal(*results)
