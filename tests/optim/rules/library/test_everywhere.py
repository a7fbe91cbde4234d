"""Every rule of the library with what all rules have: masters, checkpoints, offload, skipped steps, plans."""

import io

import pytest
import torch
from torch import nn

import quintic
from quintic.optim.numeric.precision import full_precision
from quintic.optim.rules.table import RULES
from quintic.optim.state.placement import state_bytes

SHAPES = {"tall": (12, 5), "wide": (5, 12), "square": (6, 6), "bank": (3, 4, 7)}

# bfloat16 state cannot follow the momentum of two-rate's slow average, which is float32 anyway.
NARROW = {"state_dtype": "bf16", "master": "mantissa"}
of_every_rule = pytest.mark.parametrize("name", RULES)


def weights_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def started(weights, **options):
    """Return parameters with these values, and their optimizer."""
    params = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    matrices = [(name, param) for name, param in params.items() if name != "bank"]
    groups = [{"params": matrices}, {"params": [("bank", params["bank"])], "view": quintic.Experts()}]
    options = {"lr": 0.05, "weight_decay": 0.1, "compute_dtype": torch.float32, **options}
    return params, quintic.Muon(groups, **options)


def give_gradients(params, number, missing=()):
    generator = torch.Generator().manual_seed(number)
    for name, param in params.items():
        # bfloat16 in all dtypes of weights.
        gradient = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)
        param.grad = None if name in missing else gradient


def train(params, optimizer, first, last):
    for number in range(first, last):
        give_gradients(params, number)
        optimizer.step()


def snapshot(params, optimizer):
    """Return copies of all weights and state by name."""
    found = {name: param.detach().clone() for name, param in params.items()}
    for name, param in params.items():
        found |= {f"{name}: {key}": value.detach().clone() for key, value in optimizer.state[param].items()}
    return found


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(
    ("name", "master"), [*((name, "mantissa") for name in RULES), ("muown", "fp32"), ("ema_nesterov", "fp32")]
)
def test_completed_weights_are_those_of_float32(name, master):
    weights = weights_of(torch.bfloat16)
    params, optimizer = started(weights, update_rule=name, master=master)
    wide, wide_optimizer = started({key: value.float() for key, value in weights.items()}, update_rule=name)
    for number in range(4):
        train(params, optimizer, number, number + 1)
        train(wide, wide_optimizer, number, number + 1)
        for key, param in params.items():
            whole = full_precision(
                param.detach(), optimizer.state[param]["mantissa" if master == "mantissa" else "master"]
            )
            assert torch.equal(whole, wide[key].detach()), key


@of_every_rule
def test_state_in_bfloat16_stays_close_and_lies_where_it_was_declared(name):
    weights = weights_of()
    params, optimizer = started(weights, update_rule=name, state_dtype="bf16")
    wide, wide_optimizer = started(weights, update_rule=name)
    train(params, optimizer, 0, 4)
    train(wide, wide_optimizer, 0, 4)
    for key, param in params.items():
        moved = (wide[key] - weights[key]).norm()
        assert (param - wide[key]).norm() < 0.05 * moved
        declared = {spec.name: spec.dtype_for(torch.float32, "bf16") for spec in RULES[name].state}
        assert {key: value.dtype for key, value in optimizer.state[param].items()} == declared


@of_every_rule
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {**NARROW, "compute_dtype": None})],
    ids=["float32", "narrow"],
)
def test_every_step_agrees_with_the_reference_bit_for_bit(name, dtype, options):
    params, optimizer = started(weights_of(dtype), update_rule=name, **options)
    for number in range(3):
        give_gradients(params, number)
        report = quintic.verify(nn.ParameterDict(params), optimizer)
        assert report.is_bitwise, str(report)
        optimizer.step()


@of_every_rule
@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, NARROW)], ids=["float32", "narrow"]
)
def test_saved_and_offloaded_steps_go_on_bit_for_bit(name, dtype, options):
    weights = weights_of(dtype)
    params, optimizer = started(weights, update_rule=name, **options)
    train(params, optimizer, 0, 3)
    buffer = io.BytesIO()
    torch.save(
        {"model": {key: param.detach() for key, param in params.items()}, "state": optimizer.state_dict()}, buffer
    )
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    loaded, twin = started(saved["model"], update_rule=name, offload=True, **options)
    twin.load_state_dict(saved["state"])
    for optimizers in ((params, optimizer), (loaded, twin)):
        train(*optimizers, 3, 5)
    assert_same_bits(snapshot(params, optimizer), snapshot(loaded, twin))


