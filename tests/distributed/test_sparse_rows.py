"""`comms="sharded_sparse"`: the bits of `"sharded"`, whatever rows are touched or announced, and who sends what.

Every rank steps two copies of the same parameters, one with each `comms`, and compares weights and state to the bit.
"""

import copy
import functools
import time
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, ON_GPUS, run
from torch import nn

import quintic
from quintic.optim.plan import row_sharding
from quintic.optim.step import sparse_rows, transports

NUM_STEPS = 5


def on_rank(function):
    """Decorate what a rank runs: its tensors are on its device, and tables travel by rows however small they are."""

    @functools.wraps(function)
    def on_its_device(*args):
        with torch.device(DEVICE), mock.patch.object(row_sharding, "_LEAST_BYTES", 0):
            return function(*args)

    return on_its_device


SHAPES = {
    "even": (128, 64),
    "uneven": (17, 512),
    "odd": (500, 33),
    "few": (3, 4096),
    "stack": (34, 4, 64),
    "small": (64, 8),
    "vector": (8192,),
    "turned": (80, 128),
    "matrix": (24, 40),
}

# On how many ranks which of these may travel by rows.
SHARDED = {
    2: ["even", "few", "odd", "stack", "uneven"],
    3: ["even", "few", "odd", "stack", "uneven"],
    4: ["even", "odd", "stack", "uneven"],
}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the AdamW groups."""
    announces: str = "never"
    """never, always, more (with superfluous rows, in several calls), some (ranks), other (steps on each rank)."""
    gaps: bool = False
    """Gradients are missing."""
    clips: bool = False
    """Gradients are clipped, but for the last step."""


CASES = {
    "found": Case(),
    "announced": Case(announces="always"),
    "accumulated": Case(announces="more"),
    "some": Case(announces="some"),
    "other": Case(announces="other", gaps=True),
    "gaps": Case(gaps=True, options={"weight_decay": 0.1, "adamw_weight_decay": 0.1, "cautious": True}),
    "gaps_announced": Case(
        announces="always", gaps=True, options={"weight_decay": 0.1, "adamw_weight_decay": 0.1, "on_nonfinite": "skip"}
    ),
    "bf16": Case(torch.bfloat16, announces="some"),
    "float64": Case(torch.float64),
    "fp32": Case(torch.bfloat16, {"master": "fp32"}, announces="always"),
    "mantissa": Case(
        torch.bfloat16, {"master": "mantissa", "weight_decay": 0.1, "adamw_weight_decay": 0.1}, announces="more"
    ),
    "step_every": Case(options={"step_every": 2}, announces="always"),
    "clipped": Case(announces="some", clips=True),
    "offload": Case(options={"offload": True}),
    "workspace": Case(options={"max_workspace_bytes": 512}, announces="always"),
}


def generator(*label):
    return torch.Generator(torch.get_default_device()).manual_seed(zlib.crc32(repr(label).encode()))


def make(dtype):
    params = {}
    for name, shape in SHAPES.items():
        value = (torch.randn(shape, generator=generator(name)) * 0.3).to(dtype)
        params[name] = nn.Parameter(value.T if name == "turned" else value)
    return params


def optimizer_of(params, comms, **options):
    """Two groups of tables, so that they are not all in one place, and one of matrices."""
    tables = [name for name in params if name != "matrix"]

    def group(names):
        found = [(name, params[name]) for name in names if name in params]
        return {"params": found, "algorithm": "adamw", "comms": comms, **options}

    groups = [group(tables[::2]), group(tables[1::2])]
    if "matrix" in params:
        groups.insert(1, {"params": [("matrix", params["matrix"])], "comms": "sharded"})
    return quintic.Muon(groups, lr=0.05, adamw_lr=0.01, compute_dtype=torch.float32)


def touch(params, rows, value, name="table"):
    """Give a table a gradient of zeros but for some rows."""
    params[name].grad = torch.zeros_like(params[name])
    params[name].grad[rows] = value


def two_tables(comms="sharded_sparse", **options):
    """Return two copies of a table, and the optimizer of each: with `comms`, and with "sharded"."""
    params, expected = ({"table": nn.Parameter(torch.ones(600, 64))} for _ in range(2))
    return params, expected, optimizer_of(params, comms, **options), optimizer_of(expected, "sharded", **options)


def touched(name, step, rank, num_rows):
    """Return the rows that a rank touches: few at first, then none, then too many, then few of which many are equal."""
    if step == 1:
        return torch.empty(0, dtype=torch.int64)
    if step == 2:
        return torch.arange(num_rows)
    high = num_rows if step else max(1, num_rows // 4)
    return torch.randint(high, (max(1, num_rows // 8),), generator=generator(name, step, rank))


def gradient(name, param, step, rank):
    """Return a gradient with zeros in most rows, and all that could go wrong with them in the others."""
    found = torch.zeros_like(param)
    rows = touched(name, step, rank, param.shape[0])
    values = torch.randn(param.shape, generator=generator(name, step, rank, "values"))
    kind = torch.randint(8, param.shape, generator=generator(name, step, "kind"))
    values[kind == 0] = -0.0
    values[kind == 1] = 1e-40
    found[rows] = values[rows].to(param.dtype)
    if step == 3 and len(rows):
        found[rows[0]] = -0.0
    return found


def is_missing(case, name, step, rank, world_size):
    if not case.gaps:
        return False
    if name in ("uneven", "small", "matrix") and step == 0:
        return True
    return (rank == world_size - 1 and step in (0, 3)) or (name == "few" and rank == 0)


def announce(optimizer, case, name, param, step, rank):
    rows = touched(name, step, rank, param.shape[0])
    announces = case.announces
    if announces == "some":
        announces = "always" if rank % 2 else "never"
    elif announces == "other":
        announces = "always" if (step + rank) % 3 else "never"
    if announces == "always":
        optimizer.announce_rows(param, rows.view(1, -1).repeat(2, 1))
    elif announces == "more":
        superfluous = torch.tensor([0, param.shape[0] - 1], dtype=torch.int32)
        optimizer.announce_rows(name, rows[: len(rows) // 2], more=True)
        optimizer.announce_rows(param, superfluous, more=True)
        optimizer.announce_rows(name, rows[len(rows) // 2 :])


def bits(tensor):
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def differences(params, optimizer, expected, dense):
    """Return the differences between two optimizers."""
    found = []
    for name, param in params.items():
        state, other = optimizer.state[param], dense.state[expected[name]]
        pairs = {"weight": (param.detach(), expected[name].detach()), **{k: (state[k], other[k]) for k in other}}
        found += [f"{name}: {what}" for what, (a, b) in pairs.items() if not torch.equal(bits(a), bits(b))]
    return found


class Watch(ExitStack):
    """Records whose touched rows travel, and the sizes of what does."""

    def __enter__(self):
        self.tables, self.sent = [], []
        start, send = transports.start_mean_of_rows, sparse_rows.start_all_to_all

        def started(bucket, table, group):
            self.tables.append(table.name)
            return start(bucket, table, group)

        def sending(tensor, sends, receives, group):
            if tensor.dtype != torch.uint8:  # marks
                self.sent.append((sum(sends), sum(receives)))
            return send(tensor, sends, receives, group)

        self.enter_context(mock.patch.object(transports, "start_mean_of_rows", started))
        self.enter_context(mock.patch.object(sparse_rows, "start_all_to_all", sending))
        return super().__enter__()


@on_rank
def trajectory(rank, world_size, case):
    params, expected = make(case.dtype), make(case.dtype)
    optimizer = optimizer_of(params, "sharded_sparse", **case.options)
    dense = optimizer_of(expected, "sharded", **case.options)
    every = case.options.get("step_every", 1)
    by_rows = []
    for step in range(NUM_STEPS * every):
        for name, param in params.items():
            if name != "matrix":
                announce(optimizer, case, name, param, step // every, rank)
            missing = is_missing(case, name, step // every, rank, world_size)
            found = None if missing else gradient(name, param, step // every, rank)
            for one in (param, expected[name]):
                if found is not None:
                    one.grad = found.clone() if one.grad is None else one.grad + found
        if case.clips and step + 1 < NUM_STEPS:
            norms = [quintic.clip_grad_norm_(one, 0.1) for one in (optimizer, dense)]
            assert torch.equal(*norms)
        with Watch() as watch:
            optimizer.step()
        dense.step()
        by_rows.append(sorted(watch.tables))
        assert not (wrong := differences(params, optimizer, expected, dense)), f"step {step}: {wrong}"
        for one in (optimizer, dense):
            one.zero_grad()
    saved, other = optimizer.state_dict(), dense.state_dict()
    assert saved["state"].keys() == other["state"].keys()
    for key, tensors in other["state"].items():
        assert saved["state"][key].keys() == tensors.keys()
        assert all(torch.equal(saved["state"][key][what], value) for what, value in tensors.items())
    return by_rows[every - 1 :: every]


SIZES = {1: ["announced"], 2: ["announced", "gaps", "bf16"], 3: CASES, 4: ["found", "accumulated", "other", "mantissa"]}


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in SIZES.items() for name in names])
def test_the_bits_are_those_of_sharded(name, world_size):
    results = run(trajectory, world_size, CASES[name], timeout=100)
    assert all(result == results[0] for result in results)
    sharded = SHARDED.get(world_size, [])
    assert any(results[0]) == (world_size > 1)
    if name in ("found", "announced"):
        # The table of three rows has more than a half of them touched if two ranks touch another one each.
        few, nothing, everything, *_ = ([name for name in tables if name != "few"] for tables in results[0])
        assert few == nothing == [name for name in sharded if name != "few"]
        assert everything == []


@on_rank
def send_few(rank, world_size):
    params = {"table": nn.Parameter(torch.randn(2000, 32, generator=generator(0)))}
    optimizer = optimizer_of(params, "sharded_sparse")
    sent = []
    for rows in ([[5, 999, 1000], [1000, 1999]], [[], [0]], [list(range(1000)), [1007]], [list(range(1000)), [7]]):
        touch(params, rows[rank], 1.0)
        with Watch() as watch:
            optimizer.step()
        sent.append([(sends // 32, receives // 32) for sends, receives in watch.sent])
        [bucket] = optimizer.plan()
        assert all(4 * sum(entries) <= bucket.phase_bytes.gathering for entries in watch.sent)
    return sent, str(optimizer.plan())


def test_only_touched_rows_travel_and_from_half_of_all_on_the_whole_table():
    (first, printed), (second, _) = run(send_few, 2)
    # Sent and received. In the last step the first rank would receive 1001 rows of twice 1000.
    assert first == [[(3, 2)], [(0, 1)], [(1000, 1000)], []]
    assert second == [[(2, 3)], [(1, 0)], [(1, 1)], []]
    assert "adamw, sparse" in printed


def step_and_look(optimizer):
    """Step, and let the host learn what the device found."""
    optimizer.step()
    if ON_GPUS:
        torch.cuda.synchronize()
        optimizer.state_dict()


@on_rank
def fails_softly(rank, world_size):
    """Leave a row out of an announcement; return what the error says, and what became of the step."""
    params = {name: nn.Parameter(torch.randn(600, 64, generator=generator(name))) for name in ("first", "second")}
    optimizer = optimizer_of(params, "sharded_sparse")
    optimizer.step()
    before = {name: param.detach().clone() for name, param in params.items()}
    state = copy.deepcopy(dict(optimizer.state[params["first"]]))
    for name, param in params.items():
        touch(params, [3, 599], 1.0, name)
        optimizer.announce_rows(param, torch.tensor([599, 3]) if rank or param is params["second"] else torch.tensor(3))
    with pytest.raises(RuntimeError, match=r"first: rank 0 has a gradient in rows that it had not announced"):
        step_and_look(optimizer)
    assert torch.equal(params["first"], before["first"])
    assert not torch.equal(params["second"], before["second"])
    for key, value in optimizer.state[params["first"]].items():
        assert torch.equal(value, state[key]), key
    # It goes on.
    optimizer.announce_rows("first", torch.tensor([3, 599]))
    optimizer.step()
    assert not torch.equal(params["first"], before["first"])
    everywhere = [torch.empty_like(params["first"]) for _ in range(world_size)]
    dist.all_gather(everywhere, params["first"].detach())
    assert all(torch.equal(other, params["first"]) for other in everywhere)


def test_a_row_that_was_not_announced_is_an_error_and_not_a_wrong_step():
    run(fails_softly, 3)


@on_rank
def fails_later(rank, world_size):
    """As on a device that the host does not wait for: whoever looks first finds the error, once."""
    params = {"table": nn.Parameter(torch.ones(600, 64))}
    optimizer = optimizer_of(params, "sharded_sparse")
    looks = [
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.announce_rows("table", torch.tensor([1])),
    ]
    for look in looks:
        touch(params, 7, 1.0)
        optimizer.announce_rows("table", torch.tensor([6]))
        with mock.patch.object(sparse_rows.HostCopy, "is_there", False):
            optimizer.step()
        before = params["table"].detach().clone()
        with pytest.raises(RuntimeError, match="table: rank 1 has a gradient in rows"):
            look()
        assert torch.equal(params["table"], before)
    optimizer.step()
    assert not torch.equal(params["table"], before)


def test_devices_tell_later_that_rows_were_not_announced():
    run(fails_later, 2)


@on_rank
def capture(rank, world_size):
    optimizer = optimizer_of({"table": nn.Parameter(torch.ones(600, 64))}, "sharded_sparse")
    optimizer.step()
    with mock.patch.object(sparse_rows, "is_capturing", return_value=True):
        for captured in (optimizer.step, lambda: optimizer.announce_rows("table", torch.tensor([1]))):
            with pytest.raises(
                RuntimeError, match=r"table: .* CUDA graph cannot capture; use .* comms='sharded' to capture"
            ):
                captured()


def test_graphs_cannot_capture_messages_that_vary():
    run(capture, 2)


@on_rank
def switch(rank, world_size):
    """The state of both is divided alike: groups change between them at any time."""
    params, expected, optimizer, dense = two_tables("sharded")
    for comms in ("sharded", "sharded_sparse", "sharded", "sharded_sparse"):
        for group in optimizer.param_groups:
            group["comms"] = comms
        for one in (params, expected):
            touch(one, rank, 0.3)
        with Watch() as watch:
            optimizer.step()
        dense.step()
        assert watch.tables == ["table"] * (comms == "sharded_sparse")
        assert not differences(params, optimizer, expected, dense)


def test_groups_change_their_comms():
    run(switch, 2)


@on_rank
def announces_wrongly(rank, world_size):
    params = make(torch.float32)
    optimizer = optimizer_of(params, "sharded_sparse")
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    rows = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="'nobody', which is no parameter"):
        optimizer.announce_rows("nobody", rows)
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 3\), which is no parameter"):
        optimizer.announce_rows(torch.ones(2, 3), rows)
    with pytest.raises(ValueError, match=r"matrix: rows are announced for comms='sharded_sparse'.*'sharded'"):
        optimizer.announce_rows("matrix", rows)
    for wrong in (torch.ones(3), torch.ones(3, dtype=torch.bool), [1, 2]):
        with pytest.raises(TypeError, match="tensor of integers"):
            optimizer.announce_rows("even", wrong)
    for wrong in ([0, 128], [-1]):
        with pytest.raises(IndexError, match=r"even: rows from .* the parameter has 128"):
            optimizer.announce_rows("even", torch.tensor(wrong, device="cpu"))
    optimizer.announce_rows("small", torch.tensor([10**6]))  # always travels whole
    optimizer.announce_rows("even", rows)
    with pytest.raises(RuntimeError, match=r"even: announce_rows was called again.*more=True.*withdraw_rows\(\)"):
        optimizer.announce_rows("even", rows)
    optimizer.step()
    params["even"].grad = torch.zeros(128, 64).to_sparse()
    with pytest.raises(ValueError, match="even: sparse gradients are not supported"):
        optimizer.step()


def test_mistakes_are_named():
    run(announces_wrongly, 2)


def test_matrices_are_refused():
    param = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"\(weight\): comms='sharded_sparse' is for tables.*use comms='sharded'"):
        quintic.Muon([("weight", param)], comms="sharded_sparse")


def test_without_ranks_announcements_change_nothing():
    params, expected = make(torch.float32), make(torch.float32)
    optimizer, dense = optimizer_of(params, "sharded_sparse"), optimizer_of(expected, "sharded")
    for name, param in params.items():
        param.grad = gradient(name, param, 0, 0)
        expected[name].grad = param.grad.clone()
    optimizer.announce_rows("even", torch.tensor([0]))
    optimizer.withdraw_rows()
    for one in (optimizer, dense):
        one.step()
    assert not differences(params, optimizer, expected, dense)


@on_rank
def leave_steps_out(rank, world_size):
    """Announce, leave the step out, and go on with other rows; the last rank never announces."""
    params, expected, optimizer, dense = two_tables()
    for step in range(4):
        rows = touched("table", 4 + step, rank, 600)
        if rank < world_size - 1:
            optimizer.announce_rows("table", rows)
        if step % 2:
            optimizer.withdraw_rows()
            continue
        for one, comms in ((params, optimizer), (expected, dense)):
            touch(one, rows, float(step + rank + 1))
            comms.step()
        assert not differences(params, optimizer, expected, dense)


def test_a_step_that_is_left_out():
    run(leave_steps_out, 3)


@on_rank
def step_with_nan(rank, world_size, on_nonfinite):
    params, expected, optimizer, dense = two_tables(on_nonfinite=on_nonfinite)
    for step in range(3):
        rows = touched("table", 4 + step, rank, 600)
        for one in (params, expected):
            touch(one, rows, 1.0)
            if rank == 1 and step == 1:
                one["table"].grad[rows[0], 3] = float("nan")
        optimizer.announce_rows("table", rows)
        if on_nonfinite == "raise" and step == 1:
            for one in (optimizer, dense):
                with pytest.raises(FloatingPointError, match="^table" if rank == 1 else "^on rank 1: table"):
                    one.step()
        else:
            optimizer.step()
            dense.step()
        assert not differences(params, optimizer, expected, dense)
    assert bool(params["table"].isnan().any()) == (on_nonfinite == "propagate")


@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip", "raise"])
def test_what_is_not_finite(on_nonfinite):
    run(step_with_nan, 2, on_nonfinite)


@on_rank
def announce_beside_others(rank, world_size):
    """Ranks announce at different times, or not at all, between collectives of the user in the same process group."""
    params, expected = make(torch.float32), make(torch.float32)
    optimizer, dense = optimizer_of(params, "sharded_sparse"), optimizer_of(expected, "sharded")
    for step in (0, 3, 4):
        found = {name: gradient(name, param, step, rank) for name, param in params.items()}
        order = ["even", "uneven", "odd"] if rank % 2 else ["odd", "even"]
        for name in order[: rank + step % 2]:
            optimizer.announce_rows(name, touched(name, step, rank, SHAPES[name][0]))
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)
        assert total.tolist() == [float(sum(range(world_size)))] * 3
        for name, value in found.items():
            params[name].grad, expected[name].grad = value, value.clone()
        optimizer.step()
        dense.step()
        assert not differences(params, optimizer, expected, dense)


def test_ranks_announce_when_they_please():
    run(announce_beside_others, 4)


@on_rank
def announce_and_wait(rank, world_size):
    """Return the seconds of announcing before another rank has come so far, and the messages that it starts."""
    params = {"table": nn.Parameter(torch.ones(600, 64))}
    optimizer = optimizer_of(params, "sharded_sparse")
    for step in range(2):
        params["table"].grad = torch.zeros(600, 64)
        if rank and step:
            time.sleep(1.0)  # what the other rank must not wait for
        start = time.monotonic()
        with mock.patch.object(sparse_rows, "start_all_to_all", wraps=sparse_rows.start_all_to_all) as sending:
            optimizer.announce_rows("table", torch.tensor([rank]))
        elapsed = time.monotonic() - start
        optimizer.step()
    return elapsed, sending.call_count


def test_announcing_sends_marks_and_does_not_wait_for_other_ranks():
    (elapsed, count), _ = run(announce_and_wait, 2)
    assert elapsed < 0.5
    assert count == 1


@on_rank
def copy_and_go_on(rank, world_size):
    params = {"table": nn.Parameter(torch.ones(600, 64)), "late": nn.Parameter(torch.ones(600, 64))}
    optimizer = optimizer_of({"table": params["table"]}, "sharded_sparse")
    expected = copy.deepcopy(params)
    dense = optimizer_of({"table": expected["table"]}, "sharded")

    def step(one, other):
        for name in params:
            rows = touched(name, 4, rank, 600)
            for optimizer_, of_optimizer in ((one, params), (other, expected)):
                touch(of_optimizer, rows, rank + 0.3, name)
                if optimizer_ is one and any(name in group["param_names"] for group in one.param_groups):
                    one.announce_rows(name, rows)
        one.step()
        other.step()

    step(optimizer, dense)
    for one, comms in ((optimizer, "sharded_sparse"), (dense, "sharded")):
        late = (params if one is optimizer else expected)["late"]
        one.add_param_group({"params": [("late", late)], "algorithm": "adamw", "comms": comms, "lr": 0.01})
    step(optimizer, dense)
    step(optimizer, dense)
    assert not differences(params, optimizer, expected, dense)
    copied = copy.deepcopy(optimizer)
    twin = {n: p for group in copied.param_groups for n, p in zip(group["param_names"], group["params"], strict=True)}
    for name, param in twin.items():
        rows = touched(name, 4, rank, 600)
        param.grad = expected[name].grad.clone()
        copied.announce_rows(name, rows)
    copied.step()
    dense.step()
    assert not differences(twin, copied, expected, dense)


def test_groups_added_and_copies():
    run(copy_and_go_on, 2)


@on_rank
def load(rank, world_size, comms, weights, state_dict):
    params = {"table": nn.Parameter(weights.to(DEVICE, copy=True)), "vector": nn.Parameter(torch.ones(4096))}
    optimizer = optimizer_of(params, comms)
    optimizer.load_state_dict(state_dict)
    for name in params:
        touch(params, 5, 0.5, name)
    optimizer.step()
    return params["table"].detach()


@on_rank
def save(rank, world_size):
    params = {"table": nn.Parameter(torch.ones(600, 64)), "vector": nn.Parameter(torch.ones(4096))}
    optimizer = optimizer_of(params, "sharded_sparse")
    for name in params:
        touch(params, 7, 0.5, name)
    optimizer.step()
    return params["table"].detach(), optimizer.state_dict()


def test_state_goes_on_in_other_layouts():
    weights, state_dict = run(save, 3)[0]
    results = [
        run(load, ranks, comms, weights, state_dict)[0]
        for ranks, comms in ((3, "sharded"), (2, "sharded_sparse"), (2, "replicated"))
    ]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-8)
