"""`state_dtype="int8"`: options that change, copies, checkpoints, host memory, bad and missing gradients, `verify`."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_bf16_state import ORTHOGONALIZE, give, optimizer_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import quintic
from quintic.interchange import export_torch_state, import_state, import_torch_state
from quintic.optim.numeric.int8_state import is_packed, read_packed, store_packed_
from quintic.optim.rules import update
from quintic.optim.rules.update import adamw_, momentum_
from quintic.optim.step import torch_backend

AVERAGES = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq"})
DTYPES = {"momentum_buffer": torch.int8, "exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
WIDE = {None: torch.float32, "bf16": torch.bfloat16}
ALL = (None, "bf16", "int8")
# Parameters whose averages are of 8 bits.
PACKED = ("matrix", "wide", "nothing", "table")


def params_of(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = {"matrix": (6, 16), "wide": (3, 24), "odd": (4, 5), "nothing": (0, 8), "table": (9, 8), "vector": (8,)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def stepped(dtype=torch.float32, steps=3, **options):
    params = params_of(dtype)
    optimizer = optimizer_of(params, **options)
    for step in range(steps):
        give(params, step)
        optimizer.step()
    return params, optimizer


def averages(params, optimizer):
    return {
        (name, key): optimizer.state[p][key].clone()
        for name, p in params.items()
        for key in AVERAGES
        if key in optimizer.state[p]
    }


def everything(params, optimizer):
    return [t.detach().clone() for p in params.values() for t in (p, *optimizer.state[p].values())]


def assert_dtypes(found, state_dtype):
    for (name, key), value in found.items():
        if state_dtype == "int8":
            assert value.dtype == (DTYPES[key] if name in PACKED else torch.float32), name
        else:
            assert value.dtype == WIDE[state_dtype]


def assert_converted(found, source):
    """The numbers are the source's, as the dtype holds them."""
    assert found.keys() == source.keys()
    for key, value in found.items():
        expected = source[key]
        if expected.dtype != value.dtype:
            expected = read_packed(expected) if is_packed(expected) else expected.float()
            if is_packed(value):
                numbers, expected = expected, torch.empty_like(value)
                store_packed_(expected, numbers)
            else:
                expected = expected.to(value.dtype)
        assert torch.equal(value, expected), key


# -- from one dtype to another -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("after", ALL)
@pytest.mark.parametrize("before", ALL)
def test_a_changed_option_converts_state(before, after, offload):
    params, optimizer = stepped(state_dtype=before, master="fp32", normalize="neuron", offload=offload)
    source = averages(params, optimizer)
    assert_dtypes(source, before)
    for group in optimizer.param_groups:
        group["state_dtype"] = after
    optimizer.plan()
    found = averages(params, optimizer)
    assert_dtypes(found, after)
    assert_converted(found, source)
    give(params, 9)
    optimizer.step()
    assert_dtypes(averages(params, optimizer), after)


def test_there_and_back_keeps_the_bytes():
    params, optimizer = stepped(state_dtype="int8")
    source = averages(params, optimizer)
    for state_dtype in (None, "int8"):
        for group in optimizer.param_groups:
            group["state_dtype"] = state_dtype
        optimizer.plan()
    assert_converted(averages(params, optimizer), source)


def test_groups_may_differ():
    params = params_of()
    optimizer = quintic.Muon([{"params": [params["matrix"]], "state_dtype": "int8"}], **ORTHOGONALIZE)
    optimizer.add_param_group({"params": [params["wide"]]})
    optimizer.add_param_group({"params": [params["table"]], "algorithm": "adamw", "state_dtype": "int8"})
    dtypes = [found.dtype for name in ("matrix", "wide", "table") for found in optimizer.state[params[name]].values()]
    assert dtypes == [torch.int8, torch.float32, torch.float32, torch.int8, torch.uint8]


# -- copies and checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))])
def test_copies_keep_the_bytes_and_go_on_alike(copied):
    params, optimizer = stepped(state_dtype="int8")
    params_copy, twin = copied((params, optimizer))
    assert_dtypes(averages(params_copy, twin), "int8")
    for found, one in ((params, optimizer), (params_copy, twin)):
        give(found, 7)
        one.step()
    assert all(map(torch.equal, everything(params, optimizer), everything(params_copy, twin)))


def through_state_dict(optimizer, twin, params, twin_params):
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def through_torch(optimizer, twin, params, twin_params):
    model, twin_model = (nn.ParameterDict(found) for found in (params, twin_params))
    set_optimizer_state_dict(twin_model, twin, get_optimizer_state_dict(model, optimizer))


