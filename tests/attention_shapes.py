"""Names and shapes of attention layers' weights, from which QK-clip finds queries and keys."""

import torch

__all__ = ["DIM", "WIDTH", "separate_qk"]

DIM, WIDTH = 4, 16


def separate_qk(prefix="attn", query="q_proj", key="k_proj", heads=4, kv_heads=2):
    return {
        f"{prefix}.{query}.weight": torch.Size((heads * DIM, WIDTH)),
        f"{prefix}.{key}.weight": torch.Size((kv_heads * DIM, WIDTH)),
        f"{prefix}.v_proj.weight": torch.Size((kv_heads * DIM, WIDTH)),
    }
