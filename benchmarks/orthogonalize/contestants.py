"""Implementations of orthogonalisation, and the polynomials that each of them means to compute.

A library that is not installed, or refuses a shape, raises when its function is made or called: the row tells that.
"""

import ast
import importlib.util
import inspect
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.orthogonalize.shapes import NOMINAL_TFLOPS, STEPS, Polynomials, Shape, floor_ms

Function = Callable[[Any], Any]


def polar_express() -> Polynomials:
    """Return Polar Express with the speedrun's safety, which Quintic, dion and nanochat share."""
    from quintic.optim.polar.coefficients import SAFETY, polar_express_coefficients

    return Polynomials(polar_express_coefficients(STEPS), SAFETY)


def muon_post() -> Polynomials:
    """Return the Muon post's triple."""
    from quintic.optim.polar.coefficients import newton_schulz_coefficients

    return Polynomials(newton_schulz_coefficients(STEPS))


def _dion_newton_schulz() -> Polynomials:
    # You Jiacheng's five, https://x.com/YouJiacheng/status/1905861218138804534; dion has no name for them to import.
    triples = (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )
    return Polynomials(triples)


def _gram_newton_schulz() -> Polynomials:
    from gram_newton_schulz import POLAR_EXPRESS_COEFFICIENTS

    return Polynomials(tuple(tuple(triple) for triple in POLAR_EXPRESS_COEFFICIENTS))


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to orthogonalise a batch of bf16 matrices.

    Attributes:
        name: how it is called on the command line and in the tables.
        family: contestants that share a process, and the caches of the compilers.
        make: takes the shape and an input of that shape, returns what is timed; an ImportError says what is missing.
        polynomials: what it means to compute.
        default: whether it runs without being named and without `--all`.
        takes: the shapes it runs for by default.
        preload: modules worth importing while the family before it is measured.
        first_limit: seconds that it may take for its first shape, where it compiles or tunes what all shapes need.
    """

    name: str
    family: str
    make: Callable[[Shape, Any], Function]
    polynomials: Callable[[], Polynomials] = polar_express
    default: bool = True
    takes: Callable[[Shape], bool] = lambda shape: True
    preload: tuple[str, ...] = ("torch",)
    first_limit: float = 0.0

    @property
    def is_peer(self) -> bool:
        """Return whether Quintic is compared with it."""
        return self.family != "quintic"


def _quintic(method: str, dtype: str | None = None, kernels: str = "auto") -> Callable[[Shape, Any], Function]:
    """Return the public function; with kernels="torch" what stands behind it, unless it takes that option itself."""

    def make(shape: Shape, x: Any) -> Function:
        import torch

        import quintic

        compute_dtype = getattr(torch, dtype) if dtype else None
        options: dict[str, Any] = {"method": method, "compute_dtype": compute_dtype}
        if kernels == "auto":
            return partial(quintic.orthogonalize, **options)
        if "kernels" in inspect.signature(quintic.orthogonalize).parameters:
            return partial(quintic.orthogonalize, **options, kernels=kernels)
        from quintic.optim.polar.forms import resolve
        from quintic.optim.polar.orthogonalize import apply_form

        form = resolve(method, shape.m, shape.n, compute_dtype=compute_dtype, device_type=x.device.type, dtype=x.dtype)
        return lambda y: apply_form(y, form, kernels).to(y.dtype)

    return make


def _eager(shape: Shape, x: Any) -> Function:
    return polar_express().apply


def _compiled(shape: Shape, x: Any) -> Function:
    import torch

    return torch.compile(polar_express().apply, dynamic=False, fullgraph=True)


def _dion_triton(shape: Shape, x: Any) -> Function:
    from dion import newton_schulz_triton as module

    _prepare_dion(module, x)
    function: Function = module.newton_schulz_triton
    return function


def _dion_polar_express(shape: Shape, x: Any) -> Function:
    from dion.polar_express import polar_express_triton

    return polar_express_triton


# Milliseconds for warming up and for timing one configuration: Triton's own 25 and 100 choose no better for kernels of
# a millisecond, and 30 configurations of two kernels for eleven shapes would take two minutes.
_TUNING_MS = {"warmup": 5, "rep": 20}


def _prepare_dion(module: Any, x: Any) -> None:
    """Compile the configurations that dion's kernels are tuned over, on all cores, instead of one after another."""
    if x.device.type != "cuda":
        return
    import torch
    from triton.testing import do_bench

    gram = torch.empty(*x.shape[:-1], x.shape[-2], device=x.device, dtype=x.dtype)
    calls = {
        module.ns_line_1_kernel: lambda: module.ns_line_1(x, out=gram),
        module.ns_line_2_kernel: lambda: module.ns_line_2(gram, alpha=1.0, beta=1.0, out=torch.empty_like(gram)),
    }
    for kernel in calls:
        kernel._do_bench = partial(do_bench, **_TUNING_MS)
    try:
        precompile(calls)
    except Exception:  # Triton's interfaces for this are its own: without them, it compiles in its own time
        traceback.print_exc()


