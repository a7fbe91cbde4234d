"""Measure whether scaling rows first, as Turbo-Muon does, saves a step of orthogonalisation.

    python -m benchmarks.aol_error                                       # ten minutes on two cores
    python -m benchmarks.aol_error --loss --jobs 16 --rates 0.03 0.04    # 30 runs of the quick start

The first trains a small GPT on the quick start's text, keeps directions that Muon orthogonalises, and compares results
of every variant with the exact polar factor, also for made-up matrices. The second compares validation losses.

AOL scaling: x <- diag(s) x with s_i = (sum_j |x x^T|_ij)^(-1/2), on the short side. No singular value is above one
then, and they are larger than with a Frobenius norm of one. But the polynomials tend to the polar factor of diag(s) x.

Source: Turbo-Muon, T. Boissin et al. 2025, https://arxiv.org/abs/2512.04632.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common.results import print_table, recorded_command
from quintic.commands.parsing import options_of, read_options
from quintic.data.dataset import Dataset
from quintic.data.preparation import prepare
from quintic.optim.polar.coefficients import SAFETY, Coefficients, polar_express_coefficients
from quintic.optim.polar.forms import Form, resolve
from quintic.optim.polar.orthogonalize import ieee_matmul
from quintic.optim.polar.products import multiply
from quintic.optim.polar.program import products_of, run_products
from quintic.train.config import Config
from quintic.train.hardware import choose_hardware, machine_facts
from quintic.train.saved_config import with_options
from quintic.train.source import package_versions
from quintic.train.trainer import Trainer

ERROR_OPTIONS = "--kv-ratio 2 --steps 400 --batch-tokens 2048 --rows 8"  # of the run whose directions are kept
KEPT_AT = (0.05, 0.35, 1.0)  # of its steps: when
ENTRY_NORM = 128.0  # scale of what float16 sees, as in the library; the first products take it out again
AIMED_AT = 1e-3  # times the Frobenius norm: smaller singular values need not reach one


def unit(x: Tensor, norm: Tensor) -> Tensor:
    """Return x / norm; zeros stay zeros."""
    return x / torch.where(norm > 0, norm, 1)


def frobenius(x: Tensor) -> Tensor:
    return unit(x, torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))


def aol(x: Tensor, *, long_side: bool = False) -> Tensor:
    """Return x with the vectors along one side, by default the short one, scaled: no singular value is above one."""
    if long_side == (x.shape[-2] < x.shape[-1]) and x.shape[-2] != x.shape[-1]:
        return aol(x.mT, long_side=long_side).mT
    x = frobenius(x)  # so that no square leaves the range of numbers
    return unit(x, (x @ x.mT).abs().sum(-1, keepdim=True).sqrt())


def schatten4(x: Tensor) -> Tensor:
    """Return x / |x x^T|_F^(1/2): no singular value is above one either, and the polar factor is the same."""
    x = frobenius(x)
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return unit(x, torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).sqrt())


def spectral(x: Tensor) -> Tensor:
    return unit(x, torch.linalg.matrix_norm(x, 2, keepdim=True))  # no factor could do more


class Variant(NamedTuple):
    """A scaling of matrices, and the polynomials that orthogonalise them then."""

    label: str
    scale: Callable[[Tensor], Tensor]
    coefficients: Coefficients
    safety: float = SAFETY

    def form(self, m: int, n: int, device_type: str, dtype: torch.dtype | None = None) -> Form:
        """Return the form that "auto" chooses for these polynomials."""
        return resolve("auto", m, n, coefficients=self.coefficients, compute_dtype=dtype, device_type=device_type)

    def orthogonalize(self, x: Tensor, form: Form | None = None) -> Tensor:
        """Return the results for matrices (b, m, n), in their dtype; `form` is by default what "auto" chooses."""
        form = form or self.form(*x.shape[-2:], x.device.type)
        wide = torch.promote_types(x.dtype, torch.promote_types(form.compute_dtype, torch.float32))
        program = products_of(tuple(form.segments), form.coefficients, ENTRY_NORM)
        with ieee_matmul(x.device.type, form.compute_dtype):
            scaled = self.scale(x.to(wide)) * (ENTRY_NORM / (1 + self.safety))
            return run_products(program, [scaled.to(form.compute_dtype).contiguous()], multiply).to(x.dtype)


FIVE = polar_express_coefficients(5)
FOUR = polar_express_coefficients(4, lower_bound=1e-2)
FOUR_LOW, FOUR_HIGH = (polar_express_coefficients(4, lower_bound=bound) for bound in (3e-3, 3e-2))
FOUR_UNSAFE = polar_express_coefficients(4, lower_bound=1e-2, safety=0.0)
VARIANTS = {
    "five": Variant("Frobenius norm, 5 steps (today)", frobenius, FIVE),
    "four": Variant("Frobenius norm, 4 steps from 0.01", frobenius, FOUR),
    "last-four": Variant("Frobenius norm, last 4 of the 5 steps", frobenius, FIVE[1:]),
    "aol-five": Variant("AOL, 5 steps", aol, FIVE),
    "aol-last-four": Variant("AOL, last 4 of the 5 steps (Turbo-Muon)", aol, FIVE[1:]),
    "aol-four-3e-3": Variant("AOL, 4 steps from 0.003", aol, FOUR_LOW),
    "aol-four": Variant("AOL, 4 steps from 0.01", aol, FOUR),
    "aol-four-3e-2": Variant("AOL, 4 steps from 0.03", aol, FOUR_HIGH),
    "aol-four-unsafe": Variant("AOL, 4 steps from 0.01, no safety factor", aol, FOUR_UNSAFE, 0.0),
    "aol-long-four": Variant("AOL of the long side, 4 steps from 0.01", functools.partial(aol, long_side=True), FOUR),
    "schatten-four": Variant("Schatten-4 norm, 4 steps from 0.01", schatten4, FOUR),
    "spectral-four": Variant("largest singular value, 4 steps from 0.01", spectral, FOUR),
}
TRAINED = ("five", "four", "aol-last-four", "aol-four", "schatten-four")


class Errors(NamedTuple):
    """Distances of results from the exact polar factor U V^T of an (m, n) matrix with short side s."""

    distance: float  # |result - U V^T|_F / sqrt(s), in float64
    fp16: float  # the same for the form and dtype that "auto" takes on GPUs
    bf16: float  # and for those on CPUs
    bias: float  # and for the exact polar factor of the scaled matrix, which no number of steps can improve
    singular: float  # largest |u^T result v - 1| of singular values that the polynomials aim at
    cosine: float  # between the result and U V^T
    orthogonality: float  # |result result^T - I|_F / sqrt(s), on the short side


def errors_of(x: Tensor) -> dict[str, Errors]:
    """Return the errors of all variants for one float64 matrix (m, n)."""
    (m, n), side = x.shape, math.sqrt(min(x.shape))
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    aimed_at = s >= AIMED_AT * torch.linalg.vector_norm(s)

    def distance(result: Tensor) -> float:
        return float(torch.linalg.vector_norm(result - u @ vh)) / side

    @functools.cache
    def bias(scale: Callable[[Tensor], Tensor]) -> float:
        left, _, right = torch.linalg.svd(scale(x), full_matrices=False)
        return distance(left @ right)

    found = {}
    forms = (("cpu", torch.float64), ("cuda", None), ("cpu", torch.bfloat16))
    for name, variant in VARIANTS.items():
        result, fp16, bf16 = (variant.orthogonalize(x[None], variant.form(m, n, *form))[0] for form in forms)
        gram = result @ result.mT if m <= n else result.mT @ result
        gram.diagonal().sub_(1)
        singular = (u.mT @ result @ vh.mT).diagonal()
        found[name] = Errors(
            *map(distance, (result, fp16, bf16)),
            bias=bias(variant.scale),
            singular=float((singular[aimed_at] - 1).abs().max()),
            cosine=float(singular.sum() / torch.linalg.vector_norm(result)) / side,
            orthogonality=float(torch.linalg.vector_norm(gram)) / side,
        )
    return found


def made_up(side: int) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices with spectra that one can name, of shape (side, 2 side); and a Gaussian square one."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    yield "Gaussian, square", normal(side, side)
    yield "Gaussian", normal(side, 2 * side)
    u, v = torch.linalg.qr(normal(side, side))[0], torch.linalg.qr(normal(2 * side, side))[0]
    for power in (0.5, 1.0):
        yield f"singular values i^-{power:g}", (u * torch.arange(1, side + 1, dtype=torch.float64) ** -power) @ v.T
    low_rank = normal(side, side // 16) @ normal(side // 16, 2 * side) * (4 / math.sqrt(side))
    yield "rank s/16 and noise", low_rank + normal(side, 2 * side)
    yield "heavy-tailed rows", normal(side, 2 * side) * normal(side, 1).abs() ** -1.5


def train(config: Config, dataset: Dataset, orthogonalize: Callable[[int, Tensor], Tensor] | None) -> Trainer:
    """Train a model; `orthogonalize` takes the number of the step, from 1, and directions (b, m, n)."""
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(config, dataset, Path(folder), choose_hardware(config.run))
        for group in run.optimizer.param_groups:
            if group["algorithm"] == "muon" and orthogonalize is not None:
                group["orthogonalizer"] = lambda x: orthogonalize(run.step + 1, x)
        with run.loader:
            while run.step < run.total:
                run.train_step()
        run.evaluate()
    return run


def directions(config: Config, dataset: Dataset) -> dict[tuple[int, int, int], list[Tensor]]:
    """Train with today's orthogonalisation and return the matrices it was given, but zeros, by (step, m, n)."""
    assert config.schedule.steps is not None, "--steps None: give a number"
    kept_at = {max(1, round(share * config.schedule.steps)) for share in KEPT_AT}
    found: dict[tuple[int, int, int], list[Tensor]] = {}

    def orthogonalize(step: int, x: Tensor) -> Tensor:
        for one in x.double().cpu() if step in kept_at else ():
            if one.any():
                found.setdefault((step, *one.shape), []).append(one)
        return VARIANTS["five"].orthogonalize(x)

    train(config, dataset, orthogonalize)
    return dict(sorted(found.items()))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def error_page(config: Config, dataset: Dataset, side: int) -> None:
    """Print the errors of all variants for the directions of a training run and for made-up matrices."""
    kept = directions(config, dataset)
    errors = {key: [errors_of(x) for x in matrices] for key, matrices in kept.items()}
    print(f"## Directions of a training run: {sum(map(len, kept.values()))} matrices, median (least to most)\n")
    rows = []
    for name, variant in VARIANTS.items():
        own = zip(*(one[name] for found in errors.values() for one in found), strict=True)
        rows.append([variant.label, *map(spread, own)])
    print_table(["variant", "distance", "in fp16", "in bf16", "bias", "singular", "cosine", "orthogonality"], rows)
    print("## Distance by shape and step: medians\n")
    norms = torch.linalg.matrix_norm
    ranks = [statistics.median(float(norms(x) / norms(x, 2)) ** 2 for x in found) for found in kept.values()]
    rows = [["(Frobenius norm / largest singular value)^2", *(f"{rank:.1f}" for rank in ranks)]]
    for name, variant in VARIANTS.items():
        medians = [statistics.median(one[name].distance for one in found) for found in errors.values()]
        rows.append([variant.label, *(f"{median:.3f}" for median in medians)])
    heads = [f"{m} x {n}, step {step} ({len(found)})" for (step, m, n), found in kept.items()]
    print_table(["variant", *heads], rows)
    print(f"## Made-up matrices, {side} x {2 * side}: distance / bias\n")
    made = {name: errors_of(x) for name, x in made_up(side)}
    rows = []
    for name, variant in VARIANTS.items():
        rows.append([variant.label, *(f"{one[name].distance:.3f} / {one[name].bias:.3f}" for one in made.values())])
    print_table(["variant", *made], rows)


