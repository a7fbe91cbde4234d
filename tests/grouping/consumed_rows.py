"""The rows of a fused weight that a forward pass consumes together: the proof of a view.

The fused layer puts out the numbers of its rows, the module's own forward pass runs, and what reaches each consumer (a
matrix product, a norm, a gate) tells which rows belong together.
"""

import contextlib

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quintic.grouping.assign import assign

# Row r is sent as r + OFFSET: never zero, and so large that SiLU in float64 is the identity.
OFFSET = 101

CONSUMERS = (
    *("matmul", "__matmul__", "bmm", "baddbmm", "linear", "einsum", "normalize", "softmax"),
    *("scaled_dot_product_attention", "sigmoid"),
)


class Arguments(TorchFunctionMode):
    """Records what goes into matrix products and gates, and what explicit splits return."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in CONSUMERS:
            self.tensors += [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        elif name in ("split", "chunk"):
            self.tensors += result
        return result


def numbers(tensor):
    """The distinct row numbers inside a tensor, up to a common factor, or nothing if there is no such factor."""
    values = tensor.detach().double().abs().unique()
    return values[values != 0]


def rows_reach(owner, fused, call, silence=(), watch=()):
    """All sets of numbers that reach a consumer when `owner.fused` returns the numbers of its rows."""
    with contextlib.ExitStack() as stack:
        rows = torch.arange(owner.get_submodule(fused).out_features, dtype=torch.float64) + OFFSET
        hook = owner.get_submodule(fused).register_forward_hook(lambda m, a, out: rows.expand(out.shape).clone())
        stack.callback(hook.remove)
        for name in silence:
            hook = owner.get_submodule(name).register_forward_hook(lambda m, a, out: torch.zeros_like(out))
            stack.callback(hook.remove)
        mode = Arguments()
        for name in watch:
            hook = owner.get_submodule(name).register_forward_pre_hook(lambda m, a: mode.tensors.append(a[0]))
            stack.callback(hook.remove)
        with mode, torch.no_grad():
            call(owner)
    return [numbers(tensor) for tensor in mode.tensors]


def view_of(owner, parameter):
    """The registry's view of `owner.parameter`, through the same door as `param_groups`."""
    found = {d.name: d for d in assign(nn.ModuleDict({"owner": owner})).values()}
    decision = found[f"owner.{parameter}"]
    assert decision.algorithm == "muon"
    return decision.view


def rows_of(view, tensor_rows):
    """For each kind of matrix, the numbers of the rows that the view gives it."""
    numbered = (torch.arange(tensor_rows, dtype=torch.float64) + OFFSET)[:, None]
    return [batch.flatten() for batch in view.batches(numbered)]


def assert_parts_are_what_is_consumed(owner, fused, call, **options):
    reached = rows_reach(owner, fused, call, **options)
    assert_consumed(view_of(owner, f"{fused}.weight"), owner.get_submodule(fused).out_features, reached)


def numbered_weight(linear):
    """Make a linear layer put out the numbers of its rows where all its inputs are ones, also as `F.linear`."""
    assert linear.in_features & (linear.in_features - 1) == 0, "sums of equal numbers must be exact"
    with torch.no_grad():
        rows = torch.arange(linear.out_features, dtype=torch.float64) + OFFSET
        linear.weight.copy_(rows[:, None].expand(linear.weight.shape) / linear.in_features)
        if linear.bias is not None:
            linear.bias.zero_()


def assert_parts_of_weight_are_consumed(owner, path, call):
    """As `assert_parts_are_what_is_consumed`, for layers that are not called; `call` gives the layer ones."""
    linear = owner.get_submodule(path)
    view = view_of(owner, f"{path}.weight")
    numbered_weight(linear)
    mode = Arguments()
    with mode, torch.no_grad():
        call(owner)
    reached = [numbers(tensor) for tensor in mode.tensors if tensor.is_floating_point()]
    assert_consumed(view, linear.out_features, reached)


def assert_consumed(view, num_rows, reached):
    """Each part of a view is a set of rows that reached a consumer, and together they are all rows."""
    parts = rows_of(view, num_rows)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(num_rows).double() + OFFSET)
    assert len(parts) > 1
    for part in parts:
        wanted = part.sort().values
        assert any(  # up to a factor: some models scale queries before the product
            len(got) == len(wanted) and torch.allclose(got / got[0], wanted / wanted[0], rtol=1e-12, atol=0)
            for got in reached
        ), f"no consumer gets exactly the rows {wanted.int().tolist()} of {view}"


def assert_parts_are_gate_and_up(owner, fused, out, in_order=False):
    """The parts of a gated MLP's first layer are what its own forward pass uses as gate and as up.

    With `in_order` the gate comes first.
    """
    layer = owner.get_submodule(fused)
    width, inputs = layer.out_features, layer.in_features
    caught = []
    owner.get_submodule(out).register_forward_pre_hook(lambda m, a: caught.append(a[0]))

    def gated(values):
        hook = layer.register_forward_hook(lambda m, a, o: values)
        owner(torch.zeros(width, inputs, dtype=torch.float64))
        hook.remove()
        return caught.pop().detach()

    parts = [sorted(int(row) - OFFSET for row in part) for part in rows_of(view_of(owner, f"{fused}.weight"), width)]
    consumed = list(gate_and_up(gated, width))
    assert (parts == consumed) if in_order else (sorted(parts) == sorted(consumed))


def gate_and_up(function, width):
    """Find, by perturbing one input at a time, the (gate, up) pairs of a gated product of `width` inputs.

    An output depends on exactly two inputs; it is affine in the upper one and curved in the gate.
    """
    base = torch.linspace(0.3, 0.9, width, dtype=torch.float64)
    outputs = torch.stack([function(base + step * torch.eye(width, dtype=torch.float64)) for step in (0.0, 0.2, 0.4)])
    first, second = outputs[1] - outputs[0], outputs[2] - 2 * outputs[1] + outputs[0]
    gates, ups = [], []
    for output in range(first.shape[1]):
        pair = first[:, output].abs().gt(1e-3).nonzero().flatten().tolist()  # some compute in float32
        assert len(pair) == 2
        curved = [i for i in pair if second[i, output].abs() > 1e-5]
        assert len(curved) == 1
        gates += curved
        ups += [i for i in pair if i not in curved]
    return sorted(gates), sorted(ups)