def precompile(calls: dict[Any, Callable[[], object]]) -> None:
    """Compile every configuration of autotuned Triton kernels in parallel.

    Args:
        calls: for each kernel (what `triton.autotune` returns) a call that launches it, with real arguments. It is made
            with a kernel that compiles instead of running.
    """
    from triton.runtime._async_compile import AsyncCompileMode

    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
        for kernel, call in calls.items():
            kernel.run = partial(_compile_only, kernel)
            try:
                call()
            finally:
                del kernel.run


def _compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    kernel.warmup(*args, grid=(1,), **options)


def _speedrun(shape: Shape, x: Any) -> Function:
    """Return Polar Express of modded-nanogpt's train_gpt.py, without the momentum that it is fused with.

    Importing that file would train: the function is taken out of its source, to be run with the kernels beside it.
    """
    import torch

    spec = importlib.util.find_spec("triton_kernels")
    path = Path(spec.origin).parent / "train_gpt.py" if spec and spec.origin else None
    if path is None or not path.exists():
        raise ModuleNotFoundError("No module named 'triton_kernels' with train_gpt.py beside it (modded-nanogpt)")
    import triton_kernels

    code = compile(without_momentum(path.read_text(encoding="utf-8")), str(path), "exec")
    names: dict[str, Any] = {**vars(triton_kernels), "torch": torch}
    exec(code, names)
    return partial(names["polar_express"], split_baddbmm=shape.m > 1024)  # as its optimizer chooses


def without_momentum(source: str) -> ast.Module:
    """Return the coefficients and `polar_express(g, *, split_baddbmm)` of the speedrun's training script.

    What its function does before it makes `X` from `g` is momentum, and left out.

    Raises:
        ValueError: the script has no such function.
    """
    tree = ast.parse(source)
    coefficients, function = None, None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "polar_express":
            function = node
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "polar_express_coeffs":
            coefficients = node
    if coefficients is None or function is None:
        raise ValueError("train_gpt.py has no polar_express with polar_express_coeffs")
    first = next((i for i, node in enumerate(function.body) if ast.unparse(node).startswith("X = g.")), None)
    if first is None:
        raise ValueError("polar_express of train_gpt.py does not make X from g")
    function.body = function.body[first:]
    function.args = ast.arguments(
        posonlyargs=[],
        args=[ast.arg("g")],
        kwonlyargs=[ast.arg("split_baddbmm")],
        kw_defaults=[ast.Constant(False)],
        defaults=[],
    )
    return ast.fix_missing_locations(ast.Module([coefficients, function], type_ignores=[]))


def _gram_ns(kind: str, kernels: bool, compile_options: dict[str, Any] | None) -> Callable[[Shape, Any], Function]:
    def make(shape: Shape, x: Any) -> Function:
        import gram_newton_schulz

        made = getattr(gram_newton_schulz, kind)(ns_use_kernels=kernels, compile_kwargs=compile_options)
        # Its compiled function is the object's own attribute, which `made(x)` does not look up.
        return made if compile_options is None else vars(made)["__call__"]

    return make


