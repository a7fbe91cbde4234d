"""`trace`: one forward pass of a copy of the model on fake tensors, which gives each weight a role.

The copy has the model's modules and attributes, but fake parameters and buffers, so that neither memory nor data is
needed, and nothing that the pass does is left in the model.
"""

import contextlib
import copy
import importlib
import random
import sys
import types
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from quintic.grouping.forward.flow import LARGEST, Flow, Usage
from quintic.grouping.forward.roles import UNSEEN, Role, Roles
from quintic.grouping.uses import attribute_of
from quintic.optim.groups.names import model_parameters, unwrap_module

__all__ = ["trace"]

Call = Callable[[nn.Module, Any], Any]

_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
    ("triton.runtime.autotuner", "Heuristics"),
)

_ATOMS = (bool, int, float, complex, str, bytes, type, types.FunctionType, torch.dtype, torch.device)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trace(model: nn.Module, example: Any, *, call: Call | None = None) -> Roles:
    """Return the role of each weight of `model`, read from one forward pass on tensors without data.

    The pass runs a copy of the model in evaluation mode; no parameter, gradient, buffer, attribute or random state of
    yours changes, and your hooks do not run. It takes about a tenth of a second, also for a model on the meta device.

    Args:
        model: any module; wrappers are looked through. Before it is sharded by tensor parallelism or cut into stages.
        example: the model's input: a tensor, a tuple of arguments, or a dictionary of named ones such as a batch of a
            Hugging Face tokenizer; on any device. Shapes and dtypes matter, and the values of integers and masks.
        call: `call(model, example)` runs the pass, for a model with other methods than `forward`; it gets a copy of the
            model and the example without data.

    Returns:
        A role for each weight of two dimensions or more; print it, save it, or give it to
        `param_groups(model, roles=...)`.

    Raises:
        TypeError: `model` is no module, or `call` cannot be called.
        ValueError: the forward pass fails on tensors without data, as where it reads a value computed from weights; the
            message has the error.

    Ranks need not call it together. The method is an analysis of our own; `docs/how-to/parameter-groups.md` has its
    results on the models of libraries.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: trace needs the model itself, a torch.nn.Module")
    if call is not None and not callable(call):
        raise TypeError(f"call={call!r} must be a function of the model and the example")
    # Takes a moment to load, which only a trace has to pay.
    fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    inner = unwrap_module(model)
    params = list(model_parameters(model))
    for name, param in params:
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet: run one batch through the model before tracing it")
    with _nothing_changes():
        copied, memo = _copy_of(inner, fake)
        for module in copied.modules():
            module.training = False  # modules of torch.export refuse `eval`
        layers = {id(module._parameters.get("weight")) for module in inner.modules() if isinstance(module, nn.Linear)}
        weights = [(Usage(name, tuple(param.shape), id(param) in layers), memo[id(param)]) for name, param in params]
        flow = Flow(fake, [(usage, weight) for usage, weight in weights if len(usage.shape) > 1])
        devices = {weight.device for _, weight in weights}
        # Batches often are on the CPU before a loop moves them.
        device = devices.pop() if len(devices) == 1 else None
        # A batch may be a mapping of its own class.
        plain = dict(example.items()) if isinstance(example, Mapping) else example
        inputs = tree_map(lambda one: _without_data(one, fake, device) if isinstance(one, Tensor) else one, plain)
        for value in _tensors(inputs):
            # Images may be bytes; other integers are indices and lengths, which are constants here.
            if value.is_floating_point() or value.is_complex() or value.dtype == torch.uint8:
                flow.put_input(value)
        try:
            with torch.no_grad(), _no_launches(flow), flow:
                out = (call or _run)(copied, inputs)
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the forward pass of {type(inner).__name__} on tensors without data failed, {type(error).__name__}: "
                f"{said}; give its arguments as example, or call=lambda model, example: ... to run a part of it"
            ) from error
        for value in _tensors(out):
            flow.returned(value)
    return Roles(type(inner).__name__, _roles(flow))


def _run(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


@contextlib.contextmanager
def _nothing_changes() -> Iterator[None]:
    """Run without compilers and fast paths, which would hide operations; restore random states and settings."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # Compiled modules run as they are written.
        eager = torch.compiler.set_stance("force_eager")
        with warnings.catch_warnings(), torch.random.fork_rng(devices), eager:
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


