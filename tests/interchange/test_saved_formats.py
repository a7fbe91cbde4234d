"""Training begun with another library continues with Quintic as it would have continued there."""

import itertools

import foreign_optimizers
import pytest
import torch
from torch import nn

from quintic import Flatten, Muon, Split
from quintic.interchange import import_state

# One row, one column and a shape that occurs once are among them.
MATRICES = {"tall": (9, 6), "wide": (6, 9), "wide2": (6, 9), "row": (1, 5), "column": (5, 1), "wide3": (6, 9)}
TALL = {"tall": (9, 6), "column": (5, 1), "square": (4, 4), "tall2": (9, 6)}
OTHERS = {"embedding": (8, 3), "bias": (7,), "scale": ()}

LR, ADAMW_LR, MU, BETAS, EPS, DECAY = 0.02, 0.003, 0.9, (0.8, 0.95), 1e-8, 0.1
NANOCHAT = {"normalize": "neuron", "normalize_beta": 0.9}


def weights(shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def give_gradients(seed, *models):
    for params in models:
        generator = torch.Generator().manual_seed(seed)
        for param in params.values():
            gradient = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad = gradient.to(param.dtype)


def divided(params):
    """The parameters that the other library's matrix optimizer takes, and the others, in its own order."""
    other = [param for name, param in params.items() if name in OTHERS]
    return [param for name, param in params.items() if name not in OTHERS], other


def names_of(optimizer, params):
    """The names of an optimizer's parameters in the order of its groups, None for those not in `params`."""
    names = {param: name for name, param in params.items()}
    return [names.get(param) for group in optimizer.param_groups for param in group["params"]]


def ours(params, others=None, **options):
    """Quintic's optimizer, with its groups and names in another order than any library has them."""
    names = list(reversed(params))
    groups = []
    for algorithm, chosen in [
        ("adamw", [name for name in names if name in OTHERS]),
        ("muon", [name for name in names if name not in OTHERS]),
    ]:
        extra = (others or {}) if algorithm == "adamw" else {}
        group = {"params": [params[name] for name in chosen], "param_names": chosen, "algorithm": algorithm}
        groups.append({**group, **extra})
    return Muon(
        groups,
        **{
            "lr": LR,
            "momentum": MU,
            "orthogonalizer": "svd",
            "weight_decay": DECAY,
            "adamw_weight_decay": DECAY,
            "adamw_lr": ADAMW_LR,
            "betas": BETAS,
            "eps": EPS,
            **options,
        },
    )


def begun(library, params, num_steps=4):
    for seed in range(num_steps):
        give_gradients(seed, params)
        library.step()
    return library


def assert_continues(library, params, optimizer, twins, num_steps=3):
    for seed in range(100, 100 + num_steps):
        give_gradients(seed, params, twins)
        library.step()
        optimizer.step()
        for name, param in params.items():
            torch.testing.assert_close(twins[name], param, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def twins_of(params):
    return {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}


def keller_jordan(params):
    matrices, other = divided(params)
    common = {"weight_decay": DECAY}
    return foreign_optimizers.KellerJordan(
        [
            {"params": matrices, "use_muon": True, "lr": LR, "momentum": MU, **common},
            {"params": other, "use_muon": False, "lr": ADAMW_LR, "betas": BETAS, "eps": EPS, **common},
        ]
    )


def nanochat(params):
    matrices, other = divided(params)
    adamw = {"kind": "adamw", "lr": ADAMW_LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    muon = {"kind": "muon", "lr": LR, "momentum": MU, "beta2": 0.9, "weight_decay": DECAY}
    groups = [{"params": [param], **adamw} for param in other]
    for shape in sorted({param.shape for param in matrices}):
        groups.append({"params": [param for param in matrices if param.shape == shape], **muon})
    return foreign_optimizers.Nanochat(groups)


def dion(params, algorithm="muon", *, nesterov=True, adjust_lr="spectral_norm", **options):
    matrices, other = divided(params)
    common = {"mu": MU, "nesterov": nesterov, "adjust_lr": adjust_lr, "muon_beta2": 0.95, "weight_decay": DECAY}
    adamw = {"beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPS, "weight_decay": DECAY}
    return foreign_optimizers.Dion(
        [
            {"params": other, "algorithm": "adamw", "lr": ADAMW_LR, **adamw},
            {"params": matrices, "algorithm": algorithm, "lr": LR, **common, **options},
        ]
    )


@pytest.mark.parametrize("world_size", [1, 2, 4, 9])
def test_keller_jordan(world_size):
    params = weights({**MATRICES, **OTHERS})
    library = begun(keller_jordan(params), params)
    twins = twins_of(params)
    optimizer = ours(twins)
    saved = [library.of_rank(rank, world_size) for rank in range(world_size)]
    imported = import_state(optimizer, saved, source="keller_jordan", names=names_of(library, params))
    assert imported == [name for group in optimizer.param_groups for name in group["param_names"]]
    assert_continues(library, params, optimizer, twins)


def test_keller_jordan_of_2024():
    params = weights({"filters": (5, 2, 3, 3), **MATRICES, **OTHERS})
    matrices, other = divided(params)
    options = {"lr": LR, "momentum": MU, "adamw_lr_ratio": ADAMW_LR / LR, "adamw_betas": BETAS}
    library = begun(foreign_optimizers.KellerJordan2024(matrices, other, **options), params)
    twins = twins_of(params)
    filters = {"params": [twins["filters"]], "param_names": ["filters"], "view": Flatten()}
    optimizer = ours(
        {name: twin for name, twin in twins.items() if name != "filters"},
        weight_decay=0.0,
        adamw_weight_decay=0.0,
        eps=0.0,
    )
    optimizer.add_param_group(filters)
    import_state(optimizer, library.state_dict(), source="keller_jordan_2024", names=names_of(library, params))
    assert_continues(library, params, optimizer, twins)


@pytest.mark.parametrize("nesterov", [True, False])
def test_dion_muon(nesterov):
    params = weights({**MATRICES, **OTHERS})
    library = begun(dion(params, nesterov=nesterov), params)
    twins = twins_of(params)
    optimizer = ours(twins, nesterov=nesterov, adjust_lr="unit_rms")
    import_state(optimizer, library.state_dict(), source="dion", names=names_of(library, params))
    assert_continues(library, params, optimizer, twins)


def test_dion_normuon():
    params = weights({**TALL, **OTHERS})
    library = begun(dion(params, "normuon"), params)
    twins = twins_of(params)
    optimizer = ours(twins, normalize="neuron", adjust_lr="unit_rms")
    import_state(optimizer, library.state_dict(), source="dion", names=names_of(library, params))
    assert_continues(library, params, optimizer, twins)


@pytest.mark.parametrize(
    ("adjust_of_dion", "adjust_lr"), [("spectral_norm", "unit_rms"), ("rms_norm", "match_rms_adamw")], ids=str
)
def test_dion_normuon_of_row_blocks(adjust_of_dion, adjust_lr):
    params = weights({"fused": (13, 4), "fused2": (13, 4)})
    library = begun(dion(params, "normuon", adjust_lr=adjust_of_dion, split_sizes=(8, 5)), params)
    twins = twins_of(params)
    group = {"params": list(twins.values()), "param_names": list(twins), "view": Split((8, 5))}
    options = {"lr": LR, "momentum": MU, "weight_decay": DECAY, "orthogonalizer": "svd"}
    optimizer = Muon([group], normalize="neuron", adjust_lr=adjust_lr, **options)
    import_state(optimizer, library.state_dict(), source="dion", names=names_of(library, params))
    assert_continues(library, params, optimizer, twins)


@pytest.mark.parametrize(
    ("adjust_lr", "squared_scales"),
    [("spectral_norm", (2 / 13, 11 / 13)), ("rms_norm", (4 / 13, 11 / 13)), (None, (1, 1))],
)
def test_mean_squares_of_row_blocks_lose_the_scale_of_the_block(adjust_lr, squared_scales):
    params = weights({"fused": (13, 4)})
    state = {"momentum": torch.zeros(13, 4), "variance_neuron": torch.ones(13, 1, dtype=torch.float64)}
    group = {"params": ["fused"], "algorithm": "normuon", "mu": MU, "split_sizes": (2, 11), "adjust_lr": adjust_lr}
    members = {"params": list(params.values()), "param_names": ["fused"], "view": Split((2, 11))}
    optimizer = Muon([members], normalize="neuron")
    saved = {"state": {"fused": state}, "param_groups": [group]}
    import_state(optimizer, saved, source="dion", second_moments="average")
    # The first block is wide, and so has one value for each of its 4 columns.
    expected = torch.tensor([1 / squared_scales[0]] * 4 + [1 / squared_scales[1]] * 11, dtype=torch.float64)
    torch.testing.assert_close(optimizer.state[params["fused"]]["second_momentum_buffer"], expected)


def test_dion_counted_the_steps_of_a_group():
    params = weights(OTHERS)
    library = begun(dion(params), params)
    saved = library.state_dict()
    for state in saved["state"].values():
        del state["step_dev"]
    optimizer = ours(twins_of(params))
    import_state(optimizer, saved, source="dion", names=names_of(library, params))
    assert {float(state["step"]) for state in optimizer.state.values()} == {4}


# More ranks than matrices of a shape, and than there are at all; slices of 8 rows need a divisor.
@pytest.mark.parametrize(("world_size", "replicated_below"), [(1, 100), (2, 8), (3, 100), (4, 24), (8, 24)])
def test_nanochat(world_size, replicated_below):
    params = weights({**MATRICES, **OTHERS})
    library = begun(nanochat(params), params)
    twins = twins_of(params)
    optimizer = ours(twins, others={"cautious": False}, cautious=True, **NANOCHAT)
    saved = [library.of_rank(rank, world_size, replicated_below) for rank in range(world_size)]
    import_state(optimizer, saved, source="nanochat", names=names_of(library, params))
    assert_continues(library, params, optimizer, twins)


def test_nanochat_with_a_state_of_its_own_for_each_matrix():
    params = weights(MATRICES)
    library = begun(nanochat(params), params)
    saved = library.of_rank(0, 1, 100)
    for group in saved["param_groups"]:
        stacks = saved["state"][group["params"][0]]
        for number, key in enumerate(group["params"]):
            saved["state"][key] = {name: stack[number] for name, stack in stacks.items()}
    twins = twins_of(params)
    optimizer = ours(twins, cautious=True, **NANOCHAT)
    import_state(optimizer, saved, source="nanochat", names=names_of(library, params))
    assert_continues(library, params, optimizer, twins)


@pytest.mark.parametrize("left_out", ["wide", "wide2", "wide3"])
def test_a_matrix_of_a_stack_can_be_left_out(left_out):
    params = weights(MATRICES)
    library = begun(nanochat(params), params)
    names = [None if name == left_out else name for name in names_of(library, params)]
    optimizer = ours(twins_of(params), **NANOCHAT)
    imported = import_state(optimizer, library.state_dict(), source="nanochat", names=names)
    assert set(imported) == set(MATRICES) - {left_out}
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            assert bool(optimizer.state[param]["momentum_buffer"].any()) == (name != left_out)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.95])
def test_a_sum_becomes_the_average_of_the_same_gradients(mu):
    params = weights({"matrix": (3, 4)})
    library = dion(params)
    library.param_groups[1]["mu"] = mu
    begun(library, params, num_steps=6)
    optimizer = ours(twins_of(params), momentum=mu)
    import_state(optimizer, library.state_dict(), source="dion", names=["matrix"])
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for seed in range(6):
        give_gradients(seed, params)
        expected += (1 - mu) * mu ** (5 - seed) * params["matrix"].grad
    (state,) = optimizer.state.values()
    torch.testing.assert_close(state["momentum_buffer"], expected, rtol=1e-13, atol=1e-13)


def test_a_sum_of_bfloat16_gradients_is_averaged_in_float32():
    params = weights({"matrix": (3, 4)}, dtype=torch.bfloat16)
    state = {"momentum": torch.randn(3, 4).bfloat16()}
    group = {"algorithm": "muon", "mu": MU, "params": ["matrix"]}
    optimizer = ours(params)
    import_state(optimizer, {"state": {"matrix": state}, "param_groups": [group]}, source="dion")
    (ours_now,) = optimizer.state.values()
    assert torch.equal(ours_now["momentum_buffer"], state["momentum"].float() * (1 - MU))


@pytest.mark.parametrize(
    ("source", "state", "group", "message"),
    [
        ("dion", {"momentum": torch.zeros(2, 2), "Q": torch.zeros(2, 1)}, {"algorithm": "dion"}, "algorithm='dion'"),
        ("dion", {"momentum": torch.zeros(2, 2)}, {"algorithm": "lion"}, "algorithm='lion'"),
        ("dion", {"momentum": torch.zeros(2, 2)}, {"algorithm": "muon"}, "must have 'mu'"),
        ("dion", {"momentum": torch.zeros(2, 2)}, {"algorithm": "muon", "mu": 1.0}, "'mu' in .* it has 1.0"),
        ("dion", {"momentum": torch.zeros(2, 2)}, {"algorithm": "normuon", "mu": MU}, "no 'variance_neuron'"),
        ("dion", {"momentum": torch.zeros(2, 2)}, {"algorithm": "adamw"}, "no 'variance'"),
        ("dion", {"momentum_buffer": torch.zeros(2, 2)}, {"algorithm": "muon", "mu": MU}, "no 'momentum'"),
        ("keller_jordan", {"momentum": torch.zeros(2, 2)}, {}, "neither Muon's"),
        ("keller_jordan", {}, {}, "no state was saved"),
        ("keller_jordan_2024", {"use_muon": True}, {"momentum": MU}, "no state was saved"),
        ("keller_jordan_2024", {"momentum_buffer": torch.zeros(2, 2)}, {}, "must have 'momentum'"),
        ("nanochat", {}, {}, "no state was saved"),
        ("nanochat", {"momentum": torch.zeros(2, 2)}, {}, "neither Muon's"),
        ("nanochat", {"momentum_buffer": torch.zeros(2, 2), "x": 1}, {}, r"has \['x'\], which nanochat does not keep"),
        ("nanochat", {"momentum_buffer": torch.zeros(1, 2, 2), "x": 1}, {}, r"has \['x'\], which"),
        ("nanochat", {"momentum_buffer": torch.zeros(2, 2, 2)}, {}, "1 state dicts hold 2 matrices"),
        ("nanochat", {"exp_avg": torch.zeros(2, 2), "step": 1}, {}, "neither Muon's"),
        ("torch", {"momentum_buffer": torch.zeros(2, 2), "max_exp_avg_sq": torch.zeros(2, 2)}, {}, "neither Muon's"),
    ],
)
def test_what_a_library_did_not_save_so_is_an_error_that_names_the_parameter(source, state, group, message):
    optimizer = ours(weights({"matrix": (2, 2)}))
    saved = {"state": {"matrix": state}, "param_groups": [{"params": ["matrix"], **group}]}
    with pytest.raises(ValueError, match=f"^matrix: .*{message}"):
        import_state(optimizer, saved, source=source)


@pytest.mark.parametrize("source", ["keller_jordan", "nanochat"])
def test_ranks_that_are_missing_are_an_error(source):
    params = weights({**MATRICES, **OTHERS})
    library = begun({"keller_jordan": keller_jordan, "nanochat": nanochat}[source](params), params)
    pieces = (8,) if source == "nanochat" else ()
    saved = [library.of_rank(rank, 4, *pieces) for rank in range(4)]
    names = names_of(library, params)
    for given in itertools.chain.from_iterable(itertools.combinations(saved, count) for count in (1, 2, 3)):
        optimizer = ours(twins_of(params), **NANOCHAT)
        with pytest.raises(ValueError, match=r"^(\w+): .*(all ranks|has shape)"):
            import_state(optimizer, given, source=source, names=names)
        assert not any(value.any() for state in optimizer.state.values() for value in state.values())
