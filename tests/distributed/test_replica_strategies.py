"""Division of the work on several copies that are cut among ranks: the same bits, no messages between copies."""

import functools
import math
from unittest import mock

import pytest
import torch
import wrappings
from collectives import logged
from harness import DEVICE, run
from models import Awkward, give_gradients, gradient, held_by, local_of, rules
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trajectories import CASES, NO_GAPS, Gaps, disagreements, reference

import quintic
from quintic.optim.comms import collectives as comms
from quintic.optim.comms import communicators
from quintic.optim.step.consensus import RankConsensus

GAPS = Gaps(("stack.2.weight", "attention.qkv.weight", "experts.up", "embedding.weight", "mlp.0.bias"), others=True)
NAMES = ("copy", "shard", "tensor")


def model_of(dtype=torch.float32):
    return Awkward(dtype=dtype)


def wrap(model, mesh):
    """HSDP, on top of tensor parallelism where the mesh has three dimensions."""
    if mesh.ndim == 3:
        wrappings.tensor_parallel(model, mesh["tensor"])
        mesh = mesh["copy", "shard"]
    wrappings.data_parallel(model, mesh)


@functools.cache
def laid_out(shape):
    """A function that lays a model out over a mesh; all ranks must call it."""
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=NAMES[: len(shape)])
    return functools.partial(wrap, mesh=mesh)


def on_hosts(of_ranks):
    """Let each rank be on the host that a list names."""
    return mock.patch.object(comms, "host_name", return_value=str(of_ranks[dist.get_rank()]))


# -- bits -------------------------------------------------------------------------------------------------------------


def compare_on_ranks(rank, world_size, shape, replicas, hosts, gaps, references):
    wrong, ranks = [], range(world_size)
    with on_hosts(hosts or [0] * world_size):
        for title, expected in references.items():
            found = disagreements(
                "awkward", laid_out(shape), title, ranks, expected, rank=rank, gaps=gaps, replicas=replicas
            )
            wrong += [f"{title}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)


def compare_with_one_device(shape, titles, replicas, hosts, gaps=NO_GAPS):
    expected = reference("awkward", titles, range(math.prod(shape)), gaps=gaps)
    run(compare_on_ranks, math.prod(shape), shape, replicas, hosts, gaps, expected, timeout=150)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "titles", "replicas", "hosts"),
    [
        pytest.param((2, 2), ("plain", "neuron", "mantissa", "workspace"), "repeat", None, marks=pytest.mark.slow),
        ((2, 2), ("plain", "neuron", "mantissa", "workspace"), "divide", None),
        ((2, 2), ("neuron",), "auto", (0, 0, 1, 1)),
        ((4, 2), ("neuron",), "repeat", None),
        pytest.param((2, 4), ("neuron", "bf16"), "repeat", None, marks=pytest.mark.slow),
        ((2, 2, 2), ("neuron", "mantissa"), "repeat", None),
        pytest.param((2, 2, 2), ("neuron",), "divide", None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_who_divides_the_work_does_not_change_the_numbers(shape, titles, replicas, hosts):
    compare_with_one_device(shape, titles, replicas, hosts)


def test_missing_gradients_of_another_copy_count():
    compare_with_one_device((2, 2), ("neuron",), "repeat", None, GAPS)


# -- messages ---------------------------------------------------------------------------------------------------------


def optimizer_of(model, title="plain", **options):
    case = CASES[title]
    groups = quintic.param_groups(model, rules=rules(model, multipliers=case.multipliers))
    return quintic.Muon(groups, lr=0.05, **case.options, **options)


class Messages:
    """Between which ranks the collectives of steps went, those apart that sum up at most a number per parameter."""

    def __init__(self):
        self.sets, self.counting = set(), set()
        self._is_step = False

    def note(self, call):
        ranks = tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(call.group)))
        if self._is_step:
            (self.counting if call.kind == "all_reduce" and call.sent.dtype == torch.int32 else self.sets).add(ranks)

    def of_steps(self):
        original = RankConsensus.validate_plans

        def agree(agreements):
            self._is_step = False
            original(agreements)
            self._is_step = True

        return mock.patch.object(RankConsensus, "validate_plans", agree)


def find_messages(rank, world_size, shape, replicas, hosts, options):
    """Between which ranks the step sends directions, updates and factors; between which it counts."""
    found = Messages()
    with on_hosts(hosts or [0] * world_size), logged(found.note):
        model = model_of()
        laid_out(shape)(model)
        held = held_by(model_of, laid_out(shape))
        optimizer = optimizer_of(model, "neuron", replicas=replicas, on_nonfinite="skip", **options)
        with found.of_steps():
            for step in range(2):
                named = model.named_parameters()
                give_gradients(model, {n: gradient(n, p.shape, p.dtype, step) for n, p in named}, held)
                optimizer.step()
    return found.sets, found.counting


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "replicas", "hosts", "options", "expected"),
    [
        slow((2, 2), "divide", None, {}, [{(0, 1, 2, 3)}] * 4),
        slow((2, 2), "repeat", None, {}, [{(0, 1)}] * 2 + [{(2, 3)}] * 2),
        slow((2, 2), "repeat", None, {"max_workspace_bytes": 512}, [{(0, 1)}] * 2 + [{(2, 3)}] * 2),
        slow((2, 2), "repeat", None, {"offload": True}, [{(0, 1)}] * 2 + [{(2, 3)}] * 2),
        ((2, 2), "auto", (0, 0, 1, 1), {}, [{(0, 1)}] * 2 + [{(2, 3)}] * 2),
        slow((2, 4), "repeat", None, {}, [{(0, 1, 2, 3)}] * 4 + [{(4, 5, 6, 7)}] * 4),
        # Two of four copies are on one host.
        slow((4, 2), "auto", (0, 0, 0, 0, 1, 1, 1, 1), {}, None),
        # Biases and the like are copies on ranks of one tensor-parallel group, too.
        slow((2, 2, 2), "repeat", (0, 0, 0, 0, 1, 1, 1, 1), {}, None),
    ],
    ids=str,
)
def test_what_is_repeated_is_not_sent_between_copies(shape, replicas, hosts, options, expected):
    everyone = tuple(range(math.prod(shape)))
    for rank, (sets, counting) in enumerate(run(find_messages, len(everyone), shape, replicas, hosts, options)):
        # Whether all copies have a gradient, a number per parameter, is asked everywhere.
        assert everyone in counting
        if expected is None:
            assert {hosts[other] for ranks in sets for other in ranks} == {hosts[rank]}
        else:
            assert sets == expected[rank]


