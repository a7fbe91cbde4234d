"""Marks of the files whose tests all need a CUDA device."""

import pytest
import torch

__all__ = ["ON_CUDA"]

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
