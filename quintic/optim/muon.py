"""`Muon`: the optimizer a user constructs. Validates groups, owns state, and runs the plan.

One step is: for every bucket of the plan, the update rule of `update.py` on its batch of matrices. What the rules are
is in `update.py` and `orthogonalize.py`; which matrices a parameter holds is in `views.py`; what is computed together
is in `plan.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw as torch_adamw

from quintic.optim.orthogonalize import DEFAULT_STEPS, Method, orthogonalize
from quintic.optim.plan import Bucket, Plan, build_plan
from quintic.optim.state import CODE_KEYS, init_state, load_state, second_moments
from quintic.optim.update import LrScale, adamw_, apply_, lr_scale_factor, momentum_, normalize_neurons_
from quintic.optim.validate import check_group, check_keys
from quintic.optim.views import Matrix, View

__all__ = ["Muon", "Orthogonalizer"]

Orthogonalizer = Method | Callable[[Tensor], Tensor]


class Muon(Optimizer):
    """Muon for matrices, AdamW for everything else, in one `torch.optim.Optimizer`.

    For a group with `algorithm="muon"` (the default) each step is

        m <- m + (1 - momentum)(g - m)
        u  = polar factor of (1 - momentum) g + momentum m
        w <- w - lr weight_decay w - lr lr_scale(rows, columns) u

    and for `algorithm="adamw"` AdamW with bias correction and `lr=adamw_lr`. `quintic.param_groups(model)` makes the
    groups; every option below can also be set on a group. Momentum and moments are float32 for low-precision weights.
    Gradients are never modified; a parameter whose gradient is None keeps its weights and state.

    Args:
        params: parameter groups, or an iterable of parameters or of (name, parameter) pairs; plain parameters are
            Muon matrices.
        lr: learning rate of Muon groups. Every update has unit spectral norm before `lr_scale`, whatever the size of
            the gradient.
        momentum: averaging coefficient in [0, 1).
        nesterov: look one gradient ahead.
        weight_decay: decoupled, w <- w - lr weight_decay w per step; AdamW groups use it too unless they set their own.
        cautious: decay only entries where update and weight agree in sign (arXiv 2510.12402).
        orthogonalizer: `"polar_express"`, `"newton_schulz"`, `"svd"`, or a function (b, m, n) -> (b, m, n).
        orthogonalizer_steps: polynomial steps of the named methods.
        compute_dtype: dtype of the orthogonaliser's matrix products.
        normalize: None, or `"neuron"` for NorMuon (arXiv 2510.05491).
        normalize_beta: averaging coefficient of NorMuon's second moment.
        lr_scale: see `quintic.optim.update.lr_scale_factor`.
        adamw_lr: learning rate of AdamW groups that set none themselves.
        betas: AdamW's averaging coefficients.
        eps: AdamW's denominator guard.
        comms: `"none"`; this version runs on one device.
        process_group: None.
        master: None: updates are applied in the weight's own dtype.
        qk_clip: None.
        offload: False.
        on_nonfinite: `"propagate"`.
        max_workspace_bytes: upper bound of the temporary memory of one batched computation (a single parameter may
            exceed it); None for no bound.

    Raises:
        ValueError: an unknown algorithm or option, a value out of range, a parameter that is not a matrix in a Muon
            group, or a view that does not fit; the message names the parameter.
        TypeError: a parameter is not floating point.

    Source: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        cautious: bool = False,
        orthogonalizer: Orthogonalizer = "polar_express",
        orthogonalizer_steps: int = DEFAULT_STEPS,
        compute_dtype: torch.dtype = torch.bfloat16,
        normalize: Literal["neuron"] | None = None,
        normalize_beta: float = 0.95,
        lr_scale: LrScale = "spectral",
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        comms: Literal["none"] = "none",
        process_group: None = None,
        master: None = None,
        qk_clip: None = None,
        offload: bool = False,
        on_nonfinite: Literal["propagate"] = "propagate",
        max_workspace_bytes: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "orthogonalizer": orthogonalizer,
            "orthogonalizer_steps": orthogonalizer_steps,
            "compute_dtype": compute_dtype,
            "normalize": normalize,
            "normalize_beta": normalize_beta,
            "lr_scale": lr_scale,
            "adamw_lr": adamw_lr,
            "betas": betas,
            "eps": eps,
            "comms": comms,
            "process_group": process_group,
            "master": master,
            "qk_clip": qk_clip,
            "offload": offload,
            "on_nonfinite": on_nonfinite,
            "max_workspace_bytes": max_workspace_bytes,
            "algorithm": "muon",
            "view": Matrix(),
        }
        self._plan: Plan | None = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a validated group and create its state at once.

        Raises:
            ValueError, TypeError: as the constructor.
        """
        group = dict(param_group)
        number = len(self.param_groups)
        check_keys(number, group, self.defaults)
        if group.get("algorithm", "muon") == "adamw" and "lr" not in group:
            group["lr"] = group.get("adamw_lr", self.defaults["adamw_lr"])
        _add_names(number, group)
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            check_group(number, added)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for param in added["params"]:
            self.state[param] = init_state(param, added)
        self._plan = None

    def plan(self) -> Plan:
        """Return what one step computes together, with FLOPs and temporary memory; `print` it for a table."""
        if self._plan is None:
            self._plan = build_plan(self.param_groups)
        return self._plan

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model with gradients enabled and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: the closure returned None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is None:
                raise ValueError("closure returned None: it must compute the loss, call backward() and return the loss")
        for bucket in self.plan():
            group = self.param_groups[bucket.group]
            if bucket.algorithm == "muon":
                self._step_matrices(bucket, group)
            else:
                self._step_adamw(bucket, group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters as PyTorch does, with views and callables as text (they are not loaded)."""
        result = super().state_dict()
        for group in result["param_groups"]:
            for key in ("view", *CODE_KEYS):
                group[key] = str(group[key])
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, matching parameters by name; nothing changes unless everything fits.

        Raises:
            ValueError: the saved state belongs to other parameters, shapes, algorithms or views.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        load_state(self, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from pickle or deepcopy; the plan is rebuilt on demand."""
        super().__setstate__(state)
        self._plan = None

    def _step_matrices(self, bucket: Bucket, group: Mapping[str, Any]) -> None:
        view: View = group["view"]
        weights, gradients, momenta, moments = [], [], [], []
        for member in bucket.members:
            param = group["params"][member.index]
            if param.grad is None:
                continue
            state = self.state[param]
            weights.append(view.batches(param)[member.batch])
            gradients.append(view.batches(_dense_gradient(param, member.name))[member.batch])
            momenta.append(view.batches(state["momentum_buffer"])[member.batch])
            if group["normalize"] == "neuron":
                moments.append(second_moments(state["second_momentum_buffer"], param, view)[member.batch])
        if not weights or weights[0].numel() == 0:
            return
        directions = momentum_(momenta, gradients, mu=float(group["momentum"]), nesterov=group["nesterov"])
        counts = [weight.shape[0] for weight in weights]
        update = _orthogonalized(torch.cat(directions), group).to(momenta[0].dtype)
        if group["normalize"] == "neuron":
            second_moment = torch.cat(moments)
            update = normalize_neurons_(update, second_moment, beta=group["normalize_beta"])
            torch._foreach_copy_(moments, list(second_moment.split(counts)))
        _, m, n = update.shape
        apply_(
            weights,
            update.split(counts),
            lr=float(group["lr"]),
            lr_scale=lr_scale_factor(group["lr_scale"], m, n),
            weight_decay=float(group["weight_decay"]),
            cautious=group["cautious"],
        )

    def _step_adamw(self, bucket: Bucket, group: Mapping[str, Any]) -> None:
        params = [group["params"][member.index] for member in bucket.members]
        names = [member.name for member in bucket.members]
        active = [(p, _dense_gradient(p, name)) for p, name in zip(params, names, strict=True) if p.grad is not None]
        if not active:
            return
        states = [self.state[p] for p, _ in active]
        lr, eps, weight_decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        beta1, beta2 = group["betas"]
        uniform = all(g.dtype == p.dtype == s["exp_avg"].dtype for (p, g), s in zip(active, states, strict=True))
        if uniform and not group["cautious"]:
            torch_adamw(
                [p for p, _ in active],
                [g for _, g in active],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [s["step"] for s in states],
                fused=bucket.device.type in ("cpu", "cuda"),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=weight_decay,
                eps=eps,
                maximize=False,
            )
            return
        for (param, gradient), state in zip(active, states, strict=True):
            adamw_(
                param,
                gradient,
                state["exp_avg"],
                state["exp_avg_sq"],
                state["step"],
                lr=lr,
                betas=(beta1, beta2),
                eps=eps,
                weight_decay=weight_decay,
                cautious=group["cautious"],
            )


def _add_names(number: int, group: dict[str, Any]) -> None:
    """Name parameters that come without names: messages, plans and checkpoints need some, PyTorch makes none."""
    params = group.get("params")
    if isinstance(params, Tensor):
        group["params"] = params = [params]
    if params is None or isinstance(params, set):
        return  # PyTorch's own message is right
    group["params"] = params = list(params)
    if not any(isinstance(param, tuple) for param in params):
        group.setdefault("param_names", [f"group{number}.param{i}" for i in range(len(params))])


def _orthogonalized(directions: Tensor, group: Mapping[str, Any]) -> Tensor:
    orthogonalizer: Orthogonalizer = group["orthogonalizer"]
    if callable(orthogonalizer):
        return orthogonalizer(directions)
    return orthogonalize(
        directions, orthogonalizer, group["orthogonalizer_steps"], compute_dtype=group["compute_dtype"]
    )


def _dense_gradient(param: Tensor, name: str) -> Tensor:
    gradient = param.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ValueError(f"{name}: sparse gradients are not supported; build the embedding with sparse=False")
    if gradient.stride() == param.stride():
        return gradient
    # Views may be impossible without a copy, and PyTorch's fused kernel reads memory in order, whatever the strides.
    return torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)
