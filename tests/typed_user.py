"""A training script as users write it: mypy and pyright must find it right, and the marked lines wrong.

Not run; `test_package.py` has it checked against the installed package.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import quintic
from quintic import CapturedStep, Experts, Heads, Matrix, Muon, QKClip, Rule, Split, UpdateRule
from quintic.testing import check_update_rule
from quintic.update_rules import RULES, Equalize, MatrixStage, StageOptions, StateSpec, norms


def train(model: nn.Module, batches: list[Tensor]) -> float:
    rules = [
        Rule("blocks.*.qkv.weight", "muon", Split((64, 64, 64)), options={"lr": 0.01}),
        Rule("*.query.weight", "muon", Heads(4)),
        Rule("experts.*", "muon", Experts()),
    ]
    groups = quintic.param_groups(model, muon={"weight_decay": 0.1}, adamw={"betas": (0.8, 0.95)}, rules=rules)
    optimizer = Muon(
        groups,
        lr=0.02,
        adamw_lr_ratio=0.015,
        normalize="neuron",
        master="mantissa",
        comms="averaged",
        qk_clip=QKClip(threshold=100.0),
        orthogonalizer=lambda x: quintic.orthogonalize(x, "svd"),
    )
    scheduler = OneCycleLR(optimizer, max_lr=0.02, total_steps=len(batches))
    LambdaLR(optimizer, lambda step: 1.0)
    ReduceLROnPlateau(optimizer, min_lr=1e-3)
    loss: Tensor = torch.zeros(())
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        norm: Tensor = quintic.clip_grad_norm_(optimizer, max_norm=1.0)
        print(float(norm))
        optimizer.step()
        optimizer.step(qk_logits={"layers.0": torch.ones(4)})
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    with CapturedStep(optimizer) as step:
        step()
    return float(loss)


def closures(optimizer: Muon) -> float:
    def closure() -> float:
        return 1.0

    def tensor_closure() -> Tensor:
        return torch.ones(())

    def nothing() -> None:
        return None

    value: float = optimizer.step(closure)
    tensor: Tensor = optimizer.step(tensor_closure)
    none: None = optimizer.step(nothing)
    print(tensor, none)
    return value


def looking(model: nn.Module, optimizer: Muon) -> str:
    explanation: quintic.Explanation = quintic.explain(model, lr=0.02)
    plan: quintic.Plan = optimizer.plan()
    report: quintic.StepReport = optimizer.last_step()
    verification: quintic.Verification = quintic.verify(model, optimizer)
    names: list[str] = [row.name for row in explanation.rows]
    flops: int = plan.flops + sum(bucket.flops for bucket in plan)
    matrices: int = report.num_matrices
    ok: bool = verification.ok
    rms: list[float] = [matrix.update_rms for found in optimizer.telemetry().values() for matrix in found]
    version: str = quintic.__version__
    return f"{names} {flops} {matrices} {ok} {rms} {version}"


def plainly(weights: list[nn.Parameter], model: nn.Module) -> list[Muon]:
    return [
        Muon(weights),
        Muon(model.parameters()),
        Muon(model.named_parameters()),
        Muon([{"params": weights, "algorithm": "adamw", "view": Matrix()}], lr=torch.tensor(0.1)),
    ]


@dataclass(frozen=True)
class Scaled(MatrixStage):
    label = "scaled"
    state = (StateSpec("row_scale", "wide", "rows"),)
    rate: float = 0.9

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        state["row_scale"].lerp_(norms(matrices, -1), 1 - self.rate)
        return matrices / (state["row_scale"] + 1e-8), None


def own_rules(weights: list[nn.Parameter]) -> list[Muon]:
    rule = UpdateRule(title="mine", before=(Equalize("both"), Scaled(rate=0.5)), drift=RULES["ema_nesterov"].drift)
    checked: list[str] = check_update_rule(rule, options={"lr": 0.1})
    print(checked)
    return [Muon(weights, update_rule=rule), Muon(weights, update_rule="normuon")]


def saving(optimizer: torch.optim.Optimizer, path: str) -> None:
    torch.save(optimizer.state_dict(), path)
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    for group in optimizer.param_groups:
        group["lr"] = 0.1


def mistakes(weights: list[nn.Parameter], optimizer: Muon) -> None:
    Muon(weights, momentum="0.95")  # type: ignore[arg-type]
    Muon(weights, normalize="no rule")  # type: ignore[arg-type]
    Muon(weights, update_rule=Scaled())  # type: ignore[arg-type]
    UpdateRule(title="mine", before=(RULES["muon"],))  # type: ignore[arg-type]
    Muon(weights, weight_dcay=0.1)  # type: ignore[call-arg]
    Rule("*", "sgd")  # type: ignore[arg-type]
    optimizer.plan().bucket  # type: ignore[attr-defined]  # noqa: B018
    optimizer.step(1.0)  # type: ignore[call-overload]
    quintic.orthogonalize(weights[0], "qr")  # type: ignore[arg-type]
