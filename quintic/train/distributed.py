"""Several processes that train one run: their connection, their agreements, and the division of model and batch.

torchrun starts and numbers them (`quintic.launch`). `connected` joins them; through `Ranks` they exchange small things
on the host: a name, a stop request, sums of losses. `Parallelism` divides a model.
"""

import contextlib
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from quintic.errors import ConfigError, OtherRankError, QuinticError
from quintic.launch import Launch
from quintic.model.gpt import GPT
from quintic.model.layers import Attention
from quintic.train.config import Config, ParallelName

__all__ = ["ALONE", "Parallelism", "Ranks", "check_gpus", "connected", "rows_at_once"]

T = TypeVar("T")

_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that train a run. Every method must be called by all of them, in the same order."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: Any = field(default=None, compare=False)
    """Process group of gloo, for messages between hosts; None for one process."""

    @property
    def is_first(self) -> bool:
        """True for the rank that names, logs and prints."""
        return self.rank == 0

    def agree(self, make: Callable[[], T]) -> T:
        """Return this rank's result of `make`, if it succeeds on all ranks.

        Raises:
            QuinticError: `make` raised it here, and on no lower rank.
            OtherRankError: it raised a `QuinticError` on another rank, which says why.
        """
        if self.size == 1:
            return make()
        error: QuinticError | None = None
        try:
            made = make()
        except QuinticError as raised:
            error = raised
        failed = self.every(error is not None)
        if not any(failed):
            return made
        if error is not None and failed.index(True) == self.rank:
            raise error
        raise self.failed_elsewhere()

    def failed_elsewhere(self) -> OtherRankError:
        """Return the error to raise where another rank reports the failure, once that rank has ended.

        Not before: torchrun ends all ranks when the first one is gone, also one that is about to speak.
        """
        with contextlib.suppress(RuntimeError):  # a connection that closes
            dist.barrier(group=self.group)
        return OtherRankError("another rank has failed")

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on all ranks the first one's result of `make`, which can be pickled.

        Raises:
            QuinticError: as `agree`.
        """
        made = self.agree(lambda: make() if self.is_first else None)
        if self.size == 1:
            return made  # type: ignore[return-value]  # the first rank made it
        box = [made]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def once_per_host(self, make: Callable[[], T]) -> T:
        """Return this rank's result of `make`, which runs on one rank of each host before it runs on the others."""
        made = self.agree(lambda: make() if self.local_rank == 0 else None)
        rest = self.agree(lambda: make() if self.local_rank else made)
        assert rest is not None
        return rest

    def every(self, value: T) -> list[T]:
        """Return the value of each rank, which can be pickled, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.total(torch.tensor(float(flag), dtype=torch.float64)).item() > 0

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor on the CPU, with the same bits on all of them."""
        if self.size == 1:
            return tensor
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(every, tensor, group=self.group)
        return torch.stack(every).sum(0)


ALONE = Ranks()


@contextlib.contextmanager
def connected(launch: Launch) -> Iterator[Ranks]:
    """Join the processes of a launch while the block runs; ranks other than the first write no standard output.

    A block that ends with an exception leaves without a farewell: the others may wait in a collective that this rank
    will never join, and torchrun ends them once this process is gone.
    """
    if launch.size == 1:
        yield ALONE
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if launch.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(launch.local_rank)
    if launch.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the process ends
    store, _, _ = next(rendezvous("env://", launch.rank, launch.size))
    if launch.may_restart:
        store = PrefixStore(_attempt(store, launch.rank, launch.size), store)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size)
    # One rank may prepare text for hours. One that dies is noticed at once: its connections close.
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    yield Ranks(
        rank=launch.rank,
        size=launch.size,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        group=group,
    )
    dist.barrier(group=group)
    dist.destroy_process_group()


def _attempt(store: Store, rank: int, size: int) -> str:
    """Return a name that the processes of this attempt share, and no others.

    After a restart torchrun gives the same store, and in it are the addresses of processes that are gone; nor do agents
    of several hosts count restarts alike. So the first rank draws a name, and gives it to those that show they are
    there: an answer to a process that is gone has that one's mark.
    """
    mark = uuid.uuid4().hex
    if rank > 0:
        store.set(f"here/{rank}", mark)
        while True:
            answered, _, name = _read_key(store, f"attempt/{rank}").partition(" ")
            if answered == mark:
                store.set(f"{name}/{rank}", "taken")
                return name
            time.sleep(_POLL_SECONDS)
    waiting = set(range(1, size))
    while waiting:
        for other in waiting:
            store.set(f"attempt/{other}", f"{_read_key(store, f'here/{other}')} {mark}")
        time.sleep(_POLL_SECONDS)
        waiting = {other for other in waiting if not _read_key(store, f"{mark}/{other}")}
    return mark


