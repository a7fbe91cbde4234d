"""Drop-ins for other Muons: the constructor of the original, and its update, computed anew in float64."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from torch import nn

import quintic
from quintic.integrations import dion, keller_jordan, torch_optim

MUON_POST = [(3.4445, -4.7750, 2.0315)] * 5
DION_NEWTON_SCHULZ = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
STEPS = 4


def newton_schulz(x, triples=MUON_POST):
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def polar_express(x):
    return quintic.orthogonalize(x, "polar_express", compute_dtype=torch.float64)


def parameters(*shapes):
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def trained(params, optimizer, steps=STEPS):
    """The parameters after steps with drawn gradients, products in float64."""
    for group in optimizer.param_groups:
        group["compute_dtype"] = torch.float64
    for gradients in drawn_gradients(params, steps):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
    return params


def drawn_gradients(params, steps=STEPS):
    generator = torch.Generator().manual_seed(6)
    return [[torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params] for _ in range(steps)]


def reference(param, gradients, rule, *, mu, lr, decay, scale, nesterov, cautious=False):
    """What the original makes of a parameter: it sums gradients, and `rule` orthogonalises."""
    weight, total = param.detach().clone(), torch.zeros_like(param)
    for gradient in gradients:
        total = mu * total + gradient
        update = rule(gradient + mu * total if nesterov else total)
        decayed = lr * decay * weight * ((update * weight >= 0) if cautious else 1)
        weight = weight - decayed - lr * scale * update
    return weight


def adamw(param, gradients, **options):
    """The parameter after `torch.optim.AdamW`'s steps."""
    twin = nn.Parameter(param.detach().clone())
    optimizer = torch.optim.AdamW([twin], **options)
    for gradient in gradients:
        twin.grad = gradient
        optimizer.step()
    return twin.detach()


def assert_same(actual, expected):
    torch.testing.assert_close(actual.detach(), expected, rtol=1e-9, atol=1e-9)


# torch.optim.Muon

has_original = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has no Muon before 2.9")


@has_original
def test_torch_has_the_constructor_of_the_original():
    theirs, own = (inspect.signature(cls).parameters for cls in (torch.optim.Muon, torch_optim.Muon))
    assert [(name, p.default) for name, p in theirs.items()] == [(name, p.default) for name, p in own.items()]


@has_original
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "weight_decay": 0.3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3},
        {"adjust_lr_fn": "match_rms_adamw", "eps": 1e-9},
        {"adjust_lr_fn": "original", "lr": torch.tensor(0.05)},
    ],
)
def test_torch_makes_the_updates_of_the_original(options):
    options = {"lr": 0.02, **options}
    params, twins = ([nn.Parameter(p.detach().float()) for p in parameters((24, 16), (16, 40))] for _ in range(2))
    ours, theirs = torch_optim.Muon(params, **options), torch.optim.Muon(twins, **options)
    starts = [param.detach().clone() for param in params]
    for gradients in drawn_gradients(params):
        for param, twin, gradient in zip(params, twins, gradients, strict=True):
            param.grad, twin.grad = gradient.float(), gradient.float()
        ours.step()
        theirs.step()
    for param, twin, start in zip(params, twins, starts, strict=True):
        # Both multiply in bfloat16, each rounding in its own places.
        assert (param - twin).norm() < 0.03 * (twin - start).norm()


@pytest.mark.parametrize(
    ("adjust", "scale"),
    [
        (None, lambda m, n: math.sqrt(max(1, m / n))),
        ("match_rms_adamw", lambda m, n: 0.2 * math.sqrt(max(m, n))),
        ("spectral_unclamped", lambda m, n: math.sqrt(m / n)),  # since PyTorch 2.14
    ],
)
def test_torch_in_float64(adjust, scale):
    params = parameters((24, 16), (16, 40))
    expected = [
        reference(p, g, newton_schulz, mu=0.9, lr=0.02, decay=0.1, scale=scale(*p.shape), nesterov=True)
        for p, *g in zip(params, *drawn_gradients(params), strict=True)
    ]
    trained(params, torch_optim.Muon(params, lr=0.02, momentum=0.9, adjust_lr_fn=adjust))
    for param, value in zip(params, expected, strict=True):
        assert_same(param, value)


