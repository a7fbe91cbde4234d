"""`Muon`: the optimizer a user constructs; its options, and its step. Groups and state are in `optimizer_base.py`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption
from quintic.optim.comms.collectives import ProcessGroup
from quintic.optim.grad_scaler import unscale_
from quintic.optim.group_keys import suggests_options
from quintic.optim.groups.options import Orthogonalizer
from quintic.optim.layout.views import Matrix
from quintic.optim.layout.wrappers import OPENED
from quintic.optim.optimizer_base import OptimizerBase
from quintic.optim.plan.order import orders_of
from quintic.optim.plan.plan import Plan
from quintic.optim.polar.coefficients import DEFAULT_STEPS
from quintic.optim.polar.forms import Polynomials
from quintic.optim.qk_clip.clip import QKClip
from quintic.optim.rules.device import is_capturing
from quintic.optim.rules.dynamo import disable_dynamo, disable_dynamo_with_hooks
from quintic.optim.rules.rates import ADAMW_LR
from quintic.optim.rules.update import AdjustLr, Cautious, DecayCoupling
from quintic.optim.step.runner import StepOutcome
from quintic.optim.step.telemetry import MatrixTelemetry, StepReport, collected

__all__ = ["Muon", "Orthogonalizer", "muon_in"]

# What a closure returns: a number, a tensor, or None.
Loss = TypeVar("Loss")

# Names in the constructor that are no options of a group.
_NOT_OF_GROUPS = frozenset({"self", "params", "comm_order", "compute_order", "__class__"})


class Muon(OptimizerBase):
    """Train a model with Muon: its weight matrices by orthogonalised momentum, everything else by AdamW.

        optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, weight_decay=0.1)

    takes the place of AdamW in a training loop and is used like any other `torch.optim.Optimizer`. Embeddings, the
    output head, norms and biases go to AdamW by themselves. Tune `lr`, `weight_decay` and `adamw_lr`; the defaults of
    all other options suit most models.

    For a group with `algorithm="muon"` (the default) each step is

        m <- m + (1 - momentum)(g - m)
        u  = polar factor of (1 - momentum) g + momentum m
        w <- w - lr weight_decay w - lr adjust_lr(rows, columns) u

    and for `algorithm="adamw"` AdamW with bias correction, with `lr=adamw_lr` and `weight_decay=adamw_weight_decay`.
    `quintic.param_groups(model)` makes the groups; every option below can also be set on a group. Momentum and moments
    are float32 for low-precision weights, too, unless `state_dtype` says otherwise. Gradients are not modified,
    but for those of tied parameters (`tie`); a parameter whose gradient is None keeps its weights and state.

    Args: What is trained, and how fast
        params: parameter groups, or an iterable of parameters or of (name, parameter) pairs; plain parameters are
            Muon matrices.
        lr: learning rate of Muon groups. Whatever the size of the gradient, the singular values of an update end near
            one before `adjust_lr`, at most about 1.15 with the defaults, 1.2 for long matrices in float16, see
            `docs/explanation/orthogonalization.md`.
        weight_decay: of Muon groups, decoupled: w <- w - lr weight_decay w per step.
        adamw_lr: learning rate of AdamW groups that set none themselves.
        adamw_lr_ratio: let AdamW groups have Muon's `lr` and step with `lr * adamw_lr_ratio`, so that one number drives
            both: for schedulers with absolute rates, such as `OneCycleLR(max_lr=...)` or `eta_min`. In place of
            `adamw_lr`; None for learning rates of their own.
        adamw_weight_decay: of AdamW groups that set none themselves: embeddings, heads, norms and biases decay only if
            asked to.
        betas: AdamW's averaging coefficients.
        eps: AdamW's denominator guard.

    Args: The update
        momentum: averaging coefficient in [0, 1).
        nesterov: look one gradient ahead.
        orthogonalizer: `"auto"` (Polar Express in the cheapest form for the shape), `"polar_express"`, `"gram"`,
            `"newton_schulz"`, `"svd"`, or a function (b, m, n) -> (b, m, n).
        orthogonalizer_steps: polynomial steps of the named methods. With fewer than five of Polar Express small
            singular values stay small, see `docs/explanation/orthogonalization.md`.
        coefficients: other polynomials for the named methods: one triple (a, b, c), or one per step.
        normalize: None, `"neuron"` for NorMuon (arXiv 2510.05491), or `"element"` for AdaMuon (arXiv 2507.11005).
        normalize_beta: averaging coefficient of the second moments of NorMuon or AdaMuon.
        adjust_lr: see `quintic.optim.rules.update.adjust_lr_factor`. AdaMuon has a scale of its own in its place.
        lr_multipliers: for each matrix of a parameter, in the order of its view, a factor on its learning rate; for
            groups whose parameters are banks of equally many matrices.
        cautious: decay only entries where update and weight agree in sign (arXiv 2510.12402), or one is zero;
            `"strict"`: not where one is zero, so that rows of a table that were never touched keep their weights.
        decay_coupling: `"lr"`, or `"lr_squared"` for w <- w - lr^2 weight_decay w, which falls faster than a falling
            learning rate.
        scale_decay: multiply the decay of a matrix, as its update, by `adjust_lr` and its multiplier, too.
        qk_clip: `quintic.QKClip(...)` (MuonClip): give `step` the largest attention logits.
        step_every: step only every k-th time. In between, `zero_grad` leaves the group's gradients alone, so that they
            add up (AdamW does not see their scale).

    Args: Precision
        compute_dtype: dtype of the orthogonaliser's matrix products; None for the method's own, see
            `quintic.orthogonalize`.
        master: how extra precision is stored for bfloat16 and float16 weights. None: updates are applied in the
            weight's own dtype; `"fp32"`: to a float32 copy in the state; `"mantissa"`: to bfloat16 weight and uint16
            low bits, bit for bit the trajectory of the copy at half its memory. Parameters of float32 and wider need
            none and have none. May be changed at any time: either form becomes the other.
        state_dtype: dtype of momentum and AdamW's moments in memory. None: float32; `"bf16"`: bfloat16, half of it.
            Every step computes in float32 either way; what it stores is rounded to the nearest bfloat16, and its update
            is made of the values before that rounding. Needs `momentum` of Muon groups, and both `betas` of AdamW
            groups, of at most 0.98: averages nearer to one change by less than bfloat16 resolves. May be changed at any
            time, and need not be that of a loaded state: values are converted. float64 parameters keep float64 state.

    Args: Several ranks
        comms: for plain tensors on several ranks (a `DTensor` carries its own layout). `"none"`: gradients are final
            and this rank does all of the work; `"averaged"`: gradients are the same on all ranks, as under DDP, and the
            ranks divide the orthogonalisation; `"replicated"`: gradients differ, they are averaged in place and every
            rank does all of the work; `"sharded"`: gradients differ, they are averaged on their way to the rank that
            owns a part of a parameter and its state, and the weights come back; `"sharded_sparse"`: the same bits, but
            of embedding tables (AdamW groups only) just the touched rows travel, see `announce_rows`. Averages are sums
            in the order of the ranks, rounded once. Without an initialised process group there is one rank.
        process_group: the ranks that `comms` applies to; None for all. With `comms="none"`: ranks that decide together
            (`on_nonfinite`, clipping) though they share no parameters, such as stages of a pipeline with tied weights;
            None for none.
        replicas: for `DTensor`s of which there are several copies, each cut among ranks, as under HSDP: `"divide"`: all
            ranks divide the orthogonalisation, and updates go to every copy; `"repeat"`: the ranks of each copy do all
            of it, and nothing of it is sent between copies, which may be nodes with slow links between them; `"auto"`:
            whichever is estimated to be faster from the plan and the ranks' hosts, see
            `docs/explanation/several-ranks.md`. The bits are the same.
        comm_order: names of parameters whose messages are sent first, in this order, where ranks divide the work;
            the same on all ranks. None for the largest bucket, then AdamW's.
        compute_order: names of parameters that are stepped first once they have arrived, likewise.

    Args: Safety
        on_nonfinite: `"propagate"`; `"skip"`: a non-finite gradient in any group with this option leaves all their
            weights and state bitwise untouched, without host synchronisation on CUDA devices; `"raise"`: the same with
            an error that names the parameter, on every rank (waits for the device).
        telemetry_every: measure every matrix each k-th step, see `telemetry`; None for never.

    Args: Memory and speed
        offload: keep state of the parameter's shape in host memory and bring it to the device while it is used, bucket
            by bucket; the same bits, for less memory and more time (`docs/how-to/offload.md`). May be changed at any
            time: on a group it holds from the next step on, with `offload(...)` for all groups at once.
        max_workspace_bytes: upper bound of the temporary memory of one batched computation (a single matrix may
            exceed it), at least 1; None for no bound.
        kernels: implementation of the element-wise passes: `"auto"` (Triton on CUDA devices), `"triton"` or `"torch"`.

    Raises:
        ValueError: an unknown algorithm or option, a value out of range, a parameter that is not a matrix in a Muon
            group, or a view that does not fit; the message names the parameter.
        TypeError: a parameter is no dense tensor of float64, float32, bfloat16 or float16.

    Source: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """

    @suggests_options
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        decay_coupling: DecayCoupling = "lr",
        scale_decay: bool = False,
        cautious: Cautious = False,
        orthogonalizer: Orthogonalizer = "auto",
        orthogonalizer_steps: int = DEFAULT_STEPS,
        coefficients: Polynomials | None = None,
        compute_dtype: torch.dtype | None = None,
        normalize: Literal["neuron", "element"] | None = None,
        normalize_beta: float = 0.95,
        adjust_lr: AdjustLr = "spectral",
        lr_multipliers: Sequence[float] | None = None,
        adamw_lr: float = ADAMW_LR,
        adamw_lr_ratio: float | None = None,
        adamw_weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        step_every: int = 1,
        comms: Literal["none", "averaged", "replicated", "sharded", "sharded_sparse"] = "none",
        process_group: ProcessGroup | None = None,
        replicas: Literal["auto", "divide", "repeat"] = "auto",
        master: Literal["fp32", "mantissa"] | None = None,
        state_dtype: Literal["bf16"] | None = None,
        qk_clip: QKClip | None = None,
        offload: bool = False,
        on_nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        max_workspace_bytes: int | None = 2**31,
        kernels: KernelsOption = "auto",
        telemetry_every: int | None = None,
        comm_order: Sequence[str] | None = None,
        compute_order: Sequence[str] | None = None,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in _NOT_OF_GROUPS}
        if adamw_lr_ratio is not None and adamw_lr != ADAMW_LR:
            raise ValueError(f"adamw_lr={adamw_lr!r} and adamw_lr_ratio={adamw_lr_ratio!r}: give one of them")
        defaults |= {"algorithm": "muon", "view": Matrix(), "pending_steps": 0, "tied_to": None}
        super().__init__(params, defaults, orders_of(comm_order, compute_order))

    def offload(self, on: bool = True) -> None:
        """Move the state of all groups to host memory now, or back, and set their option, also of groups added later.

        Steps do the same with either setting. What has the parameter's shape moves: momentum, moments, masters. With
        `on` nothing of it is left on the device between steps, nor any buffer; PyTorch keeps the memory for other
        tensors until `torch.cuda.empty_cache()`. Waits for the device. Nothing is communicated, but all ranks that
        share parameters must call it before their next step.

        Args:
            on: True for host memory, False for the device. May be repeated: `offload(True)` gives buffers back.
        """
        for options in (self.defaults, *self.param_groups):
            options["offload"] = bool(on)
        self._plan_cache.invalidate()
        if self._home["state"]:
            self._needed_state()

    def plan(self) -> Plan:
        """Return the plan of a step: its buckets, with FLOPs and temporary memory; `print` it for a table."""
        return self.runner.plan

    @overload
    def step(self, closure: None = None, *, qk_logits: Mapping[str | int, Tensor] | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss], *, qk_logits: Mapping[str | int, Tensor] | None = None) -> Loss: ...

    @disable_dynamo_with_hooks
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Loss] | None = None, *, qk_logits: Mapping[str | int, Tensor] | None = None
    ) -> Loss | None:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model with gradients enabled and returns the loss, or None.
            qk_logits: for QK-clip: attention layer -> (heads,) largest logit of each head since the last step, of all
                the tokens that this rank saw; a `DTensor` where it has some of the heads. See `docs/how-to/qk-clip.md`.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: a gradient is sparse, or `qk_logits` is no mapping to tensors or fits no attention layer; an
                option of a group was set to what the constructor refuses: nothing was changed or sent, and only ranks
                that have such a value raise.
            FloatingPointError: a gradient is not finite and `on_nonfinite="raise"`; nothing was changed. Mend the
                gradients and step again, or drop them with `zero_grad`.
            RuntimeError: this rank has a gradient as a sum still to be made (`Partial`) that no rank had as one before
                the first step; nothing was changed or sent. Only ranks that have such a gradient raise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runner = self._plan_cache.connected(self.param_groups, self._home["state"])
        first, is_scaled = self._step_history.first_gradients, "found_inf" in self._home  # set by GradScaler
        if is_scaled:
            unscale_(self._plan_cache.groups, self._home["grad_scale"])
        for group in self._plan_cache.groups:
            if group.step_every > 1 and any(is_capturing(param.device) for param in group.params):
                raise RuntimeError(
                    "step_every counts on the host, which a CUDA graph does not: use quintic.CapturedStep"
                )
        steps_until_due = self._steps_until_due()
        if not runner.context.is_single_rank:
            runner.consensus.check_partial(steps_until_due)
        self._plan_cache.use_state(self._home["state"])
        if first is not None:
            first.check(self._plan_cache.groups, allow_missing=closure is not None and loss is None)
        logits = {} if qk_logits is None else qk_logits
        qk_step = self._plan_cache.start_qk_step(runner, self._home["state"], logits)
        try:
            outcome = runner.step(steps_until_due, self._step_history.num_steps, skips_nonfinite=is_scaled)
        except FloatingPointError:
            self._step_history.rejected_steps = steps_until_due
            raise
        if first is not None and first.start_rank_check(runner.consensus.any_present()):
            self._step_history.first_gradients = None
        if qk_step is not None:
            with runner.reachable_state():
                qk_step.finish(outcome.apply_mask)
        self.record_step(outcome, steps_until_due, qk_layers=len(logits))
        if self._plan_cache.rows.tables:
            self._plan_cache.rows.check(wait=False)
        return loss

    def step_part(self, steps_until_due: Sequence[int]) -> StepOutcome:
        """Step the groups that wait for 0 more steps, and note nothing of it on the host. For `CapturedStep`."""
        runner = self.connected()
        if not runner.context.is_single_rank:
            runner.consensus.check_partial(steps_until_due)
        self._plan_cache.use_state(self._home["state"])
        outcome = runner.step(steps_until_due, self._step_history.num_steps)
        list(runner.consensus.any_present())  # a CUDA graph must wait for all counts that it has started, needed or not
        return outcome

    @disable_dynamo
    @torch.no_grad()
    def announce_rows(self, param: Tensor | str, rows: Tensor, *, more: bool = False) -> None:
        """Say which rows of a table the next step's gradient touches, so that ranks exchange them meanwhile.

        For groups with `comms="sharded_sparse"`; ranks may do so or not, as they please. Call it as soon as the tokens
        are known; it does not wait, and the exchange goes on beside the backward pass. All rows must be announced: if
        others have a gradient, the parameter stays as it was on all ranks, and on CUDA devices the next step raises the
        error. Without any announcement the step looks for touched rows itself, and waits for the device. Several
        tables are best announced in the order of the parameter groups. See `docs/explanation/several-ranks.md`.

        Args:
            param: the table, or its name.
            rows: numbers of rows, integers of any shape on the device or the CPU, in any order, several times or
                without being touched after all.
            more: whether another call for this table follows before the step, as with accumulated gradients: rows add
                up, and are sent with the last call. With `step_every` also those of the steps between add up.

        Raises:
            ValueError: there is no such parameter, or its group has another `comms`.
            TypeError: the rows are no integers.
            IndexError: the table has no such row (for rows on the CPU).
            RuntimeError: the rows of this step were sent before, or rows were missing in the step before.
        """
        plans_validated = self.runner.consensus.plans_validated
        self._plan_cache.rows.announce(
            self._plan_cache.groups, self._steps_until_due(), param, rows, more=more, may_send=plans_validated
        )

    def withdraw_rows(self) -> None:
        """Forget announced rows, where a step is left out. All ranks must call it, also those that announced none."""
        plans_validated = self.runner.consensus.plans_validated
        self._plan_cache.rows.withdraw(self._steps_until_due(), may_have_sent=plans_validated)

    @disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, except of groups that are between two of their steps (`step_every`)."""
        if self._step_history.rejected_steps is not None:
            self._advance(self._step_history.rejected_steps)  # what could not be stepped with does not wait
        waiting = [(p, p.grad) for group in self.param_groups if group["pending_steps"] for p in group["params"]]
        for param, _ in waiting:
            param.grad = None
        super().zero_grad(set_to_none)
        for param, gradient in waiting:
            param.grad = gradient
        due = (n for n, group in enumerate(self.param_groups) if not group["pending_steps"])
        self._plan_cache.precomputed.invalidate(due)

    def last_step(self) -> StepReport:
        """Return a report of the last step: matrices orthogonalised by method, AdamW parameters, steps skipped.

        Reads the count of skipped steps from the device, and so waits for it.
        """
        return self._step_history.report()

    def telemetry(self) -> dict[str, list[MatrixTelemetry]]:
        """Return the measurements of the last sampled steps: parameter name -> one entry per matrix of its view.

        Parameters that were not stepped then, such as those without a gradient, are absent. Empty until a step was
        sampled (`telemetry_every`). Waits for the device.
        """
        runner = self._plan_cache.runner
        return collected(runner.context.measured) if runner is not None else {}

    def upload_hyperparameters(self) -> None:
        """Bring changed learning rates, momenta, decays, betas and eps to the device, where a CUDA graph reads them.

        `step` does it by itself; needed only before replaying a captured step. Does not wait for the device.
        """
        self._cycled.follow()
        if self._plan_cache.runner is not None:
            self.runner.upload_hyperparameters()

    def record_step(
        self, outcome: StepOutcome, steps_until_due: Sequence[int], *, qk_layers: int = 0, is_replayed: bool = False
    ) -> None:
        """Note for each group how many steps it waits for, and for `last_step` the outcome of this one.

        QK-clip had logits of some attention layers. Where a CUDA graph is replayed, it has counted skipped steps.
        """
        if OPENED:
            self._plan_cache.close_wrappers(steps_until_due)
        self._advance(steps_until_due)
        waiting = sum(len(g["params"]) for g, n in zip(self._home["param_groups"], steps_until_due, strict=True) if n)
        self._step_history.count(outcome, waiting=waiting, qk_layers=qk_layers, is_replayed=is_replayed)

    def _advance(self, steps_until_due: Sequence[int]) -> None:
        """Let the next step come, for each group, after the steps that it still waits for."""
        runner = self._plan_cache.runner
        if runner is not None and (runner.ties or self._plan_cache.precomputed.groups):
            runner.end_step(steps_until_due)
        for dictionary, pending in zip(self._home["param_groups"], steps_until_due, strict=True):
            dictionary["pending_steps"] = pending % dictionary["step_every"]
        self._step_history.rejected_steps = None


def muon_in(optimizer: Any, caller: str) -> Muon:
    """Return the optimizer inside a training library's wrappers; a TypeError names the caller if it is no `Muon`.

    Accelerate (also in transformers' `Trainer`) and Lightning wrap it, as an attribute `optimizer`.
    """
    # Lightning's wrapper is an instance of the wrapped class, too, without what that needs.
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Muon):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: {caller} needs a quintic.Muon")
    return optimizer
