"""Implementations behind the optimizer, the model and the loss: `active` says which of them run."""

import torch
from torch import Tensor

__all__ = ["active"]


def active(device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """Return the implementation of each operation that `"auto"` takes on a device, and why it is not a faster one.

    >>> import quintic
    >>> quintic.kernels.active("cpu")["attention"]
    'sdpa'

    Args:
        device: by default CUDA's current device, or the CPU where there is none.
        dtype: of the tensors that an operation gets: of weights for the optimizer's passes, of the matrices that are
            multiplied for `"orthogonalize"`, of activations for the others.

    Returns:
        Operation -> `"triton"`, `"torch"`, or the name of an attention's implementation; in brackets behind it, why
        the preferred one cannot run.

    Raises:
        ValueError: there is no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        probe = torch.empty((16, 16), dtype=dtype, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(device)!r}: {str(error).splitlines()[0]}") from None
    return {
        "momentum_and_weights": _of_parameters(probe),
        "adamw": _of_parameters(probe),
        "normalize": _normalize(probe),
        "orthogonalize": _orthogonalize(probe),
        "mlp_relu2": _chosen_mlp_relu2(probe),
        "fp8_linear": _chosen_fp8_linear(probe),
        "softcap_cross_entropy": _softcap_cross_entropy(probe),
        "transpose": _transpose(probe),
        "lookup": _chosen_lookup(probe),
        "attention": _attention(probe),
        "max_logits": _max_logits(probe),
    }


# Each asks what the operation itself asks. Imports are inside: an optimizer has no use for most of these modules.


def _said(name: str, reason: str | None) -> str:
    return name if reason is None else f"{name} ({reason})"


def _of_parameters(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide, obstacle_to_kernels

    return _said(*decide("auto", probe.device, lambda: obstacle_to_kernels(probe)))


def _normalize(probe: Tensor) -> str:
    said = _of_parameters(probe)
    if said != "triton":
        return said
    from quintic.kernels.products.normalize import can_normalize

    return said if can_normalize(probe.unsqueeze(0), probe.dtype) else f"torch ({probe.dtype} has no kernel)"


def _orthogonalize(probe: Tensor) -> str:
    said = _of_parameters(probe)
    if said != "triton":
        return said
    from quintic.kernels.products.choose_products import choose_products

    chosen = choose_products(torch.Size((1, 4096, 4096)), probe.dtype, probe.device)
    if chosen is None:
        return f"torch ({probe.dtype} has no kernel)"
    return f"triton ({chosen})"


def _chosen_mlp_relu2(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.linear.mlp import obstacle_to_mlp_relu2

    return _said(*decide("auto", probe.device, lambda: obstacle_to_mlp_relu2(probe)))


def _chosen_fp8_linear(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.linear.fp8_quantize import obstacle_to_fp8

    return _said(*decide("auto", probe.device, lambda: obstacle_to_fp8(probe.device)))


def _softcap_cross_entropy(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.loss.loss import obstacle_to_loss

    return _said(*decide("auto", probe.device, lambda: obstacle_to_loss(probe)))


def _transpose(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.linear.transpose import obstacle_to_transpose

    other = torch.empty_like(probe)
    return _said(*decide("auto", probe.device, lambda: obstacle_to_transpose(other, probe, add=False)))


def _chosen_lookup(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.lookup.lookup import obstacle_to_lookup

    return _said(*decide("auto", probe.device, lambda: obstacle_to_lookup(probe)))


def _attention(probe: Tensor) -> str:
    from quintic.kernels.attention.attention import fastest_attention

    name, reasons = fastest_attention(probe.device, probe.dtype)
    # On other devices nothing faster was ever in question.
    return _said(name, "; ".join(reasons) if reasons and probe.is_cuda else None)


def _max_logits(probe: Tensor) -> str:
    from quintic.kernels.attention.attention import choose_max_logits

    return choose_max_logits(probe.view(1, 4, 4, 16))
