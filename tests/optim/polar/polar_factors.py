"""`quintic.orthogonalize` without the last rounding."""

from quintic.optim.polar.forms import resolve
from quintic.optim.polar.orthogonalize import apply_form


def polar_factor(x, method, steps=5, **options):
    """The polar factor in the dtype of the products, with the options of `quintic.orthogonalize`."""
    form = resolve(method, *x.shape[-2:], steps=steps, device_type=x.device.type, dtype=x.dtype, **options)
    return apply_form(x, form)
