"""The memory of a model by setting: against tensors that are allocated, and properties of the savings."""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quintic
from quintic.errors import ConfigError
from quintic.simulate.memory import FREE, SAVINGS, cheapest, kept_bytes, memory_table, needs_of, peak, setups_of
from quintic.simulate.options import SimulationOptions, size_in_bytes
from quintic.simulate.planned_models import Decoder, Sizes
from quintic.simulate.simulate import simulate_plan

SMALL = Sizes(layers=2, width=20, heads=2, kv_heads=1, head_dim=6, hidden=28, vocab_size=19)
MIXTURE = Sizes(layers=1, width=10, heads=2, kv_heads=1, head_dim=6, hidden=6, vocab_size=19, qk_norm=True, experts=5)
MESHES = [((2,), ("fsdp",)), ((5,), ("fsdp",)), ((2, 3), ("replicate", "fsdp")), ((2, 2), ("fsdp", "tp"))]


def groups_of(sizes, dtype, device="meta"):
    with torch.device(device):
        return quintic.param_groups(Decoder(sizes).to(dtype))


def options_of(dtype, **more):
    return SimulationOptions(model="none", dtype=str(dtype).removeprefix("torch."), **more)


def savings_on(mesh):
    return [({"mesh": mesh} if "mesh" in change else change, cost) for change, cost in SAVINGS]


# -- against what is allocated ----------------------------------------------------------------------------------------

SETTINGS = [
    {},
    {"max_workspace_bytes": 4000},
    {"master": "mantissa"},
    {"state_dtype": "bf16"},
    {"state_dtype": "int8", "master": "8bit"},
    {"offload": True},
    {"release_gradients": True},
    {"max_workspace_bytes": 4000, "master": "mantissa", "state_dtype": "bf16", "offload": True},
]


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("sizes", "dtype", "rule"),
    [
        (SMALL, torch.float32, "muon"),
        (SMALL, torch.bfloat16, "normuon"),
        (MIXTURE, torch.bfloat16, "muown"),
        (MIXTURE, torch.float32, "adamuon"),
    ],
    ids=["dense", "dense-bf16-normuon", "mixture-bf16-muown", "mixture-adamuon"],
)
def test_every_part_is_what_an_optimizer_on_this_device_has(sizes, dtype, rule, chosen):
    parts = needs_of(options_of(dtype, update_rule=rule), groups_of(sizes, dtype), device="cpu")(chosen)
    options = {"update_rule": rule, "master": "fp32" if dtype == torch.bfloat16 else None} | chosen
    optimizer = quintic.Muon(groups_of(sizes, dtype, "cpu"), **options)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    values = [(param, value) for param in params for value in optimizer.state[param].values()]
    state = sum(value.nbytes for _, value in values)
    # All but step counts and numbers of rows are moved to the host.
    in_host = sum(value.nbytes for param, value in values if value.shape == param.shape)
    assert parts["weights"] == sum(param.nbytes for param in params)
    assert parts["gradients"] == sum(param.grad.nbytes for param in params)
    assert parts["host"] == in_host * chosen.get("offload", False)
    assert parts["state"] + parts["host"] == state
    assert parts["step"] == optimizer.plan().peak_workspace_bytes


def test_a_step_keeps_the_state_that_was_counted():
    needs = needs_of(options_of(torch.bfloat16), groups_of(SMALL, torch.bfloat16), device="cpu")
    optimizer = quintic.Muon(groups_of(SMALL, torch.bfloat16, "cpu"), master="mantissa", state_dtype="bf16")
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    optimizer.step()
    kept = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
    assert needs({"master": "mantissa", "state_dtype": "bf16"})["state"] == kept


@pytest.mark.parametrize(("mesh", "names"), MESHES, ids=str)
def test_shards_of_all_ranks_are_the_whole_weights(mesh, names):
    optimizer = quintic.Muon(groups_of(SMALL, torch.bfloat16), master="mantissa", offload=True)
    stored = simulate_plan(optimizer, mesh, names).stored
    params = [param for group in optimizer.param_groups for param in group["params"]]
    whole = sum(param.nbytes for param in params)
    copies = dict(zip(names, mesh, strict=True)).get("replicate", 1)
    # Tensor parallelism leaves norms as copies.
    assert int(stored.weights.sum()) >= whole * copies
    assert int(stored.weights.sum()) == whole * copies or "tp" in names
    # Momentum, or two moments, and the mantissas are as large as two of the weights and more.
    assert bool((stored.host >= 3 * stored.weights).all())
    assert bool((stored.state - stored.host >= 0).all())


# -- properties -------------------------------------------------------------------------------------------------------