def final_loss(name: str, rate: float, seed: int, config: Config, dataset: Path) -> float:
    """Return the validation loss of a run; today's orthogonalisation is the library's own."""
    optim, run = dataclasses.replace(config.optim, muon_lr=rate), dataclasses.replace(config.run, seed=seed)
    own = None if name == "five" else lambda step, x: VARIANTS[name].orthogonalize(x)
    loss = train(dataclasses.replace(config, optim=optim, run=run), Dataset.open(dataset), own).score.loss
    print(f"{name} {rate:g} seed {seed}: {loss:.4f}", file=sys.stderr, flush=True)
    return loss


def loss_page(config: Config, dataset: Dataset, options: argparse.Namespace) -> None:
    """Train every variant with every rate and seed; print the losses, and how they differ from today's."""
    jobs = list(itertools.product(TRAINED, options.rates, options.seeds))
    arguments = [*zip(*jobs, strict=True), itertools.repeat(config), itertools.repeat(dataset.path)]
    if options.jobs == 1:
        losses = dict(zip(jobs, map(final_loss, *arguments), strict=True))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the runs share the cores
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            losses = dict(zip(jobs, pool.map(final_loss, *arguments), strict=True))
    print(f"## Validation loss, {len(options.seeds)} seeds, median (least to most)\n")
    rows = []
    for name, rate in itertools.product(TRAINED, options.rates):
        own = [losses[name, rate, seed] for seed in options.seeds]
        more = [losses[name, rate, seed] - losses["five", rate, seed] for seed in options.seeds]
        rows.append([VARIANTS[name].label, f"{rate:g}", spread(own), spread(more)])
    print_table(["variant", "learning rate", "loss (nats per token)", "more than today's with the same seed"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="options of `quintic train`")
    parser.add_argument("--side", type=int, default=256, help="short side of the made-up matrices")
    parser.add_argument("--loss", action="store_true", help="compare losses instead of errors")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, with --loss")
    parser.add_argument("--seeds", type=int, nargs="+", default=[21, 22, 23], help="of the runs, with --loss")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03], help="of the matrices, with --loss")
    options = parser.parse_args()
    config = with_options(Config(), compile=False)
    for words in ([] if options.loss else ERROR_OPTIONS.split(), shlex.split(options.base)):
        config = with_options(config, **read_options(options_of(Config), words, "train"))
    data = {field.name: getattr(config.data, field.name) for field in dataclasses.fields(config.data)}
    is_verified_again = data.pop("verify")
    dataset = prepare(data.pop("data"), **data)
    dataset.verify(once=not is_verified_again)
    facts, versions = machine_facts(choose_hardware(config.run)), package_versions()
    machine = f"{facts['cores']}-core {facts['cpu']} CPU" if facts["device"] == "CPU" else f"one {facts['device']}"
    print(f"# {'Losses' if options.loss else 'Errors'} with and without AOL scaling\n")
    print(f"`{recorded_command('benchmarks.aol_error', sys.argv[1:], {})}`; {machine},", end=" ")
    print(f"model in {facts['dtype']}; Python {versions['python']}, torch {versions['torch']}.\n")
    loss_page(config, dataset, options) if options.loss else error_page(config, dataset, options.side)


if __name__ == "__main__":
    main()
