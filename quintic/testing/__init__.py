"""Tests for update rules: one function that tries a rule on every layout, in a script or under pytest.

stages.py      each stage by itself: batches, inputs, shapes, waits for the device
steps.py       steps of an optimizer on one device: state, gaps, checkpoints, CUDA graphs
layouts.py     the same steps on two ranks, and checkpoints from one layout into another
processes.py   the two processes
"""

import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.table import RULES, check_rule
from quintic.testing.layouts import LAYOUTS, check_checkpoints, check_layout
from quintic.testing.processes import run_on_ranks
from quintic.testing.stages import check_stages
from quintic.testing.steps import CASES, check_graphs, check_one_device

__all__ = ["check_update_rule"]


def check_update_rule(
    rule: str | UpdateRule,
    *,
    options: Mapping[str, Any] | None = None,
    gpu: bool | None = None,
    timeout: float = 600.0,
) -> list[str]:
    """Try a rule on every layout, and raise an AssertionError that lists its mistakes.

        def test_my_rule():
            quintic.testing.check_update_rule(MY_RULE)

    Two processes on this machine try the stages by themselves, then steps on one device, then the same steps on two
    ranks: as DDP has weights (`comms` `"averaged"`, `"replicated"`, `"sharded"`), and FSDP2 and tensor parallelism.
    The weights are matrices, heads, experts and transposed ones, in float32, float64, and bfloat16 with mantissas. On
    every layout all weights and state must have the bits of one device, also after missing gradients, gradients with
    NaN under `on_nonfinite="skip"`, and a checkpoint that is loaded into another layout.

    On Linux the processes are forked, so a rule may be defined anywhere. On other systems, and once this process has
    used CUDA, they are started anew and the rule is pickled: its stages must be classes at the top level of a module,
    and a script needs `if __name__ == "__main__":` around the call.

    Args:
        rule: the rule, or the name of one in `quintic.update_rules.RULES`.
        options: options of `quintic.Muon` to try it with, such as `{"lr": 3e-4, "nesterov": False}`.
        gpu: whether also to capture steps in CUDA graphs on this machine's GPU; None if there is one.
        timeout: seconds for everything but the GPU.

    Returns:
        The names of the checks that passed.

    Raises:
        AssertionError: the rule is wrong. The message names the rule and for each finding the check, layout, tensor and
            first matrix. Later checks are left out if earlier ones find something.
        TypeError: no rule was given.
        ValueError: no rule has this name, or the rule does not orthogonalise.
        RuntimeError: this process is in a process group, NumPy is missing, or the rule cannot be sent to the other
            processes.
        TimeoutError: the processes had not finished in time.
    """
    # None would be Muon as an option.
    check_rule(rule if rule is not None else "None", None)
    chosen = RULES[rule] if isinstance(rule, str) else rule
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "check_update_rule starts processes of its own: call it where torch.distributed is not initialised"
        )
    if find_spec("numpy") is None:
        raise RuntimeError("check_update_rule needs NumPy: PyTorch sends objects between ranks with it; install numpy")
    given = dict(options or {})
    done, findings = run_on_ranks(_check_on_rank, 2, chosen, given, timeout=timeout)
    if not findings and (torch.cuda.is_available() if gpu is None else gpu):
        findings = check_graphs(chosen, given)
        done.append("CUDA graphs")
    if findings:
        lines = [f"{chosen.title}: {len(findings)} finding{'s' * (len(findings) > 1)}", *findings]
        raise AssertionError("\n  ".join(lines))
    return done


def _check_on_rank(rank: int, rule: UpdateRule, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the checks, and the mistakes found; all ranks call it and take the same steps."""
    done = ["stages"]
    # An error of a stage would come again in every step, with less to say where it is from.
    if findings := check_stages(rule):
        return done, findings
    references = {}
    # Finding -> the dtypes that have it: a mistake mostly shows in all of them.
    cases: dict[str, list[str]] = {}
    for case in CASES:
        done.append(f"{case}, one device")
        references[case], found = check_one_device(rule, case, options)
        for line in found:
            cases.setdefault(line.removeprefix(f"{case}: "), []).append(case)
    if cases:
        return done, [f"{', '.join(names)}: {line}" for line, names in cases.items()]
    for layout in LAYOUTS:
        for case in CASES:
            done.append(f"{case}, {layout}")
            try:
                findings += check_layout(rule, case, options, layout, references[case])
            except Exception as error:
                # Other ranks may wait for this one: nothing more can be tried.
                text = "".join(traceback.format_exception(error))
                return done, [*findings, f"{case}: {layout}: rank {rank}: {text}"]
    if not findings:
        done.append("checkpoints")
        findings = check_checkpoints(rule, options, references)
    return done, findings