small_sizes = st.builds(
    Sizes,
    layers=st.integers(1, 2),
    width=st.integers(2, 40),
    heads=st.integers(1, 3),
    kv_heads=st.just(1),
    head_dim=st.integers(2, 9),
    hidden=st.integers(2, 70),
    vocab_size=st.integers(2, 90),
    tied=st.booleans(),
    experts=st.sampled_from([0, 0, 3]),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.mark.slow
@given(small_sizes, dtypes, st.sampled_from(MESHES), st.sampled_from([None, "normuon"]), st.data())
@settings(max_examples=40)
def test_each_rung_takes_less_and_the_cheapest_fits(sizes, dtype, mesh, rule, data):
    needs = needs_of(options_of(dtype, update_rule=rule), groups_of(sizes, dtype))
    setups = setups_of(savings_on(mesh), needs)
    peaks = [peak(setup.parts) for setup in setups]
    assert all(later < earlier for earlier, later in itertools.pairwise(peaks))
    for setup, most in zip(setups, peaks, strict=True):
        on_device = {name: size for name, size in setup.parts.items() if name != "host"}
        assert min(setup.parts.values()) >= 0
        assert most == sum(on_device.values()) == kept_bytes(setup.parts) + setup.parts["step"]
    # With more memory the costliest setting is never a costlier one.
    costs = [change for change, _ in savings_on(mesh)]
    memories = sorted(data.draw(st.lists(st.integers(peaks[-1] - 1, peaks[0] + 1), min_size=2, max_size=4)))
    highest = math.inf
    for memory in memories:
        best = cheapest(setups, needs, memory)
        assert (best is None) == (memory < peaks[-1])
        if best is None:
            continue
        assert peak(best.parts) <= memory
        assert best.parts == needs(best.settings)
        # One setting stands in two places; the first counts.
        used = [costs.index(change) for change in costs if change.items() <= best.settings.items()]
        assert max(used, default=-1) <= highest
        highest = max(used, default=-1)


@pytest.mark.slow
@given(small_sizes, dtypes, st.sampled_from(MESHES))
@settings(max_examples=20)
def test_the_cheapest_has_no_costly_setting_that_it_does_not_need(sizes, dtype, mesh):
    needs = needs_of(options_of(dtype), groups_of(sizes, dtype))
    setups = setups_of(savings_on(mesh), needs)
    memory = peak(setups[-1].parts) + 100
    best = cheapest(setups, needs, memory)
    costly = [setup.change for setup in setups if setup.change and setup.cost != FREE]
    for change in costly[:-1]:
        if change.items() <= best.settings.items():
            fewer = {name: value for name, value in best.settings.items() if name not in change}
            assert peak(needs(fewer)) > memory


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_device_as_large_as_a_rung_is_large_enough(mesh):
    needs = needs_of(options_of(torch.bfloat16), groups_of(SMALL, torch.bfloat16))
    setups = setups_of(savings_on(mesh), needs)
    assert [setup.change for setup in setups[1:-1]][-1] == {"mesh": mesh} or setups[-1].change == {"mesh": mesh}
    for earlier, later in itertools.pairwise(setups):
        assert peak(later.parts) < peak(earlier.parts)
        best = cheapest(setups, needs, peak(later.parts))
        assert later.change.items() <= best.settings.items()
        assert peak(best.parts) <= peak(later.parts)
    assert cheapest(setups, needs, peak(setups[-1].parts) - 1) is None


def test_settings_that_cost_nothing_are_used_although_less_would_fit():
    needs = needs_of(options_of(torch.bfloat16), groups_of(SMALL, torch.bfloat16))
    setups = setups_of(savings_on(((1,), ("fsdp",))), needs)
    assert cheapest(setups, needs, 2**30).settings == {"master": "mantissa"}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_do_not_reuse_the_memory_of_gradients(mesh):
    needs = needs_of(options_of(torch.bfloat16), groups_of(SMALL, torch.bfloat16))
    assert needs({"mesh": mesh, "release_gradients": True}) == needs({"mesh": mesh})
    assert needs({"release_gradients": True})["step"] < needs({})["step"]


def test_a_setting_that_saves_nothing_has_no_rung():
    for given_options, missing in (
        ({"state_dtype": "bf16"}, {"state_dtype": "bf16"}),
        ({"master": "mantissa"}, {"master": "mantissa"}),
    ):
        needs = needs_of(options_of(torch.bfloat16, **given_options), groups_of(SMALL, torch.bfloat16))
        assert missing not in [setup.change for setup in setups_of(savings_on(((1,), ("fsdp",))), needs)]


def test_a_later_value_of_an_option_replaces_an_earlier_one():
    sizes = {None: 100, "bf16": 60, "int8": 40}

    def needs(settings):
        return {"weights": 10, "gradients": 10, "state": sizes[settings.get("state_dtype")], "step": 5}

    setups = setups_of([({"state_dtype": "bf16"}, "loss"), ({"state_dtype": "int8"}, "loss")], needs)
    assert [peak(setup.parts) for setup in setups] == [125, 85, 65]
    found = [cheapest(setups, needs, memory) for memory in (125, 124, 84, 64)]
    assert [best and dict(best.settings) for best in found] == [
        {},
        {"state_dtype": "bf16"},
        {"state_dtype": "int8"},
        None,
    ]


def test_8_bit_state_is_counted_where_the_layout_cuts_its_groups():
    # Two ranks cut the MLP's rows of 24 after 12 columns, three ranks cut no group.
    sizes = Sizes(layers=1, width=16, heads=6, kv_heads=6, head_dim=8, hidden=24, vocab_size=16)
    needs = needs_of(options_of(torch.bfloat16), groups_of(sizes, torch.bfloat16))
    for ranks in (2, 3):
        given = {"mesh": ((ranks,), ("tp",))}
        narrow, packed = (needs({**given, "state_dtype": dtype}) for dtype in ("bf16", "int8"))
        assert packed["state"] < narrow["state"]
        # Averages are float32 during a step.
        assert (packed["step"] > narrow["step"]) == (ranks == 2)
        with pytest.raises(ValueError, match="columns are cut") if ranks == 2 else nullcontext():
            needs({**given, "state_dtype": "int8", "offload": True})


def test_where_8_bit_state_cannot_be_offloaded_16_bits_are():
    def needs(settings):
        dtype, offload = settings.get("state_dtype"), settings.get("offload", False)
        if dtype == "int8" and offload:
            raise ValueError("columns are cut")
        state = 0 if offload else {None: 40, "bf16": 20, "int8": 10}[dtype]
        return {"weights": 10, "gradients": 10, "state": state, "step": 5}

    savings = [({"state_dtype": "bf16"}, "loss"), ({"state_dtype": "int8"}, "loss"), ({"offload": True}, "copies")]
    assert setups_of(savings, needs)[-1].settings == {"state_dtype": "bf16", "offload": True}

    def refuses(settings):
        if settings:
            raise ValueError("refused")
        return needs(settings)

    with pytest.raises(ValueError, match="refused"):
        setups_of([({"offload": True}, "copies")], refuses)


def test_activations_and_the_step_share_memory():
    parts = {"weights": 1 << 30, "gradients": 1 << 30, "state": 1 << 31, "step": 1 << 28, "activations": 1 << 29}
    assert peak(parts) == (1 << 32) + (1 << 29)
    [head, row] = memory_table(setups_of([], lambda settings: parts), 1 << 33, 1 << 29, "start", str).splitlines()
    assert head.split()[-2:] == ["sum", "fits"]
    assert row.split() == ["start", "8.00", "1.00", "1.00", "2.00", "0.25", "0.50", "4.50", "yes"]


def test_graphs_keep_activations_during_the_step():
    parts = {"weights": 1 << 30, "gradients": 1 << 30, "state": 1 << 31, "step": 1 << 28, "graphs": 1 << 29}
    assert peak(parts) == (1 << 32) + (1 << 28) + (1 << 29)
    [head, row] = memory_table(setups_of([], lambda settings: parts), 1 << 33, 1 << 29, "start", str).splitlines()
    assert head.split()[-2:] == ["sum", "fits"]
    assert row.split() == ["start", "8.00", "1.00", "1.00", "2.00", "0.25", "0.50", "4.75", "yes"]


# -- sizes as text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * 2**30),
        ("24000MiB", 24000 * 2**20),
        ("1.5TB", 15 * 10**11),
        ("85899345920", 80 * 2**30),
        ("85899345920B", 80 * 2**30),
        ("4000000KiB", 4_096_000_000),
    ],
)
def test_a_size_has_a_number_and_a_unit(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "80G", "-1GiB", "1e9", "80 GiB GiB", "nan", "inf", "8_0GB", "8٣GB", "9" * 5000]
)
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(ConfigError, match=r"^--memory .*: give a number with a unit, such as 80GiB"):
        size_in_bytes(text)


@pytest.mark.parametrize("text", ["0", "80", "0.5MiB", "0GiB", "1048575"])
def test_a_size_of_less_than_a_mebibyte_is_an_error(text):
    with pytest.raises(ConfigError, match=rf"^--memory {text}: [\d,]+ bytes are less than a MiB"):
        size_in_bytes(text)
