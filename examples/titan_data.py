"""The examples' data as torchtitan wants them, and what lets it be tried on a CPU: replace all of this by your own."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils
from tiny import batch
from torch.distributed.fsdp import FSDPModule


class Host:
    """The functions of an accelerator's module that torchtitan calls."""

    set_device = synchronize = empty_cache = reset_peak_memory_stats = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda *_: "cpu")
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(total_memory=1))
    memory_stats = staticmethod(lambda *_: dict.fromkeys(("num_alloc_retries", "num_ooms"), 0))


# Before other modules of torchtitan are imported, which take over what they find there.
if not torch.accelerator.is_available():
    torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", Host
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 uses what PyTorch 2.13 does not have yet
    torch.distributed.set_timeout = lambda *_: None

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402


class Rows(BaseDataLoader):
    """The examples' data, to each rank its rows; a checkpoint has the number of the step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.step, self.part, self.parts = 0, dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        while True:
            x, y = batch(self.step, "cpu", self.part, self.parts)
            self.step += 1
            yield {"input": x}, y

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    encode = decode = get_vocab_size = None

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()


def sum_gradients(model_parts: list[torch.nn.Module]) -> None:
    """Let FSDP2 scale gradients beside the reduction and not in it, which gloo cannot."""
    for module in (module for part in model_parts for module in part.modules()):
        if isinstance(module, FSDPModule) and not torch.accelerator.is_available():
            module.set_force_sum_reduction_for_comms(True)