@pytest.mark.parametrize("load", [through_state_dict, through_torch])
@pytest.mark.parametrize("own", ALL)
@pytest.mark.parametrize("saved", ALL)
def test_loaded_state_takes_the_dtype_of_the_option_that_is_set(saved, own, load):
    params, optimizer = stepped(torch.bfloat16, state_dtype=saved, master="mantissa")
    twin_params = params_of(torch.bfloat16)
    twin = optimizer_of(twin_params, state_dtype=own, master="mantissa")
    load(optimizer, twin, params, twin_params)
    assert [group["state_dtype"] for group in twin.param_groups] == [own, own]
    found = averages(twin_params, twin)
    assert_dtypes(found, own)
    assert_converted(found, averages(params, optimizer))
    if saved == own:
        for group, one in ((params, optimizer), (twin_params, twin)):
            give(group, 8)
            for param, twin_param in zip(params.values(), twin_params.values(), strict=True):
                twin_param.data.copy_(param.data) if one is optimizer else None
            one.step()
        assert_converted(averages(twin_params, twin), averages(params, optimizer))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("own", ALL)
@pytest.mark.parametrize("saved", ALL)
def test_a_checkpoint_that_was_cast_on_loading_is_refused(saved, own, tmp_path):
    params, optimizer = stepped(state_dtype=saved)
    twin_params, twin = stepped(steps=1, state_dtype=own)
    dcp.save(optimizer.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    found = twin.state_dict()
    # Into tensors of its own, as a model that is not to be changed by a failure.
    found = copy.deepcopy(found)
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    before = everything(twin_params, twin)
    if "int8" in (saved, own) and saved != own:
        with pytest.raises(ValueError, match=f"state_dtype={saved!r}: torch.distributed.checkpoint.load has cast"):
            twin.load_state_dict(found)
        assert all(map(torch.equal, everything(twin_params, twin), before))
        # As the message says: the same option, and the other one after.
        for group in twin.param_groups:
            group["state_dtype"] = saved
        found = twin.state_dict()
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        twin.load_state_dict(found)
        for group in twin.param_groups:
            group["state_dtype"] = own
        twin.plan()
    else:
        twin.load_state_dict(found)
    assert_dtypes(averages(twin_params, twin), own)
    assert_converted(averages(twin_params, twin), averages(params, optimizer))


WHOLE, CUT = quintic.Matrix(), quintic.Heads(4, dim=1)


def of_form(view, order, state_dtype):
    """A matrix whose momentum is of 8 bits if the option says so, the view cuts no groups, and rows lie together."""
    torch.manual_seed(0)
    whole = torch.randn(6, 16)
    param = nn.Parameter(whole if order == "rows" else whole.mT.contiguous().mT)
    return param, quintic.Muon([{"params": [("matrix", param)], "view": view}], lr=0.01, state_dtype=state_dtype)


@pytest.mark.filterwarnings("ignore:parameters are not what they were")
@pytest.mark.parametrize(
    "own", [(WHOLE, "rows", "int8"), (CUT, "rows", "int8"), (WHOLE, "columns", "int8"), (CUT, "rows", None)]
)
@pytest.mark.parametrize("saved", [(WHOLE, "rows", "int8"), (CUT, "rows", "int8"), (WHOLE, "columns", "int8")])
def test_momentum_goes_on_where_its_groups_may_not_be_stored_together_any_more(saved, own):
    """Another view or order in memory also decides whether averages are of 8 bits; nothing was cast."""
    param, optimizer = of_form(*saved)
    twin_param, twin = of_form(*own)
    for each, its_optimizer in ((param, optimizer), (twin_param, twin)):
        each.grad = torch.randn(6, 16)
        its_optimizer.step()
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()), strict=saved[0] == own[0])
    found, expected = twin.state[twin_param]["momentum_buffer"], optimizer.state[param]["momentum_buffer"]
    assert is_packed(found) == (own == (WHOLE, "rows", "int8"))
    values = read_packed(expected) if is_packed(expected) else expected
    if is_packed(found):
        stored = torch.empty_like(found)
        store_packed_(stored, values.contiguous())
        assert torch.equal(found, stored)
    else:
        assert torch.equal(found, values)


def test_state_goes_to_pytorch_as_numbers_and_back():
    params, optimizer = stepped(state_dtype="int8")
    exported = export_torch_state(optimizer)
    found = [
        state[key] for part in exported.values() for state in part["state"].values() for key in AVERAGES & state.keys()
    ]
    assert {value.dtype for value in found} == {torch.float32}
    twin_params = params_of()
    twin = optimizer_of(twin_params, state_dtype="int8")
    import_torch_state(twin, *exported.values())
    assert_dtypes(averages(twin_params, twin), "int8")
    assert_converted(averages(twin_params, twin), averages(params, optimizer))


