"""`Muon`: the optimizer that users construct.

Groups and state belong to PyTorch: users and libraries change both at any time, and do not tell the optimizer. So the
plan (`plan_cache.py`) and options that follow others (`linked_options.py`) are brought up to date at every use.
`undecided.py` decides about groups without `algorithm`, and `step_history.py` counts steps.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintic.kernels.dispatch import KernelsOption
from quintic.optim.checkpoint.loading import check_is_state_dict, load_state
from quintic.optim.checkpoint.saving import check_can_pickle, saved_state, with_mantissas
from quintic.optim.comms.collectives import ProcessGroup
from quintic.optim.deprecated import renamed_method
from quintic.optim.first_gradients import FirstGradients
from quintic.optim.grad_scaler import leaves_overflow_to_step, unscale_
from quintic.optim.group_keys import check_keys, check_loaded, check_supported, suggests_options, with_algorithm
from quintic.optim.groups.group import find_parameter
from quintic.optim.groups.names import strip_wrappers
from quintic.optim.groups.options import Orthogonalizer, adopt_old_names, group_defaults, with_new_names
from quintic.optim.linked_options import LinkedOptions
from quintic.optim.numeric.bf16_state import StateDtype
from quintic.optim.numeric.dynamo import disable_dynamo, disable_dynamo_with_hooks
from quintic.optim.numeric.numbers import to_python_scalar
from quintic.optim.plan.order import Orders, orders_of
from quintic.optim.plan.plan import Plan
from quintic.optim.plan_cache import PlanCache
from quintic.optim.polar.forms import Polynomials
from quintic.optim.qk_clip.clip import QKClip
from quintic.optim.rules.device import refuse_capture
from quintic.optim.rules.rates import ADAMW_LR, check_keywords, fill_adamw_rates
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.table import orthogonalizes
from quintic.optim.rules.update import AdjustLr, Cautious, DecayCoupling
from quintic.optim.state.parameters import copy_state, whole_states
from quintic.optim.step.runner import StepOutcome
from quintic.optim.step.telemetry import MatrixTelemetry, StepReport, collected
from quintic.optim.step_history import StepHistory
from quintic.optim.undecided import Undecided
from quintic.optim.validate import add_names, check_is_group, check_is_listed_once, check_params

__all__ = ["Muon", "Orthogonalizer", "muon_in"]

Loss = TypeVar("Loss")  # the result of a closure


def _kept_at_home(name: str) -> property:
    return property(
        lambda self: self._own(name),
        lambda self, value: self._home.update({name: value}),
        lambda self: self._home.pop(name),
    )


class Muon(Optimizer):
    """Train a model with Muon: its weight matrices by orthogonalised momentum, everything else by AdamW.

        optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, weight_decay=0.1)

    takes the place of AdamW in a training loop and is used like any other `torch.optim.Optimizer`. Embeddings, the
    output head, norms and biases go to AdamW. Tune `lr`, `weight_decay` and `adamw_lr`; the other defaults suit most.

    For a group with `algorithm="muon"` (the default) each step is

        m <- m + (1 - momentum)(g - m)
        u  = polar factor of (1 - momentum) g + momentum m
        w <- w - lr weight_decay w - lr adjust_lr(rows, columns) u

    and for `algorithm="adamw"` AdamW with bias correction, with `lr=adamw_lr` and `weight_decay=adamw_weight_decay`.
    `quintic.param_groups(model)` makes the groups; every option below can also be set on a group. Momentum and moments
    are float32 for low-precision weights, too, unless `state_dtype` says otherwise. Gradients are not modified,
    except by `tie` and `release_gradients`; a parameter without a gradient (None) keeps its weights and state.

    Args: Parameters and learning rates
        params: parameter groups, or an iterable of parameters or of (name, parameter) pairs; plain parameters are
            Muon matrices.
        lr: learning rate of Muon groups. Before `adjust_lr` the singular values of an update are near one for gradients
            of any size: at most about 1.15 with the defaults, 1.2 for long matrices in float16, see
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
        orthogonalizer_steps: of the polynomials, ignored by `"svd"`; None: five, or as many as coefficients have.
        coefficients: other polynomials for the named methods: one triple (a, b, c), one per step, or a name:
            `"polar_express"`, `"muon"`, `"moonlight"`, `"deepseek_v4"`, `"cubic"`, `"cans"`; see, also for few steps,
            `docs/explanation/orthogonalization.md`.
        update_rule: None for Muon, the name of another rule (`docs/reference/rules.md`), or a `quintic.UpdateRule`.
        normalize: `"neuron"` is short for `update_rule="normuon"`, `"element"` for `update_rule="adamuon"`.
        normalize_beta: averaging coefficient of the second moments of NorMuon or AdaMuon.
        adjust_lr: see `quintic.optim.rules.update.adjust_lr_factor`. Some rules have a scale of their own in its place.
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
        compute_dtype: dtype of the named methods' matrix products; None: the method's own (`quintic.orthogonalize`).
        master: how 16-bit weights keep more precision. None: not at all; `"fp32"`: updates go to a float32
            copy in the state; `"mantissa"`: to bfloat16 weight and uint16 low bits, bit for bit the trajectory of the
            copy at half its memory; `"8bit"`: to weight and uint8 bits, rounded to nearest: steps below 2^-17 of a
            weight are lost. Wider parameters have none. May change at any time, and differ from a loaded state's.
        state_dtype: form of momentum and AdamW's moments in memory. None: float32; `"bf16"`: half of that; `"int8"`: a
            byte each, with a scale for 8 neighbours (`docs/how-to/save-memory.md`). Steps compute in float32, and only
            stored values are rounded. `momentum` and `betas` may be at most 0.98, since stored averages do not resolve
            slower changes. May change at any time, and need not be a loaded state's. float64 state stays as it is.

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
        replicas: for `DTensor`s with several copies, each sharded among ranks, as under HSDP: `"divide"`: all ranks
            divide the orthogonalisation, and updates go to every copy; `"repeat"`: the ranks of each copy do all of it,
            and send no updates to other copies, which may be on nodes with slow links between them; `"auto"`: the one
            that is estimated to be faster from the plan and the ranks' hosts, see
            `docs/explanation/several-ranks.md`. The bits are the same.
        comm_order: names of parameters whose messages are sent first, in this order, where ranks divide the work;
            the same on all ranks. None for the largest bucket, then AdamW's.
        compute_order: names of parameters that are stepped first once they have arrived, in this order.

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
        release_gradients: free each gradient as soon as `step` has read it, for the same bits; `p.grad` of all groups
            that are stepped is then None, also where `on_nonfinite="skip"` or a scaler skips the step. An error that
            `step` documents comes before, and leaves all gradients (`docs/how-to/save-memory.md`).

    Raises:
        ValueError: an unknown algorithm or option, a value out of range, a parameter that is not a matrix in a Muon
            group, or a view that does not fit; the message names the parameter.
        TypeError: a parameter is no dense tensor of float64, float32, bfloat16 or float16.

    Source: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """

    _home: dict[str, Any]
    """State and groups, which wrappers share that borrow the class or copy attributes. It is not the `__dict__`, which
    would then hold itself, and keep the state in memory until Python collects its garbage."""
    _plans: PlanCache
    _links: LinkedOptions
    _undecided: Undecided
    _step_history: StepHistory

    # `GradScaler` sets these for one step, sometimes on a wrapper that borrows the class.
    grad_scale = _kept_at_home("grad_scale")
    found_inf = _kept_at_home("found_inf")

    # ------------------------------------------------------------------------------------------ options and groups

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
        orthogonalizer_steps: int | None = None,
        coefficients: Polynomials | None = None,
        compute_dtype: torch.dtype | None = None,
        update_rule: str | UpdateRule | None = None,
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
        master: Literal["fp32", "mantissa", "8bit"] | None = None,
        state_dtype: StateDtype = None,
        qk_clip: QKClip | None = None,
        offload: bool = False,
        on_nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        max_workspace_bytes: int | None = 2**31,
        kernels: KernelsOption = "auto",
        telemetry_every: int | None = None,
        comm_order: Sequence[str] | None = None,
        compute_order: Sequence[str] | None = None,
        release_gradients: bool = False,
    ) -> None:
        defaults = group_defaults(
            lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, decay_coupling=decay_coupling,
            scale_decay=scale_decay, cautious=cautious, orthogonalizer=orthogonalizer,
            orthogonalizer_steps=orthogonalizer_steps, coefficients=coefficients, compute_dtype=compute_dtype,
            update_rule=update_rule, normalize=normalize, normalize_beta=normalize_beta, adjust_lr=adjust_lr,
            lr_multipliers=lr_multipliers, adamw_lr=adamw_lr, adamw_lr_ratio=adamw_lr_ratio, betas=betas, eps=eps,
            adamw_weight_decay=adamw_weight_decay, step_every=step_every, comms=comms, process_group=process_group,
            replicas=replicas, master=master, state_dtype=state_dtype, qk_clip=qk_clip, offload=offload,
            on_nonfinite=on_nonfinite, max_workspace_bytes=max_workspace_bytes, kernels=kernels,
            telemetry_every=telemetry_every,
        )  # fmt: skip
        check_keywords(adamw_lr, adamw_lr_ratio, release_gradients=release_gradients)
        self._begin(orders_of(comm_order, compute_order), release_gradients)
        check_params(params)
        super().__init__(self._undecided.begin(params), defaults)
        self._undecided.end(stacklevel=3)
        strip_wrappers(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking it; a group without an `algorithm` gets one, and may become several.

        Raises:
            ValueError, TypeError: as the constructor.
        """
        number = len(self.param_groups)
        check_is_group(number, param_group)
        group = with_new_names(dict(param_group), f"parameter group {number}", stacklevel=2)
        check_keys(number, group, self.defaults)
        decided = self._undecided.assigned_groups(number, with_algorithm(number, group), self.defaults)
        try:
            for one in decided:
                self._add_decided(one)
        except (TypeError, ValueError):
            # Some of the groups may have been added.
            del self.param_groups[number:]
            self._undecided.forget_guesses()
            self._links.watch(self.param_groups)
            self._plans.invalidate()
            raise
        self._links.watch(self.param_groups)
        self._undecided.warn(stacklevel=2)

    def _add_decided(self, group: dict[str, Any]) -> None:
        """Add a group that has an algorithm."""
        number = len(self.param_groups)
        add_names(number, group)
        if isinstance(group.get("params"), list):
            check_is_listed_once(number, group, self.param_groups)
        if not orthogonalizes(group.get("algorithm", "muon")):
            fill_adamw_rates(number, group, self.defaults)
        super().add_param_group(group)
        added = self.param_groups[-1]
        # Options or groups may share one array, and a schedule that writes to it would change all of them.
        added.update({key: to_python_scalar(value) for key, value in added.items()})
        try:
            check_supported(number, added)
            self._plans.add(number, added)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _own(self, name: str) -> Any:
        """Return the value of a property, or raise an AttributeError that names it, as for any other attribute."""
        try:
            return self._home[name]
        except (AttributeError, KeyError):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups; where a scheduler cycles `betas`, `momentum` of Muon groups follows."""
        groups: list[dict[str, Any]] = self._own("param_groups")
        self._links.follow()
        return groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = self._home["param_groups"] = value
        self._links.watch(value)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State by parameter; missing state is made first.

        Frozen parameters have none. Waits for state on its way to host memory (`offload`), so read it anew after every
        step. Keys that are no parameters are the user's, and saved with the rest.
        """
        state: defaultdict[Tensor, Any] = self._own("state")
        self._plans.give_state()
        return state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.__dict__["state"] = self._home["state"] = value
        self._plans.invalidate()

    # ------------------------------------------------------------------------------------------------------- steps

    def plan(self) -> Plan:
        """Return the plan of a step: its buckets, with FLOPs and temporary memory; `print` it for a table."""
        plan = self._plans.planned().plan
        return replace(plan, release_gradients=True) if self._plans.frees_all_gradients() else plan

    def last_step(self) -> StepReport:
        """Return a report of the last step: matrices orthogonalised by method, AdamW parameters, steps skipped.

        Waits for the device, which has the count of skipped steps.
        """
        return self._step_history.report()

    def telemetry(self) -> dict[str, list[MatrixTelemetry]]:
        """Return the measurements of the last sampled steps: parameter name -> one entry per matrix of its view.

        Parameters that were not stepped then, such as those without a gradient, are absent. Empty until a step was
        sampled (`telemetry_every`). Waits for the device.
        """
        runner = self._plans.runner
        return collected(runner.context.measured) if runner is not None else {}

    def upload_hyperparameters(self) -> None:
        """Bring changed learning rates, momenta, decays, betas and eps to the device, where a CUDA graph reads them.

        `step` does it by itself; needed only before replaying a captured step. Does not wait for the device.
        """
        if self._plans.runner is not None:
            self._plans.planned().upload_hyperparameters()

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
            ValueError: a gradient is sparse, or `qk_logits` is no mapping to tensors or fits no attention layer; or an
                option of a group was set to a value that the constructor refuses: nothing was changed or sent, and only
                ranks with such a value raise.
            FloatingPointError: a gradient is not finite and `on_nonfinite="raise"`; nothing was changed. Mend the
                gradients and step again, or drop them with `zero_grad`.
            RuntimeError: this rank has a `Partial` gradient that was not `Partial` on any rank before the first step;
                nothing was changed or sent. Only ranks with such a gradient raise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # 1. The plan for the groups as they are now, and the groups that are due.
        plans, history = self._plans, self._step_history
        runner, first = plans.connected(), history.first_gradients
        is_scaled = "found_inf" in self._home  # given by GradScaler, see `_step_supports_amp_scaling`
        if is_scaled:
            unscale_(plans.groups, self._home["grad_scale"])
        for group in plans.groups:
            if group.step_every > 1 or plans.release_gradients:
                refuse_capture(group.params, releases_gradients=plans.release_gradients)
        steps_waited = plans.steps_waited()

        # 2. Checks, local ones first: a rank that raises must not leave others waiting in a collective. Then the state.
        if not runner.context.is_single_rank:
            runner.consensus.check_partial(steps_waited)
        plans.use_state()
        if first is not None:
            first.check(plans.groups, allow_missing=closure is not None and loss is None)
        logits = {} if qk_logits is None else qk_logits
        qk_step = plans.start_qk_step(runner, logits)

        # 3. The updates, and QK-clip on the new weights.
        try:
            outcome = runner.step(
                steps_waited, history.num_steps, skips_nonfinite=is_scaled, release_gradients=plans.release_gradients
            )
        except FloatingPointError:
            history.rejected_steps = steps_waited
            raise
        if first is not None and first.start_rank_check(runner.consensus.any_present()):
            history.first_gradients = None
        if qk_step is not None:
            with runner.reachable_state():
                qk_step.finish(outcome.apply_mask)

        # 4. The record of the step, without waiting for the device.
        self._record_step(outcome, steps_waited, qk_layers=len(logits))
        if plans.rows.tables:
            plans.rows.check(wait=False)
        return loss

    @disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, except of groups that are between two of their steps (`step_every`)."""
        if self._step_history.rejected_steps is not None:
            # Gradients that a step has rejected do not count toward `step_every`.
            self._plans.advance(self._step_history.rejected_steps)
            self._step_history.rejected_steps = None
        waiting = [(p, p.grad) for group in self.param_groups if group["pending_steps"] for p in group["params"]]
        for param, _ in waiting:
            param.grad = None
        super().zero_grad(set_to_none)
        for param, gradient in waiting:
            param.grad = gradient
        self._plans.reduction.invalidate(n for n, group in enumerate(self.param_groups) if not group["pending_steps"])

    @disable_dynamo
    @torch.no_grad()
    def announce_rows(self, param: Tensor | str, rows: Tensor, *, more: bool = False) -> None:
        """Announce the rows of a table that the next gradient touches; ranks exchange them during the backward pass.

        For groups with `comms="sharded_sparse"`; each rank may call it or not. Call it as soon as the tokens are known;
        it does not wait. All touched rows must be announced: if others have a gradient, the parameter stays as it was
        on all ranks, and on CUDA devices the next step raises the error. Without an announcement the step looks for
        touched rows itself, and waits for the device. Several tables are best announced in the order of the parameter
        groups. See `docs/explanation/several-ranks.md`.

        Args:
            param: the table, or its name.
            rows: row indices, integers of any shape on the device or the CPU, in any order; a row may occur several
                times, and need not be touched after all.
            more: whether another call for this table follows before the step, as with accumulated gradients: rows are
                collected, and sent with the last call. With `step_every` they are collected over the steps between.

        Raises:
            ValueError: there is no such parameter, or its group has another `comms`.
            TypeError: the rows are no integers.
            IndexError: the table has no such row (for rows on the CPU).
            RuntimeError: the rows of this step were sent before, or rows were missing in the step before.
        """
        plans = self._plans
        may_send = plans.planned().consensus.plans_validated
        plans.rows.announce(plans.groups, plans.steps_waited(), param, rows, more=more, may_send=may_send)

    def withdraw_rows(self) -> None:
        """Forget announced rows before skipping a step. All ranks must call it, even if they announced no rows."""
        plans = self._plans
        may_have_sent = plans.planned().consensus.plans_validated
        plans.rows.withdraw(plans.steps_waited(), may_have_sent=may_have_sent)

    def offload(self, on: bool = True) -> None:
        """Move the state of all groups to host memory now, or back, and set their option, also of groups added later.

        Steps compute the same bits with either setting. Tensors of the parameter's shape move: momentum, moments,
        masters. With `on` neither they nor buffers are on the device between steps; PyTorch keeps the memory for other
        tensors until `torch.cuda.empty_cache()`. Waits for the device. Nothing is communicated, but all ranks that
        share parameters must call it before their next step.

        Args:
            on: True for host memory, False for the device. Calling `offload(True)` again frees buffers.
        """
        for options in (self.defaults, *self.param_groups):
            options["offload"] = bool(on)
        self._plans.invalidate()
        if self._home["state"]:
            self._plans.needed_state()

    # ----------------------------------------------------------------------------- checkpoints, and copies of state

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters as PyTorch does, with views and callables as text (they are not loaded).

        All ranks must call it if the rule of a `DTensor` has vector state, and where `comms` shards state, which
        it returns whole; see `state/parameters.py` and `docs/how-to/checkpoints.md`.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._plans.rows.check(wait=True)
        state = self._plans.needed_state()
        whole = whole_states(self._plans.groups, self._plans.communicators, state)
        saved = saved_state(self.param_groups, {**state, **whole})
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, saved)
            if replaced is not None:
                saved = replaced
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load what `state_dict` returned, matching parameters by name; nothing changes unless everything fits.

        Where one side has no names, positions count. Nothing is communicated: of whole tensors each rank takes its
        piece. See `docs/how-to/checkpoints.md`.

        Args:
            state_dict: saved state and hyperparameters.
            strict: whether both sides must have the same parameters, views and algorithms. If not, parameters without
                saved state begin anew, and saved ones without a parameter are left out. For another view or algorithm a
                warning says which state is loaded (momentum), and which begins anew.

        Raises:
            ValueError: the saved state belongs to other parameters, shapes, algorithms, views or an unfit layout.
            TypeError: it is no state dict at all.
        """
        check_is_state_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        check_is_state_dict(state_dict)
        state = self._plans.needed_state()
        groups, typed = self.param_groups, self._plans.groups
        without, names = load_state(groups, state, typed, state_dict, check_loaded, strict=strict)
        self._links.watch(self._home["param_groups"])
        self._plans.end_load(without, names)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @disable_dynamo
    @torch.no_grad()
    def copy_state(self, source: Tensor | str, target: Tensor | str, *, transposed: bool = False) -> None:
        """Give a parameter the state of another: moments, counts of steps, masters; in place, to the last bit.

        For a copy of a weight that is trained separately from now on, such as an embedding that was tied to the output
        head. Ranks may shard the two in different ways (`comms`, `DTensor`s), or keep state in host memory; the source
        keeps its state. Weights are not copied: a mantissa only completes weights equal to the source's. All ranks that
        share the parameters must call it. Temporary memory: twice the whole state of the parameter, on every rank.

        Args:
            source: the parameter, or its name.
            target: another one, or its name, of the same shape.
            transposed: whether the target is stored as the transpose, (n, m) for a source of (m, n).

        Raises:
            ValueError: the shapes, algorithms, dtypes of state or ranks of the two do not fit; nothing was changed.
        """
        states = self._plans.needed_state()
        self._plans.connected()
        groups, communicators = self._plans.groups, self._plans.communicators
        copy_state(groups, communicators, states, source, target, transposed=transposed)
        self._plans.use_state()

    carry_state = renamed_method("carry_state", copy_state)

    @disable_dynamo
    @torch.no_grad()
    def tie(self, head: Tensor | str, embedding: Tensor | str, *, transposed: bool = False) -> None:
        """Let one parameter be the copy of another, from now on and until `untie`.

        The embedding takes the head's weights at once. From then on each step in which the head is due moves the
        embedding's gradient to the head's (`p.grad` of both changes), steps the head alone, and writes its new weights
        to the embedding as soon as they are there. The embedding is not averaged, counted or stepped, and keeps its
        state. The tie is an option of its group, `tied_to`, and saved with it. All ranks that share the parameters must
        call it.

        Args:
            head: the parameter that is stepped, or its name.
            embedding: its copy, alone in its group, with the head's `comms`, `process_group` and `step_every`; or its
                name.
            transposed: whether the copy is stored as the transpose, (n, m) for a head of (m, n).

        Raises:
            ValueError: they cannot be tied, as `DTensor`s cannot; the message says why, and nothing was changed.
        """
        (head_group, index), (group, _) = (
            find_parameter(self._plans.current_groups(), param, "tie was given") for param in (head, embedding)
        )
        dictionary, before = self.param_groups[group.number], group.tied_to
        dictionary["tied_to"] = (head_group.param_names[index], transposed)
        try:
            ties = self._plans.planned().ties
        except ValueError:
            dictionary["tied_to"] = before
            raise
        for tie in ties:
            if tie.copy is group.params[0]:
                tie.write()

    def untie(self, embedding: Tensor | str) -> None:
        """Let a tied parameter go its own way, with the state of the one that it was a copy of (`copy_state`).

        All ranks that share the parameters must call it.

        Args:
            embedding: the copy, or its name.

        Raises:
            ValueError: it is not tied, or cannot have the state; nothing was changed.
        """
        group, index = find_parameter(self._plans.current_groups(), embedding, "untie was given")
        if group.tied_to is None:
            raise ValueError(f"{group.param_names[index]} is not tied to another parameter")
        head, transposed = group.tied_to
        self.copy_state(head, embedding, transposed=transposed)
        self.param_groups[group.number]["tied_to"] = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether `GradScaler` calls `step` also after an overflow, and sets `grad_scale` and `found_inf`."""
        return leaves_overflow_to_step(self._home["param_groups"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with the same process groups, which cannot be copied."""
        for group in (self.defaults, *self.param_groups):
            memo[id(group["process_group"])] = group["process_group"]
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(deepcopy(self.__getstate__(), memo))
        copied._step_history = self._step_history.copy()
        copied._step_history.first_gradients = FirstGradients()  # its parameters are others
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle an optimizer with a process group, which other processes cannot use: a TypeError."""
        check_can_pickle(type(self).__name__, (self.defaults, *self.param_groups))
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that pickle and deepcopy keep."""
        state = self._home["state"]
        return {
            "defaults": self.defaults,
            "state": with_mantissas(self._plans.needed_state(), torch.int16) if state else state,
            "param_groups": self.param_groups,
            "_orders": self._plans.orders,
            "_release_gradients": self._plans.release_gradients,
            "_decided_by": self._undecided.decided_by,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from pickle or deepcopy; the plan is rebuilt on demand."""
        for options in (state["defaults"], *state["param_groups"]):
            adopt_old_names(options)  # of a file that an older version wrote
        super().__setstate__({**state, "state": with_mantissas(state["state"], torch.uint16)})
        self.defaults.pop("differentiable", None)  # PyTorch's addition, which groups would get that are added later
        self._begin(self.__dict__.pop("_orders"), self.__dict__.pop("_release_gradients", False))
        self._undecided.decided_by = self.__dict__.pop("_decided_by", "nobody")
        self._links.watch(self._home["param_groups"])

    def _record_step(
        self, outcome: StepOutcome, steps_waited: Sequence[int], *, qk_layers: int = 0, is_replayed: bool = False
    ) -> None:
        """Update counts of pending steps, and keep the outcome for `last_step`; `CapturedStep` calls it, too."""
        waiting = sum(len(g["params"]) for g, n in zip(self._home["param_groups"], steps_waited, strict=True) if n)
        self._plans.end_step(steps_waited)
        self._step_history.rejected_steps = None
        self._step_history.record(outcome, waiting=waiting, qk_layers=qk_layers, is_replayed=is_replayed)

    def _begin(self, orders: Orders, release_gradients: bool) -> None:
        """Begin without steps, and without anything that follows from the groups."""
        self._home = {key: value for key, value in vars(self).items() if key in ("param_groups", "state")}
        self._links, self._undecided = LinkedOptions(), Undecided()
        self._plans = PlanCache(self._home, self._links, orders, release_gradients=release_gradients)
        self._step_history = StepHistory()


def muon_in(optimizer: Any, caller: str) -> Muon:
    """Return the optimizer inside a training library's wrappers; a TypeError names the caller if it is no `Muon`.

    Accelerate (also in transformers' `Trainer`) and Lightning wrap it, as an attribute `optimizer`.
    """
    # Lightning's wrapper is an instance of the wrapped class, too, but lacks its attributes.
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Muon):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: {caller} needs a quintic.Muon")
    return optimizer
