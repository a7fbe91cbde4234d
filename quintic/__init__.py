"""Quintic: Muon for PyTorch. This module holds only the public names.

>>> import torch, quintic
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
>>> optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02)

Each name is imported when it is first used (PEP 562), so that the command line, which is in the same package, answers
`--help` without importing PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quintic import hooks

if TYPE_CHECKING:  # `_MODULES` says the same to Python; a test compares the two
    from quintic.grouping.assign import Rule
    from quintic.grouping.explain import Explanation, explain
    from quintic.grouping.forward.roles import Role, Roles
    from quintic.grouping.forward.trace import trace
    from quintic.grouping.param_groups import param_groups
    from quintic.optim.captured_step import CapturedStep
    from quintic.optim.clip import clip_grad_norm_
    from quintic.optim.layout.views import Experts, Flatten, Heads, Matrix, Rows, Split
    from quintic.optim.muon import Muon
    from quintic.optim.plan.plan import Plan
    from quintic.optim.polar.orthogonalize import orthogonalize
    from quintic.optim.qk_clip.clip import QKClip
    from quintic.optim.rules.rule import UpdateRule
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
    "Role",
    "Roles",
    "Rows",
    "Rule",
    "Split",
    "StepReport",
    "UpdateRule",
    "Verification",
    "__version__",
    "clip_grad_norm_",
    "explain",
    "orthogonalize",
    "param_groups",
    "reference_step",
    "trace",
    "verify",
]

__version__ = "0.1.0"

_MODULES = {
    "CapturedStep": "optim.captured_step",
    "Experts": "optim.layout.views",
    "Explanation": "grouping.explain",
    "Flatten": "optim.layout.views",
    "Heads": "optim.layout.views",
    "Matrix": "optim.layout.views",
    "Muon": "optim.muon",
    "Plan": "optim.plan.plan",
    "QKClip": "optim.qk_clip.clip",
    "Role": "grouping.forward.roles",
    "Roles": "grouping.forward.roles",
    "Rows": "optim.layout.views",
    "Rule": "grouping.assign",
    "Split": "optim.layout.views",
    "StepReport": "optim.step.telemetry",
    "UpdateRule": "optim.rules.rule",
    "Verification": "optim.verify.report",
    "clip_grad_norm_": "optim.clip",
    "explain": "grouping.explain",
    "orthogonalize": "optim.polar.orthogonalize",
    "param_groups": "grouping.param_groups",
    "reference_step": "optim.verify.reference",
    "trace": "grouping.forward.trace",
    "verify": "optim.verify.verify",
}
# Packages that are attributes of `quintic` without an import of their own.
_PARTS = frozenset({"errors", "interchange", "kernels", "optim", "testing", "update_rules"})

# `Muon` asks about parameter groups that do not name their algorithm; `optim` itself must not import the package.
hooks.load_classifier = lambda: import_module("quintic.grouping.plain_groups")


if not TYPE_CHECKING:  # type checkers would take any name for one that exists

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, and keep it."""
        if name in _PARTS:
            return import_module(f"quintic.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'quintic' has no attribute {name!r}")
        value = getattr(import_module(f"quintic.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the names of the public API, imported or not."""
    return sorted({*globals(), *__all__, *_PARTS})
