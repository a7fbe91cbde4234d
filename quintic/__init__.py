"""Quintic: Muon for PyTorch. The public names, and nothing else.

>>> import torch, quintic
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
>>> optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02)
"""

from quintic.optim.captured_step import CapturedStep
from quintic.optim.clip import clip_grad_norm_
from quintic.optim.explain import Explanation, explain
from quintic.optim.groups.groups import Rule, param_groups
from quintic.optim.layout.views import Experts, Flatten, Heads, Matrix, Rows, Split
from quintic.optim.muon import Muon
from quintic.optim.plan.plan import Plan
from quintic.optim.polar.orthogonalize import orthogonalize
from quintic.optim.qk_clip.clip import QKClip
from quintic.optim.step.telemetry import StepReport
from quintic.optim.verify.reference import reference_step
from quintic.optim.verify.report import Verification
from quintic.optim.verify.verify import verify

__all__ = [
    "CapturedStep",
    "Experts",
    "Explanation",
    "Flatten",
    "Heads",
    "Matrix",
    "Muon",
    "Plan",
    "QKClip",
    "Rows",
    "Rule",
    "Split",
    "StepReport",
    "Verification",
    "__version__",
    "clip_grad_norm_",
    "explain",
    "orthogonalize",
    "param_groups",
    "reference_step",
    "verify",
]

__version__ = "0.1.0"