def test_torch_groups_set_options_of_their_own():
    params = parameters((8, 4), (4, 8), (5,))
    own = {"ns_steps": 2, "ns_coefficients": (1.5, -0.5, 0.0), "momentum": 0.5, "eps": 1e-8}
    scaled = {"adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch_optim.Muon([{"params": params[:1], **own}, {"params": [params[1]], **scaled}])
    optimizer.add_param_group({"params": params[2], "algorithm": "adamw", "eps": 1e-3, "lr": 0.1})
    gradients = list(zip(*drawn_gradients(params), strict=True))
    first, second = copy.deepcopy(params[:2])
    expected = adamw(params[2], gradients[2], lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0)
    trained(params, optimizer)
    quintic_step = lambda x: newton_schulz(x, [(1.5, -0.5, 0.0)] * 2)  # noqa: E731
    common = {"lr": 1e-3, "decay": 0.1, "nesterov": True}
    assert_same(params[0], reference(first, gradients[0], quintic_step, mu=0.5, scale=math.sqrt(2), **common))
    scale = 0.2 * math.sqrt(8)
    assert_same(params[1], reference(second, gradients[1], newton_schulz, mu=0.95, scale=scale, **common))
    assert_same(params[2], expected)


# KellerJordan/Muon


@pytest.mark.parametrize("name", ["SingleDeviceMuonWithAuxAdam", "MuonWithAuxAdam"])
def test_keller_jordan_makes_the_updates_of_the_original(name):
    shapes = [(24, 16), (16, 40), (3, 12, 7), (8, 4, 3, 3), (8, 4, 3, 1), (9,), (12, 5)]
    params = parameters(*shapes)
    gradients = list(zip(*drawn_gradients(params), strict=True))
    # That library takes the last two dimensions for its scale, also of the kernels of a convolution.
    scales = [math.sqrt(24 / 16), 1, math.sqrt(12 / 7), 1, math.sqrt(3)]
    flat = lambda x: newton_schulz(x.flatten(1)).view_as(x) if x.ndim == 4 else newton_schulz(x)  # noqa: E731
    expected = [
        reference(p, g, flat, mu=0.9, lr=0.03, decay=0.1, scale=s, nesterov=True)
        for p, g, s in zip(params, gradients, scales, strict=False)
    ]
    expected += [
        adamw(p, g, lr=3e-4, betas=(0.8, 0.9), eps=1e-10, weight_decay=0)
        for p, g in zip(params[5:], gradients[5:], strict=True)
    ]
    optimizer = getattr(keller_jordan, name)(
        [
            {"params": params[:5], "use_muon": True, "lr": 0.03, "momentum": 0.9, "weight_decay": 0.1},
            {"params": params[5:], "use_muon": False, "betas": (0.8, 0.9)},
        ]
    )
    trained(params, optimizer)
    for param, value in zip(params, expected, strict=True):
        assert_same(param, value)


@pytest.mark.parametrize("name", ["SingleDeviceMuon", "Muon"])
def test_keller_jordan_without_adam(name):
    params = parameters((24, 16))
    gradients = [gradient for (gradient,) in drawn_gradients(params)]
    expected = reference(params[0], gradients, newton_schulz, mu=0.95, lr=0.02, decay=0, scale=1.5**0.5, nesterov=True)
    optimizer = getattr(keller_jordan, name)(params)
    trained(params, optimizer)
    assert_same(params[0], expected)
    comms = {"Muon": "averaged", "SingleDeviceMuon": "none"}
    assert optimizer.param_groups[0]["comms"] == comms[name]


def test_keller_jordan_defaults_of_groups():
    muon, adam = parameters((4, 4), (4,))
    optimizer = keller_jordan.SingleDeviceMuonWithAuxAdam(
        [{"params": [muon], "use_muon": True}, {"params": [adam], "use_muon": False}]
    )
    first, second = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.02, 0.95, 0)
    assert (second["lr"], second["betas"], second["eps"], second["weight_decay"]) == (3e-4, (0.9, 0.95), 1e-10, 0)


