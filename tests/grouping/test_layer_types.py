"""Models whose layers are no instances of `torch.nn`'s classes: scripted, traced, exported, of other libraries."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn import functional

import quintic
from quintic import Matrix, Split
from quintic.grouping.assign import assign
from quintic.grouping.layer_types import with_layer_types


def decided(model, **options):
    return {d.name: (d.algorithm, d.view) for d in assign(model, **options).values()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.gate = nn.Linear(16, 32, bias=False)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16)
        self.router = nn.Linear(16, 4)
        self.norm = nn.LayerNorm((4, 16))  # two dimensions, and no matrix

    def forward(self, x):
        x = x + self.attn(x, x, x, need_weights=False)[0]
        x = x + self.down(functional.silu(self.gate(x)) * self.up(x)) * self.router(x).sum()
        return self.norm(x)


class LanguageModel(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 16, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.up(self.depthwise(self.grouped(self.stem(x))))).mean((2, 3))


TOKENS = torch.zeros(2, 4, dtype=torch.long)
IMAGES = torch.zeros(2, 3, 8, 8)


def exported(model, example):
    return torch.export.export(model, (example,))


TRACED = {
    "script": lambda model, example: torch.jit.script(model),
    "trace": lambda model, example: torch.jit.trace(model, example),
    "export": lambda model, example: exported(model, example).module(),
    "unflatten": lambda model, example: torch.export.unflatten(exported(model, example)),
    "fx": lambda model, example: torch.fx.symbolic_trace(model),
}


@pytest.fixture(autouse=True)
def _tracers_may_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("kind", ["script", "trace", "export", "unflatten"])
def test_a_traced_language_model_is_decided_as_the_model_itself(kind):
    model = LanguageModel()
    want = decided(model)
    assert want["layers.0.attn.in_proj_weight"] == ("muon", Split((16, 16, 16)))
    assert {want[f"layers.1.{name}.weight"][0] for name in ("gate", "up", "down")} == {"muon"}
    assert {want[name][0] for name in ("embed.weight", "lm_head.weight", "layers.0.router.weight")} == {"adamw"}
    assert decided(TRACED[kind](model, TOKENS)) == want


@pytest.mark.parametrize("kind", TRACED)
@pytest.mark.parametrize("convolutions", ["adamw", "muon"])
def test_traced_convolutions_keep_their_groups_and_their_orientation(kind, convolutions):
    model = Convolutions().eval()
    want = decided(model, convolutions=convolutions)
    found = decided(TRACED[kind](model, IMAGES), convolutions=convolutions)
    assert found == want
    assert want["depthwise.weight"][0] == "adamw"
    assert want["grouped.weight"][0] == convolutions


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_are_decided_as_the_model_that_was_cut(tied):
    model = LanguageModel(tied)
    want = decided(LanguageModel())
    pipe = pipeline(model, (TOKENS,), split_spec={"layers.1": SplitPoint.BEGINNING})
    found = [decided(pipe.get_stage_module(number)) for number in range(2)]
    # Before PyTorch 2.11 a tied weight is in both stages by its first name, too.
    assert not found[0].keys() & found[1].keys() - {"lm_head.weight", *(["embed.weight"] if tied else [])}
    both = found[0] | found[1]
    assert both == want


@pytest.mark.parametrize("kind", ["script", "export"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_traced_module_inside_a_model_is_stepped_like_the_plain_one(kind, frozen):
    """Perceptual losses, teachers and tokenizers are often TorchScript, and often frozen."""

    def made(traced):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        if traced:
            inner = TRACED[kind](inner, torch.zeros(4, 8))
        for param in inner.parameters():
            param.requires_grad = not frozen
        return nn.ModuleDict({"body": nn.Linear(8, 8), "loss": inner})

    models = made(False), made(True)
    x = torch.randn(4, 8)
    for model in models:
        optimizer = quintic.Muon(quintic.param_groups(model), lr=0.1, compute_dtype=torch.float32)
        for _ in range(2):
            optimizer.zero_grad()
            model["loss"](model["body"](x)).square().sum().backward()
            optimizer.step()
    rows = zip(models[0].named_parameters(), models[1].named_parameters(), strict=True)
    for (name, plain), (other_name, traced) in rows:
        assert name == other_name
        assert torch.equal(plain, traced), name
    assert [row.name for row in quintic.explain(models[1]).rows] == [name for name, _ in models[0].named_parameters()]


class Products(nn.Module):
    """Parameters that no layer of their own holds, each used in one way."""

    def __init__(self):
        super().__init__()
        self.by_linear = nn.Parameter(torch.randn(24, 16))
        self.by_matmul = nn.Parameter(torch.randn(16, 24))
        self.by_transpose = nn.Parameter(torch.randn(24, 16))
        self.table = nn.Parameter(torch.randn(9, 16))
        self.several = nn.Parameter(torch.randn(16, 16))
        self.added = nn.Parameter(torch.randn(4, 16))

    def forward(self, tokens):
        x = functional.embedding(tokens, self.table) + self.added
        products = functional.linear(x, self.by_linear) + x @ self.by_matmul + x @ self.by_transpose.t()
        return products, functional.linear(x, self.several) + x * self.several[:4]


@pytest.mark.parametrize("kind", ["export", "unflatten", "fx"])
def test_the_graph_says_what_a_parameter_without_a_layer_is(kind):
    traced = TRACED[kind](Products(), TOKENS)
    with pytest.raises(ValueError, match=r"these 2 parameters: (several|added) of shape .*, (several|added) of shape"):
        assign(traced)
    found = decided(traced, rules=[quintic.Rule("several", "muon"), quintic.Rule("added", "adamw")])
    assert found["by_linear"] == ("muon", Matrix())
    assert found["by_transpose"] == ("muon", Matrix())
    assert found["by_matmul"] == ("muon", Matrix(transposed=True))
    assert found["table"] == ("adamw", Matrix())


def test_a_table_that_is_multiplied_with_elsewhere_stays_an_embedding():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, 16))

        def forward(self, tokens):
            return functional.linear(functional.embedding(tokens, self.table), self.table)

    assert decided(torch.fx.symbolic_trace(Tied()))["table"] == ("adamw", Matrix())


@pytest.mark.slow
def test_known_models_are_known_when_they_are_exported():
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, n_positions=16)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    for config in (gpt2, transformers.LlamaConfig(**sizes, vocab_size=50)):
        config._attn_implementation = "eager"
        inner = transformers.AutoModelForCausalLM.from_config(config)

        class Logits(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, tokens):
                return self.inner(input_ids=tokens, use_cache=False).logits

        model = Logits(inner)
        traced = torch.export.unflatten(exported(model, TOKENS))
        assert decided(traced) == decided(model)
    # How many heads GPT-NeoX has, no graph says: one matrix would be a silent change of the update rule.
    neox = transformers.GPTNeoXConfig(**sizes, vocab_size=50, attn_implementation="eager")
    model = Logits(transformers.AutoModelForCausalLM.from_config(neox))
    with pytest.raises(ValueError, match=r"query_key_value\.weight .*but GPTNeoXAttention has none of num_attention"):
        assign(torch.export.unflatten(exported(model, TOKENS)))


# -- linear layers of other libraries ----------------------------------------------------------------------------------


def layer(name, module, **attributes):
    """Return a linear layer that is none by its class, (5, 3), with attributes of its own."""

    def init(self, shape=(5, 3)):
        nn.Module.__init__(self)
        vars(self).update(attributes)
        self.weight, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(shape[0]))

    return type(name, (nn.Module,), {"__init__": init, "__module__": module})


PYG = layer("Linear", "torch_geometric.nn.dense.linear", in_channels=3, out_channels=5)
IBERT = layer("QuantLinear", "transformers.models.ibert.quant_modules", in_features=3, out_features=5)
FAIRSCALE = layer("ColumnParallelLinear", "fairscale.nn", in_features=3, out_features=5, output_size_per_partition=5)
MEGATRON = layer("RowParallelLinear", "megatron.core", input_size=3, output_size=5, input_size_per_partition=3)
OTHERS = [PYG, IBERT, FAIRSCALE, MEGATRON]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__module__)
def test_linear_layers_of_other_libraries_are_linear_layers(kind):
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "layers": nn.ModuleList([kind()]), "head": kind()})
    found = decided(model)
    assert found["layers.0.weight"] == ("muon", Matrix())
    assert found["head.weight"][0] == "adamw"
    assert type(model["head"]) is kind
    assert quintic.param_groups(model)[0]["params"] == [model["layers"][0].weight]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__module__)
def test_what_names_and_gates_say_holds_for_them_too(kind):
    with pytest.warns(UserWarning, match=r"perhaps several matrices each.*: qkv_proj\.weight"):
        groups = quintic.param_groups(nn.ModuleDict({"qkv_proj": kind()}))
    assert groups[0]["algorithm"] == "muon"
    assert decided(nn.ModuleDict({"router": kind()}))["router.weight"] == ("adamw", Matrix())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (PYG, (3, 5)),  # stored (in, out)
        (MEGATRON, (5, 2)),  # a piece of it, as tensor parallelism leaves it on a rank
        (layer("Prototypes", "mine", in_features=3, out_features=5), (5, 3)),
        (layer("Linear", "mine", in_features=None, out_features=5), (5, 3)),
    ],
)
def test_other_shapes_and_other_classes_stay_undecided(kind, shape):
    with pytest.raises(ValueError, match=r"no rule covers this parameter: x\.weight"):
        assign(nn.ModuleDict({"x": kind(shape)}))


def test_a_model_without_such_layers_is_not_copied():
    model = LanguageModel()
    assert with_layer_types(model) is model
    mixed = nn.ModuleDict({"plain": model, "other": PYG()})
    copy = with_layer_types(mixed)
    assert copy is not mixed
    assert copy["plain"] is model
    assert isinstance(copy["other"], nn.Linear | PYG)
    assert copy["other"].weight is mixed["other"].weight


# -- models that answer no questions -----------------------------------------------------------------------------------


class Unready(RuntimeError):
    pass


def raising(*_):
    raise Unready("the model is not ready for this")


@pytest.mark.parametrize("name", ["get_classifier", "get_output_embeddings", "get_input_embeddings"])
@pytest.mark.parametrize("as_property", [False, True])
@pytest.mark.parametrize("error", [Unready, NotImplementedError, KeyError, AssertionError])
def test_a_question_that_raises_counts_as_no_answer(name, as_property, error):
    def ask(self, *_):
        raise error("not for this model")

    plain = nn.ModuleDict({"up": nn.Linear(4, 8), "score": nn.Linear(8, 3)})
    kind = type("Model", (nn.ModuleDict,), {name: property(ask) if as_property else ask})
    model = kind(dict(plain.items()))
    assert decided(model) == decided(plain)
    assert len(quintic.explain(model).rows) == 4


@pytest.mark.parametrize(
    "name", ["sharding_strategy", "config", "head_first", "key_dim", "val_dim", "weight", "nf", "graph", "_ty"]
)
def test_properties_that_cannot_be_read_do_not_stop_anything(name):
    """Deprecated, lazy and distributed attributes raise whatever their libraries like."""
    plain = nn.ModuleDict({"qkv": nn.Linear(4, 12), "proj": nn.Linear(4, 4), "layer_v": nn.Linear(4, 4)})
    kind = type("Attention", (nn.ModuleDict,), {name: property(raising), "__module__": "timm.layers"})
    model = kind(dict(plain.items()))
    if name in ("sharding_strategy", "config", "weight", "nf", "graph", "_ty", "key_dim", "val_dim"):
        assert decided(model)["qkv.weight"] == ("muon", Split((4, 4, 4)))
    assert decided(model)["proj.weight"] == ("muon", Matrix())
