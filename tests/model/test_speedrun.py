"""The speedrun's model against an implementation of its description, in float64, with explicit masks and loops."""

import cmath
import functools
import math

import pytest
import torch

import quintic
from quintic.kernels.attention.attention import choose_attention
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT

BOS = 3
VOCAB = 40
STARTS = [0, 7, 8, 19, 24]  # of the documents of `tokens`, the last with one token, and the number of tokens
SHORT, LONG = 3, 6
FEATURES = [
    "attention_free_layer",
    "paired_heads",
    "key_offset",
    "value_embeddings",
    "shared_attention_input",
    "attention_gates",
    "exclusive_attention",
    "embedding_injection",
    "smear",
    "bigram_hash",
    "skip",
    "residual_scalars",
    "dense_connections",
    "gate_channels",
    "yarn",
    "sigmoid_logits",
    "multi_token",
    "prefix_tokens",
]


def sizes(**changes):
    options = {"vocab_size": VOCAB, "num_layers": 11, "width": 32, "num_heads": 4, "head_dim": 8, "bos_id": BOS}
    return SpeedrunConfig(**{**options, "gate_channels": 5, "bigram_rows": 11, "bigram_sign_rows": 6, **changes})


def build(seed=0, **changes):
    """A model in float64 whose parameters are all away from where they start, after one growth of its windows."""
    model = SpeedrunGPT(sizes(**changes), attention="sdpa")
    model.init_weights(seed)
    model = model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    if model.config.prefix_tokens:
        model.prefixes[10:30] = torch.arange(20)
    model.rotary.set_windows(2, 4)
    model.rotary.set_windows(SHORT, LONG)
    return model


def tokens(seed=1):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(4, VOCAB, (STARTS[-1] + 1,), generator=generator)
    row[STARTS[:-1]] = BOS
    return row[:-1], row[1:]


# ----------------------------------------------------------------------------------------- the description, in float64