# dion


def even_rows(beta, orthogonalize=polar_express):
    """NorMuon's rule of dion: rows are divided by the root of the average of their mean squares."""
    averages = []

    def rule(x):
        update = orthogonalize(x)
        squares = update.square().mean(-1, keepdim=True)
        averages.append((averages[-1] if averages else 0) * beta + (1 - beta) * squares)
        divided = update / averages[-1].sqrt()
        return divided * (update.norm() / divided.norm())

    return rule


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True, "mu": 0.8},
        {"cautious_wd": True, "weight_decay": 0.5},
        {"adjust_lr": "rms_norm"},
        {"adjust_lr": None},
        {"use_polar_express": False},
        {"use_triton": True},
        {"newton_schulz_func": lambda x, epsilon: x.double().sign() + epsilon, "epsilon": 0.25},
    ],
)
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_dion_makes_the_updates_of_the_original(name, options):
    shapes = [(24, 16), (16, 16), (32, 8), (9,)]
    shapes += [(16, 40)] if name == "Muon" else []
    params = parameters(*shapes)
    gradients = list(zip(*drawn_gradients(params), strict=True))
    scales = {
        "spectral_norm": lambda m, n: math.sqrt(m / n),
        "rms_norm": lambda m, n: 0.2 * math.sqrt(max(m, n)),
        None: lambda m, n: 1,
    }
    scale = scales[options.get("adjust_lr", "spectral_norm")]
    common = {"mu": options.get("mu", 0.95), "lr": 0.02, "decay": options.get("weight_decay", 0.01)}
    common |= {"nesterov": options.get("nesterov", False), "cautious": options.get("cautious_wd", False)}
    rule = polar_express
    if "newton_schulz_func" in options:
        rule = lambda x: x.bfloat16().double().sign() + 0.25  # noqa: E731
    elif options.get("use_polar_express") is False:
        rule = lambda x: newton_schulz(x, DION_NEWTON_SCHULZ)  # noqa: E731
    expected = [
        reference(p, g, even_rows(0.9, rule) if name == "NorMuon" else rule, scale=scale(*p.shape), **common)
        for p, g in zip(params, gradients, strict=True)
        if p.ndim == 2
    ]
    vector = adamw(params[3], gradients[3], lr=0.1, betas=(0.7, 0.95), eps=1e-3, weight_decay=common["decay"])
    matrices = [param for param in params if param.ndim == 2]
    own = {"algorithm": "adamw", "lr": 0.1, "beta1": 0.7, "epsilon": 1e-3}
    if name == "NorMuon":
        options = options | {"muon_beta2": 0.9}
    optimizer = getattr(dion, name)([{"params": matrices}, {"params": [params[3]], **own}], lr=0.02, **options)
    trained(params, optimizer)
    for param, value in zip(matrices, expected, strict=True):
        assert_same(param, value)
    if not options.get("cautious_wd"):
        assert_same(params[3], vector)


