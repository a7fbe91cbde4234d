"""Several processes that train one run: connecting them, small messages between them, and `--parallel`.

torchrun starts and numbers the processes (`quintic.launch`). `connected` initialises `torch.distributed` and yields
`Ranks`, whose methods are collectives on the host (gloo) for small values: names, stop requests, sums of losses.
`Parallelism` places the model on the ranks and tells which rows of a batch each rank gets. With `data_ranks` ranks that
get different rows, a batch of B tokens consists of `micro_steps` passes of (rows, seq_len) tokens on each rank:
B = micro_steps x rows x seq_len x data_ranks.
"""

import contextlib
import hashlib
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

__all__ = ["SINGLE_PROCESS", "Parallelism", "Ranks", "connected", "micro_batch_rows"]

T = TypeVar("T")

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Ranks(Launch):
    """The connected processes that train a run. All of them must call each method, in the same order."""

    group: Any = field(default=None, compare=False)
    """Process group (gloo) for messages between host processes; None if there is only one process."""

    @property
    def is_first(self) -> bool:
        """True for rank 0, which chooses names, writes the log and prints."""
        return self.rank == 0

    def run_on_all(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank and return this rank's result; if it fails on one rank, raise on all.

        Only errors that users can do something about are agreed on. Others end the process at once, and thereby free
        ranks that wait for it inside of `make`.

        Raises:
            QuinticError, OSError: `make` raised this error here, and on no lower rank.
            OtherRankError: `make` raised such an error on another rank, which reports it.
        """
        if self.size == 1:
            return make()
        error: QuinticError | OSError | None = None
        try:
            made = make()
        except (QuinticError, OSError) as raised:
            error = raised
        # Every rank reports success or failure, so that none waits in a later collective for a rank that failed. An
        # OtherRankError comes from a call inside of `make`; the rank that it is about reports the failure.
        failed = [False] * self.size
        dist.all_gather_object(failed, error is not None and not isinstance(error, OtherRankError), group=self.group)
        if not any(failed):
            return made
        if error is not None and failed.index(True) == self.rank:
            raise error
        raise OtherRankError("another rank has failed")

    def from_rank0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 only and return its result, which must be picklable, on all ranks.

        Raises:
            QuinticError, OSError: as `run_on_all`.
        """
        made = self.run_on_all(lambda: make() if self.is_first else None)
        if self.size == 1:
            return made  # type: ignore[return-value]  # the first rank made it
        box = [made]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def once_per_host(self, make: Callable[[], T]) -> T:
        """Call `make` on one rank of each host, then on the host's other ranks; return this rank's result."""
        made = self.run_on_all(lambda: make() if self.local_rank == 0 else None)
        rest = self.run_on_all(lambda: make() if self.local_rank else made)
        assert rest is not None
        return rest

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.total(torch.tensor(float(flag), dtype=torch.float64)).item() > 0

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of a CPU tensor, bit for bit the same on all ranks."""
        if self.size == 1:
            return tensor
        # All ranks add the gathered tensors in the same order. An all-reduce does not promise equal bits.
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(every, tensor, group=self.group)
        return torch.stack(every).sum(0)


SINGLE_PROCESS = Ranks()


@contextlib.contextmanager
def connected(launch: Launch) -> Iterator[Ranks]:
    """Connect the processes of a launch while the `with` block runs; only rank 0 keeps its standard output.

    After an exception the process group is not destroyed: the other ranks may be waiting in a collective that this rank
    will never join. torchrun kills all ranks once a process has ended, so a rank on which an OtherRankError leaves the
    block first waits until the failing rank has printed its error and ended.
    """
    if launch.size == 1:
        yield Ranks(**vars(launch))
        return
    # gloo for CPU tensors, NCCL for GPU tensors; rank r of a host uses its GPU r.
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if launch.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(launch.local_rank)
    if launch.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # stays open until the process ends
    store, _, _ = next(rendezvous("env://", launch.rank, launch.size))
    if launch.may_restart:  # the store may hold addresses of processes from before the restart
        store = PrefixStore(_agree_on_attempt(store, launch.rank, launch.size), store)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size)
    # A long timeout: one rank may prepare text for hours while the others wait. A rank that dies is noticed at once
    # all the same, because its connections close.
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    try:
        yield Ranks(**vars(launch), group=group)
    except OtherRankError:
        with contextlib.suppress(RuntimeError):  # the connection closes when the failing rank ends
            dist.barrier(group=group)
        raise
    dist.barrier(group=group)
    dist.destroy_process_group()


def _agree_on_attempt(store: Store, rank: int, size: int) -> str:
    """Return a name for this attempt of the launch, the same on all of its processes and new after each restart.

    After a restart torchrun passes the same store, which still holds the addresses of processes that are gone, and the
    agents of several hosts may count restarts differently. So each rank writes a random mark, and then the hash of all
    ranks' marks until every rank has written the same hash: it includes this rank's new mark, so all have read it.
    """
    store.set(f"mark/{rank}", uuid.uuid4().hex)
    while True:
        marks = store.multi_get([f"mark/{other}" for other in range(size)])
        name = hashlib.sha256(b"".join(marks)).hexdigest()
        store.set(f"name/{rank}", name)
        names = store.multi_get([f"name/{other}" for other in range(size)])
        if all(other == name.encode() for other in names):
            return name
        time.sleep(_POLL_SECONDS)


class Parallelism:
    """Places a model on ranks and splits batches among them, as `--parallel` asks.

    Args:
        kind: the layout.
            `sharded`: each rank has the whole model and its own rows; the optimizer averages gradients, shards state.
            `ddp`: the same, with DistributedDataParallel averaging the gradients and unsharded state.
            `fsdp`: weights, gradients and state are sharded over all ranks (FSDP2).
            `hsdp`: sharded over groups of `shard_ranks` ranks, replicated over the groups.
            `tp`: each layer is sharded (tensor parallelism), and all ranks get the same rows.
        ranks: all processes of the run.
        shard_ranks: ranks that hold one copy of the model under `hsdp`; None for the ranks of a host.

    Raises:
        ConfigError: `shard_ranks` does not divide the number of ranks.
    """

    def __init__(self, kind: ParallelName, ranks: Ranks, *, shard_ranks: int | None = None) -> None:
        self.kind = kind if ranks.size > 1 else None
        self.ranks = ranks
        self.shard_ranks = ranks.local_size if shard_ranks is None else shard_ranks
        if kind == "hsdp" and ranks.size % self.shard_ranks:
            raise ConfigError(f"--shard-ranks {self.shard_ranks} does not divide the {ranks.size} ranks")
        same_rows = self.kind in (None, "tp")
        self.data_size = 1 if same_rows else ranks.size
        """Number of ranks that get different rows of a batch."""
        self.data_rank = 0 if same_rows else ranks.rank
        """Index of this rank among them."""

    @property
    def comms(self) -> Literal["none", "averaged", "sharded"]:
        """The optimizer's option `comms`; "none" where DTensors carry the layout (`fsdp`, `hsdp`, `tp`)."""
        return "sharded" if self.kind == "sharded" else "averaged" if self.kind == "ddp" else "none"

    def place(self, model: GPT, device: torch.device) -> None:
        """Shard a model that is on the meta device: under `fsdp`, `hsdp` and `tp` its parameters become `DTensor`s.

        Args:
            model: changed in place.
            device: the device that it will be moved to.

        Raises:
            ConfigError: the number of ranks does not divide the number of heads (`tp`).
        """
        if self.kind in ("fsdp", "hsdp"):
            self._apply_fsdp(model, device)
        elif self.kind == "tp":
            self._apply_tensor_parallel(model, device)

    def wrapped(self, model: GPT) -> nn.Module:
        """Return the module to call in training: `model`, under `ddp` wrapped in DistributedDataParallel."""
        if self.kind != "ddp":
            return model
        on_gpu = model.head.weight.is_cuda
        # Gradients as views into buckets save a copy of all gradients.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 renames broadcast_buffers
            return nn.parallel.DistributedDataParallel(
                model,
                device_ids=[self.ranks.local_rank] if on_gpu else None,
                broadcast_buffers=False,  # they are constant, and the same on all ranks
                gradient_as_bucket_view=True,
            )

    def micro_step(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for one forward and backward pass; PyTorch averages gradients only in the last pass."""
        if self.kind == "ddp" and not last:
            context: contextlib.AbstractContextManager[None] = module.no_sync()  # type: ignore[operator]
            return context
        if self.kind in ("fsdp", "hsdp"):
            module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over the ranks that get different rows of a batch."""
        return self.ranks.total(tensor) if self.data_size > 1 else tensor

    def mean_gradient(self, gradient: Tensor) -> Tensor:
        """Return a gradient averaged over ranks. Under `sharded` this averages a float32 copy, as the step will."""
        if self.comms != "sharded":
            return gradient
        # A copy: the optimizer averages the gradient itself in its step.
        mean = gradient.to(torch.float32, copy=True)
        dist.all_reduce(mean)
        return mean / self.ranks.size

    def _apply_fsdp(self, model: GPT, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        sizes = {"shard": self.ranks.size}
        if self.kind == "hsdp":
            # Consecutive ranks, usually those of a host, hold one copy, so that sharded weights stay on fast links.
            sizes = {"replicate": self.ranks.size // self.shard_ranks, "shard": self.shard_ranks}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        # A block casts all of its weights to the compute dtype anyway, so gathering them in that dtype changes no bit
        # and halves the traffic. Gradients are reduced in float32.
        policy = MixedPrecisionPolicy()
        if model.compute_dtype != torch.float32:
            policy = MixedPrecisionPolicy(
                param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)

    def _apply_tensor_parallel(self, model: GPT, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        heads, size = model.config.num_kv_heads, self.ranks.size
        if heads % size:
            raise ConfigError(
                f"--parallel tp: {heads} key/value heads cannot be divided among {size} ranks; use as many ranks as "
                "divide them, another --parallel, or other sizes (--depth, --head-dim, --kv-ratio)"
            )
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tensor",))
        # Column-wise layers keep their outputs sharded by head, or by hidden unit; row-wise layers sum them up again.
        columns = ("attention.query", "attention.key", "attention.value", "attention.value_gate", "mlp.up")
        for block in model.blocks:
            attention = block.get_submodule("attention")
            assert isinstance(attention, Attention)
            present = {name for name, _ in block.named_modules()}  # only some blocks have a value gate
            plan: dict[str, Any] = {name: ColwiseParallel() for name in columns if name in present}
            plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
            parallelize_module(block, mesh, plan)
            # From here on the heads of this rank.
            attention.num_heads //= size
            attention.num_kv_heads //= size
        parallelize_module(
            model, mesh, {f"value_embeddings.{layer}": ColwiseParallel() for layer in model.value_embeddings}
        )


def micro_batch_rows(config: Config, data_ranks: int) -> int:
    """Return the rows of one forward and backward pass on each rank: `--rows`, or fewer if the batch is too small.

    Args:
        config: its `batch_tokens` must be a number; it counts the tokens of all ranks.
        data_ranks: number of ranks that get different rows of a batch.

    Raises:
        ConfigError: the batch is not a multiple of rows x seq_len x data_ranks tokens.
    """
    batch, seq_len = config.schedule.batch_tokens, config.model.seq_len
    assert batch is not None  # set by the trainer; it counts the tokens of all ranks
    rows = min(config.schedule.rows, max(1, batch // (seq_len * data_ranks)))
    step = rows * seq_len * data_ranks
    if batch % step:
        raise ConfigError(
            f"--batch-tokens {batch} cannot be split among {data_ranks} ranks: it is not a multiple of {rows} rows x "
            f"--seq-len {seq_len} x {data_ranks} ranks = {step}; change --batch-tokens, --rows or the number of ranks"
        )
    return rows
