"""The steps of `steps.py` on two ranks, in every layout, compared with one device bit for bit."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from quintic.optim.rules.rule import UpdateRule
from quintic.testing.steps import STEPS, Snapshot, Trained, as_param, comparable, saved_state, wrong_matrix

__all__ = ["LAYOUTS", "check_checkpoints", "check_layout"]


class Laid(NamedTuple):
    """A layout: the option `comms`, and how a model of plain tensors is laid out."""

    comms: str = "none"
    wrap: Callable[[nn.Module], None] = lambda model: None


@cache
def _mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()))


def _fsdp2(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=_mesh())


def _fsdp2_last_dimension(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    def place(param: nn.Parameter) -> Shard | None:
        # PyTorch refuses sizes that the ranks do not divide.
        return Shard(param.ndim - 1) if param.shape[-1] % _mesh().size() == 0 else None

    fully_shard(model, mesh=_mesh(), shard_placement_fn=place)


def _tensor_parallel(model: nn.Module) -> None:
    """Shard weights by rows and columns in turn, as column- and row-wise layers do."""
    for number, (name, param) in enumerate(list(model.named_parameters())):
        pieces = distribute_tensor(param.detach(), _mesh(), [Shard(number % 2)], src_data_rank=None)
        model.register_parameter(name, nn.Parameter(pieces))


LAYOUTS = {
    "comms='averaged'": Laid("averaged"),
    "comms='replicated'": Laid("replicated"),
    "comms='sharded'": Laid("sharded"),
    "FSDP2": Laid(wrap=_fsdp2),
    "FSDP2 on the last dimension": Laid(wrap=_fsdp2_last_dimension),
    "tensor parallel": Laid(wrap=_tensor_parallel),
}

# Checkpoints: a case, the layout that saves, and the layout that loads.
_MOVES = (("bfloat16 with mantissas", "FSDP2", "comms='sharded'"), ("float32", "tensor parallel", "FSDP2"))


def _start(rule: UpdateRule, case: str, options: Mapping[str, Any], layout: str) -> Trained:
    comms, wrap = LAYOUTS[layout]
    return Trained(rule, case, options, wrap=wrap, comms=comms)


def _take(trained: Trained, layout: str, steps: range) -> None:
    # Where the optimizer averages, a gradient that one rank lacks counts as zeros. Elsewhere it is missing for all.
    has_gaps = LAYOUTS[layout].comms in ("replicated", "sharded") or dist.get_rank() == 1
    for number in steps:
        trained.step(number, has_gaps=has_gaps)


def check_layout(
    rule: UpdateRule, case: str, options: Mapping[str, Any], layout: str, reference: Snapshot
) -> list[str]:
    """Take all steps in a layout; return a line for each weight that differs from one device. All ranks call it."""
    trained = _start(rule, case, options, layout)
    _take(trained, layout, STEPS)
    return _other_bits(f"{case}: {layout}", trained, reference)


def _other_bits(what: str, trained: Trained, reference: Snapshot) -> list[str]:
    state = saved_state(trained.optimizer)
    lines = []
    for name, param in trained.model.named_parameters():
        found: dict[str, Tensor] = {"weight": param.detach(), **state[name]}
        if found.keys() != reference[name].keys():
            lines.append(f"{what}: {name} has {sorted(found)}, one device has {sorted(reference[name])}")
            continue
        for key, value in found.items():
            expected = reference[name][key]
            if not torch.equal(comparable(value), comparable(as_param(expected, value))):
                lines.append(f"{what}: {name}, {key}: {wrong_matrix(name, value, expected)} from one device")
                break
    return lines


def check_checkpoints(rule: UpdateRule, options: Mapping[str, Any], references: Mapping[str, Snapshot]) -> list[str]:
    """Save in the middle of the steps, and go on in another layout; all ranks call it."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    lines = []
    for case, saving, loading in _MOVES:
        folder = [tempfile.mkdtemp(prefix="quintic-testing-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        first, second = (_start(rule, case, options, layout) for layout in (saving, loading))
        _take(first, saving, STEPS[:2])
        save(_state_of(first), checkpoint_id=folder[0])
        loaded = _state_of(second)
        load(loaded, checkpoint_id=folder[0])
        weights, state = loaded["model"], loaded["optimizer"]
        set_state_dict(second.model, second.optimizer, model_state_dict=weights, optim_state_dict=state)
        _take(second, loading, STEPS[2:])
        lines += _other_bits(f"{case}: checkpoint from {saving} to {loading}", second, references[case])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return lines


def _state_of(trained: Trained) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(trained.model, trained.optimizer)
    return {"model": weights, "optimizer": state}
