"""Accelerate shards models on accelerators only; this lets its examples be tried on a CPU. You do not need it."""

from typing import Any

import torch


def accelerate() -> None:
    """Let Accelerate, which ignores FSDP on CPUs, use it there, too."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    if not torch.accelerator.is_available():
        AcceleratorState.__init__ = with_fsdp
