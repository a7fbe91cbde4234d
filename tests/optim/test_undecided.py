"""Groups without `algorithm`, as unfreezing callbacks add them and layer-decay helpers return them."""

import copy
import gc
import pickle
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import quintic
from quintic import Matrix, Muon, Split
from quintic.grouping.plain_groups import _requests


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict(
            {
                "embed": nn.Embedding(20, 8),
                "attn": nn.MultiheadAttention(8, 2),
                "up": nn.Linear(8, 16),
                "conv": nn.Conv2d(1, 2, 3),
                "norm": nn.LayerNorm(8),
            }
        )
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)


def frozen_model():
    torch.manual_seed(0)
    model = Model()
    model.backbone.requires_grad_(False)
    return model


def unfreeze(model, optimizer, **options):
    """What Lightning's `BaseFinetuning` and loops like fastai's do."""
    model.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.backbone.parameters()), **options})


def treatments(optimizer):
    return {
        name: (group["algorithm"], group["view"], param)
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def step(optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = {name: param for name, (_, _, param) in treatments(optimizer).items()}
    for name in sorted(params):
        params[name].grad = torch.randn(params[name].shape, generator=generator)
    optimizer.step()


def test_an_unfrozen_backbone_is_stepped_and_saved_as_one_that_never_was_frozen():
    late, whole = frozen_model(), frozen_model()
    whole.backbone.requires_grad_(True)
    optimizer, usual = (Muon(quintic.param_groups(model), lr=0.02) for model in (late, whole))
    unfreeze(late, optimizer)
    found, want = treatments(optimizer), treatments(usual)
    assert {name: entry[:2] for name, entry in found.items()} == {name: entry[:2] for name, entry in want.items()}
    assert want["backbone.attn.in_proj_weight"][:2] == ("muon", Split((8, 8, 8)))
    assert want["backbone.embed.weight"][0] == want["backbone.conv.weight"][0] == "adamw"
    for seed in range(3):
        for one in (optimizer, usual):
            step(one, seed)
    for name, param in whole.named_parameters():
        assert torch.equal(late.get_parameter(name), param), name
    usual.load_state_dict(optimizer.state_dict())
    assert all(
        torch.equal(usual.state[want[n][2]][k], v) for n in want for k, v in optimizer.state[found[n][2]].items()
    )


def test_rules_and_options_of_the_call_hold_for_what_is_unfrozen_later():
    model = frozen_model()
    rules = [
        quintic.Rule("backbone.up.weight", "adamw", options={"weight_decay": 0.3}),
        quintic.Rule("body.weight", "muon"),
    ]
    # A rule for frozen parameters alone is an error at first, so it is one of several patterns.
    model.backbone.up.requires_grad_(True)
    groups = quintic.param_groups(model, rules=rules, muon={"momentum": 0.8}, adamw={"lr": 1e-3}, convolutions="muon")
    model.backbone.up.requires_grad_(False)
    kept = [{**group, "params": [], "param_names": []} for group in groups]
    for target, group in zip(kept, groups, strict=True):
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if not name.startswith("backbone"):
                target["params"].append(param)
                target["param_names"].append(name)
    optimizer = Muon([group for group in kept if group["params"]], lr=0.02)
    unfreeze(model, optimizer, lr=0.01)
    by_name = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert (by_name["backbone.up.weight"]["algorithm"], by_name["backbone.up.weight"]["weight_decay"]) == ("adamw", 0.3)
    assert by_name["backbone.attn.in_proj_weight"]["momentum"] == 0.8
    assert by_name["backbone.conv.weight"]["algorithm"] == "muon"
    # The rate is that of matrices; the ratio is that of the call's AdamW rate to the optimizer's.
    assert by_name["backbone.embed.weight"]["lr"] == 0.01
    typed = {name: group.effective_lr for group in optimizer._plans.current_groups() for name in group.param_names}
    assert typed["backbone.embed.weight"] == pytest.approx(0.01 * 1e-3 / 0.02)
    assert typed["backbone.attn.in_proj_weight"] == 0.01


@pytest.mark.parametrize("ratio", [None, 0.05])
def test_one_rate_for_a_divided_group_keeps_the_proportion_of_the_optimizer(ratio):
    model = frozen_model()
    optimizer = Muon(quintic.param_groups(model), lr=0.02, adamw_lr_ratio=ratio)
    unfreeze(model, optimizer, lr=0.004)
    typed = {name: group.effective_lr for group in optimizer._plans.current_groups() for name in group.param_names}
    assert typed["backbone.up.weight"] == 0.004
    assert typed["backbone.up.bias"] == pytest.approx(0.004 * (ratio or 3e-4 / 0.02))


def test_the_rate_that_a_callback_writes_to_the_last_group_is_that_of_all_its_parts():
    model = frozen_model()
    optimizer = Muon(quintic.param_groups(model), lr=0.02)
    before = len(optimizer.param_groups)
    unfreeze(model, optimizer, lr=0.001)
    added = optimizer.param_groups[before:]
    assert len(added) == 3
    optimizer.param_groups[-1]["lr"] = 0.005
    assert [group["lr"] for group in optimizer.param_groups[before:]] == [0.005] * 3
    assert [group["lr"] for group in optimizer.param_groups[:before]] == [0.02, 3e-4]
    # What was set on its own keeps what it was set to.
    optimizer.param_groups[before]["lr"] = 0.007
    optimizer.param_groups[-1]["lr"] = 0.006
    assert [group["lr"] for group in optimizer.param_groups[before:]] == [0.007, 0.006, 0.006]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer)), lambda optimizer: optimizer]
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_parts_share_their_rate_after_copies_and_loading(duplicate, is_loaded):
    model = frozen_model()
    optimizer = Muon(quintic.param_groups(model), lr=0.02)
    before = len(optimizer.param_groups)
    unfreeze(model, optimizer, lr=0.001)
    optimizer = duplicate(optimizer)
    if is_loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[-1]["lr"] = 0.005
    assert [group["lr"] for group in optimizer.param_groups[before:]] == [0.005] * 3


SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "multiplicative": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_made_before_scale_every_part_once(name):
    model = frozen_model()
    optimizer = Muon(quintic.param_groups(model), lr=0.02)
    scheduler = SCHEDULERS[name](optimizer)
    if name == "plateau":
        scheduler.step(1.0)
        scheduler.min_lrs = [0.0] * 9
    unfreeze(model, optimizer, lr=0.008)
    for _ in range(2):
        step(optimizer)
        scheduler.step(*([2.0] if name == "plateau" else []))
    assert [group["lr"] for group in optimizer.param_groups[2:]] == [0.002] * 3
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_a_scheduler_with_rates_of_its_own_leaves_added_groups_as_pytorch_does():
    """`LambdaLR` has one function for each group that was there; PyTorch's optimizers keep added groups' rates, too."""

    def rates(optimizer, add):
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        add()
        for _ in range(2):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.ones_like(param)
            optimizer.step()
            scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    model, other = frozen_model(), nn.Linear(2, 2)
    plain = torch.optim.SGD(model.head.parameters(), lr=0.1)
    optimizer = Muon(quintic.param_groups(model), lr=0.02)
    try:
        reference = rates(plain, lambda: plain.add_param_group({"params": other.parameters(), "lr": 0.3}))
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            rates(optimizer, lambda: unfreeze(model, optimizer, lr=0.3))
        return
    assert reference[1:] == [0.3]
    assert rates(optimizer, lambda: unfreeze(model, optimizer, lr=0.3))[2:] == [0.3] * 3


# -- models that are not known -----------------------------------------------------------------------------------------


def test_unknown_matrices_are_muons_with_one_warning_that_says_what_to_do():
    optimizer = Muon(quintic.param_groups(nn.Linear(4, 4)))
    layer = nn.ModuleList([nn.Linear(6, 4), nn.Embedding(9, 4), nn.Conv2d(1, 2, 3)])
    with pytest.warns(UserWarning, match="parameter groups without algorithm") as seen:
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.1})
    assert len(seen) == 1
    message = str(seen[0].message)
    assert (
        "taken for Muon's matrices are group2.param0 of shape (4, 6), group2.param2 of shape (9, 4); given" in message
    )
    assert "given to AdamW are group2.param3 of shape (2, 1, 3, 3). Set algorithm='muon' or 'adamw'" in message
    assert "for group in quintic.param_groups(module): optimizer.add_param_group(group)" in message
    assert seen[0].filename == __file__
    found = treatments(optimizer)
    assert found["group2.param1"][0] == found["group2.param4"][0] == "adamw"
    assert found["group2.param0"][:2] == ("muon", Matrix())
    step(optimizer)