def test_imported_momentum_of_another_scale_is_rounded_once():
    param = nn.Parameter(torch.randn(40, 48))
    optimizer = quintic.Muon([("weight", param)], state_dtype="int8", momentum=0.95)
    saved, expected = torch.randn(40, 48), torch.empty(40, 48, dtype=torch.int8)
    state = {"state": {0: {"momentum_buffer": saved}}, "param_groups": [{"params": [0], "momentum": 0.95}]}
    import_state(optimizer, state, source="keller_jordan_2024", names=["weight"])
    store_packed_(expected, saved * torch.tensor(1 - 0.95))
    assert torch.equal(optimizer.state[param]["momentum_buffer"], expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_state_is_copied_to_another_parameter(algorithm, transposed):
    torch.manual_seed(0)
    source = nn.Parameter(torch.randn(16, 24))
    target = nn.Parameter(torch.randn(24, 16) if transposed else torch.randn(16, 24))
    groups = [{"params": [("source", source), ("target", target)], "algorithm": algorithm}]
    optimizer = quintic.Muon(groups, state_dtype="int8", **ORTHOGONALIZE)
    for _ in range(3):
        for param in (source, target):
            param.grad = torch.randn(param.shape)
        optimizer.step()
    optimizer.copy_state("source", "target", transposed=transposed)
    for key in AVERAGES:
        if key not in optimizer.state[source]:
            continue
        one, other = optimizer.state[source][key], optimizer.state[target][key]
        assert other.dtype == one.dtype == DTYPES[key]
        expected = one
        if transposed:
            expected = torch.empty_like(other)
            store_packed_(expected, read_packed(one).mT)
        assert torch.equal(other, expected)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_offloaded_state_gives_the_same_bits():
    params, optimizer = stepped(state_dtype="int8", normalize="neuron")
    options = {"offload": True, "max_workspace_bytes": 600}
    twin_params, twin = stepped(state_dtype="int8", normalize="neuron", **options)
    assert_dtypes(averages(twin_params, twin), "int8")
    assert all(map(torch.equal, everything(params, optimizer), everything(twin_params, twin)))


def test_a_bad_gradient_is_skipped():
    params, optimizer = stepped(state_dtype="int8", on_nonfinite="skip")
    before = everything(params, optimizer)
    give(params, 5)
    params["table"].grad[0, 0] = torch.inf
    optimizer.step()
    assert all(map(torch.equal, everything(params, optimizer), before))


def test_without_a_gradient_the_bytes_stay():
    params, optimizer = stepped(state_dtype="int8")
    before = averages(params, optimizer)
    give(params, 5)
    params["matrix"].grad = params["table"].grad = None
    optimizer.step()
    after = averages(params, optimizer)
    for key, value in before.items():
        is_same = torch.equal(after[key], value)
        assert is_same == (key[0] in ("matrix", "table", "nothing")), key


# -- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"normalize": "neuron"}, {"offload": True}, {"update_rule": "adamuon"}], ids=str
)
def test_verify_finds_a_right_step_right(options):
    params, optimizer = stepped(state_dtype="int8", **options)
    model = nn.ParameterDict(params)
    give(params, 5)
    before = everything(params, optimizer)
    report = quintic.verify(model, optimizer)
    assert report.ok, str(report)
    assert report.is_bitwise
    assert all(map(torch.equal, everything(params, optimizer), before))


def moved(monkeypatch, factor):
    """Let the real step make averages that are off by a factor; the reference has functions of its own."""

    def momentum(momenta, gradients, **options):
        found = momentum_(momenta, gradients, **options)
        for one in momenta:
            one.mul_(factor)
        return found

    def store(state, values, step):
        store_packed_(state, values * factor, step)

    def adamw(*tensors, **options):
        with monkeypatch.context() as patched:
            patched.setattr(update, "store_packed_", store)
            adamw_(*tensors, **options)

    monkeypatch.setattr(torch_backend, "momentum_", momentum)
    monkeypatch.setattr(torch_backend, "adamw_", adamw)


@pytest.mark.parametrize("factor", [1 + 2.0**-22, 1 - 2.0**-22])
def test_verify_explains_bytes_that_a_last_bit_moves(factor, monkeypatch):
    torch.manual_seed(0)
    matrix, table = nn.Parameter(torch.randn(200, 160)), nn.Parameter(torch.randn(200, 160))
    groups = [{"params": [matrix], "orthogonalizer": lambda x: x}, {"params": [table], "algorithm": "adamw"}]
    optimizer = quintic.Muon(groups, state_dtype="int8")
    for _ in range(3):
        matrix.grad, table.grad = torch.randn(200, 160), torch.randn(200, 160)
        optimizer.step()
    moved(monkeypatch, factor)
    model = nn.ParameterDict({"matrix": matrix, "table": table})
    report = quintic.verify(model, optimizer)
    # Some bytes have moved by a step.
    assert not report.is_bitwise
    assert report.ok, str(report)


@pytest.mark.parametrize("factor", [1.2, 0.8])
def test_verify_finds_wrong_bytes(factor, monkeypatch):
    params, optimizer = stepped(state_dtype="int8")
    give(params, 5)
    moved(monkeypatch, factor)
    report = quintic.verify(nn.ParameterDict(params), optimizer)
    assert {(one.name, one.tensor) for one in report.wrong} >= {("matrix", "momentum_buffer"), ("table", "exp_avg_sq")}


def test_the_reference_step_makes_the_bytes_of_a_step():
    found = []
    for step in (lambda optimizer: optimizer.step(), quintic.reference_step):
        params, optimizer = stepped(state_dtype="int8")
        give(params, 5)
        step(optimizer)
        found.append(averages(params, optimizer))
    assert_converted(*found)
