"""`Muon`: the optimizer a user constructs. Validates groups, owns state, and runs the plan.

One step is: for every bucket of the plan, the update rule of `update.py` on its batch of matrices. What the rules are
is in `update.py` and `orthogonalize.py`; which matrices a parameter holds is in `views.py`; what is computed together
is in `plan.py`; how it is run in `runner.py`, and how one bucket is in `pipeline.py`. Where matrices lie on several
ranks: `travel.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintic.kernels.dispatch import KernelsOption
from quintic.optim.coefficients import DEFAULT_STEPS
from quintic.optim.comms import (
    Communicators,
    ProcessGroup,
    dividing_ranks,
    layouts_of,
    this_rank,
)
from quintic.optim.device_memory import is_capturing
from quintic.optim.forms import Method, Polynomials
from quintic.optim.plan import PLANNED_OPTIONS, Plan
from quintic.optim.precision import full_precision, store_
from quintic.optim.qk_clip import LayerClip, QKClip, RowFactors
from quintic.optim.runner import Runner
from quintic.optim.sharded import divided_state, parts_of
from quintic.optim.sharded_state import whole_states
from quintic.optim.state import as_saved, complete_second_moments, init_state, load_state, master_of
from quintic.optim.telemetry import MatrixTelemetry, StepReport
from quintic.optim.update import DecayCoupling, LrScale
from quintic.optim.validate import check_group, check_keys
from quintic.optim.views import Matrix

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
        decay_coupling: `"lr"`, or `"lr_squared"` for w <- w - lr^2 weight_decay w, which falls faster than a falling
            learning rate.
        cautious: decay only entries where update and weight agree in sign (arXiv 2510.12402).
        orthogonalizer: `"auto"` (Polar Express in the cheapest form for the shape), `"polar_express"`, `"gram"`,
            `"newton_schulz"`, `"svd"`, or a function (b, m, n) -> (b, m, n).
        orthogonalizer_steps: polynomial steps of the named methods.
        coefficients: other polynomials for the named methods: one triple (a, b, c), or one per step.
        compute_dtype: dtype of the orthogonaliser's matrix products; None for the method's own, see
            `quintic.orthogonalize`.
        normalize: None, or `"neuron"` for NorMuon (arXiv 2510.05491).
        normalize_beta: averaging coefficient of NorMuon's second moment.
        lr_scale: see `quintic.optim.update.lr_scale_factor`.
        lr_multipliers: for each matrix of a parameter, in the order of its view, a factor on its learning rate; for
            groups whose parameters are banks of equally many matrices.
        adamw_lr: learning rate of AdamW groups that set none themselves.
        betas: AdamW's averaging coefficients.
        eps: AdamW's denominator guard.
        step_every: step only every k-th time. In between, `zero_grad` leaves the group's gradients alone, so that they
            add up (AdamW does not see their scale).
        comms: for plain tensors on several ranks (a `DTensor` carries its own layout). `"none"`: gradients are final
            and this rank does all of the work; `"averaged"`: gradients are the same on all ranks, as under DDP, and the
            ranks divide the orthogonalisation; `"replicated"`: gradients differ, they are averaged in place and every
            rank does all of the work; `"sharded"`: gradients differ, they are averaged on their way to the rank that
            owns a part of a parameter and its state, and the weights come back. Averages are sums in the order of the
            ranks, rounded once. Without an initialised process group there is one rank.
        process_group: the ranks that `comms` speaks of; None for all.
        master: what stands behind bfloat16 and float16 weights. None: updates are applied in the weight's own dtype;
            `"fp32"`: to a float32 copy in the state; `"mantissa"`: to bfloat16 weight and uint16 low bits, bit for bit
            the trajectory of the copy at half its memory. Parameters of float32 and wider need none and have none.
        qk_clip: `quintic.QKClip(...)` (MuonClip): give `step` the largest attention logits.
        offload: False.
        on_nonfinite: `"propagate"`; `"skip"`: a non-finite gradient in any group with this option leaves all their
            weights and state bitwise untouched, without host synchronisation on CUDA devices; `"raise"`: the same with
            an error that names the parameter (waits for the device).
        max_workspace_bytes: upper bound of the temporary memory of one batched computation (a single matrix may
            exceed it); None for no bound.
        kernels: implementation of the element-wise passes: `"auto"` (Triton on CUDA devices), `"triton"` or `"torch"`.
        telemetry_every: measure every matrix each k-th step, see `telemetry`; None for never.

    Raises:
        ValueError: an unknown algorithm or option, a value out of range, a parameter that is not a matrix in a Muon
            group, or a view that does not fit; the message names the parameter.
        TypeError: a parameter is not floating point.

    Source: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """

    # What follows from the groups, made when needed and dropped when they change.
    _runner: Runner | None
    _planned_options: list[list[Any]]
    _communicators: Communicators
    _clips: dict[str | int, tuple[LayerClip, dict[str, Tensor]]]
    # What the user may ask about the steps made.
    _skipped: Tensor | None
    _num_steps: int
    _report: tuple[StepReport, Tensor | None]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        decay_coupling: DecayCoupling = "lr",
        cautious: bool = False,
        orthogonalizer: Orthogonalizer = "auto",
        orthogonalizer_steps: int = DEFAULT_STEPS,
        coefficients: Polynomials | None = None,
        compute_dtype: torch.dtype | None = None,
        normalize: Literal["neuron"] | None = None,
        normalize_beta: float = 0.95,
        lr_scale: LrScale = "spectral",
        lr_multipliers: Sequence[float] | None = None,
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        step_every: int = 1,
        comms: Literal["none", "averaged", "replicated", "sharded"] = "none",
        process_group: ProcessGroup | None = None,
        master: Literal["fp32", "mantissa"] | None = None,
        qk_clip: QKClip | None = None,
        offload: bool = False,
        on_nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        max_workspace_bytes: int | None = 2**31,
        kernels: KernelsOption = "auto",
        telemetry_every: int | None = None,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        self._forget_steps()
        super().__init__(params, {**defaults, "algorithm": "muon", "view": Matrix(), "pending_steps": 0})

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
            layouts = layouts_of(number, added)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._communicators.connect([added], [layouts])
        ranks = dividing_ranks(added, layouts)
        parts = parts_of(added, ranks) if ranks else []
        for index, param in enumerate(added["params"]):
            state = init_state(param, added)
            # One at a time: never is more than one parameter's state whole on a rank.
            self.state[param] = divided_state(state, parts[index], ranks.index(this_rank())) if ranks else state
        self._forget_plan()

    def plan(self) -> Plan:
        """Return what one step computes together, with FLOPs and temporary memory; `print` it for a table."""
        return self._planned().plan

    def _planned(self) -> Runner:
        options = [[group[key] for key in PLANNED_OPTIONS] for group in self.param_groups]
        if self._runner is None or options != self._planned_options:
            self._forget_plan()
            self._runner = Runner(self.param_groups, self.state, self._communicators)
            self._planned_options = options
        return self._runner

    @overload
    def step(self, closure: None = None, *, qk_logits: Mapping[str | int, Tensor] | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, qk_logits: Mapping[str | int, Tensor] | None = None) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        qk_logits: Mapping[str | int, Tensor] | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model with gradients enabled and returns the loss.
            qk_logits: for QK-clip: attention layer -> (heads,) largest logit of each head since the last step.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: the closure returned None, a gradient is sparse, or `qk_logits` fits no attention layer.
            FloatingPointError: a gradient is not finite and `on_nonfinite="raise"`; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is None:
                raise ValueError("closure returned None: it must compute the loss, call backward() and return the loss")
        row_factors = self._row_factors(qk_logits or {})
        runner = self._planned()
        pending_steps = self._pending_steps()
        done = runner.step(pending_steps, self._num_steps)
        if done.go is not None:
            if self._skipped is None:
                self._skipped = torch.zeros((), dtype=torch.int64, device=done.go.device)
            self._skipped += 1 - done.go
        for param, factors in row_factors:
            self._scale(param, factors, done.go)
        for group, pending in zip(self.param_groups, pending_steps, strict=True):
            group["pending_steps"] = pending
        waiting = sum(len(group["params"]) for group in self.param_groups if group["pending_steps"])
        self._num_steps += 1
        self._report = replace(done.report, waiting=waiting, clipped_layers=len(qk_logits or {})), done.go
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, except of groups that are between two of their steps (`step_every`)."""
        waiting = [(p, p.grad) for group in self.param_groups if group["pending_steps"] for p in group["params"]]
        for param, _ in waiting:
            param.grad = None
        super().zero_grad(set_to_none)
        for param, gradient in waiting:
            param.grad = gradient

    def last_step(self) -> StepReport:
        """Return what the last step did: matrices orthogonalised by method, AdamW parameters, steps skipped.

        Reads the count of skipped steps from the device, and so waits for it.
        """
        report, go = self._report
        skipped_steps = int(self._skipped) if self._skipped is not None else 0
        return replace(report, skipped=go is not None and not bool(go), skipped_steps=skipped_steps)

    def telemetry(self) -> dict[str, list[MatrixTelemetry]]:
        """Return the measurements of the last sampled step: parameter name -> one entry per matrix of its view.

        Empty until a step was sampled (`telemetry_every`). Waits for the device.
        """
        found: dict[str, dict[int, MatrixTelemetry]] = {}
        measured = self._runner.measured.values() if self._runner is not None else []
        for members, values in measured:
            rows = iter(values.tolist())
            for member in members:
                for offset in range(member.num_matrices):
                    rms, mean, spread, rank = next(rows)
                    found.setdefault(member.name, {})[member.first_matrix + offset] = MatrixTelemetry(
                        update_rms=rms, mean_squared_sigma=mean, sigma_spread=spread, effective_rank=rank
                    )
        return {name: [entries[index] for index in sorted(entries)] for name, entries in found.items()}

    def upload_hyperparameters(self) -> None:
        """Bring changed learning rates, momenta, decays, betas and eps to the device, where a CUDA graph reads them.

        `step` does it by itself; needed only before replaying a captured step. Does not wait for the device.
        """
        if self._runner is not None:
            self._runner.upload_hyperparameters()

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters as PyTorch does, with views and callables as text (they are not loaded).

        All ranks must call it if a `DTensor` has `normalize="neuron"`, and with `comms="sharded"`, whose divided state
        it returns whole; see `state.py` and `docs/checkpoints.md`.
        """
        complete_second_moments(self.param_groups, self.state, self._communicators)
        whole = whole_states(self.param_groups, self.state, self._communicators)
        divided = {param: self.state[param] for param in whole}
        self.state.update(whole)
        try:
            return as_saved(super().state_dict())
        finally:
            self.state.update(divided)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, matching parameters by name; nothing changes unless everything fits.

        Nothing is communicated: of whole tensors each rank takes its piece. See `docs/checkpoints.md`.

        Raises:
            ValueError: the saved state belongs to other parameters, shapes, algorithms, views or an unfit layout.
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
        self._forget_steps()

    def _forget_steps(self) -> None:
        """Forget what is told about the steps made, and the plan."""
        self._skipped = None
        self._num_steps = 0
        self._report = StepReport(), None
        self._communicators = Communicators()
        self._forget_plan()

    def _forget_plan(self) -> None:
        """Forget everything that follows from the groups."""
        self._runner = None
        self._planned_options = []
        self._clips = {}

    def _pending_steps(self) -> list[int]:
        """Return for each group how many steps it waits for after this one; 0 if it is stepped now."""
        pending_steps = []
        for group in self.param_groups:
            if group["step_every"] > 1 and any(is_capturing(param.device) for param in group["params"]):
                raise RuntimeError("step_every counts on the host: a step with it cannot be captured in a CUDA graph")
            pending_steps.append((group["pending_steps"] + 1) % group["step_every"])
        return pending_steps

    def _row_factors(self, qk_logits: Mapping[str | int, Tensor]) -> list[tuple[Tensor, RowFactors]]:
        """Return what QK-clip multiplies which parameters with; every mistake in `qk_logits` is found here."""
        if not qk_logits:
            return []
        qk_clip = next((group["qk_clip"] for group in self.param_groups if group["qk_clip"] is not None), None)
        if qk_clip is None:
            raise ValueError("step got qk_logits, but no QK-clip was asked for: quintic.Muon(..., qk_clip=QKClip(...))")
        found = []
        for layer, maxima in qk_logits.items():
            if layer not in self._clips:
                named = {name: (param, group["view"]) for name, param, group in self._named_groups()}
                clip = qk_clip.resolve(
                    layer,
                    {name: param.shape for name, (param, _) in named.items()},
                    maxima.numel(),
                    views={name: view for name, (_, view) in named.items()},
                )
                self._clips[layer] = clip, {name: named[name][0] for name in clip.names}
            clip, params = self._clips[layer]
            found += [(params[name], factors) for name, factors in clip.factors(maxima).items()]
        return found

    def _scale(self, param: Tensor, row_factors: RowFactors, go: Tensor | None) -> None:
        factor = row_factors.factor
        if go is not None:
            factor = torch.where(go.to(factor.device) != 0, factor, torch.ones_like(factor))
            row_factors = row_factors._replace(factor=factor)
        master = master_of(self.state[param])
        if master is None:
            row_factors.scale_(param)
        else:
            store_(param, master, full_precision(param, master) * row_factors.over(param))

    def _named_groups(self) -> Iterable[tuple[str, Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                yield name, param, group


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