_COMPILED = ("torch", "torch._dynamo", "torch._inductor.compile_fx")
_FULL_GRAPH = {"fullgraph": True, "dynamic": False}
_REPLAYED = {"fullgraph": True, "mode": "reduce-overhead"}


def _is_rectangular(shape: Shape) -> bool:
    return not shape.square


def _is_small(shape: Shape) -> bool:
    return floor_ms(shape, NOMINAL_TFLOPS) < 0.3


def _quintic_variants() -> list[Contestant]:
    """Return the combinations of method, dtype and kernels that are not measured by default."""
    found = []
    for method, dtypes in {
        "auto": (None, "bfloat16"),
        "polar_express": ("bfloat16", "float16", "float32"),
        "newton_schulz": ("bfloat16", "float16"),
        "gram": ("bfloat16", "float16"),
    }.items():
        for dtype in dtypes:
            for kernels in ("auto", "torch"):
                if kernels == "auto" and (method, dtype) in (("auto", None), ("polar_express", "bfloat16")):
                    continue  # by default
                short = {"bfloat16": "-bf16", "float16": "-fp16", "float32": "-fp32", None: ""}[dtype]
                suffix = "-torch" if kernels == "torch" else ""
                found.append(
                    Contestant(
                        name=f"quintic-{method.replace('_', '-')}{short}{suffix}",
                        family="quintic",
                        make=_quintic(method, dtype, kernels),
                        polynomials=muon_post if method == "newton_schulz" else polar_express,
                        default=False,
                    )
                )
    return found


# In the order in which they run: who was seen to be fastest for some shape comes first, in case that the time ends.
CONTESTANTS = (
    Contestant(name="quintic", family="quintic", make=_quintic("auto")),
    Contestant(name="quintic-polar-express-bf16", family="quintic", make=_quintic("polar_express", "bfloat16")),
    *_quintic_variants(),
    Contestant(
        name="gram-ns-compiled",
        family="gram-ns",
        make=_gram_ns("GramNewtonSchulz", False, _FULL_GRAPH),
        polynomials=_gram_newton_schulz,
        preload=_COMPILED,
    ),
    Contestant(
        name="gram-ns-replayed",
        family="gram-ns",
        make=_gram_ns("GramNewtonSchulz", False, _REPLAYED),
        polynomials=_gram_newton_schulz,
        takes=_is_small,
        preload=_COMPILED,
    ),
    Contestant(
        name="dion-newton-schulz",
        family="dion",
        make=_dion_triton,
        polynomials=_dion_newton_schulz,
        preload=("torch", "triton.testing"),
        first_limit=150,
    ),
    Contestant(name="speedrun", family="speedrun", make=_speedrun, preload=_COMPILED, first_limit=90),
    Contestant(
        name="gram-ns-cute",
        family="cute",
        make=_gram_ns("GramNewtonSchulz", True, None),
        polynomials=_gram_newton_schulz,
        preload=("torch", "quack.gemm_interface"),
        first_limit=150,
    ),
    Contestant(
        name="standard-cute",
        family="cute",
        make=_gram_ns("StandardNewtonSchulz", True, None),
        polynomials=_gram_newton_schulz,
        takes=_is_rectangular,  # for square matrices the two are the same
        preload=("torch", "quack.gemm_interface"),
        first_limit=150,
    ),
    Contestant(
        name="gram-ns-cute-compiled",
        family="cute",
        make=_gram_ns("GramNewtonSchulz", True, _FULL_GRAPH),
        polynomials=_gram_newton_schulz,
        default=False,
        preload=("torch", "quack.gemm_interface"),
        first_limit=150,
    ),
    Contestant(name="compiled", family="plain", make=_compiled, preload=_COMPILED),
    Contestant(name="eager", family="plain", make=_eager, preload=_COMPILED),
    Contestant(
        name="dion-polar-express",
        family="dion-compiled",
        make=_dion_polar_express,
        preload=_COMPILED,
        first_limit=120,
    ),
)


def of(name: str) -> Contestant:
    """Return the contestant of that name."""
    return next(contestant for contestant in CONTESTANTS if contestant.name == name)