# -- changes and mistakes ---------------------------------------------------------------------------------------------


def take_steps(model, held, optimizer, steps):
    for step in steps:
        give_gradients(model, {n: gradient(n, p.shape, p.dtype, step) for n, p in model.named_parameters()}, held)
        optimizer.step()


def everything(model, optimizer):
    params = dict(model.named_parameters())
    tensors = {(name, key): value for name, p in params.items() for key, value in optimizer.state[p].items()}
    return {key: local_of(value.detach()).clone() for key, value in {**params, **tensors}.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def change_between_steps(rank, world_size):
    results = []
    # What "auto" chooses depends on the device; at the end both divide the work, and with it the state.
    for values in (("divide",) * 3, ("repeat", "auto", "divide")):
        model = model_of()
        laid_out((2, 2))(model)
        optimizer = optimizer_of(model, "neuron", replicas=values[0])
        for step, value in enumerate(values):
            for group in optimizer.param_groups:
                group["replicas"] = value
            take_steps(model, held_by(model_of, laid_out((2, 2))), optimizer, [step])
        results.append(everything(model, optimizer))
    assert_same(*results)


def test_the_option_may_change_between_steps():
    run(change_between_steps, 4, timeout=100)


FIRST = {
    "step": lambda optimizer: None,
    "clip": lambda optimizer: quintic.clip_grad_norm_(optimizer, math.inf, scope="all"),
    "reference": quintic.reference_step,
}


def connect_late(rank, world_size, first):
    """Ranks that were not connected at construction, as those of a model that is moved to its device later."""
    with on_hosts([0, 0, 1, 1]):
        model = model_of()
        laid_out((2, 2))(model)
        held = held_by(model_of, laid_out((2, 2)))
        with mock.patch.object(communicators, "supports_device", return_value=False):
            optimizer = optimizer_of(model, "neuron")
        if rank < 2:  # some ask early
            assert optimizer.plan().choices == ()
            assert {bucket.ranks for bucket in optimizer.plan() if bucket.needs_comm} == {(0, 1, 2, 3)}
        give_gradients(model, {n: gradient(n, p.shape, p.dtype, 0) for n, p in model.named_parameters()}, held)
        FIRST[first](optimizer)
        take_steps(model, held, optimizer, [1])
        plan = optimizer.plan()
        assert {bucket.ranks for bucket in plan if bucket.needs_comm} == {((0, 1), (2, 3))[rank // 2]}
        (choice,) = plan.choices
        assert choice.strategy == "repeat"
        assert f"\n{choice}" in plan.to_table(width=1000)
        assert "\ncounts and GFLOP of this rank's matrices; other ranks" in plan.to_table(width=1000)
        early = model_of()
        laid_out((2, 2))(early)
        other = optimizer_of(early, "neuron")
        assert other.plan().choices == plan.choices
        if first != "reference":  # which has not all of a step's bits
            take_steps(early, held, other, [1])
            assert_same(everything(model, optimizer), everything(early, other))


@pytest.mark.parametrize("first", [pytest.param(way, marks=() if way == "step" else pytest.mark.slow) for way in FIRST])
def test_hosts_that_are_known_late(first):
    run(connect_late, 4, first, timeout=100)


def disagree(rank, world_size):
    model = model_of()
    laid_out((2, 2))(model)
    optimizer = optimizer_of(model, replicas="divide" if rank else "repeat")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"replicas=repeat.*rank 1 has .*replicas=divide"):
        optimizer.step()


def test_ranks_that_disagree_are_an_error():
    run(disagree, 4, timeout=60)


def measure_all(rank, world_size):
    model = model_of()
    laid_out((2, 2))(model)
    optimizer = optimizer_of(model, replicas="repeat", telemetry_every=1)
    take_steps(model, held_by(model_of, laid_out((2, 2))), optimizer, [0])
    return {name: len(of_matrices) for name, of_matrices in optimizer.telemetry().items()}, optimizer.last_step()


def test_the_ranks_of_each_copy_measure_every_matrix():
    by_rank = run(measure_all, 4, timeout=60)
    for one, other in zip(by_rank[:2], by_rank[2:], strict=True):
        assert one == other
    measured = [dict(by_rank[0][0]), dict(by_rank[1][0])]
    counts = {name: sum(found.get(name, 0) for found in measured) for name in {*measured[0], *measured[1]}}
    views = {g["param_names"][i]: g["view"].shapes(p.shape) for g in groups_of() for i, p in enumerate(g["params"])}
    assert counts == {name: sum(b for b, m, n in shapes if m * n) for name, shapes in views.items() if shapes[0][1]}


def groups_of():
    """The groups of matrices of a whole model."""
    model = model_of()
    return [group for group in optimizer_of(model).param_groups if group["algorithm"] == "muon"]
