"""Makes the files of `tests/older`, states of each kind, as the version of `quintic` that Python imports saves them.

    cd CHECKOUT_OF_THE_VERSION && PYTHONPATH=$PWD python /path/to/tests/older/make.py /path/to/tests/older/VERSION

Weights and gradients follow from formulas, so that another version can make the same ones; the state is that after
three steps. Uses public names only: it has to work with every version.
"""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import quintic

NUM_STEPS = 3
SHAPES = {"wide": (4, 6), "tall": (9, 5), "qkv": (12, 4), "bank": (3, 4, 5), "table": (8, 3), "bias": (5,)}
VIEWS = {"qkv": lambda: quintic.Split([4, 4, 4]), "bank": lambda: quintic.Experts()}
ELEMENTWISE = ("table", "bias")

CASES = {
    "muon": {},
    "normuon": {"normalize": "neuron", "cautious": True, "weight_decay": 0.1},
    "fp32-master": {"dtype": torch.bfloat16, "master": "fp32", "normalize": "neuron"},
    "mantissa": {"dtype": torch.bfloat16, "master": "mantissa"},
    "bf16-state": {"dtype": torch.bfloat16, "state_dtype": "bf16"},
    "accumulating": {"step_every": 2, "decay_coupling": "lr_squared"},
}
"""Options of the optimizer, and `dtype` of the weights, by the name of the file."""

SHARDED = {"comms": "sharded", "normalize": "neuron"}
"""Options of the states that two ranks save together."""

SHARDED_NAMES = ("wide", "qkv", "table")
"""The parameters of that state: each tensor takes several kilobytes of a distributed checkpoint."""


def values(name: str, number: int, dtype: torch.dtype) -> Tensor:
    """Entries between -1 and 1 that follow from a parameter's name and a number: exact in float32."""
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    start = sum(map(ord, name)) + 104_729 * number
    entries = (torch.arange(count, dtype=torch.int64) + start) * 7919 % 2039 - 1019
    return (entries.double() / 1024).reshape(shape).to(dtype)


def parameters(names: Iterable[str] = SHAPES, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Parameters, by name; without names all of them."""
    return {name: nn.Parameter(values(name, 0, dtype)) for name in names}


def optimizer_of(params: dict[str, nn.Parameter], **options: object) -> quintic.Muon:
    """An optimizer with a group for each view, and one of AdamW."""
    groups = []
    for name, param in params.items():
        group: dict[str, object] = {"params": [(name, param)]}
        if name in VIEWS:
            group["view"] = VIEWS[name]()
        if name in ELEMENTWISE:
            group["algorithm"] = "adamw"
        groups.append(group)
    return quintic.Muon(groups, lr=0.02, adamw_lr=0.003, **options)  # type: ignore[arg-type]


def make_steps(params: dict[str, nn.Parameter], optimizer: quintic.Muon, steps: range, rank: int = 0) -> None:
    """Step with the gradients of these numbers."""
    for step in steps:
        for name, param in params.items():
            param.grad = values(name, step + 1 + 1000 * rank, param.dtype)
        optimizer.step()


def options_of(case: str) -> tuple[torch.dtype, dict[str, object]]:
    """The dtype of a case's weights, and its options."""
    options = dict(CASES[case])
    return options.pop("dtype", torch.float32), options  # type: ignore[return-value]


def _save_sharded(rank: int, folder: str, address: str) -> None:
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    params = parameters(SHARDED_NAMES)
    optimizer = optimizer_of(params, **SHARDED)
    make_steps(params, optimizer, range(NUM_STEPS), rank)
    whole = optimizer.state_dict()
    if rank == 0:
        torch.save({"weights": dict(params), "optimizer": whole}, Path(folder, "sharded.pt"))
    weights = {name: param.detach() for name, param in params.items()}
    dcp.save({"weights": weights, "optimizer": whole}, checkpoint_id=Path(folder, "sharded"))
    dist.destroy_process_group()


def main() -> None:
    """Write a file of each case, and a distributed checkpoint of two ranks."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for case in CASES:
        dtype, options = options_of(case)
        params = parameters(dtype=dtype)
        optimizer = optimizer_of(params, **options)
        make_steps(params, optimizer, range(NUM_STEPS))
        torch.save({"weights": dict(params), "optimizer": optimizer.state_dict()}, folder / f"{case}.pt")
    address = f"file://{folder.resolve()}/rendezvous"
    torch.multiprocessing.spawn(_save_sharded, (str(folder), address), nprocs=2)
    (folder / "rendezvous").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