@of_every_rule
def test_gradients_that_are_not_finite_leave_every_bit_alone(name):
    params, optimizer = started(weights_of(torch.bfloat16), update_rule=name, on_nonfinite="skip", **NARROW)
    optimizer.state_dict()  # which makes the state
    for steps in (0, 2):
        train(params, optimizer, 0, steps)
        before = snapshot(params, optimizer)
        give_gradients(params, 9)
        params["bank"].grad[1, 2, 3] = float("inf")
        optimizer.step()
        assert_same_bits(before, snapshot(params, optimizer))
    train(params, optimizer, 5, 7)
    # As if these steps had not been.
    twins, twin = started(weights_of(torch.bfloat16), update_rule=name, **NARROW)
    train(twins, twin, 0, 2)
    train(twins, twin, 5, 7)
    assert_same_bits(snapshot(params, optimizer), snapshot(twins, twin))


@of_every_rule
def test_parameters_without_gradients_stay_and_change_nothing_for_others(name):
    params, optimizer = started(weights_of(), update_rule=name)
    train(params, optimizer, 0, 2)
    before = snapshot(params, optimizer)
    give_gradients(params, 2, missing=("tall", "bank"))
    optimizer.step()
    after = snapshot(params, optimizer)
    for key, value in before.items():
        is_missing = key.split(":")[0] in ("tall", "bank")
        assert torch.equal(value, after[key]) == is_missing or (not is_missing and key.endswith("radius")), key
    alone, single = started(weights_of(), update_rule=name)
    train(alone, single, 0, 2)
    give_gradients(alone, 2)
    single.step()
    for key in ("wide", "square"):
        assert torch.equal(alone[key], params[key])


@of_every_rule
def test_matrices_together_and_one_by_one_have_the_same_bits(name):
    found = []
    for limit in (None, 1):
        params, optimizer = started(weights_of(), update_rule=name, max_workspace_bytes=limit)
        train(params, optimizer, 0, 3)
        found.append(snapshot(params, optimizer))
    assert_same_bits(*found)


@of_every_rule
def test_rules_are_explained_and_their_state_is_planned(name):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    explained = quintic.explain(model, update_rule=name, lr=0.02)
    rows = {row.name: row for row in explained.rows}
    assert rows["0.weight"].optimizer == RULES[name].title
    assert RULES[name].title in str(explained)
    optimizer = quintic.Muon(quintic.param_groups(model), update_rule=name, offload=True)
    for group in optimizer._plans.groups:
        for param in group.params:
            assert state_bytes(param, group) == sum(value.nbytes for value in optimizer.state[param].values())
    assert rows["0.weight"].state_bytes == sum(value.nbytes for value in optimizer.state[model[0].weight].values())
    matrices = [bucket for bucket in optimizer.plan() if bucket.rule is RULES[name]]
    # State of the parameter's shape is in host memory, vectors are not.
    of_entries = [
        value.nbytes for layer in model for value in optimizer.state[layer.weight].values() if value.ndim == 2
    ]
    assert sum(bucket.offloaded.num_bytes for bucket in matrices) == sum(of_entries)


@of_every_rule
def test_telemetry_measures_every_matrix(name):
    params, optimizer = started(weights_of(), update_rule=name, telemetry_every=2, orthogonalizer="svd")
    train(params, optimizer, 0, 2)
    measured = optimizer.telemetry()
    assert {key: len(values) for key, values in measured.items()} == {"tall": 1, "wide": 1, "square": 1, "bank": 3}
    for values in measured.values():
        for one in values:
            # Signs of a small matrix, which AdaMuon orthogonalises, may be of a lower rank.
            assert one.mean_squared_sigma == pytest.approx(1.0, rel=1e-3) or name == "adamuon"
            assert 0 < one.update_rms < 10
