"""The same numbers on any layout: after a few steps on several ranks every bit is what it is on one device.

The one exception is stated in `trajectories.py`: the last bit of what PyTorch's fused AdamW updates in pieces.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import wrappings
from harness import DEVICE, run
from torch.distributed.device_mesh import DeviceMesh
from trajectories import CASES, EIGHTS, TAKES_ALL, Gaps, Layout, disagreements, reference, run_layout

# The rules of papers and races, each in every layout.
RULES = tuple(case for case in CASES if "update_rule" in CASES[case].options)
ALL = tuple(case for case in CASES if case not in RULES and case not in EIGHTS and case != "8bit")

# Those that no other layout of two ranks has, and the plainest.
REST = tuple(case for case in ALL if case not in ("cautious", "mantissa", "narrow"))

LAYOUTS = {
    "averaged-1": Layout((1,), comms="averaged", cases=("plain",)),
    "averaged-2": Layout((2,), comms="averaged"),
    "averaged-3": Layout((3,), comms="averaged", cases=ALL),
    "averaged-4": Layout((4,), comms="averaged"),
    "replicated-1": Layout((1,), comms="replicated", cases=("plain",)),
    "replicated-2": Layout((2,), comms="replicated", cases=REST),
    "replicated-3": Layout((3,), comms="replicated", cases=ALL),
    "sharded-1": Layout((1,), comms="sharded"),
    "sharded-2": Layout((2,), comms="sharded", cases=("plain", "cautious", "mantissa", "narrow", "element")),
    "sharded-3": Layout((3,), comms="sharded", cases=ALL),
    "sharded-4": Layout((4,), comms="sharded"),
    "dtensor_copies-2": Layout((2,), wrappings.replicated),
    "fsdp2-1": Layout((1,), wrappings.data_parallel, cases=("plain",)),
    "fsdp2-2": Layout((2,), wrappings.data_parallel),
    "fsdp2-3": Layout((3,), wrappings.data_parallel, cases=ALL),
    "fsdp2-4": Layout((4,), wrappings.data_parallel),
    "fsdp2-8": Layout((8,), wrappings.data_parallel, cases=("neuron", "element")),
    "fsdp2_last_dimension-2": Layout((2,), wrappings.last_dimension, cases=("neuron", "mantissa", "element")),
    "fsdp2_last_dimension-4": Layout((4,), wrappings.last_dimension, cases=("neuron", "mantissa", "8bit", "element")),
    "hsdp-2x2": Layout((2, 2), wrappings.data_parallel),
    "tp-2": Layout((2,), wrappings.tensor_parallel),
    "tp-3": Layout((3,), wrappings.tensor_parallel, cases=("neuron", "mantissa", "8bit", "element")),
    "tp_fsdp2-2x2": Layout((2, 2), wrappings.tensor_and_data_parallel, cases=ALL),
    "ep_fsdp2-4": Layout((4,), wrappings.expert_and_data_parallel),
    "ep_fsdp2-2x2": Layout((2, 2), wrappings.expert_and_data_parallel),
}

# A matrix among others of its shape, one of a fused projection, a stack, and parameters of AdamW.
WITHOUT = Gaps(("stack.2.weight", "attention.qkv.weight", "experts.up", "embedding.weight", "mlp.0.bias"), others=True)

# What the plan of tensor parallelism names. The rest has a mesh of half of the ranks, and the other half cannot know.
WITHOUT_ON_THE_WHOLE_MESH = Gaps(("stack.1.weight", "attention.qkv.weight", "embedding.weight", "mlp.0.bias"))

WITH_GAPS = {
    "averaged-3": (Layout((3,), comms="averaged"), WITHOUT),
    "replicated-2": (Layout((2,), comms="replicated", cases=("cautious", "mantissa")), WITHOUT),
    "sharded-3": (Layout((3,), comms="sharded"), WITHOUT),
    "dtensor_copies-2": (Layout((2,), wrappings.replicated, cases=("neuron",)), WITHOUT),
    "fsdp2-3": (Layout((3,), wrappings.data_parallel, cases=("neuron", "mantissa", "element")), WITHOUT),
    "hsdp-2x2": (Layout((2, 2), wrappings.data_parallel, cases=("neuron", "element")), WITHOUT),
    "tp_fsdp2-2x2": (
        Layout((2, 2), wrappings.tensor_and_data_parallel, cases=("cautious",)),
        WITHOUT_ON_THE_WHOLE_MESH,
    ),
    "ep_fsdp2-4": (Layout((4,), wrappings.expert_and_data_parallel, cases=("plain",)), WITHOUT),
}

# Two models over every second rank each: what concerns one of them must not wait for ranks of the other.
PAIRS = [[0, 2], [1, 3]]
PAIR_MODELS = ["awkward", "narrow"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_does_not_change_the_numbers(name):
    run_layout(LAYOUTS[name])


# Of all layouts the quick tests take the ones with the fewest processes that send all kinds of messages.
QUICK = ("fsdp2-2", "sharded-2")
OF_EIGHTS = list(LAYOUTS)
if not TAKES_ALL:
    # One of each kind. Three ranks cut 512 columns behind column 171, inside of a group of 8.
    kinds = ("replicated-3", "fsdp2-3", "fsdp2_last_dimension-4", "tp-2", "tp-3", "tp_fsdp2-2x2")
    OF_EIGHTS = [*QUICK, *kinds, "ep_fsdp2-4"]


@pytest.mark.parametrize(
    "name", [name if name == "sharded-2" else pytest.param(name, marks=pytest.mark.slow) for name in OF_EIGHTS]
)
def test_layout_does_not_change_state_of_8_bits(name):
    run_layout(replace(LAYOUTS[name], cases=tuple(sorted(EIGHTS))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded-3", "fsdp2-3"])
def test_a_missing_gradient_leaves_state_of_8_bits(name):
    layout, gaps = WITH_GAPS[name]
    run_layout(replace(layout, cases=tuple(sorted(EIGHTS))), gaps)


# Each rule once. Layouts take turns with the halves, and two have all rules, in all their dtypes.
ONCE = tuple({CASES[case].options["update_rule"]: case for case in reversed(RULES)}.values())
IN_ALL_DTYPES = ("fsdp2-3", "sharded-3")
# A rule for each kind of stage that keeps state.
OF_EACH_KIND = ("muown", "hyperball", "two_rate", "ema_nesterov")


def rules_by_layout():
    """Yield (name of a layout, cases), few enough for the time-out of its processes."""
    for number, name in enumerate(LAYOUTS):
        has_all = name in IN_ALL_DTYPES
        cases = RULES if has_all else ONCE
        halves = [cases[::2], cases[1::2]]
        for half in halves if TAKES_ALL or has_all else halves[number % 2 :][:1]:
            marks = () if name in QUICK else pytest.mark.slow
            yield pytest.param(name, half, marks=marks, id=f"{name}-{half[0]}")


@pytest.mark.parametrize(("name", "cases"), list(rules_by_layout()))
def test_layout_does_not_change_the_rules_of_the_field(name, cases):
    run_layout(replace(LAYOUTS[name], cases=cases))


@pytest.mark.slow
@pytest.mark.parametrize("cases", [ONCE[::2], ONCE[1::2]] if TAKES_ALL else [OF_EACH_KIND], ids=lambda cases: cases[0])
@pytest.mark.parametrize("name", WITH_GAPS if TAKES_ALL else ["averaged-3", "sharded-3", "fsdp2-3", "tp_fsdp2-2x2"])
def test_a_missing_gradient_under_the_rules_of_the_field(name, cases):
    layout, gaps = WITH_GAPS[name]
    run_layout(replace(layout, cases=cases), gaps)


@pytest.mark.parametrize("name", WITH_GAPS)
def test_a_missing_gradient_changes_nothing_or_counts_as_zeros(name):
    run_layout(*WITH_GAPS[name])


def check_pairs(rank, world_size, comms, expected):
    mesh = DeviceMesh(DEVICE, torch.tensor(PAIRS), mesh_dim_names=("model", "shard"))["shard"]
    ranks = PAIRS[rank % 2]
    name = PAIR_MODELS[rank % 2]
    if comms == "none":
        wrap, options = partial(wrappings.data_parallel, mesh=mesh), {}
    else:
        wrap, options = partial(wrappings.plain, mesh=mesh), {"process_group": mesh.get_group()}
    wrong = disagreements(name, wrap, "neuron", ranks, expected[rank % 2], rank=rank, comms=comms, **options)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "comms", ["none", *(pytest.param(way, marks=pytest.mark.slow) for way in ("averaged", "replicated", "sharded"))]
)
def test_two_models_on_every_second_rank_each(comms):
    models = zip(PAIR_MODELS, PAIRS, strict=True)
    expected = [reference(name, ["neuron"], ranks, comms)["neuron"] for name, ranks in models]
    run(check_pairs, 4, comms, expected, timeout=100)
