"""QK-clip of whole parameters: what a step does to the pieces of each rank."""

import torch


@torch.no_grad()
def clip_(clip, params, max_logits):
    """Scale the parameters of a resolved layer, given by name, in place."""
    for name, row_factors in clip.factors(max_logits).items():
        params[name].mul_(row_factors.over(params[name]))