def _read_key(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


class Parallelism:
    """The division of a run among ranks: `--parallel`.

    Args:
        kind: `sharded`: each rank has the model and its own rows, the optimizer averages gradients and divides its
            state; `ddp`: PyTorch averages gradients; `fsdp`: weights, gradients and state are divided; `hsdp`: the same
            within groups of ranks; `tp`: each layer is divided, and all ranks have the same rows.
        ranks: all processes of the run.
        shard_ranks: ranks that share one copy of the model under `hsdp`; None for those of a host.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """

    def __init__(self, kind: ParallelName, ranks: Ranks, *, shard_ranks: int | None = None) -> None:
        self.kind = kind if ranks.size > 1 else None
        self.ranks = ranks
        self.shard_ranks = ranks.local_size if shard_ranks is None else shard_ranks
        if kind == "hsdp" and ranks.size % self.shard_ranks:
            raise ConfigError(f"--shard-ranks {self.shard_ranks} does not divide the {ranks.size} ranks")
        self._is_divided = self.kind not in (None, "tp")

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of each batch."""
        return self.ranks.rank if self._is_divided else 0

    @property
    def data_size(self) -> int:
        """Number of shares of a batch."""
        return self.ranks.size if self._is_divided else 1

    @property
    def comms(self) -> Literal["none", "averaged", "sharded"]:
        """The optimizer's option `comms`; DTensors carry their own layout."""
        return "sharded" if self.kind == "sharded" else "averaged" if self.kind == "ddp" else "none"

    def place(self, model: GPT, device: torch.device) -> None:
        """Divide a model that is on the meta device: its parameters become `DTensor`s where ranks have parts of them.

        Args:
            model: is changed.
            device: where it will be.

        Raises:
            ConfigError: its heads cannot be divided among the ranks.
        """
        if self.kind in ("fsdp", "hsdp"):
            self._shard(model, device)
        elif self.kind == "tp":
            self._divide_layers(model, device)

    def wrapped(self, model: GPT) -> nn.Module:
        """Return the module to call for losses that are differentiated, given the initialised model."""
        if self.kind != "ddp":
            return model
        on_gpu = model.head.weight.is_cuda
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 has another name for broadcast_buffers
            return nn.parallel.DistributedDataParallel(
                model,
                device_ids=[self.ranks.local_rank] if on_gpu else None,
                broadcast_buffers=False,  # they are the same everywhere, and stay so
                gradient_as_bucket_view=True,
            )

    def micro_step(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for one forward and backward pass of `wrapped`: gradients are averaged after the last."""
        if self.kind == "ddp" and not last:
            context: contextlib.AbstractContextManager[None] = module.no_sync()  # type: ignore[operator]
            return context
        if self.kind in ("fsdp", "hsdp"):
            module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over the shares of a batch of a tensor on the CPU."""
        return self.ranks.total(tensor) if self._is_divided else tensor

    def mean_gradient(self, gradient: Tensor) -> Tensor:
        """Return a gradient as the optimizer will see it; `sharded` averages on the way, so here a copy is averaged."""
        if self.comms != "sharded":
            return gradient
        mean = gradient.float()
        mean = mean.clone() if mean is gradient else mean
        dist.all_reduce(mean)
        return mean / self.ranks.size

    def _shard(self, model: GPT, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        size = self.ranks.size
        if self.kind == "fsdp":
            mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        else:
            shape = (size // self.shard_ranks, self.shard_ranks)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        # Weights are cast where they are used, all of a block's: gathering them in that dtype changes no bit.
        policy = MixedPrecisionPolicy()
        if model.compute_dtype != torch.float32:
            policy = MixedPrecisionPolicy(
                param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)

    def _divide_layers(self, model: GPT, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        heads, size = model.config.num_kv_heads, self.ranks.size
        if heads % size:
            raise ConfigError(
                f"--parallel tp: {heads} key/value heads cannot be divided among {size} ranks; use as many ranks as "
                "divide them, another --parallel, or other sizes (--depth, --head-dim, --kv-ratio)"
            )
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tensor",))
        columns = ("attention.query", "attention.key", "attention.value", "attention.value_gate", "mlp.up")
        for block in model.blocks:
            attention = block.get_submodule("attention")
            assert isinstance(attention, Attention)
            there = {name for name, _ in block.named_modules()}
            plan: dict[str, Any] = {name: ColwiseParallel() for name in columns if name in there}
            plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
            parallelize_module(block, mesh, plan)
            attention.num_heads //= size  # those of this rank
            attention.num_kv_heads //= size
        parallelize_module(
            model, mesh, {f"value_embeddings.{layer}": ColwiseParallel() for layer in model.value_embeddings}
        )


def check_gpus(ranks: Ranks, device: torch.device) -> None:
    """Check that every rank of this host has a GPU of its own.

    Raises:
        ConfigError: there are fewer.
    """
    if device.type == "cuda" and ranks.local_size > torch.cuda.device_count():
        here = f"{torch.cuda.device_count()} {'GPU' if torch.cuda.device_count() == 1 else 'GPUs'}"
        raise ConfigError(
            f"--nproc-per-node {ranks.local_size}: this host has {here}, and each process needs one; start fewer, or "
            "use --device cpu"
        )


def rows_at_once(config: Config, shares: int) -> int:
    """Return the rows that go through the model at once on each rank: `--rows`, or a rank's whole share if it is less.

    Args:
        config: with the batch of all ranks.
        shares: number of shares of a batch.

    Raises:
        ConfigError: the batch cannot be divided so.
    """
    batch, seq_len = config.schedule.batch_tokens, config.model.seq_len
    assert batch is not None  # derived by now
    rows = min(config.schedule.rows, max(1, batch // (seq_len * shares)))
    step = rows * seq_len * shares
    if batch % step:
        raise ConfigError(
            f"--batch-tokens {batch} cannot be dealt out to {shares} ranks: it is not a multiple of {rows} rows x "
            f"--seq-len {seq_len} x {shares} ranks = {step}; change --batch-tokens, --rows or the number of ranks"
        )
    return rows