def normed(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()


def document(position):
    return max(number for number, start in enumerate(STARTS[:-1]) if start <= position)


def is_start(position):
    return position in STARTS


def mask_of(copies, window):
    """An explicit table of the positions (`copies` to a token) that see each other."""
    count = copies * STARTS[-1]
    return torch.tensor(
        [
            [
                document(query // copies) == document(key // copies) and 0 <= query - key <= window
                for key in range(count)
            ]
            for query in range(count)
        ]
    )


def turned(x, position, frequencies):
    """Channels of one head at one position, the first half of them turned."""
    pairs = len(frequencies)
    turn = [cmath.exp(1j * position * frequency) for frequency in frequencies]
    real = torch.tensor([z.real for z in turn], dtype=torch.float64)
    imag = torch.tensor([z.imag for z in turn], dtype=torch.float64)
    a, b = x[:pairs], x[pairs : 2 * pairs]
    return torch.cat([a * real - b * imag, a * imag + b * real, x[2 * pairs :]])


class Reference:
    """The race's eleven layers, from the parameters of a model."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.p = {name.removeprefix("inputs."): param for name, param in model.named_parameters()}
        self.has = {name: bool(getattr(self.config, name)) for name in FEATURES}
        config = self.config
        self.paired = {0, 2, 5, 9} if config.paired_heads else set()
        self.attending = [0, 1, 2, 3, 4, 5, 7, 8, 9, 10] if config.attention_free_layer else list(range(11))
        # YaRN, from windows of (2, 4) to (SHORT, LONG).
        pairs = config.head_dim // 4
        self.frequencies = [1024.0 ** (-number / (pairs - 1)) for number in range(pairs)]
        self.scale = 0.1
        if config.yarn:
            grown = []
            for frequency in self.frequencies:
                turns = 4 * frequency / (2 * math.pi)
                kept = min(max((turns - 1) / 31, 0.0), 1.0)
                grown.append(frequency * (kept + (1 - kept) * 4 / LONG))
            self.frequencies = grown
            self.scale = 0.1 * (1 + 0.2 * math.log(LONG / 4))

    def coefficients(self, owner, names, x, scale):
        """name -> one column per number."""
        bias = self.p[f"{owner}.bias"]
        if self.config.gate_channels:
            hidden = x @ self.p[f"{owner}.up"].T
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
            numbers = (hidden @ self.p[f"{owner}.down"].T + bias) * scale
        else:
            numbers = (bias * scale).repeat(len(x), 1)
        found, place = {}, 0
        for name, size in names:
            found[name] = numbers[:, place : place + size]
            place += size
        assert place == numbers.shape[1]
        return found

    def gate_names(self, layers):
        heads, has, names = self.config.num_heads, self.has, []
        for layer in layers:
            if has["exclusive_attention"] and layer in {1, 3, 4, 7} - self.paired:
                names.append((("exclusive", layer), heads))
            if has["attention_gates"] and layer in {3, 10}:
                names.append((("attention", layer), heads))
            if has["skip"] and layer == 6:
                names.append((("skip", layer), 1))
            if layer in self.attending and not (has["dense_connections"] and layer == 10):
                names += [(("embedding", layer), 1)] * has["embedding_injection"]
                names += [(("bigram", layer), 1)] * has["bigram_hash"]
        return names

    def hidden(self, inputs):
        p, config, has = self.p, self.config, self.has
        width, count = config.width, len(inputs)
        ids = inputs.tolist()
        embedded = [p["embedding"][token] for token in ids]
        if has["smear"]:
            smeared = []
            for t, own in enumerate(embedded):
                gate = p["smear_scale"] * torch.sigmoid(p["smear_gate"][0] @ own[:12])
                smeared.append(own if is_start(t) else own + gate * embedded[t - 1])
            embedded = smeared
        x0 = normed(torch.stack(embedded))
        gates = self.coefficients("early_gates", self.gate_names(range(4)), x0, p["gate_scale"]) if self.early() else {}
        entry = x0
        bigram = None
        if has["bigram_hash"]:
            rows = []
            for t, token in enumerate(ids):
                row, sign = 10, 0
                if not is_start(t):
                    row, sign = ((36313 * token) ^ (27191 * ids[t - 1])) % 10, (token ^ ids[t - 1]) % 6
                rows.append(p["bigram_embedding"][row] * self.model.inputs.bigram_signs[sign])
            bigram = torch.stack(rows)
            entry = x0 + gates["bigram", 0] * bigram
        tables = [layer for layer in (1, 2, 8, 9, 10) if layer in self.attending]
        x = entry
        kept = {}
        sublayer = 0
        for layer in range(11):
            if layer == 4 and self.gate_names(range(4, 11)):
                gates |= self.coefficients("late_gates", self.gate_names(range(4, 11)), x, p["gate_scale"])
            dense = has["dense_connections"] and layer == 10
            added_values = 0.0
            source, residuals, outputs, found = x0, [1.0, 1.0], [1.0, 1.0], {}
            if has["skip"] and layer == 6:
                x = x + torch.sigmoid(p["skip_scale"]) * gates["skip", 6] * kept["early"]
            if dense:
                kept["last"] = x
                names = [("v0", 1), ("v1", 1), ("v2", 1), ("s0", 1), ("s1", 1), ("s2", 1)]
                names += [("value", 2)] * has["value_embeddings"]
                if has["residual_scalars"]:
                    names += [("ra", 1), ("oa", 1), ("rm", 1), ("om", 1)]
                names += [("embedding", 1)] * has["embedding_injection"] + [("bigram", 1)] * has["bigram_hash"]
                found = self.coefficients("last_connections", names, x, 0.1)
                added_values = found["v0"] * entry + found["v1"] * kept["shared"] + found["v2"] * x
                x = (1 + found["s2"]) * x + found["s0"] * entry + found["s1"] * kept["shared"]
                source = entry
                if has["residual_scalars"]:
                    residuals, outputs = [found["ra"], found["rm"]], [found["oa"], found["om"]]
                gates |= {(name, 10): found[name] for name in ("embedding", "bigram") if name in found}
            elif has["residual_scalars"]:
                numbers = [sublayer, sublayer + 1] if layer in self.attending else [0, sublayer]
                residuals = [p["residual_scales"][number] for number in numbers]
                outputs = [p["output_scales"][number] for number in numbers]
                sublayer = numbers[1] + 1
            if layer in self.attending:
                read = kept["shared"] if has["shared_attention_input"] and layer > 7 else kept.get("last", x)
                if dense and not has["shared_attention_input"]:
                    read = x
                read = normed(read)
                value = torch.zeros(count, width, dtype=torch.float64) + added_values
                if has["value_embeddings"] and layer in tables:
                    number = tables.index(layer)
                    table = p["value_embeddings"][number * VOCAB : (number + 1) * VOCAB]
                    looked_up = torch.stack([table[token] for token in ids])
                    kept.setdefault("value", looked_up)
                    if dense:
                        gate = torch.stack([found["value"][:, h // 2] for h in range(4)], dim=1)
                    else:
                        seen = torch.cat([read[:, :6], looked_up[:, :6]], dim=1)
                        gate = 2 * torch.sigmoid(seen @ p["value_gates"][number].T)
                    value = value + torch.cat(
                        [gate[:, h : h + 1] * looked_up[:, 8 * h : 8 * h + 8] for h in range(4)], 1
                    )
                out = self.attention(layer, read, value, gates)
                x = residuals[0] * x + outputs[0] * out
                if has["embedding_injection"]:
                    x = x + gates["embedding", layer] * source
                if has["bigram_hash"] and layer:
                    x = x + gates["bigram", layer] * bigram
            up, down = p["mlp_bank"].view(11, 2, 4 * width, width)[layer]
            x = residuals[1] * x + outputs[1] * (torch.relu(normed(x) @ up.T) ** 2 @ down)
            if layer == 3:
                kept["early"] = x
            if layer == 7:
                kept["shared"] = x
        if has["dense_connections"]:
            names = ["entry", "shared", "last", "early"] + ["value"] * has["value_embeddings"]
            found = self.coefficients("head_connections", [(name, 1) for name in names], x, 0.1)
            kept["entry"] = entry
            for name in names:
                x = x + found[name] * kept[name]
        return normed(x)

    def early(self):
        return self.gate_names(range(4))

    def attention(self, layer, read, value, gates):
        p, config = self.p, self.config
        width, number = config.width, self.attending.index(layer)
        bank = p["qk_bank"][number * 2 * width : (number + 1) * 2 * width]
        value_weight, out_weight = p["vo_bank"][number * 2 * width : (number + 1) * 2 * width].split(width)
        if self.has["residual_scalars"]:
            value_weight = p["projection_scales"][number, 0] * value_weight
            out_weight = p["projection_scales"][number, 1] * out_weight
        length, heads = len(read), range(4)
        head = [slice(8 * h, 8 * h + 8) for h in heads]
        q = [normed(read @ bank[:width][head[h]].T) for h in heads]
        k = [normed(read @ bank[width:][head[h]].T) for h in heads]
        v = [(read @ value_weight.T + value)[:, head[h]] for h in heads]
        long = layer in (3, 10)
        window = LONG if long else SHORT
        outs = [[None] * length for _ in heads]
        if layer in self.paired:
            seen = mask_of(2, window)
            for pair in (0, 1):
                places = [(t, pair + 2 * second) for t in range(length) for second in (0, 1)]
                queries = torch.stack([turned(q[h][t], n, self.frequencies) for n, (t, h) in enumerate(places)])
                keys = torch.stack([turned(k[h][t], n, self.frequencies) for n, (t, h) in enumerate(places)])
                values = torch.stack([v[h][t] for t, h in places])
                scores = (self.scale * queries @ keys.T).masked_fill(~seen, -torch.inf)
                for out, (t, h) in zip(scores.softmax(1) @ values, places, strict=True):
                    outs[h][t] = out
        else:
            seen = mask_of(1, window)
            for h in heads:
                queries = torch.stack([turned(q[h][t], t, self.frequencies) for t in range(length)])
                keys = [turned(k[h][t], t, self.frequencies) for t in range(length)]
                if self.has["key_offset"] and long:
                    keys = [key if is_start(t) else torch.cat([key[:4], keys[t - 1][4:]]) for t, key in enumerate(keys)]
                products = self.scale * queries @ torch.stack(keys).T
                outs[h] = list(products.masked_fill(~seen, -torch.inf).softmax(1) @ v[h])
        result = []
        for h in heads:
            out = torch.stack(outs[h])
            if ("exclusive", layer) in gates:
                along = (out * v[h]).sum(1, keepdim=True) / (v[h] * v[h]).sum(1, keepdim=True)
                out = out - torch.tanh(gates["exclusive", layer][:, h : h + 1]) * along * v[h]
            if ("attention", layer) in gates:
                out = out * gates["attention", layer][:, h : h + 1]
            result.append(out)
        return torch.cat(result, 1) @ out_weight.T

    def logits(self, inputs):
        raw = self.hidden(inputs) @ self.p["head"]
        if self.has["sigmoid_logits"]:
            return 11.5 + 11.5 * torch.tanh((raw + 5) / 15)
        return 15 * torch.tanh(raw / 15)

    def loss(self, inputs, targets, weights, prefix_weight):
        log_probs = self.logits(inputs).log_softmax(1)
        total = 0.0
        for t in range(len(inputs)):
            for ahead, weight in enumerate(weights if self.has["multi_token"] else weights[:1]):
                if t + ahead < len(inputs) and document(t + ahead) == document(t):
                    total = total - weight * log_probs[t, targets[t + ahead]]
            if self.has["prefix_tokens"] and 10 <= targets[t] < 30:
                total = total - prefix_weight * log_probs[t, targets[t] - 10]
        return total


WEIGHTS = (1.0, 0.5, 0.25, 0.3)  # of the next three tokens, and of the prefix


@pytest.mark.parametrize("off", [None, *FEATURES])
def test_loss_and_gradients_are_those_of_the_description(off):
    model = build(**({} if off is None else {off: 0 if off == "gate_channels" else False}))
    inputs, targets = tokens()
    loss = model(inputs, targets, loss_weights=torch.tensor(WEIGHTS, dtype=torch.float64))
    expected = Reference(model).loss(inputs, targets, WEIGHTS[:-1], WEIGHTS[-1])
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    params = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(params.values()))
    wanted = torch.autograd.grad(expected, list(params.values()), materialize_grads=True)
    for name, got, want in zip(params, found, wanted, strict=True):
        assert got.abs().max() > 0, name
        torch.testing.assert_close(
            got, want, rtol=1e-8, atol=1e-11 * float(want.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


# ----------------------------------------------------------------------------------------------------------- properties


@torch.no_grad()
def logits(model, inputs):
    raw = model._trunk(model._row(inputs, None, None)) @ model.head
    return 23 * torch.sigmoid((raw + 5) / 7.5)


def test_logits_depend_on_no_later_token():
    model, (inputs, _) = build(), tokens()
    for position in (1, 9, 20, 23):
        changed = inputs.clone()
        changed[position] = 39 if inputs[position] != 39 else 38
        assert torch.equal(logits(model, inputs)[:position], logits(model, changed)[:position])
        assert not torch.equal(logits(model, inputs)[position], logits(model, changed)[position])


def test_documents_do_not_see_each_other():
    model, (inputs, targets) = build(), tokens()
    for document_number, start in enumerate(STARTS[:-2]):
        end = STARTS[document_number + 1]
        changed = inputs.clone()
        changed[start + 1 : end] = inputs[start + 1 : end].roll(1)
        assert torch.equal(logits(model, inputs)[end:], logits(model, changed)[end:])
    # Nor do what they predict: the second target of a document's last token is the next document's.
    weights = [torch.tensor([1.0, second, 0.0]) for second in (0.0, 1.0)]
    first, both = (float(model(inputs, targets, loss_weights=one).detach()) for one in weights)
    others = torch.tensor([position for position in range(len(inputs)) if position + 1 not in STARTS])
    second = -logits(model, inputs).log_softmax(1)[others, targets[others + 1]].sum()
    assert both - first == pytest.approx(float(second), rel=1e-10)


def test_the_loss_is_that_of_the_logits():
    model, (inputs, targets) = build(), tokens()
    expected = torch.nn.functional.cross_entropy(logits(model, inputs), targets, reduction="sum")
    torch.testing.assert_close(model(inputs, targets).detach(), expected, rtol=1e-12, atol=0)


def test_parameters_are_as_many_as_the_races():
    with torch.device("meta"):
        model = SpeedrunGPT(SpeedrunConfig())
    # Commit f411b3d3, one rank: tables, banks, gates, scalars, and the two pairs of small MLPs.
    race = {
        "embed": 50304 * 768,
        "lm_head": 768 * 50304,
        "value_embeds": 5 * 50304 * 768,
        "bigram_embed": 377_280 * 768,
        "qk_bank": 60 * 256 * 768,
        "vo_bank": 20 * 768 * 768,
        "mlp_bank": 12 * 2 * 3072 * 768,
        "ve_gate_bank": 5 * 6 * 12,
        "smear_gate": 12,
        "post_lambdas": 22,
        "resid_lambdas": 22,
        "scalars": 24,
        "mudd": 2 * 64 * 768 + 2 * 14 * 64 + 2 * 14,
        "mudd_gate": 2 * 64 * 768 + 2 * 41 * 64 + 2 * 41 + 1,
    }
    assert sum(race.values()) == 640_605_607
    # Entries that it never reads: a twelfth MLP, the last layer's gate and scales (its coefficients replace them), the
    # scales of attention in the layer without it, and what pads the shorter one of two small MLPs.
    unread = 2 * 3072 * 768 + 72 + 2 * (2 + 1) + 2 + 9 * 65 + 15 * 65
    left_out = 12 * 65  # the gates with which its last layer mixes the attention of heads
    assert sum(param.numel() for param in model.parameters()) == sum(race.values()) - unread - left_out
    names_by_role = model.names_by_role()
    by_role = {role: sum(model.get_parameter(name).numel() for name in names) for role, names in names_by_role.items()}
    assert {role: by_role[role] for role in ("qk_bank", "vo_bank", "mlp_bank", "head", "embedding")} == {
        "qk_bank": 11_796_480,
        "vo_bank": 11_796_480,
        "mlp_bank": 51_904_512,
        "head": 38_633_472,
        "embedding": 38_633_472,
    }
    assert set(by_role) == {
        *("qk_bank", "vo_bank", "mlp_bank", "head", "embedding", "value_embedding", "bigram", "value_gates"),
        *("smear_gate", "scalars", "residual_scales", "output_scales"),
        *("gate_weights", "gate_bias", "connection_weights", "connection_bias"),
    }


def test_banks_are_pairs_of_heads_and_whole_matrices():
    model = build()
    width = model.config.width
    (pairs,) = quintic.Rows(2 * model.config.head_dim).batches(model.qk_bank)
    assert pairs.shape == (10 * 2 * 2, 16, width)
    assert pairs.data_ptr() == model.qk_bank.data_ptr()
    assert quintic.Rows(width).shapes(model.vo_bank.shape) == ((20, width, width),)
    assert quintic.Rows(4 * width).shapes(model.mlp_bank.shape) == ((22, 4 * width, width),)


def test_initial_values_are_the_races():
    config = sizes(vocab_size=2048, width=256, num_heads=4, head_dim=64, gate_channels=64, bigram_sign_rows=64)
    with torch.device("meta"):
        model = SpeedrunGPT(config)
    model = model.to_empty(device="cpu")
    model.init_weights(3)
    again = SpeedrunGPT(config)
    again.init_weights(3)
    for (name, first), second in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(first, second), name
    params = {name: param.requires_grad_(False) for name, param in model.named_parameters()}
    assert torch.equal(model.inputs.embedding, model.head.T)
    assert float(model.head.std()) == pytest.approx(0.005, rel=0.01)
    assert float(model.inputs.value_embeddings.std()) == pytest.approx(0.01, rel=0.01)
    up, down = model.mlp_bank.view(11, 2, -1).unbind(1)
    for bank in (model.qk_bank, model.vo_bank, up):
        assert float(bank.std()) == pytest.approx(0.5 / 16, rel=0.01)
        assert float(bank.abs().max()) == pytest.approx(3**0.5 * 0.5 / 16, rel=1e-3)
    assert float(params["late_gates.up"].abs().max()) == pytest.approx(1 / 16, rel=1e-2)
    zeros = {"value_gates", "inputs.bigram_embedding", "inputs.smear_gate", "inputs.smear_scale"}
    zeros |= {name for name in params if name.endswith("down")}
    assert not any(params[name].any() for name in zeros)
    assert not down.any()
    assert model.skip_scale.item() == -1.5
    assert model.residual_scales.tolist() == pytest.approx([1.1**0.5] * 19)
    assert model.projection_scales.tolist() == [[0.5, 1.0]] * 10
    assert set(model.inputs.bigram_signs.unique().tolist()) == {-1.0, 1.0}
    coefficients = model.last_connections(torch.randn(2, 256), 0.1)
    starts = {name: values[0].tolist() for name, values in coefficients.items()}
    assert starts["value_gates"] == [2.0, 2.0]
    assert starts["bigram"] == [pytest.approx(0.05)]
    gates = model.late_gates(torch.randn(2, 256), model.gate_scale)
    assert gates["attention.10"][1].tolist() == [0.25] * 4
    assert gates["skip.6"].tolist() == [[0.5], [0.5]]


def test_the_first_loss_is_that_of_a_guess():
    model = SpeedrunGPT(sizes())
    model.init_weights()
    model.rotary.set_windows(SHORT, LONG)
    inputs, targets = tokens()
    assert float(model(inputs, targets).detach()) / len(inputs) == pytest.approx(math.log(VOCAB), abs=0.01)


# --------------------------------------------------------------------------------------------------------------- state


def test_windows_stretch_the_slow_channels_alone():
    model = SpeedrunGPT(sizes(width=128, num_heads=2, head_dim=64))
    model.init_weights()
    start = model.rotary.frequencies.clone()
    assert start[0] == 1
    assert float(start[-1]) == pytest.approx(1 / 1024)
    model.rotary.set_windows(128, 384)
    assert torch.equal(model.rotary.frequencies, start)
    model.rotary.set_windows(384, 896)
    assert model.rotary.frequencies[0] == 1  # 61 turns in 384 tokens
    assert float(model.rotary.frequencies[-1]) == pytest.approx(384 / 896 / 1024)
    turns = 384 * start / (2 * math.pi)
    expected = [
        frequency * (1.0 if turn > 32 else 384 / 896 if turn < 1 else 384 / 896 + (turn - 1) / 31 * (1 - 384 / 896))
        for frequency, turn in zip(start.tolist(), turns.tolist(), strict=True)
    ]
    assert sum(1 < turn < 32 for turn in turns.tolist()) > 3
    assert model.rotary.frequencies.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(model.rotary.query_scale) == pytest.approx(0.1 * (1 + 0.2 * math.log(896 / 384)))
    stretched = model.rotary.frequencies.clone()
    model.rotary.set_windows(384, 2560, stretch=False)
    assert torch.equal(model.rotary.frequencies, stretched)
    model.rotary.reset()
    model.rotary.set_windows(384, 896)
    assert torch.equal(model.rotary.frequencies, start)


def test_a_state_dict_restores_windows():
    model, other = build(), SpeedrunGPT(sizes()).double()
    other.init_weights(5)
    other.rotary.set_windows(1, 2)
    inputs, targets = tokens()
    other(inputs, targets)
    other.load_state_dict(model.state_dict())
    assert other.rotary.windows == (SHORT, LONG)
    assert torch.equal(logits(other, inputs), logits(model, inputs))
    other.rotary.set_windows(SHORT, LONG)
    assert torch.equal(other.rotary.frequencies, model.rotary.frequencies)


def test_offsets_of_documents_do_what_the_mask_does(monkeypatch):
    """The inputs of FlashAttention, by a stand-in that takes each document by itself."""
    longests = []

    def attend(name, q, k, v, starts, *, longest, window):
        longests.append((len(q), longest))
        out = torch.zeros_like(q)
        for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
            visible = (distance >= 0) & (distance < window)
            heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
            attended = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
            out[start:end] = attended.transpose(0, 1)
        return out

    model, (inputs, targets) = build(), tokens()
    expected = model(inputs, targets)
    monkeypatch.setattr("quintic.kernels.attention.attention.attend", attend)
    model.attention_name = "fa3"
    starts = torch.tensor([*STARTS, STARTS[-1], STARTS[-1]], dtype=torch.int32)
    found = model(inputs, targets, document_starts=starts, longest_document=11)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert set(longests) == {(24, 11), (48, 22)}
    with pytest.raises(ValueError, match="needs document_starts"):
        model(inputs, targets)


def test_windows_are_asked_for():
    model = SpeedrunGPT(sizes())
    model.init_weights()
    with pytest.raises(ValueError, match=r"no windows yet; call rotary\.set_windows"):
        model(*tokens())
    with pytest.raises(ValueError, match=r"set_windows\(0, 4\): a query sees at least 1 token"):
        model.rotary.set_windows(0, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers=3: must be at least 4"),
        ({"num_heads": 3}, "num_heads=3: must be even"),
        ({"head_dim": 6}, "head_dim=6: must be a multiple of 4"),
        ({"width": 48}, "width=48: must be num_heads x head_dim = 32"),
        ({"bos_id": VOCAB}, "bos_id=40 is not a token"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        sizes(**changes)


@pytest.mark.parametrize("num_layers", [4, 5, 6, 7, 8, 12])
def test_every_depth_has_its_layers_and_trains_every_parameter(num_layers):
    model = build(num_layers=num_layers)
    plans = model.config.layers
    assert plans[-1].long
    assert not plans[model.config.middle].attends
    assert not any(plan.paired and (plan.long or plan.exclusive) for plan in plans)
    model(*tokens(), loss_weights=torch.tensor([1.0, 0.5])).backward()
    assert not [name for name, param in model.named_parameters() if param.grad is None or not param.grad.any()]


def test_the_head_in_8_bits_is_close():
    inputs, targets = tokens()
    exact, rough = (SpeedrunGPT(sizes(vocab_size=48, fp8_head=fp8), attention="sdpa") for fp8 in (False, True))
    for model in (exact, rough):
        model.init_weights(0)
        model.rotary.set_windows(SHORT, LONG)
        with torch.no_grad():
            model.head.mul_(40)
    losses = [model(inputs, targets) for model in (exact, rough)]
    assert losses[0] != losses[1]
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=0.01)
    grads = [torch.autograd.grad(loss, model.head)[0] for loss, model in zip(losses, (exact, rough), strict=True)]
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 0.1
    rough.eval()
    assert torch.equal(rough(inputs, targets), exact(inputs, targets))


def test_mlps_in_8_bits_are_close():
    inputs, targets = tokens()
    switches = ({}, {"fp8_mlp": True}, {"fp8_mlp": True, "fp8_mlp_backward": True}, {"fp8_mlp_backward": True})
    models = [SpeedrunGPT(sizes(**one), attention="sdpa") for one in switches]
    for model in models:
        model.init_weights(0)
        model.rotary.set_windows(SHORT, LONG)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            model.mlp_bank.add_(0.05 * torch.randn(model.mlp_bank.shape, generator=generator))
            model.head.mul_(40)
    losses = [model(inputs, targets) for model in models]
    exact, rough, *same = (float(loss.detach()) for loss in losses)
    assert same == [rough, exact]
    assert rough != exact
    assert rough == pytest.approx(exact, rel=0.01)
    grads = [torch.autograd.grad(loss, model.mlp_bank)[0] for loss, model in zip(losses, models, strict=True)]
    off = [float((grad - grads[0]).norm() / grads[0].norm()) for grad in grads]
    assert 0 < off[1] < off[2] < 0.1
    assert off[3] == 0  # backward alone there is nothing in 8 bits
    # Neither in evaluation nor where nothing learns, as in the head.
    with torch.no_grad():
        assert len({float(model(inputs, targets)) for model in models}) == 1
    for model in models:
        model.eval()
    assert len({float(model(inputs, targets).detach()) for model in models}) == 1


# ------------------------------------------------------------------------------------------------------------- compiled


def compare(plain, compiled, inputs, targets, tolerance, *, bias_tolerance=None, **options):
    weights = torch.tensor(WEIGHTS, device=inputs.device)
    losses = [model(inputs, targets, loss_weights=weights, **options) for model in (plain, compiled)]
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=tolerance)
    for loss in losses:
        loss.backward()
    for (name, param), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        difference = (param.grad.float() - other.grad.float()).norm() / param.grad.float().norm()
        assert float(difference) < (bias_tolerance or tolerance if name.endswith(".bias") else tolerance), name


def compare_compiled(dtype, tolerance, **changes):
    plain, compiled = (build(2, num_layers=4, **changes).to(dtype) for _ in range(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.compile_trunk()
    compare(plain, compiled, *tokens(), tolerance)
    assert not torch._dynamo.utils.counters["graph_break"]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compare(plain, compiled, *tokens(2), tolerance)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
def test_compiled_code_has_no_breaks_and_compute_the_same(monkeypatch):
    # What is traced is in question here, not the code that is made of it, which takes minutes.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compare_compiled(torch.float32, 1e-4, fp8_mlp=True, fp8_mlp_backward=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler about itself
def test_compiled_code_computes_the_same():
    # In float64: gradients of scalars are sums of terms that nearly cancel, of which float32 leaves four digits.
    compare_compiled(torch.float64, 1e-9)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler about itself
def test_bfloat16_on_a_gpu_is_close_to_float32():
    options = {"vocab_size": 1024, "width": 512, "num_heads": 4, "head_dim": 128, "gate_channels": 64}
    config = sizes(**options, bigram_rows=500)
    fastest = choose_attention("auto", device=torch.device("cuda"), dtype=torch.bfloat16)
    models = [
        SpeedrunGPT(config, attention=name, dtype=dtype)
        for name, dtype in (("sdpa", torch.float32), (fastest, torch.bfloat16))
    ]
    generator = torch.Generator().manual_seed(0)
    for model in models:
        model.init_weights(0)
    with torch.no_grad():
        for param, other in zip(*(model.parameters() for model in models), strict=True):
            param.add_(0.02 * torch.randn(param.shape, generator=generator))
            other.copy_(param)
            param.copy_(other)  # what bfloat16 can hold
    plain, compiled = (model.cuda() for model in models)
    for model in models:
        model.rotary.set_windows(128, 384)
    compiled.compile_trunk()
    inputs = torch.randint(4, 1024, (2048,), generator=generator)
    starts = torch.tensor([0, 300, 301, 1100, 2048])
    inputs[starts[:-1]] = BOS
    targets = inputs.roll(-1)
    compare(
        plain,
        compiled,
        inputs.cuda(),
        targets.cuda(),
        0.1,
        bias_tolerance=0.5,  # their gradients are sums over all tokens in which most terms cancel
        document_starts=starts.to("cuda", torch.int32),
        longest_document=1024,
    )
