"""Kernels of the optimizer, the model and the loss; `active` tells which implementation runs on a device."""

import torch
from torch import Tensor

__all__ = ["active"]


def active(device: torch.device | str | None = None, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """Return the implementation that `"auto"` takes for each operation on a device, and why it is not a faster one.

    >>> import quintic
    >>> quintic.kernels.active("cpu")["attention"]
    'sdpa'

    Args:
        device: None for CUDA's current device, or for the CPU on a machine without CUDA.
        dtype: dtype of the operation's inputs: the weights for the optimizer's passes, the multiplied matrices for
            `"orthogonalize"`, the activations for all others.

    Returns:
        A dictionary from operation to `"triton"`, `"torch"` or the name of an attention implementation. If a preferred
        implementation cannot run, the reason follows in brackets.

    Raises:
        ValueError: the device does not exist.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # Only device, dtype, shape and strides of the probe matter; its values are never read.
    try:
        probe = torch.empty((16, 16), dtype=dtype, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(device)!r}: {str(error).splitlines()[0]}") from None
    return {
        "momentum_and_weights": _parameter_pass(probe),
        "adamw": _parameter_pass(probe),
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


# Each function below calls the check that the operation itself makes, so that the two cannot disagree. They import
# locally because `import quintic` loads this module, and an optimizer needs few of the others.


def _with_reason(name: str, reason: str | None) -> str:
    return name if reason is None else f"{name} ({reason})"


def _parameter_pass(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide, obstacle_to_kernels

    return _with_reason(*decide("auto", probe.device, lambda: obstacle_to_kernels(probe)))


def _normalize(probe: Tensor) -> str:
    choice = _parameter_pass(probe)
    if choice != "triton":
        return choice
    from quintic.kernels.products.normalize import can_normalize

    # The kernel takes batches of matrices: (1, 16, 16).
    return choice if can_normalize(probe.unsqueeze(0), probe.dtype) else f"torch ({probe.dtype} has no kernel)"


def _orthogonalize(probe: Tensor) -> str:
    choice = _parameter_pass(probe)
    if choice != "triton":
        return choice
    from quintic.kernels.products.choose_products import choose_products

    # A large matrix: small ones may run on other kernels than the answer given here.
    chosen = choose_products(torch.Size((1, 4096, 4096)), probe.dtype, probe.device)
    if chosen is None:
        return f"torch ({probe.dtype} has no kernel)"
    return f"triton ({chosen})"


def _chosen_mlp_relu2(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.linear.mlp import obstacle_to_mlp_relu2

    return _with_reason(*decide("auto", probe.device, lambda: obstacle_to_mlp_relu2(probe)))


def _chosen_fp8_linear(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.linear.fp8_quantize import obstacle_to_fp8

    return _with_reason(*decide("auto", probe.device, lambda: obstacle_to_fp8(probe.device)))


def _softcap_cross_entropy(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.loss.loss import obstacle_to_loss

    return _with_reason(*decide("auto", probe.device, lambda: obstacle_to_loss(probe)))


def _transpose(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.linear.transpose import obstacle_to_transpose

    other = torch.empty_like(probe)
    return _with_reason(*decide("auto", probe.device, lambda: obstacle_to_transpose(other, probe, add=False)))


def _chosen_lookup(probe: Tensor) -> str:
    from quintic.kernels.dispatch import decide
    from quintic.kernels.lookup.lookup import obstacle_to_lookup

    return _with_reason(*decide("auto", probe.device, lambda: obstacle_to_lookup(probe)))


def _attention(probe: Tensor) -> str:
    from quintic.kernels.attention.attention import fastest_attention

    name, reasons = fastest_attention(probe.device, probe.dtype)
    # The preferred implementations are for CUDA only, so on other devices their absence needs no explanation.
    return _with_reason(name, "; ".join(reasons) if reasons and probe.is_cuda else None)


def _max_logits(probe: Tensor) -> str:
    from quintic.kernels.attention.attention import choose_max_logits

    # Queries (B, T, H, D) with D = 16, the fewest channels that FlexAttention takes.
    return choose_max_logits(probe.view(1, 4, 4, 16))
