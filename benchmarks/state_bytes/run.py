"""The forms of state and weights that are compared, and the worker's job: to train with one of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.training.workers import train as train_run


class Setting(NamedTuple):
    """A form of state and weights.

    Attributes:
        matrices: `state_dtype` of Muon's groups.
        others: `state_dtype` of AdamW's groups.
        master: of bfloat16 weights; None for float32 weights.
    """

    matrices: str | None = None
    others: str | None = None
    master: str | None = None


BASELINE = "float32"
SETTINGS: Mapping[str, Setting] = {
    BASELINE: Setting(),
    "bf16": Setting("bf16", "bf16"),
    "int8": Setting("int8", "int8"),
    "int8-momentum": Setting(matrices="int8"),
    "mantissa": Setting(master="mantissa"),
    "8bit": Setting(master="8bit"),
    "mantissa-int8": Setting("int8", "int8", "mantissa"),
    "8bit-int8": Setting("int8", "int8", "8bit"),
}


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a run, see `benchmarks.training.workers.train`, and its bytes of weights and state.

    Args:
        job: what that module needs, and `setting`, a name of `SETTINGS`.
    """
    trainers: list[Any] = []

    def prepare(trainer: Any) -> None:
        set_forms(trainer.optimizer, SETTINGS[job["setting"]])
        trainers.append(trainer)

    result = train_run(job, prepare=prepare)
    return result if "cut" in result else {**result, "bytes": bytes_of(trainers[0].optimizer)}


def set_forms(optimizer: Any, setting: Setting) -> None:
    """Give an optimizer's groups a setting, before its first step."""
    for group in optimizer.param_groups:
        group["state_dtype"] = setting.matrices if group["algorithm"] == "muon" else setting.others
        if setting.master is not None:
            group["master"] = setting.master


def bytes_of(optimizer: Any) -> dict[str, float]:
    """Return algorithm -> bytes of weight and state, without the gradient, for each weight that it steps."""
    sizes: dict[str, float] = {}
    counts: dict[str, int] = {}
    for group in optimizer.param_groups:
        kind = group["algorithm"]
        for param in group["params"]:
            state = sum(value.nbytes for value in optimizer.state[param].values())
            sizes[kind] = sizes.get(kind, 0) + param.nbytes + state
            counts[kind] = counts.get(kind, 0) + param.numel()
    return {kind: size / counts[kind] for kind, size in sizes.items()}
