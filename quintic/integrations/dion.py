"""`Muon` and `NorMuon`: `quintic.Muon` with the constructors of dion's optimizers, and their updates.

    from quintic.integrations.dion import Muon, NorMuon  # in place of: from dion import Muon, NorMuon

`docs/how-to/coming-from/dion.md` says what differs.
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

# dion's words for `adjust_lr` -> ours.
_SCALES = {"spectral_norm": "unit_rms", "rms_norm": "match_rms_adamw", None: None}

# The triples of the five steps that dion takes with `use_polar_express=False`.
_NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

_NAMES = {"mu": "momentum", "epsilon": "eps", "cautious_wd": "cautious", "muon_beta2": "normalize_beta"}

# Options of a group that are translated one by one, or are none of Quintic's.
_OWN = frozenset({"algorithm", "adjust_lr", "beta1", "beta2", "flatten", "num_heads", "split_sizes"})

_Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class _Called:
    """A `newton_schulz_func`, called with what dion gives it: bfloat16 matrices and epsilon."""

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
        distributed_mesh: one-dimensional mesh or process group whose ranks divide the work on plain tensors. `DTensor`s
            say themselves where they are.
        lr: learning rate of all groups that set none.
        mu: momentum, in [0, 1). dion sums gradients and Quintic averages them: the updates are the same.
        betas: of AdamW groups.
        weight_decay: decoupled, of all groups that set none.
        cautious_wd: decay only where update and weight agree in sign.
        epsilon: of AdamW groups; in Muon groups a guard of the norm, up to 1e-6, which is not needed here.
        nesterov: look one gradient ahead.
        adjust_lr: `"spectral_norm"` is our `adjust_lr="unit_rms"`, `"rms_norm"` is `"match_rms_adamw"`, None is None.
        flatten: take tensors of three and more dimensions as one matrix each; else those of three as stacks.
        use_gram_newton_schulz: `orthogonalizer="gram"`.
        use_triton: makes no difference here: on CUDA devices kernels are used in any case.
        use_polar_express: `orthogonalizer="polar_express"`; else Newton-Schulz with dion's five triples.
        newton_schulz_func: called as `func(matrices, epsilon=epsilon)` with bfloat16 matrices (b, m, n).

    Raises:
        ValueError, TypeError: as `quintic.Muon`, and where an argument has no counterpart.
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
        """Construct `quintic.Muon` from options of dion's that groups may set, too, and from Quintic's own."""
        self._flatten = bool(own["flatten"])
        own = self._options(own, f"{type(self).__name__}")
        own |= {"adamw_lr": own["lr"], "adamw_weight_decay": own["weight_decay"]}
        ranks = _ranks_of(mesh)
        own |= {"comms": "none" if ranks is None else "averaged", "process_group": ranks}
        QuinticMuon.__init__(self, params, **own, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that pickle and deepcopy keep."""
        return {**super().__getstate__(), "_flatten": self._flatten}

    def translate(self, group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the group by what its parameters need: their views, and whether they are `DTensor`s."""
        algorithm = group.get("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, "adamw"):
            remedy = "or give these parameters an optimizer of their own"
            raise ValueError(f"{where}: algorithm={algorithm!r}: choose {self.algorithm!r} or 'adamw', {remedy}")
        if "betas" in group:
            raise ValueError(f"{where}: betas={group['betas']!r}: dion reads none in a group; set beta1 and beta2")
        own = self._options(group, where) | {"algorithm": "adamw" if algorithm == "adamw" else "muon"}
        if algorithm == "adamw":
            return split_by(own, lambda name, param: _comms_of(param))
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
        """Return the view of a parameter; `view` is what its group says."""
        if view is not None:
            return {"view": view}
        if param.ndim > 2 and flatten:
            return {"view": Flatten()}
        if param.ndim > 3:
            raise ValueError(
                f"{name}: a parameter of shape {tuple(param.shape)}: dion takes its last two dimensions as matrices; "
                f"give flatten=True for convolutions, or store stacked matrices in three dimensions"
            )
        return {"view": Experts() if param.ndim == 3 else Matrix()}

    def _options(self, group: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return dion's options under Quintic's names and values, and all other options as they are."""
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

    Rows of matrices with at least as many rows as columns are evened out as there. Those of a wide matrix's update have
    equal norms already, but for the orthogonalisation's error, and are left as they are. A group with both kinds of
    matrices becomes two groups.

    Args:
        params, distributed_mesh, lr, mu: as `Muon`.
        muon_beta2: averaging coefficient of the rows' mean squares.
        betas, weight_decay, cautious_wd, epsilon, nesterov, adjust_lr, flatten: as `Muon`.
        use_gram_newton_schulz, use_triton, use_polar_express, newton_schulz_func: as `Muon`.

    Raises:
        ValueError, TypeError: as `Muon`; a fused weight has both tall and wide parts.
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
        """Return the view of a parameter, and whether neurons are normalised: not those of wide matrices."""
        options = super()._matrices(name, param, view, flatten)
        try:
            are_tall = {m >= n for _, m, n in options["view"].shapes(param.shape)}
        except ValueError:
            return options  # the view does not fit, which the optimizer says itself
        if len(are_tall) > 1:
            raise ValueError(
                f"{name}: {options['view']} makes both tall and wide matrices of shape {tuple(param.shape)}, and rows "
                f"are evened out in all or none of a parameter; leave split_sizes out, or store its parts separately"
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
    """Return the process group of a one-dimensional mesh, or the argument if it is one itself, or None."""
    if mesh is not None and hasattr(mesh, "get_group"):
        if mesh.ndim != 1:
            raise ValueError(
                f"distributed_mesh has {mesh.ndim} dimensions: give one of them, whose ranks divide the work on plain "
                f"tensors, or None where all parameters are DTensors, which say where they are"
            )
        mesh = mesh.get_group()
    ranks: ProcessGroup | None = mesh
    return ranks


def _view_of(group: Mapping[str, Any], where: str) -> View | None:
    """Return the view that `num_heads` or `split_sizes` of a group stand for; None where it has neither."""
    heads, sizes = group.get("num_heads"), group.get("split_sizes")
    heads = None if heads == 1 else heads
    if heads is not None and sizes is not None:
        raise ValueError(f"{where}: num_heads={heads!r} and split_sizes={sizes!r}: give one of them")
    if heads is not None:
        return Heads(heads)
    return None if sizes is None else Split(tuple(sizes))
