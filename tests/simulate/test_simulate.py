"""Rehearsals: all ranks at a time against rank by rank, what is conserved, and layouts by name."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import quintic
from quintic.errors import ConfigError
from quintic.optim.comms.sharing import gather_layouts
from quintic.optim.layout.layouts import mesh_layout
from quintic.optim.plan.exchange import traffic_of
from quintic.optim.plan.kinds import direction_dtype, update_dtype
from quintic.optim.plan.planning import build_plan
from quintic.optim.plan.replicas import choose_replica_strategies, layouts_for_work
from quintic.optim.plan.schedule import overlapping_bytes
from quintic.simulate.parallelism import layouts_by_name
from quintic.simulate.planned_models import Decoder, Sizes, planned_model
from quintic.simulate.simulate import simulate_plan

MESHES = [
    ((1,), ("fsdp",)),
    ((3,), ("fsdp",)),
    ((5,), ("dp",)),
    ((3,), ("tp",)),
    ((2, 3), ("replicate", "fsdp")),
    ((3, 2), ("replicate", "fsdp")),
    ((3, 2), ("fsdp", "tp")),
    ((4,), ("ep",)),
    ((2, 2), ("fsdp", "ep")),
    ((2, 3, 2), ("replicate", "fsdp", "tp")),
    ((2, 2, 2), ("fsdp", "ep", "tp")),
]


def optimizer_of(model, **options):
    return quintic.Muon(quintic.param_groups(model), **options)


def decoder(**sizes):
    common = {"layers": 2, "width": 10, "heads": 2, "kv_heads": 1, "head_dim": 6, "hidden": 7, "vocab_size": 19}
    with torch.device("meta"):
        return Decoder(Sizes(**(common | sizes)))


sizes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "width": st.integers(1, 9),
        "heads": st.integers(1, 3),
        "kv_heads": st.integers(1, 3),
        "head_dim": st.integers(1, 4),
        "hidden": st.integers(1, 9),
        "tied": st.booleans(),
        "qk_norm": st.booleans(),
        "experts": st.integers(1, 5),
    }
)
options = st.fixed_dictionaries(
    {
        "normalize": st.sampled_from([None, "neuron"]),
        "master": st.sampled_from([None, "fp32", "mantissa", "8bit"]),
        "max_workspace_bytes": st.sampled_from([None, 2000, 2**20]),
        "replicas": st.sampled_from(["auto", "divide", "repeat"]),
    }
)


def plans_of(optimizer, mesh, names, node_size):
    """The plan of every rank, each made alone."""
    comms = "averaged" if "dp" in names else "none"
    groups = [replace(group, comms=comms) for group in optimizer._plans.current_groups()]
    found = layouts_by_name(groups, mesh, names)
    if len(found[0][0].ranks) == 1:
        found = [[None] * len(layouts) for layouts in found]
    layouts = [gather_layouts(group, of_group) for group, of_group in zip(groups, found, strict=True)]
    ranks = tuple(range(torch.Size(mesh).numel()))
    hosts = {} if node_size is None else {ranks: [rank // node_size for rank in ranks]}
    choices = choose_replica_strategies(groups, layouts, hosts)
    return [build_plan(groups, layouts_for_work(groups, layouts, choices, hosts, rank), rank) for rank in ranks]


def bytes_sent(bucket, normalizes, nodes=None):
    """The bytes that one rank sends for a bucket, by its exchange; with `nodes`, those to other nodes."""
    exchange = bucket.exchange
    here = exchange.position
    nodes = exchange.ranks if nodes is None else [nodes[rank] for rank in exchange.ranks]
    elsewhere = [other for other, node in enumerate(nodes) if node != nodes[here]]
    others = len(elsewhere)
    directions = max(direction_dtype(kind.form, bucket.dtype).itemsize for kind in bucket.units.kinds)
    updates = max(update_dtype(kind.form, bucket.dtype).itemsize for kind in bucket.units.kinds)
    # Padded to the longest, but where few ranks own anything: they broadcast it.
    longest = exchange.num_owned if exchange.has_few_owners else max(exchange.counts)
    factors = 2 * 4 * longest * others * sum(max(kind.shape) for kind in bucket.units.kinds) * normalizes
    if exchange.is_replicated:
        return longest * torch.Size(exchange.unit_shape).numel() * updates * others + factors
    gather = sum(exchange.gathering.sends[other] for other in elsewhere)
    scatter = sum(exchange.scattering.sends[other] for other in elsewhere)
    return gather * directions + scatter * updates + factors


@pytest.mark.slow
@given(st.sampled_from(MESHES), sizes, options, st.sampled_from([None, 1, 2, 3, 4]))
def test_all_ranks_at_a_time_are_the_plans_of_each_rank(where, sizes, options, node_size):
    mesh, names = where
    optimizer = optimizer_of(decoder(**sizes).to(torch.bfloat16), **options)
    simulation = simulate_plan(optimizer, mesh, names, device="meta", node_size=node_size)
    for rank, plan in enumerate(plans_of(optimizer, mesh, names, node_size)):
        loads = [load for load in simulation.bucket_loads if load.present[rank] and load.shapes]
        buckets = [bucket for bucket in plan if bucket.algorithm == "muon"]
        normalizes = options["normalize"] is not None
        # The plan is in the order in which a step runs, the simulation in that of the groups.
        assert sorted(
            (one.method, *(int(of_ranks[rank]) for of_ranks in (one.flops, one.workspace_bytes, one.bytes_sent)))
            for one in loads
        ) == sorted(
            (one.method, one.flops, one.workspace_bytes, bytes_sent(one, normalizes) if one.needs_comm else 0)
            for one in buckets
        )
        assert sum(load.exchange_bytes is not None for load in loads) == sum(bucket.needs_comm for bucket in buckets)
        nodes = [other // (node_size or 64) for other in range(simulation.num_ranks)]
        crossing = sum(bytes_sent(bucket, normalizes, nodes) for bucket in buckets if bucket.needs_comm)
        assert simulation.bytes_between[rank] == crossing
        # Of what AdamW updates these plans have the whole.
        sizes = [int(load.workspace_bytes[rank]) for load in simulation.bucket_loads if not load.shapes]
        alone = max([*sizes, *(bucket.workspace_bytes for bucket in buckets if not bucket.needs_comm)], default=0)
        stages = [bucket.phase_bytes for bucket in buckets if bucket.needs_comm]
        assert simulation.workspace_bytes[rank] == overlapping_bytes(stages, plan.schedule, alone)


@given(st.sampled_from(MESHES), sizes, options)
def test_what_is_sent_is_received(where, sizes, options):
    simulation = simulate_plan(optimizer_of(decoder(**sizes), **options), *where)
    assert simulation.bytes_sent.sum() == simulation.bytes_received.sum()
    for load in simulation.bucket_loads:
        if load.exchange_bytes is None:
            assert not load.bytes_sent.any()
            continue
        sent, received = traffic_of(load.exchange_bytes)
        assert sent.sum() == received.sum()
        assert bool((sent >= 0).all())
        assert bool((received >= 0).all())


@pytest.mark.parametrize("mesh", [(6,), (2, 3)], ids=str)
def test_traffic_is_that_between_all_ranks(mesh):
    names = ("fsdp",) if len(mesh) == 1 else ("replicate", "fsdp")
    for load in simulate_plan(optimizer_of(decoder()), mesh, names).bucket_loads:
        if load.exchange_bytes is None:
            continue
        sent = torch.zeros(6, dtype=torch.int64)
        for rank, other in itertools.permutations(range(6), 2):
            exchange = replace(load.exchange_bytes.exchange, position=rank)
            sent[rank] += exchange.gathering.sends[other] * load.exchange_bytes.direction
            sent[rank] += exchange.scattering.sends[other] * load.exchange_bytes.update
        assert torch.equal(traffic_of(load.exchange_bytes)[0], sent)


@pytest.mark.parametrize(("mesh", "names"), [where for where in MESHES if {"fsdp", "dp"} & set(where[1])], ids=str)
def test_every_matrix_is_orthogonalised_once(mesh, names):
    optimizer = optimizer_of(decoder(experts=3))
    assert int(simulate_plan(optimizer, mesh, names, device="meta").flops.sum()) == optimizer.plan().flops


@pytest.mark.parametrize(("master", "bytes_per_entry"), [("mantissa", 2), ("8bit", 1)])
@pytest.mark.parametrize("num_ranks", [1, 2, 7])
def test_fsdp_divides_the_state(num_ranks, master, bytes_per_entry):
    model = decoder().to(torch.bfloat16)
    groups = quintic.param_groups(model)
    simulation = simulate_plan(quintic.Muon(groups, master=master), (num_ranks,), ("fsdp",))
    adamw = [param for group in groups if group["algorithm"] == "adamw" for param in group["params"]]
    entries = sum(param.numel() for param in model.parameters())
    expected = (4 + bytes_per_entry) * entries + 4 * sum(param.numel() for param in adamw) + 4 * len(adamw) * num_ranks
    assert int(simulation.state_bytes.sum()) == expected


def test_the_device_decides_what_runs():
    methods = {
        device: {
            load.method for load in simulate_plan(optimizer_of(decoder()), (2,), ("fsdp",), device=device).bucket_loads
        }
        for device in ("cuda", "cpu")
    }
    assert methods == {"cuda": {"polar_express fp16", "adamw"}, "cpu": {"polar_express fp32", "adamw"}}


# -- layouts by name --------------------------------------------------------------------------------------------------


def test_a_name_says_how_parameters_are_cut():
    optimizer = optimizer_of(decoder(experts=4))
    names = ("replicate", "fsdp", "ep", "tp")
    ranks = torch.arange(48).view(2, 3, 4, 2)
    found = {}
    groups = optimizer._plans.current_groups()
    for group, layouts in zip(groups, layouts_by_name(groups, ranks.shape, names), strict=True):
        found |= dict(zip(group.param_names, zip(group.params, layouts, strict=True), strict=True))
    dense, layer = ranks.view(2, 12, 2), "model.layers.0."
    for name, mesh, placements in (
        (f"{layer}self_attn.q_proj.weight", dense, (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
        (f"{layer}self_attn.o_proj.weight", dense, (Replicate(), Shard(0), Shard(1))),
        ("model.embed_tokens.weight", dense, (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
        (f"{layer}mlp.gate.weight", dense, (Replicate(), Shard(0), Replicate())),
        ("model.norm.weight", dense, (Replicate(), Shard(0), Replicate())),
        (
            f"{layer}mlp.experts.gate_up_proj",
            ranks,
            (Replicate(), _StridedShard(0, split_factor=4), Shard(0), Shard(1)),
        ),
        (f"{layer}mlp.experts.down_proj", ranks, (Replicate(), _StridedShard(0, split_factor=4), Shard(0), Shard(2))),
    ):
        param, layout = found[name]
        assert layout == mesh_layout(param.shape, mesh, placements), name


def test_tensor_parallelism_knows_stored_transposes_and_biases():
    optimizer = optimizer_of(planned_model("gpt2", torch.float32))
    boxes = {}
    groups = optimizer._plans.current_groups()
    for group, layouts in zip(groups, layouts_by_name(groups, (2,), ("tp",)), strict=True):
        boxes |= {name: layout.box_of(1) for name, layout in zip(group.param_names, layouts, strict=True)}
    block = "transformer.h.0."
    assert boxes[f"{block}mlp.c_fc.weight"] == ((0, 768), (1536, 3072))
    assert boxes[f"{block}mlp.c_fc.bias"] == ((1536, 3072),)
    assert boxes[f"{block}mlp.c_proj.weight"] == ((1536, 3072), (0, 768))
    assert boxes[f"{block}mlp.c_proj.bias"] == ((0, 768),)
    assert boxes[f"{block}ln_1.weight"] == ((0, 768),)


@pytest.mark.parametrize(
    ("mesh", "names", "message"),
    [
        ((), (), "mesh=: give at least one rank"),
        ((0,), ("fsdp",), "mesh=0: give at least one rank"),
        ((8,), ("zero",), "layout=zero: 'zero' is unknown; choose from dp, replicate, fsdp, ep, tp"),
        ((8, 4), ("fsdp",), "layout=fsdp: 1 names for the 2 dimensions of mesh 8x4"),
        ((2, 2), ("tp", "fsdp"), "layout=tp,fsdp: give each name once, in the order"),
        ((2, 2), ("fsdp", "fsdp"), "layout=fsdp,fsdp: give each name once"),
        ((2, 2), ("dp", "tp"), "layout=dp,tp: dp cannot be combined"),
        ((2,), ("ep",), "layout=ep: ep shards nothing, because the model has no stacked experts"),
    ],
)
def test_what_is_no_mesh_is_an_error(mesh, names, message):
    with pytest.raises(ConfigError) as error:
        simulate_plan(optimizer_of(decoder()), mesh, names)
    assert str(error.value).startswith(message)


def test_tensor_parallelism_that_cuts_nothing_is_an_error():
    optimizer = optimizer_of(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match="tp shards nothing"):
        simulate_plan(optimizer, (2,), ("tp",))


# -- size -------------------------------------------------------------------------------------------------------------


def test_seventy_billion_parameters_on_a_thousand_ranks_take_seconds():
    begin = time.perf_counter()
    optimizer = optimizer_of(planned_model("llama-3-70b", torch.bfloat16), normalize="neuron")
    simulation = simulate_plan(optimizer, (128, 8), ("fsdp", "tp"))
    assert time.perf_counter() - begin < 20
    assert simulation.num_ranks == 1024
    assert sum(load.num_matrices for load in simulation.bucket_loads) == 80 * 7
    # 560 matrices for 1,024 ranks: the busiest has one of the largest, and nothing else.
    largest = max(int(load.flops.sum()) // load.num_matrices for load in simulation.bucket_loads if load.num_matrices)
    assert simulation.balance == pytest.approx(largest * 1024 / int(simulation.flops.sum()))


def test_balance_of_more_operations_than_64_bits_hold_for_all_ranks():
    param = torch.nn.Parameter(torch.empty(2**17, 2**17, device="meta"))
    simulation = simulate_plan(quintic.Muon([param]), (1024,), ("fsdp",))
    # One matrix: one rank does everything.
    assert simulation.flops.count_nonzero() == 1
    assert int(simulation.flops.sum()) * 1024 > 2**63
    assert simulation.balance == 1024.0
