"""Mixture of experts with expert parallelism; everything else under FSDP2. Each rank orthogonalises its own experts.

torchrun --nproc-per-node 2 examples/moe_ep.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import GPT, WIDTH, batch, finish, mean_over_ranks, start, tell
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import quintic

COUNT, CHOSEN = 8, 2


class MoE(nn.Module):
    """Each token goes to two of eight experts, stored as (expert, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = nn.ParameterDict(
            {
                "up": torch.randn(COUNT, WIDTH, 2 * WIDTH) * WIDTH**-0.5,
                "down": torch.randn(COUNT, 2 * WIDTH, WIDTH) * (2 * WIDTH) ** -0.5,
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        best, experts = self.router(x).topk(CHOSEN)
        gates = torch.zeros(*x.shape[:-1], COUNT, device=x.device).scatter(-1, experts, best.softmax(-1))
        up, down = self.experts["up"], self.experts["down"]
        mesh = up.device_mesh
        # All tokens come to the experts of this rank; what these make of them is summed over ranks, on the way back.
        x, gates = (_sharded(t, mesh).full_tensor(grad_placements=[Partial()]) for t in (x, gates))
        mine = gates.chunk(mesh.size(), -1)[mesh.get_local_rank()]
        hidden = F.relu(torch.einsum("btd,edh->bteh", x, up.to_local())).square()
        out = torch.einsum("bteh,ehd,bte->btd", hidden, down.to_local(), mine)
        return DTensor.from_local(out, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def _sharded(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Shard(0)])


def main(steps: int = 30) -> list[float]:
    """Train, and return the losses, averaged over ranks."""
    device = start()
    torch.manual_seed(0)
    model = GPT(MoE).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    experts = [module.experts for module in model.modules() if isinstance(module, MoE)]
    for bank in experts:
        for name, weight in list(bank.items()):
            bank[name] = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            # The sum of all ranks' losses reaches an expert, and their mean is wanted.
            bank[name].register_hook(lambda gradient: gradient / dist.get_world_size())
    fully_shard(model, mesh=mesh, ignored_params={weight for bank in experts for weight in bank.values()})
    rules = [quintic.Rule("*.experts.*", "muon", quintic.Experts(transposed=True))]
    optimizer = quintic.Muon(quintic.param_groups(model, rules=rules), lr=0.02, adamw_lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        loss = model(*batch(step, device, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return tell(losses)


if __name__ == "__main__":
    main()
    finish()
