"""Other libraries' optimizers, written anew from their update rules, with state laid out as these libraries save it.

All of them orthogonalise exactly, so that what differs is what an import has to convert: the convention of the
momentum, which neurons have second moments, names, stacks and shards.
"""

import copy
import math

import torch


def polar(matrix):
    """The nearest matrix with orthonormal rows or columns."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def adamw_direction(gradient, first, second, count, betas, eps):
    """Advance both moving averages and return AdamW's direction."""
    first.mul_(betas[0]).add_((1 - betas[0]) * gradient)
    second.mul_(betas[1]).add_((1 - betas[1]) * gradient * gradient)
    return first / (1 - betas[0] ** count) / ((second / (1 - betas[1] ** count)).sqrt() + eps)


def evened_out(update, mean_squares, beta, dim):
    """Advance the mean squares along `dim`, divide by their roots and give each matrix its Frobenius norm back."""
    norm = torch.linalg.matrix_norm(update, keepdim=True)
    mean_squares.mul_(beta).add_((1 - beta) * (update * update).mean(dim, keepdim=True))
    divided = update / mean_squares.sqrt()
    return divided * norm / torch.linalg.matrix_norm(divided, keepdim=True)


class Peer(torch.optim.Optimizer):
    """One optimizer for groups of matrices and groups of everything else."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.step_group(group)

    def step_adamw(self, param, group):
        """AdamW under PyTorch's names, with the count as a number."""
        state = self.state[param]
        first = state.setdefault("exp_avg", torch.zeros_like(param))
        second = state.setdefault("exp_avg_sq", torch.zeros_like(param))
        state["step"] = state.get("step", 0) + 1
        direction = adamw_direction(param.grad, first, second, state["step"], group["betas"], group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)


class KellerJordan(Peer):
    """`MuonWithAuxAdam`: the momentum is a moving average."""

    def step_group(self, group):
        for param in group["params"]:
            if not group["use_muon"]:
                self.step_adamw(param, group)
                continue
            mu = group["momentum"]
            average = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            average.mul_(mu).add_((1 - mu) * param.grad)
            direction = polar((1 - mu) * param.grad + mu * average)
            direction *= math.sqrt(max(1, param.shape[-2] / param.shape[-1]))
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)

    def of_rank(self, rank, world_size):
        """The checkpoint of a rank that owns every `world_size`-th matrix of a group."""
        saved = copy.deepcopy(self.state_dict())
        for group in saved["param_groups"]:
            for number, key in enumerate(group["params"]):
                if group["use_muon"] and number % world_size != rank:
                    del saved["state"][key]
        return saved


class KellerJordan2024(Peer):
    """The first `Muon`: the momentum is a sum, of convolutions as matrices; one group, with marks in the state."""

    def __init__(self, muon_params, adamw_params, **options):
        super().__init__([{"params": [*muon_params, *adamw_params], **options}])
        for param in self.param_groups[0]["params"]:
            self.state[param]["use_muon"] = any(param is other for other in muon_params)

    def step_group(self, group):
        for param in group["params"]:
            state = self.state[param]
            if state["use_muon"]:
                gradient = param.grad.flatten(1)
                total = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
                total.mul_(group["momentum"]).add_(gradient)
                direction = polar(gradient + group["momentum"] * total)
                rate = group["lr"] * math.sqrt(max(1, gradient.shape[0] / gradient.shape[1]))
            else:
                state["step"] = state.get("step", 0) + 1
                first = state.setdefault("moment1", torch.zeros_like(param))
                second = state.setdefault("moment2", torch.zeros_like(param))
                direction = adamw_direction(param.grad, first, second, state["step"], group["adamw_betas"], 0)
                rate = group["lr"] * group["adamw_lr_ratio"]
            param.sub_(rate * direction.view_as(param))


class Dion(Peer):
    """dion's `Muon` and `NorMuon`: the momentum is a sum, mean squares belong to rows, steps are counted twice."""

    def step_group(self, group):
        group["step"] = group.get("step", 0) + 1
        for param in group["params"]:
            state, rate = self.state[param], group["lr"]
            momentum = state.setdefault("momentum", torch.zeros_like(param))
            if group["algorithm"] == "adamw":
                variance = state.setdefault("variance", torch.zeros_like(param))
                state.setdefault("step_dev", torch.zeros(())).add_(1)
                betas = (group["beta1"], group["beta2"])
                direction = adamw_direction(param.grad, momentum, variance, group["step"], betas, group["epsilon"])
            else:
                momentum.mul_(group["mu"]).add_(param.grad)
                direction = param.grad + group["mu"] * momentum if group["nesterov"] else momentum
                blocks = self.polar_blocks(direction, group)
                if group["algorithm"] == "normuon":
                    variance = state.setdefault("variance_neuron", torch.zeros_like(param[..., :1]))
                    sizes = [block.shape[-2] for block in blocks]
                    rows = variance.split(sizes, dim=-2)
                    blocks = [evened_out(b, v, group["muon_beta2"], -1) for b, v in zip(blocks, rows, strict=True)]
                direction = torch.cat(blocks, dim=-2)
                rate *= self.scale(group, *param.shape[-2:])
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(rate * direction)

    @staticmethod
    def scale(group, rows, columns):
        if group["adjust_lr"] == "rms_norm":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns)

    def polar_blocks(self, direction, group):
        """With `split_sizes` a block already carries its own scale over that of the whole."""
        rows, columns = direction.shape[-2:]
        blocks = direction.split(group.get("split_sizes", rows), dim=-2)
        whole = self.scale(group, rows, columns)
        return [polar(block) * (self.scale(group, block.shape[-2], columns) / whole) for block in blocks]


class Nanochat(Peer):
    """`MuonAdamW`: matrices of one shape are a group, whose state is stacks under its first parameter."""

    def step_group(self, group):
        if group["kind"] == "adamw":
            for param in group["params"]:
                self.step_adamw(param, group)
            return
        gradients = torch.stack([param.grad for param in group["params"]])
        weights = torch.stack(group["params"])
        rows, columns = weights.shape[1:]
        neurons = (rows, 1) if rows >= columns else (1, columns)
        state, mu = self.state[group["params"][0]], group["momentum"]
        average = state.setdefault("momentum_buffer", torch.zeros_like(gradients))
        mean_squares = state.setdefault("second_momentum_buffer", gradients.new_zeros(len(gradients), *neurons))
        average.mul_(mu).add_((1 - mu) * gradients)
        dim = -1 if rows >= columns else -2
        update = evened_out(polar((1 - mu) * gradients + mu * average), mean_squares, group["beta2"], dim)
        rate = group["lr"] * math.sqrt(max(1, rows / columns))
        decay = group["lr"] * group["weight_decay"] * weights * (update * weights >= 0)
        for param, change in zip(group["params"], rate * update + decay, strict=True):
            param.sub_(change)

    def of_rank(self, rank, world_size, replicated_below):
        """The checkpoint of a rank: its chunk of each padded stack, and its slice of the larger other tensors."""
        saved = copy.deepcopy(self.state_dict())
        for group in saved["param_groups"]:
            per_rank = -(-len(group["params"]) // world_size)
            for key in group["params"]:
                state = saved["state"].get(key, {})
                for name, whole in state.items():
                    if group["kind"] == "muon":
                        padding = whole.new_zeros(per_rank * world_size - len(whole), *whole.shape[1:])
                        state[name] = torch.cat([whole, padding])[per_rank * rank : per_rank * (rank + 1)]
                    elif name != "step" and whole.numel() >= replicated_below:
                        state[name] = whole.chunk(world_size)[rank]
        return saved
