"""Wrappers' prefixes do not count: a wrapped model gives the groups, names and saved state of the bare one."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from attention_shapes import WIDTH, separate_qk
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import quintic
from quintic import Matrix, Muon, QKClip, Rule, Split
from quintic.grouping.assign import assign
from quintic.optim.groups.names import (
    clean_names,
    model_parameters,
    name_variants,
    resolve_name,
    unwrap_module,
    without_wrappers,
)

compiled = functools.partial(torch.compile, backend="eager")


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.num_heads = 2


class MptAttention(Attention):
    """Has a fused weight of the registry."""

    def __init__(self, width):
        super().__init__(width)
        self.Wqkv = nn.Linear(width, 3 * width, bias=False)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn = MptAttention(width)
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)
        self.router = nn.Linear(width, 4, bias=False)


class Model(nn.Module):
    def __init__(self, width=8, vocab=24):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        # A child of the model's own with the name that DDP gives.
        self.module = nn.Linear(width, width)
        self.weight = nn.Linear(width, width)
        self.decoder = nn.Linear(width, vocab, bias=False)  # a head by its size


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpointed(model):
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return model


def compiled_layers(model):
    for layer in model.layers:
        layer.attn = compiled(layer.attn)
        layer.gate = compiled(layer.gate)
    model.decoder = compiled(model.decoder)
    return model


def sharded(model):
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {
    "compile": compiled,
    "ddp": DistributedDataParallel,
    "data parallel": DataParallel,
    "averaged": AveragedModel,
    "checkpoint_wrapper": checkpointed,
    "the model itself checkpointed": checkpoint_wrapper,
    "compiled layers": compiled_layers,
    "compiled ddp": lambda model: compiled(DistributedDataParallel(model)),
    "ddp, compiled, checkpointed": lambda model: DistributedDataParallel(compiled(checkpointed(model))),
    "averaged ddp of everything": lambda model: AveragedModel(
        DistributedDataParallel(compiled(checkpointed(compiled_layers(model))))
    ),
    "fsdp2 with compile": lambda model: compiled(sharded(model)),
    "fsdp2 of checkpointed, compiled layers": lambda model: sharded(checkpointed(compiled_layers(model))),
}


def treatment(groups):
    return [(g["algorithm"], g["view"], g["param_names"], [tuple(p.shape) for p in g["params"]]) for g in groups]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_model_has_the_groups_of_the_bare_one(wrap):
    rules = [Rule("layers.*.up.weight", "muon", options={"lr": 0.5}), Rule("module.*", "adamw", options={"lr": 0.25})]
    bare = Model()
    expected = quintic.param_groups(bare, rules=rules)
    wrapped = WRAPPERS[wrap](copy.deepcopy(bare))
    assert treatment(quintic.param_groups(wrapped, rules=rules)) == treatment(expected)
    whys = [[(d.name, d.why) for d in assign(model, rules).values()] for model in (bare, wrapped)]
    assert whys[0] == whys[1]
    assert [row.name for row in quintic.explain(wrapped).rows] == [name for name, _ in bare.named_parameters()]
    assert [name for name, _ in model_parameters(wrapped)] == [name for name, _ in bare.named_parameters()]
    names = dict(whys[0])
    assert names["decoder.weight"] == "output head (as many outputs as tokens has rows)"
    assert names["layers.0.router.weight"] == "router"
    assert names["layers.0.gate.weight"] == "linear layer"
    assert names["layers.0.attn.Wqkv.weight"] == "fused queries, keys, values"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", ["compile", "compiled ddp", "averaged ddp of everything"])
def test_rules_may_have_the_prefixes_of_wrappers(wrap):
    wrapped = WRAPPERS[wrap](Model())
    (given,) = [name for name, _ in wrapped.named_parameters() if "layers.1." in name and name.endswith("up.weight")]
    assert given != "layers.1.up.weight"
    groups = quintic.param_groups(wrapped, rules=[Rule(given, "adamw", options={"lr": 0.5})])
    assert [g["param_names"] for g in groups if g.get("lr") == 0.5] == [["layers.1.up.weight"]]


def stepped(model, groups=None):
    optimizer = Muon(quintic.param_groups(model) if groups is None else groups, normalize="neuron")
    torch.manual_seed(1)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()
    return optimizer


def assert_equal_state(first, second):
    for left, right in zip(first.param_groups, second.param_groups, strict=True):
        for one, other in zip(left["params"], right["params"], strict=True):
            for key, value in first.state[one].items():
                assert torch.equal(value, second.state[other][key])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", ["compile", "ddp", "averaged ddp of everything", "checkpoint_wrapper"])
@pytest.mark.parametrize("direction", ["into the bare model", "into the wrapped model"])
def test_state_goes_between_the_wrapped_and_the_bare_model(wrap, direction):
    bare = Model()
    pair = [bare, WRAPPERS[wrap](copy.deepcopy(bare))]
    source, target = pair if direction == "into the wrapped model" else pair[::-1]
    saved = stepped(source)
    loaded = Muon(quintic.param_groups(target), normalize="neuron")
    loaded.load_state_dict(saved.state_dict())
    assert_equal_state(saved, loaded)
    if wrap != "averaged ddp of everything":  # PyTorch takes its prefixes for the model's
        loaded = Muon(quintic.param_groups(target), normalize="neuron")
        set_optimizer_state_dict(target, loaded, get_optimizer_state_dict(source, saved))
        assert_equal_state(saved, loaded)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", ["compile", "ddp", "averaged", "compiled ddp"])
def test_named_parameters_of_a_wrapped_model(wrap):
    def groups(model):
        return [{"params": [(n, p) for n, p in model.named_parameters() if p.ndim == 2], "view": Matrix()}]

    bare = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"module": nn.Linear(4, 4)}))
    wrapped = WRAPPERS[wrap](copy.deepcopy(bare))
    source, target = stepped(wrapped, groups(wrapped)), Muon(groups(bare), normalize="neuron")
    assert source.param_groups[0]["param_names"] == ["0.weight", "1.module.weight"]
    target.load_state_dict(source.state_dict())
    assert_equal_state(source, target)
    # Saved before names were freed of wrappers, and in another order.
    saved = source.state_dict()
    names = [name for name, p in wrapped.named_parameters() if p.ndim == 2][::-1]
    saved["param_groups"][0] |= {"param_names": names, "params": saved["param_groups"][0]["params"][::-1]}
    target = Muon(groups(bare), normalize="neuron")
    target.load_state_dict(saved)
    assert_equal_state(source, target)


def test_a_child_called_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.Linear(4, 4), "inner": nn.ModuleDict({"module": nn.Linear(4, 4)})})
    model.weight = nn.Parameter(torch.zeros(4))  # what module.weight would be called
    assert [name for name, _ in model_parameters(model)] == [name for name, _ in model.named_parameters()]
    optimizer = Muon(quintic.param_groups(model))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_part_of_a_model_may_be_wrapped():
    model = nn.ModuleDict({"encoder": DataParallel(Model()), "module": nn.Linear(4, 4)})
    names = [name for name, _ in model_parameters(model)]
    assert names[0] == "encoder.tokens.weight"
    assert "encoder.module.weight" in names  # the model's own child inside the wrapper
    assert "module.weight" in names


def test_wrappers_that_would_make_names_equal_keep_theirs():
    class AveragedModel(nn.Module):  # only the name is that of a wrapper
        def __init__(self):
            super().__init__()
            self.module, self.weight = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    assert [name for name, _ in model_parameters(AveragedModel())] == ["weight", "module.weight", "bias"]
    clean = clean_names(AveragedModel())
    assert clean["module"] == ""
    assert unwrap_module(compiled(DataParallel(model := nn.Linear(2, 2)))) is model


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["module._orig_mod.a", "module.b._checkpoint_wrapped_module.c"], ["a", "b.c"]),
        (["_orig_mod.module.module.a", "module.b"], ["module.a", "b"]),
        (["_fsdp_wrapped_module.module.a", "b"], ["module.a", "b"]),
        (["module.a", "a"], ["module.a", "a"]),
        (["_orig_mod.a", "a"], ["_orig_mod.a", "a"]),
        ([], []),
    ],
)
def test_names_alone(names, expected):
    assert without_wrappers(names) == expected


def test_a_name_with_wrappers_means_the_one_without():
    known = {"a.weight", "module.b.weight", "c.weight"}
    assert resolve_name("_orig_mod.module.a.weight", known) == "a.weight"
    assert resolve_name("module.b.weight", known) == "module.b.weight"
    assert resolve_name("module._orig_mod.module.b.weight", known) == "module.b.weight"
    assert resolve_name("c.module.weight", known) == "c.weight"
    assert resolve_name("d.weight", known) == "d.weight"
    assert name_variants("module.module.a") == ["module.module.a", "module.a", "a"]


def test_orders_and_announced_rows_may_have_the_prefixes_of_wrappers():
    model = nn.ModuleDict({"tokens": nn.Embedding(16, 4), "up": nn.Linear(4, 8, bias=False)})
    groups = quintic.param_groups(compiled(model))
    optimizer = Muon(groups, comm_order=["_orig_mod.up.weight"], compute_order=["module.tokens.weight"])
    optimizer.plan()
    with pytest.raises(ValueError, match=r"tokens\.weight: rows are announced for comms='sharded_sparse'"):
        optimizer.announce_rows("module._orig_mod.tokens.weight", torch.tensor([1]))
    with pytest.raises(ValueError, match=r"'module\.nothing', which is no parameter"):
        optimizer.announce_rows("module.nothing", torch.tensor([1]))
    with pytest.raises(ValueError, match=r"comm_order names a parameter twice"):
        Muon(groups, comm_order=["up.weight", "module.up.weight"]).plan()
    with pytest.raises(ValueError, match=r"no parameter is called 'module\.nothing'"):
        Muon(groups, comm_order=["module.nothing"]).plan()


def test_state_of_other_optimizers_may_have_the_prefixes_of_wrappers():
    from quintic.interchange import import_torch_state

    model = nn.Linear(4, 4, bias=False)
    optimizer = Muon(quintic.param_groups(model))
    buffer = torch.randn(4, 4)
    saved = {
        "state": {0: {"momentum_buffer": buffer}},
        "param_groups": [{"params": [0], "param_names": ["module._orig_mod.weight"]}],
    }
    import_torch_state(optimizer, saved)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], buffer)


def test_attention_inside_a_child_called_module_is_not_that_outside():
    parameters = separate_qk("module.attn") | separate_qk("attn")
    for layer in ("module.attn", "attn"):
        clip = QKClip().resolve(layer, parameters, 4)
        assert clip.names == (f"{layer}.q_proj.weight", f"{layer}.k_proj.weight")
    # One in the middle, which DDP of a part of the model may have made, is found as before.
    clip = QKClip().resolve("encoder.attn", separate_qk("encoder.module.attn"), 4)
    assert clip.names[0] == "encoder.module.attn.q_proj.weight"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("layer", ["attn", "module.attn", "_orig_mod.module.attn"])
def test_logits_of_a_wrapped_model_are_named_with_or_without_wrappers(layer):
    model = DistributedDataParallel(nn.ModuleDict({"attn": Attention(WIDTH)}))
    optimizer = Muon(quintic.param_groups(compiled(model)), qk_clip=QKClip(threshold=1.0), lr=0.0)
    before = model.module["attn"].q_proj.weight.detach().clone()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step(qk_logits={layer: torch.tensor([4.0, 4.0])})
    torch.testing.assert_close(model.module["attn"].q_proj.weight.detach(), before / 2)


def test_verify_reports_names_without_wrappers():
    model = compiled(nn.ModuleDict({"up": nn.Linear(4, 8, bias=False)}))
    report = quintic.verify(model, Muon(quintic.param_groups(model)))
    assert report.ok
    assert report.worst.name == "up.weight"


def test_a_view_of_the_registry_is_found_behind_wrappers():
    model = nn.ModuleDict({"attn": MptAttention(8)})
    model["attn"].Wqkv = compiled(model["attn"].Wqkv)
    views = {d.name: d.view for d in assign(model).values()}
    assert views["attn.Wqkv.weight"] == Split((8, 8, 8))
