"""Scales of 8-bit tensors from the magnitudes of the last steps, and the linear layer that lives by them.

With *delayed* scaling the scale of a step comes from largest magnitudes of earlier ones. It is on the device before the
step begins, so that quantising is one pass over the tensor and nothing waits.

Sources: P. Micikevicius et al., FP8 Formats for Deep Learning (2022), https://arxiv.org/abs/2209.05433, section 4; the
delayed-scaling recipe of NVIDIA Transformer Engine (amax history, margin). Read next: fp8.py.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quintic.kernels.dispatch import KernelsOption
from quintic.kernels.linear.fp8 import Fp8LinearScales, check_multiples, fp8_linear
from quintic.kernels.linear.fp8_quantize import LARGEST, SMALLEST_SCALE, check_float

__all__ = ["DelayedScaling", "Fp8Linear", "Fp8LinearScaling", "update_fp8_scales"]


class DelayedScaling(nn.Module):
    """A scale for one tensor, from the largest magnitudes that it had in the last steps.

    While a step runs, `amax` collects the largest magnitude seen and `scale` stays as it is; `update()` after the step
    sets `scale = 2**margin * max(last magnitudes) / largest value of the dtype`. Magnitudes that are zero or not finite
    do not count; without any that does, the scale stays what it was (at first 1). Nothing waits for the device, and the
    tensors keep their addresses, so that CUDA graphs may contain all of it.

    The buffers stay float32 whatever `module.to(dtype)` asks for.

    Args:
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        history: number of steps to look back, >= 1.
        margin: binary orders of magnitude left free above the largest value of these steps.
        device: where the buffers are.

    Raises:
        TypeError: another dtype.
        ValueError: `history` is less than 1.
    """

    scale: Tensor
    amax: Tensor
    amax_history: Tensor

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        history: int = 16,
        margin: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dtype not in LARGEST:
            raise TypeError(f"dtype={dtype}: choose torch.float8_e4m3fn or torch.float8_e5m2")
        if history < 1:
            raise ValueError(f"history={history}: need at least one step")
        self.dtype, self.margin = dtype, margin
        self.register_buffer("scale", torch.empty((), dtype=torch.float32, device=device))
        self.register_buffer("amax", torch.empty((), dtype=torch.float32, device=device))
        self.register_buffer("amax_history", torch.empty(history, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget all magnitudes."""
        self.scale.fill_(1.0)
        self.amax.zero_()
        self.amax_history.zero_()

    def extra_repr(self) -> str:
        """Describe the scaling in the module's representation."""
        return f"{self.dtype}, history={len(self.amax_history)}, margin={self.margin}"

    def update(self) -> None:
        """End a step: turn its magnitude into the next scale, in place."""
        _update([self])

    def _apply(self, fn: Any, recurse: bool = True) -> "DelayedScaling":
        def move(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


def update_fp8_scales(module: nn.Module) -> None:
    """End a step of every `DelayedScaling` inside a module, a handful of launches for all of them.

    Call it once per step, after the backward pass of its last microbatch. Every rank keeps scales of its own.
    """
    together: dict[tuple[torch.dtype, float, int, torch.device], list[DelayedScaling]] = {}
    for scaling in module.modules():
        if isinstance(scaling, DelayedScaling):
            key = (scaling.dtype, scaling.margin, len(scaling.amax_history), scaling.amax.device)
            together.setdefault(key, []).append(scaling)
    for scalings in together.values():
        _update(scalings)


@torch.no_grad()
def _update(scalings: list[DelayedScaling]) -> None:
    """Update scalings of one dtype, margin, history and device."""
    amaxes = [scaling.amax for scaling in scalings]
    scales = [scaling.scale for scaling in scalings]
    histories = [scaling.amax_history for scaling in scalings]
    latest = torch.stack(amaxes)
    latest = torch.where(latest.isfinite(), latest, 0.0)
    history = torch.cat([latest[:, None], torch.stack(histories)[:, :-1]], dim=1)
    peak = history.amax(dim=1)
    unit = 2.0 ** scalings[0].margin / LARGEST[scalings[0].dtype]
    scale = torch.where(peak > 0, (peak * unit).clamp_min(SMALLEST_SCALE), torch.stack(scales))
    torch._foreach_copy_(histories, list(history.unbind()))
    torch._foreach_copy_(scales, list(scale.unbind()))
    torch._foreach_zero_(amaxes)


class Fp8LinearScaling(nn.Module):
    """Delayed scaling of a linear layer's three tensors: `x`, `weight` (e4m3) and `grad` (e5m2).

    Args:
        history: as in `DelayedScaling`.
        margin: as in `DelayedScaling`.
        device: where the buffers are.
    """

    def __init__(self, *, history: int = 16, margin: float = 0.0, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.x = DelayedScaling(torch.float8_e4m3fn, history=history, margin=margin, device=device)
        self.weight = DelayedScaling(torch.float8_e4m3fn, history=history, margin=margin, device=device)
        self.grad = DelayedScaling(torch.float8_e5m2, history=history, margin=margin, device=device)

    def scales(self) -> Fp8LinearScales:
        """Return the current scales; while the module is in training mode, with the magnitudes to collect."""
        scales = Fp8LinearScales(self.x.scale, self.weight.scale, self.grad.scale)
        if not self.training:
            return scales
        return scales._replace(x_amax=self.x.amax, weight_amax=self.weight.amax, grad_amax=self.grad.amax)


class Fp8Linear(nn.Module):
    """A linear layer without bias that multiplies in 8 bits, with delayed scaling.

    `weight` is (in_features, out_features), the transpose of `nn.Linear`; see `fp8_linear`. Call `update_fp8_scales` on
    the model once per step. Scales begin at 1, which loses small gradients: run one forward and backward pass and
    `update_fp8_scales` before the first step of the optimizer.

    Args:
        in_features: multiple of 16.
        out_features: multiple of 16.
        history: as in `DelayedScaling`.
        margin: as in `DelayedScaling`.
        device: where parameters and buffers are.
        dtype: of the weight; float32, bfloat16 or float16. The output has the dtype of the input.
        kernels: as in `fp8_linear`.

    Raises:
        TypeError: a dtype that cannot be quantised.
        ValueError: sizes that are no multiples of 16.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        history: int = 16,
        margin: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kernels: KernelsOption = "auto",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kernels = in_features, out_features, kernels
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device, dtype=dtype))
        check_float("weight", self.weight)
        check_multiples("weight", self.weight.shape)
        self.scaling = Fp8LinearScaling(history=history, margin=margin, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight as `nn.Linear` does: uniform within 1 / sqrt(in_features)."""
        bound = self.in_features**-0.5 if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        """Describe the layer in the module's representation."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight, (..., out_features) for (..., in_features)."""
        return fp8_linear(x, self.weight, **self.scaling.scales()._asdict(), kernels=self.kernels)