def test_names_tell_embeddings_and_heads_where_no_module_does():
    optimizer = Muon(quintic.param_groups(nn.Linear(4, 4)))
    model = nn.ModuleDict(
        {
            "token_embedding": nn.Embedding(9, 4),
            "blocks": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 8), "ln_1": nn.LayerNorm(4)})]),
            "router": nn.Linear(4, 8),
            "lm_head": nn.Linear(4, 9, bias=False),
        }
    )
    with pytest.warns(
        UserWarning, match=r"given to AdamW are token_embedding\.weight .*router.*lm_head\.weight of"
    ) as seen:
        optimizer.add_param_group({"params": list(model.named_parameters())})
    assert "up.weight" not in str(seen[0].message)
    found = treatments(optimizer)
    assert {name for name, entry in found.items() if entry[0] == "muon"} == {"weight", "blocks.0.up.weight"}


def test_matrices_with_names_and_groups_that_say_what_they_are_need_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = Muon(quintic.param_groups(nn.Linear(4, 4)))
        optimizer.add_param_group({"params": [("late.up.weight", nn.Parameter(torch.ones(4, 4)))]})
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "algorithm": "muon"})
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "view": quintic.Heads(2)})
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert [group["algorithm"] for group in optimizer.param_groups] == [
        "muon",
        "adamw",
        "muon",
        "muon",
        "muon",
        "adamw",
    ]


def test_plain_parameters_stay_matrices_as_of_torch_optim_muon():
    first, second, vector = (nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (5, 4), (4,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = Muon([first])
        optimizer.add_param_group({"params": [second]})
        assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "muon"]
        with pytest.raises(ValueError, match=r"group2\.param0: a 1-D parameter"):
            optimizer.add_param_group({"params": [vector]})
        with pytest.raises(ValueError, match=r"b: a 1-D parameter"):
            Muon([("w", first), ("b", vector)])
        Muon([{"params": [first]}, {"params": [vector], "algorithm": "adamw"}])
    assert len(optimizer.param_groups) == 2


def test_groups_by_depth_are_divided_when_the_optimizer_is_made():
    """As timm's layer decay and loops like MAE's make them: names, a decay, no algorithm."""
    model = Model()
    rows = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in some], "param_names": [n for n, _ in some], "weight_decay": decay}
        for decay in (0.0, 0.05)
        if (some := [row for row in rows if (row[1].ndim < 2) == (decay == 0.0)])
    ]
    with pytest.warns(UserWarning, match="parameter groups without algorithm") as seen:
        optimizer = Muon(groups, lr=0.02)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    found = treatments(optimizer)
    want = treatments(Muon(quintic.param_groups(model)))
    assert {name: entry[0] for name, entry in found.items()} == {name: entry[0] for name, entry in want.items()}
    assert {group["weight_decay"] for group in optimizer.param_groups if "head.weight" in group["param_names"]} == {
        0.05
    }
    # Of a known model nothing is guessed, and fused weights have their views.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = treatments(Muon(groups, lr=0.02))
    assert {name: entry[:2] for name, entry in known.items()} == {name: entry[:2] for name, entry in want.items()}


def test_groups_by_depth_without_names_are_decided_by_shapes():
    """As timm's `param_groups_layer_decay` returns them for a vision transformer."""
    model = Model()
    groups = [
        {"params": (p for p in model.parameters() if p.ndim == 1), "weight_decay": 0.0, "lr_scale": 0.5},
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr_scale": 0.75},
    ]
    with pytest.warns(UserWarning, match="parameter groups without algorithm") as seen:
        optimizer = Muon(groups, lr=0.02)
    assert len(seen) == 1
    text = str(seen[0].message)
    assert "group1.param0 of shape (20, 8)" in text  # it may be an embedding
    assert "group0" not in text  # vectors are AdamW's in any case
    for group in optimizer.param_groups:
        assert {param.ndim == 2 for param in group["params"]} == {group["algorithm"] == "muon"}
        assert group["lr_scale"] == (0.5 if group["params"][0].ndim == 1 else 0.75)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.warns(UserWarning, match="parameter groups without algorithm"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5, 6)), nn.Parameter(torch.ones(5))]})
    assert [group["algorithm"] for group in optimizer.param_groups[-2:]] == ["muon", "adamw"]