def test_dion_gives_adamw_groups_its_rate_and_decay():
    params = parameters((6,))
    (gradients,) = zip(*drawn_gradients(params), strict=True)
    expected = adamw(params[0], gradients, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    trained(params, dion.Muon([{"params": params, "algorithm": "adamw"}]))
    assert_same(params[0], expected)


def test_dion_views():
    """Heads, parts of a fused weight, stacks and flattened convolutions are the matrices that they are there."""
    params = parameters((12, 8), (20, 8), (3, 8, 6), (6, 2, 3, 3))
    gradients = list(zip(*drawn_gradients(params), strict=True))
    common = {"mu": 0.95, "lr": 0.01, "decay": 0.01, "scale": 1, "nesterov": False}

    def scaled(x):
        return polar_express(x) * math.sqrt(x.shape[-2] / x.shape[-1])

    rules = [
        lambda x: torch.cat([scaled(head) for head in x.split(4)]),
        lambda x: torch.cat([scaled(part) for part in x.split((12, 4, 4))]),
        lambda x: torch.stack([scaled(matrix) for matrix in x]),
        lambda x: scaled(x.flatten(1)).view_as(x),
    ]
    expected = [reference(p, g, rule, **common) for p, g, rule in zip(params, gradients, rules, strict=True)]
    options = [{"num_heads": 3}, {"split_sizes": [12, 4, 4]}, {"num_heads": 1}, {"flatten": True}]
    optimizer = dion.Muon([{"params": [p], **own} for p, own in zip(params, options, strict=True)])
    trained(params, optimizer)
    for param, value in zip(params, expected, strict=True):
        assert_same(param, value)


def test_wide_matrices_come_nearer_to_the_original_without_normalisation():
    """dion evens out rows of all shapes; Quintic has rows or, for wide matrices, columns."""
    errors = {}
    for normalize in (None, "neuron"):
        params = parameters((16, 40))
        start = params[0].detach().clone()
        (gradients,) = zip(*drawn_gradients(params), strict=True)
        common = {"mu": 0.95, "lr": 0.01, "decay": 0, "scale": math.sqrt(16 / 40), "nesterov": False}
        expected = reference(params[0], gradients, even_rows(0.95), **common)
        optimizer = dion.NorMuon(params, weight_decay=0.0)
        assert optimizer.param_groups[0]["normalize"] is None
        optimizer.param_groups[0]["normalize"] = normalize
        trained(params, optimizer)
        errors[normalize] = (params[0].detach() - expected).norm() / (expected - start).norm()
    assert errors[None] < 0.03
    assert errors[None] < 0.3 * errors["neuron"]


def test_gram_newton_schulz_is_ours():
    optimizer = dion.Muon(parameters((8, 8)), use_gram_newton_schulz=True)
    assert optimizer.param_groups[0]["orthogonalizer"] == "gram"


# All of them


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch_optim.Muon(p, eps=1e-3), r"TorchMuon: eps=0.001 is above 1e-06.*leave it"),
        (lambda p: torch_optim.Muon([{"params": p, "eps": 0.1}]), r"parameter group 0: eps=0.1"),
        (lambda p: torch_optim.Muon(p, momentum=1.0), r"momentum=1.0 must be in \[0, 1\)"),
        (lambda p: torch_optim.Muon(p, adjust_lr_fn="rms"), r"adjust_lr_fn='rms': choose one of None, 'original'"),
        (lambda p: torch_optim.Muon(p, ns_steps=0), r"steps=0"),
        (lambda p: torch_optim.Muon(parameters((3,))), r"1-D parameter \(shape \(3,\)\) cannot be orthogonalised"),
        (lambda p: keller_jordan.MuonWithAuxAdam([{"params": p}]), r"group 0: use_muon=None; give every group"),
        (lambda p: keller_jordan.SingleDeviceMuon(p, momentum=1), r"SingleDeviceMuon: momentum=1 must"),
        (lambda p: keller_jordan.SingleDeviceMuon(parameters((2, 2, 2, 2, 2))), r"parameter 0.*convolutions='muon'"),
        (lambda p: dion.Muon(p, mu=1.5), r"DionMuon: mu=1.5 must be"),
        (lambda p: dion.NorMuon(p, adjust_lr="spectral"), r"NorMuon: adjust_lr='spectral': choose one of"),
        (lambda p: dion.Muon(p, epsilon=1e-3), r"group 0: epsilon=0.001.*AdamW groups may have another one"),
        (
            lambda p: dion.Muon([{"params": p, "algorithm": "lion"}]),
            r"'lion': choose 'muon' or 'adamw', or use a separate",
        ),
        (lambda p: dion.Muon([{"params": p, "algorithm": "normuon"}]), r"'normuon': choose 'muon' or 'adamw'"),
        (lambda p: dion.Muon([{"params": p, "betas": (0.9, 0.9)}]), r"betas=.*set beta1 and beta2"),
        (lambda p: dion.Muon([{"params": p, "num_heads": 2, "split_sizes": (2, 2)}]), r"give one of them"),
        (lambda p: dion.Muon([{"params": p, "num_heads": 2}], flatten=True), r"set flatten=False in this group"),
        (lambda p: dion.Muon([{"params": p, "num_heads": 3}]), r"Heads\(num_heads=3"),
        (lambda p: dion.Muon(parameters((2, 2, 3, 3))), r"flatten=True for convolutions"),
        (lambda p: dion.NorMuon([{"params": parameters((12, 4)), "split_sizes": (10, 2)}]), r"tall and wide matrices"),
        (lambda p: dion.Muon(p, newton_schulz_func=3), r"newton_schulz_func=3 is not callable"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(parameters((8, 4)))


def test_groups_of_matrices_and_vectors_are_refused_as_by_the_original():
    groups = [{"params": [nn.Parameter(torch.ones(3, 3))]}, {"params": [nn.Parameter(torch.ones(3))]}]
    for make in (torch_optim.Muon, keller_jordan.SingleDeviceMuon):
        with pytest.raises(ValueError, match=r"group1\.param0: a 1-D parameter"):
            make(groups, lr=0.1)


def test_a_refused_group_leaves_nothing_behind():
    first, conv, second = parameters((4, 4), (4, 2, 3, 3), (2, 2, 2, 2, 2))
    optimizer = keller_jordan.SingleDeviceMuon([first])
    with pytest.raises(ValueError, match="convolutions='muon'"):
        optimizer.add_param_group({"params": [conv, second]})
    with pytest.raises(ValueError, match="same tensor"):
        optimizer.add_param_group({"params": [conv, first]})  # as two groups, of which the second one is refused
    assert [group["params"] for group in optimizer.param_groups] == [[first]]
    optimizer.add_param_group({"params": [conv]})
    trained([first, conv], optimizer, steps=1)


def test_groups_are_split_by_need_alone_and_keep_their_names():
    named = [("b.tall", (8, 4)), ("a.wide", (4, 8)), ("c.square", (4, 4))]
    params = parameters(*(shape for _, shape in named))
    names = [name for name, _ in named]
    group = {"params": list(zip(names, params, strict=True)), "lr": 0.5}
    optimizer = dion.NorMuon([group])
    assert [own["param_names"] for own in optimizer.param_groups] == [["b.tall", "c.square"], ["a.wide"]]
    assert [own["normalize"] for own in optimizer.param_groups] == ["neuron", None]
    assert {own["lr"] for own in optimizer.param_groups} == {0.5}
    assert [len(own["params"]) for own in dion.Muon([group]).param_groups] == [3]


def test_they_are_optimizers_of_pytorch():
    """Copied, pickled, saved, scheduled, and grown by groups in the original's words."""
    params = parameters((8, 4), (6,))
    matrix = {"params": params[:1], "mu": 0.9}
    optimizer = dion.Muon([matrix, {"params": params[1:], "algorithm": "adamw"}], flatten=True)
    assert isinstance(optimizer, quintic.Muon)
    trained(params, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.005}
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is dion.Muon
        (extra,) = parameters((4, 2, 3, 3))
        other.add_param_group({"params": [extra], "mu": 0.5})
        assert other.param_groups[-1]["view"] == quintic.Flatten()
        assert other.param_groups[-1]["momentum"] == 0.5
    twins = parameters((8, 4), (6,))
    again = dion.Muon([{"params": twins[:1]}, {"params": twins[1:], "algorithm": "adamw"}])
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["momentum"] == 0.9
    with torch.no_grad():
        for twin, param in zip(twins, params, strict=True):
            twin.copy_(param)
    trained(params, optimizer, steps=2)
    trained(twins, again, steps=2)
    for twin, param in zip(twins, params, strict=True):
        assert torch.equal(twin, param)
    scheduler.step()
