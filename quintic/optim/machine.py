"""Machines as a few numbers: for predicting how long a step takes, never for choosing what runs.

A machine is a TOML file with one number per field of `Machine`; those that come with the package are in `machines/`.
What is made of them is in `prediction.py`.
"""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from quintic.errors import ConfigError

__all__ = ["Machine", "load_machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one rank computes and sends.

    Args:
        tflops: 10^12 operations per second of 16-bit matrix products.
        tflops_fp32: of 32-bit and wider ones.
        efficiency: share of these that an orthogonalisation reaches, counted as `Form.flops` counts.
        memory_gb_s: 10^9 bytes per second that the element-wise passes read and write.
        ranks_per_node: consecutive ranks that are joined by the fast links.
        node_gb_s: 10^9 bytes per second that a rank sends, and at the same time receives, within its node.
        network_gb_s: the same between nodes.
        latency_us: microseconds of one collective, whatever it sends.
    """

    tflops: float
    tflops_fp32: float
    efficiency: float
    memory_gb_s: float
    ranks_per_node: int
    node_gb_s: float
    network_gb_s: float
    latency_us: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                raise ConfigError(f"{field.name} = {value!r}: give a {'whole ' * (field.type is int)}number")
            if value < 0 or (value == 0 and field.name != "latency_us"):
                raise ConfigError(f"{field.name} = {value!r}: must be above 0")


def load_machine(name: str) -> Machine:
    """Return a machine.

    Args:
        name: of a machine that comes with the package, such as `"h200"`, or the path of a TOML file.

    Raises:
        ConfigError: there is no such machine, or the file is no machine; the message names the file and the field.
    """
    shipped = {file.name.removesuffix(".toml"): file for file in _shipped()}
    if name in shipped:
        text = shipped[name].read_text("utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text("utf-8")
    else:
        raise ConfigError(f"machine={name}: choose {', '.join(sorted(shipped))}, or the path of a TOML file")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"machine={name}: not a TOML file: {error}") from error
    names = [field.name for field in dataclasses.fields(Machine)]
    for wrong, what in (
        ([key for key in values if key not in names], "unknown"),
        ([key for key in names if key not in values], "missing"),
    ):
        if wrong:
            raise ConfigError(f"machine={name}: {wrong[0]} is {what}; its numbers are {', '.join(names)}")
    try:
        return Machine(**values)
    except ConfigError as error:
        raise ConfigError(f"machine={name}: {error}") from None


def _shipped() -> list[Traversable]:
    folder = resources.files("quintic.optim") / "machines"
    return [file for file in folder.iterdir() if file.name.endswith(".toml")]
