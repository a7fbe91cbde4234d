"""`Muon` and `NorMuon`: `quintic.Muon` with the constructors and the updates of dion's optimizers.

    from quintic.integrations.dion import Muon, NorMuon  # instead of: from dion import Muon, NorMuon

`docs/how-to/coming-from/dion.md` lists the differences.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from quintic.integrations.dropin import LARGEST_GUARD, DropIn, check_guard, check_momentum, split_by, translated
from quintic.optim.comms.collectives import ProcessGroup
from quintic.optim.layout.layouts import is_dtensor
from quintic.optim.layout.views import Experts, Flatten, Heads, Matrix, Split, View
from quintic.optim.muon import Muon as QuinticMuon

__all__ = ["DionMuon", "Muon", "NorMuon"]

# dion's values of `adjust_lr` -> ours.
_SCALES = {"spectral_norm": "unit_rms", "rms_norm": "match_rms_adamw", None: None}

# Coefficients (a, b, c) of dion's five Newton-Schulz steps with `use_polar_express=False`.
_NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

_NAMES = {"mu": "momentum", "epsilon": "eps", "cautious_wd": "cautious", "muon_beta2": "normalize_beta"}

# Options of a group that `translate` handles separately, or that have no counterpart here.
_OWN = frozenset({"algorithm", "adjust_lr", "beta1", "beta2", "flatten", "num_heads", "split_sizes"})

_Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class _Called:
    """A `newton_schulz_func` with the arguments that dion passes: (b, m, n) bfloat16 matrices and epsilon."""

    function: Callable[..., Tensor]
    epsilon: float

    def __call__(self, directions: Tensor) -> Tensor:
        return self.function(directions.bfloat16(), epsilon=self.epsilon)


class DionMuon(DropIn):
    """`quintic.Muon` with the arguments of dion's `Muon`.

    Groups may set `algorithm` (`"muon"`, `"adamw"`), `lr`, `mu`, `beta1`, `beta2`, `weight_decay`, `cautious_wd`,
    `epsilon`, `nesterov`, `adjust_lr`, `flatten`, `num_heads` and `split_sizes`.

    Args:
        params: parameters, or groups of them.
        distributed_mesh: one-dimensional mesh or process group whose ranks share the work on plain tensors. `DTensor`s
            carry their own layout.
        lr: learning rate of groups that do not set one.
        mu: momentum in [0, 1). dion sums gradients, Quintic averages them; the updates are the same.
        betas: coefficients of AdamW groups.
        weight_decay: decoupled weight decay of groups that do not set one.
        cautious_wd: decay only where update and weight have the same sign.
        epsilon: epsilon of AdamW groups. Muon groups do not need it here; they accept up to 1e-6.
        nesterov: use Nesterov momentum.
        adjust_lr: `"spectral_norm"` is our `adjust_lr="unit_rms"`, `"rms_norm"` is `"match_rms_adamw"`, None is None.
        flatten: treat a tensor of three or more dimensions as one matrix; else one of three as a stack of matrices.
        use_gram_newton_schulz: sets `orthogonalizer="gram"`.
        use_triton: ignored; CUDA devices always use kernels.
        use_polar_express: sets `orthogonalizer="polar_express"`; else Newton-Schulz with dion's coefficients.
        newton_schulz_func: called as `func(matrices, epsilon=epsilon)` with (b, m, n) bfloat16 matrices.

    Raises:
        ValueError, TypeError: as `quintic.Muon`, and if an argument has no counterpart.
    """

    algorithm: ClassVar[str] = "muon"

    def __init__(
        self,
        params: _Params,
        distributed_mesh: Any = None,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float | Tensor = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
    ) -> None:
        options: dict[str, Any] = {"mu": mu, "nesterov": nesterov, "adjust_lr": adjust_lr, "cautious_wd": cautious_wd}
        self._construct(
            params,
            distributed_mesh,
            options | {"lr": lr, "weight_decay": weight_decay, "epsilon": epsilon, "flatten": flatten},
            betas=betas,
            **_orthogonalizer(use_gram_newton_schulz, use_polar_express, newton_schulz_func, epsilon),
        )

    def _construct(self, params: _Params, mesh: Any, own: dict[str, Any], **options: Any) -> None:
        """Construct `quintic.Muon` from dion's options that groups may also set (`own`), and from Quintic's options."""
        self._flatten = bool(own["flatten"])
        own = self._options(own, f"{type(self).__name__}")
        # dion has one learning rate and one decay for both algorithms.
        own |= {"adamw_lr": own["lr"], "adamw_weight_decay": own["weight_decay"]}
        ranks = _ranks_of(mesh)
        own |= {"comms": "none" if ranks is None else "averaged", "process_group": ranks}
        QuinticMuon.__init__(self, params, **own, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that pickle and deepcopy keep."""
        # `translate` needs `_flatten` when a group is added to the copy.
        return {**super().__getstate__(), "_flatten": self._flatten}

    def translate(self, group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Return Quintic's groups for a group of dion's, split by view and by whether parameters are `DTensor`s."""
        algorithm = group.get("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, "adamw"):
            remedy = "or use a separate optimizer for these parameters"
            raise ValueError(f"{where}: algorithm={algorithm!r}: choose {self.algorithm!r} or 'adamw', {remedy}")
        if "betas" in group:
            raise ValueError(f"{where}: betas={group['betas']!r}: dion ignores it in a group; set beta1 and beta2")
        own = self._options(group, where) | {"algorithm": "adamw" if algorithm == "adamw" else "muon"}
        # AdamW groups need no view and no check of epsilon; only `DTensor`s get a group of their own.
        if algorithm == "adamw":
            return split_by(own, lambda name, param: _comms_of(param))
        # A function gets the group's epsilon; our own orthogonalisers need none, so it must be too small to matter.
        function, epsilon = self.defaults["orthogonalizer"], group.get("epsilon", self.defaults["eps"])
        if isinstance(function, _Called):
            own["orthogonalizer"] = _Called(function.function, epsilon)
        else:
            remedy = f"set it to {LARGEST_GUARD} or less in this group; AdamW groups may have another one"
            check_guard(epsilon, "epsilon", where, remedy)
        view, flatten = _view_of(group, where), bool(group.get("flatten", self._flatten))
        if view is not None and flatten:
            raise ValueError(f"{where}: flatten=True with num_heads or split_sizes; set flatten=False in this group")
        return split_by(
            own, lambda name, param: _comms_of(param) | self._matrices(f"{where}, {name}", param, view, flatten)
        )

    def _matrices(self, name: str, param: Tensor, view: View | None, flatten: bool) -> dict[str, Any]:
        """Return options with the view of a parameter; `view` is the view that its group sets, or None."""
        if view is not None:
            return {"view": view}
        if param.ndim > 2 and flatten:
            return {"view": Flatten()}
        if param.ndim > 3:
            raise ValueError(
                f"{name}: a parameter of shape {tuple(param.shape)}: dion treats its last two dimensions as matrices; "
                f"give flatten=True for convolutions, or store stacked matrices in three dimensions"
            )
        return {"view": Experts() if param.ndim == 3 else Matrix()}

    def _options(self, group: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return dion's options with Quintic's names and values; other options are not changed."""
        if "mu" in group:
            check_momentum(group["mu"], "mu", where)
        options = translated(group, _NAMES, _OWN)
        if "adjust_lr" in group:
            name = group["adjust_lr"]
            if name not in _SCALES:
                raise ValueError(f"{where}: adjust_lr={name!r}: choose one of {', '.join(map(repr, _SCALES))}")
            options["adjust_lr"] = _SCALES[name]
        if "beta1" in group or "beta2" in group:
            first, second = self.defaults["betas"]
            options["betas"] = (group.get("beta1", first), group.get("beta2", second))
        return options


# The name of the original, so that only the import changes.
Muon = DionMuon


class NorMuon(DionMuon):
    """`quintic.Muon` with the arguments of dion's `NorMuon`; groups have `algorithm="normuon"`.

    Rows of tall matrices (at least as many rows as columns) are normalised as dion does. Rows of a wide matrix's update
    already have equal norms, up to the error of the orthogonalisation, and are not normalised. A group with both kinds
    of matrices becomes two groups.

    Args:
        params, distributed_mesh, lr, mu: as `Muon`.
        muon_beta2: averaging coefficient of the rows' mean squares.
        betas, weight_decay, cautious_wd, epsilon, nesterov, adjust_lr, flatten: as `Muon`.
        use_gram_newton_schulz, use_triton, use_polar_express, newton_schulz_func: as `Muon`.

    Raises:
        ValueError, TypeError: as `Muon`; also if a fused weight holds both tall and wide matrices.
    """

    algorithm: ClassVar[str] = "normuon"

    def __init__(
        self,
        params: _Params,
        distributed_mesh: Any = None,
        lr: float = 0.01,
        mu: float = 0.95,
        muon_beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float | Tensor = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
    ) -> None:
        options: dict[str, Any] = {"mu": mu, "nesterov": nesterov, "adjust_lr": adjust_lr, "cautious_wd": cautious_wd}
        options |= {"lr": lr, "weight_decay": weight_decay, "epsilon": epsilon, "flatten": flatten}
        self._construct(
            params,
            distributed_mesh,
            options | {"muon_beta2": muon_beta2},
            betas=betas,
            **_orthogonalizer(use_gram_newton_schulz, use_polar_express, newton_schulz_func, epsilon),
        )

    def _matrices(self, name: str, param: Tensor, view: View | None, flatten: bool) -> dict[str, Any]:
        """Return options with the view of a parameter, and `normalize="neuron"` for tall matrices."""
        options = super()._matrices(name, param, view, flatten)
        try:
            are_tall = {m >= n for _, m, n in options["view"].shapes(param.shape)}
        except ValueError:
            return options  # the view does not fit the shape; the optimizer raises the error
        if len(are_tall) > 1:
            raise ValueError(
                f"{name}: {options['view']} makes both tall and wide matrices of shape {tuple(param.shape)}, but rows "
                f"are normalised in all or none of a parameter's matrices; leave split_sizes out, or store them "
                f"separately"
            )
        return options | {"normalize": "neuron" if are_tall == {True} else None}


def _comms_of(param: Tensor) -> dict[str, Any]:
    """Return options that turn the optimizer's `comms` off for a `DTensor`, which carries its own layout."""
    return {"comms": "none", "process_group": None} if is_dtensor(param) else {}


def _orthogonalizer(
    use_gram: bool, use_polar_express: bool, function: Callable[..., Tensor] | None, epsilon: float
) -> dict[str, Any]:
    if function is not None:
        if not callable(function):
            raise TypeError(f"newton_schulz_func={function!r} is not callable")
        return {"orthogonalizer": _Called(function, epsilon)}
    if use_gram:
        return {"orthogonalizer": "gram"}
    if use_polar_express:
        return {"orthogonalizer": "polar_express"}
    return {"orthogonalizer": "newton_schulz", "coefficients": _NEWTON_SCHULZ}


def _ranks_of(mesh: Any) -> ProcessGroup | None:
    """Return the process group of a one-dimensional mesh; a process group or None is returned unchanged."""
    if mesh is not None and hasattr(mesh, "get_group"):
        if mesh.ndim != 1:
            raise ValueError(
                f"distributed_mesh has {mesh.ndim} dimensions: give the one whose ranks share the work on plain "
                f"tensors, or None if all parameters are DTensors, which carry their own layout"
            )
        mesh = mesh.get_group()
    ranks: ProcessGroup | None = mesh
    return ranks


def _view_of(group: Mapping[str, Any], where: str) -> View | None:
    """Return the view given by a group's `num_heads` or `split_sizes`; None if it has neither."""
    heads, sizes = group.get("num_heads"), group.get("split_sizes")
    heads = None if heads == 1 else heads  # one head is the whole matrix
    if heads is not None and sizes is not None:
        raise ValueError(f"{where}: num_heads={heads!r} and split_sizes={sizes!r}: give one of them")
    if heads is not None:
        return Heads(heads)
    return None if sizes is None else Split(tuple(sizes))