def test_no_warning_speaks_of_a_group_that_was_refused():
    optimizer = Muon(quintic.param_groups(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="lr=-1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5, 6))], "lr": -1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})


def test_a_refused_part_leaves_nothing_of_its_group():
    model = frozen_model()
    optimizer = Muon(quintic.param_groups(model), lr=0.02)
    before = copy.deepcopy([group["param_names"] for group in optimizer.param_groups])
    model.backbone.requires_grad_(True)
    with pytest.raises(ValueError, match=r"body\.bias"):
        optimizer.add_param_group({"params": [model.backbone.up.weight, model.body.bias]})
    assert [group["param_names"] for group in optimizer.param_groups] == before
    step(optimizer)


def test_models_are_not_kept_alive_and_the_latest_call_counts():
    first = frozen_model()
    quintic.param_groups(first)
    quintic.param_groups(first, convolutions="muon")
    optimizer = Muon(quintic.param_groups(nn.Linear(4, 4)))
    optimizer.add_param_group({"params": [first.backbone.conv.weight]})
    assert optimizer.param_groups[-1]["algorithm"] == "muon"
    assert sum(ref() is first for ref, _ in _requests) == 1
    del first, optimizer
    gc.collect()
    assert not any(isinstance(ref(), Model) for ref, _ in _requests)


# -- other people's callbacks ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightnings_backbone_finetuning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8))
            self.head = nn.Linear(8, 3)

        def training_step(self, batch, _):
            return self.head(self.backbone(batch)).square().mean()

        def configure_optimizers(self):
            # With a ratio the callback finds one scale of rates in all groups.
            return Muon(quintic.param_groups(self), lr=0.02, adamw_lr_ratio=0.015)

    def fit(epochs, path=None):
        callback = lightning.callbacks.BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_lr=0.001)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        module = Module()
        data = torch.utils.data.DataLoader(torch.arange(16).view(4, 4), batch_size=2)
        trainer.fit(module, data, ckpt_path=path, weights_only=False)
        return trainer, module

    trainer, module = fit(3)
    groups = trainer.optimizers[0].param_groups
    by_name = {name: group for group in groups for name in group["param_names"]}
    assert by_name.keys() == {name for name, _ in module.named_parameters()}
    assert by_name["backbone.0.weight"]["algorithm"] == by_name["backbone.2.weight"]["algorithm"] == "adamw"
    assert by_name["backbone.1.weight"]["algorithm"] == "muon"
    # Doubled in the epoch after it was unfrozen: of all its parts.
    assert {by_name[f"backbone.{n}.weight"]["lr"] for n in range(3)} == {0.002}
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    resumed, _ = fit(4, tmp_path / "three.ckpt")
    names = [group["param_names"] for group in resumed.optimizers[0].param_groups]
    assert names == [group["param_names"] for group in groups]
    lrs = {group["lr"] for group in resumed.optimizers[0].param_groups if "backbone.1.weight" in group["param_names"]}
    assert lrs == {0.004}


@pytest.mark.slow
def test_names_decide_also_where_only_the_optimizers_module_was_imported():
    code = """
import sys, torch
from quintic.optim.muon import Muon
sizes = {"embed.weight": (9, 4), "layers.0.up.weight": (5, 4)}
params = {name: torch.nn.Parameter(torch.ones(size)) for name, size in sizes.items()}
print(any(name.startswith("quintic.grouping") for name in sys.modules))
optimizer = Muon([{"params": [("bias", torch.nn.Parameter(torch.ones(4)))], "algorithm": "adamw"}])
optimizer.add_param_group({"params": list(params.items())})
print({name: g["algorithm"] for g in optimizer.param_groups[1:] for name in g["param_names"]})
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.splitlines() == ["False", "{'layers.0.up.weight': 'muon', 'embed.weight': 'adamw'}"]