@contextlib.contextmanager
def _no_launches(flow: Flow) -> Iterator[None]:
    """Follow launches of Triton kernels in place of launching them: they need data, and perhaps a GPU."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        flow.launched(list(_tensors([args, kwargs])))

    with contextlib.ExitStack() as stack:
        for module, name in _LAUNCHERS:
            if module in sys.modules:
                stack.enter_context(mock.patch.object(getattr(sys.modules[module], name), "run", run))
        yield


def _fake(tensor: Tensor, fake: Any, device: torch.device | None = None) -> Tensor:
    """Return a tensor without data, of the whole shape of a sharded one; a meta tensor becomes one of the CPU."""
    with fake:
        # Strides do not matter here.
        own = "cpu" if tensor.is_meta else tensor.device
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device or own)


def _without_data(tensor: Tensor, fake: Any, device: torch.device | None = None) -> Tensor:
    """Return a tensor without data; integers and masks keep theirs, because models count and compare them."""
    if tensor.is_meta or tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > LARGEST:
        return _fake(tensor, fake, device)
    return tensor.detach().clone().to(device or tensor.device)


def _copy_of(model: nn.Module, fake: Any) -> tuple[nn.Module, dict[int, Any]]:
    """Return a copy of a module with fake tensors and without hooks, and {id of an original: its copy}."""
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            _copy_script(module, memo, fake)
            continue
        # `fx.GraphModule.__new__` would make another class.
        memo[id(module)] = object.__new__(_class_of(module))
        for param in module._parameters.values():
            if param is not None and id(param) not in memo:
                memo[id(param)] = nn.Parameter(_fake(param, fake), requires_grad=False)
        for buffer in module._buffers.values():
            if buffer is not None:
                memo.setdefault(id(buffer), _without_data(buffer, fake))
        for name in _HOOKS:
            hooks = module.__dict__.get(name)
            # PyTorch's weight and spectral normalisation compute the weight in a hook.
            own = {
                key: hook for key, hook in (hooks or {}).items() if type(hook).__module__.startswith("torch.nn.util")
            }
            memo[id(hooks)] = type(hooks)(own) if hooks is not None else None
    for module in modules:
        # Wrappers such as a compiled module would run the original.
        memo[id(module)] = memo[id(unwrap_module(module))]
    for module in modules:
        if unwrap_module(module) is not module or isinstance(module, torch.jit.ScriptModule):
            continue
        attributes = {key: _copied(value, memo, fake) for key, value in module.__dict__.items()}
        memo[id(module)].__dict__.update(attributes, _compiled_call_impl=None)
    return memo[id(model)], memo


def _copy_script(script: torch.jit.ScriptModule, memo: dict[int, Any], fake: Any) -> None:
    """Add the copies of a module of TorchScript and of those below it; for the time being data are copied, too."""
    if id(script) in memo:
        return
    twins: nn.Module = copy.deepcopy(script)
    for module, twin in zip(nn.Module.modules(script), twins.modules(), strict=True):
        memo[id(module)] = twin
        for key, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None:
                attribute_of(twin, "_c").setattr(
                    key, memo.setdefault(id(value), nn.Parameter(_fake(value, fake), requires_grad=False))
                )


def _copied(value: Any, memo: dict[int, Any], fake: Any) -> Any:
    """Return a copy of an attribute's value, in which modules and tensors are replaced by their copies in `memo`."""
    if value is None or isinstance(value, _ATOMS):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        copied: Any = _without_data(value, fake)
    elif type(value) in (dict, list, tuple, set):
        # One by one, so that a lock beside a module does not keep the module from being copied.
        if type(value) is dict:
            copied = {_copied(key, memo, fake): _copied(one, memo, fake) for key, one in value.items()}
        else:
            copied = type(value)(_copied(one, memo, fake) for one in value)
    else:
        found = ChainMap({}, memo)
        try:
            copied = copy.deepcopy(value, found)  # type: ignore[arg-type]
        except Exception:  # locks, process groups, files: the pass shares them with the model
            return value
        memo.update(found.maps[0])
    memo[id(value)] = copied
    return copied


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the one that FSDP2 puts before it."""
    bases = type(module).__mro__
    return bases[2] if len(bases) > 2 and bases[1].__name__ == "FSDPModule" else bases[0]


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of a model, also in objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth)
    elif depth < 3 and hasattr(value, "__dict__"):
        yield from _tensors(vars(value), depth + 1)


# ---------- roles


def _roles(flow: Flow) -> dict[str, Role]:
    # Features that are added to hidden ones, or multiplied with them, are hidden.
    hidden = {number for number, usage in enumerate(flow.usages) if usage.consumed}
    size = -1
    while size != len(hidden):
        size = len(hidden)
        hidden |= {number for number, usage in enumerate(flow.usages) if usage.space & hidden}
    return {usage.name: _role(usage, number in hidden) for number, usage in enumerate(flow.usages)}


def _role(usage: Usage, is_hidden: bool) -> Role:
    kind, evidence = _kind(usage, is_hidden)
    pieces, groups = _pieces(usage) if kind == "matrix" and "product" in usage.kinds else ((), 1)
    if pieces:
        evidence = f"{len(pieces)} matrices, whose outputs go different ways"
    return Role(kind, usage.shape, evidence, pieces, groups, usage.transposed == {True})


def _kind(usage: Usage, is_hidden: bool) -> tuple[str, str]:
    kinds = usage.kinds
    if not kinds:
        return "unknown", UNSEEN
    if kinds & {"table", "added"}:
        return "table", "looked up, joined or added"
    if "recurrent" in kinds:
        return "unknown", "in a recurrent layer, whose type says more"
    if "depthwise" in kinds:
        return "factors", "each channel by itself"
    if not kinds & {"product", "convolution"}:
        if kinds & {"factor", "norm"}:
            return "factors", "multiplied entry by entry"
        return "unknown", "multiplied with constants only" if "constants" in kinds else "used in an unknown operation"
    if 1 in (usage.rows, usage.columns):
        return "thin", "one output or one input"
    if len(usage.shape) == 3 and not usage.is_stacked:
        return "unknown", "features lie along its first dimension"
    if usage.compared:
        return "matrix", "activations are compared along its outputs"
    if usage.chooses:
        return "router", "its outputs are sorted, and the largest chosen"
    if usage.weighs and (is_hidden or not usage.returned):
        return "gate", "each of its outputs weighs several features"
    if usage.returned and not is_hidden and usage.rows != usage.columns:
        return "head", "no weight is multiplied with its outputs"
    if is_hidden:
        return "matrix", "other weights are multiplied with its outputs"
    return "unknown", "its outputs lead nowhere"


def _pieces(usage: Usage) -> tuple[tuple[int, ...], int]:
    """Return the sizes of the pieces of a weight, whose features go ways of their own, and how often they repeat.

    Features that arrived together somewhere, or were added to each other, are of one piece.
    """
    which = torch.arange(usage.rows)  # the piece of each feature
    before = None
    while before is None or not torch.equal(which, before):
        before = which.clone()
        for mask in filter(torch.any, usage.arrived.values()):
            which[mask] = which[mask].min()
        for one, two in usage.joined.values():
            which.scatter_reduce_(0, one, which[two], "amin").scatter_reduce_(0, two, which[one], "amin")
    pieces = {int(which[mask][0]) for mask in usage.arrived.values() if mask.any()}
    if len(pieces) < 2:
        return (), 1
    which[~torch.isin(which, torch.tensor(list(pieces)))] = -1  # features that arrived nowhere
    numbers, counts = (found.tolist() for found in torch.unique_consecutive(which, return_counts=True))
    runs = list(zip(numbers, counts, strict=True))
    period = next(n for n in range(1, len(runs) + 1) if len(runs) % n == 0 and runs == runs[:n] * (len(runs) // n))
    sizes, groups = tuple(count for _, count in runs[:period]), len(runs) // period
    # A piece of one row is no matrix, and several runs of one piece in a period are no `Split`.
    is_split = len({number for number, _ in runs[:period]}) == period and min(sizes) * groups > 1
    return (sizes, groups) if is_split else ((), 1)
