"""The speedrun's model against an implementation of its description, in float64, with explicit masks and loops."""

import cmath
import math

import pytest
import torch

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
        table = torch.full((VOCAB,), -1)
        table[10:30] = torch.arange(20)
        model.set_prefixes(table)
    model.set_windows(2, 4)
    model.set_windows(SHORT, LONG)
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
    """Which of the positions (`copies` to a token) see which: an explicit table."""
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
                scores = (self.scale * queries @ torch.stack(keys).T).masked_fill(~seen, -torch.inf)
                outs[h] = list(scores.softmax(1) @ v[h])
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
        return total / len(inputs)


WEIGHTS = (1.0, 0.5, 0.25)


@pytest.mark.parametrize("off", [None, *FEATURES])
def test_loss_and_gradients_are_those_of_the_description(off):
    model = build(**({} if off is None else {off: 0 if off == "gate_channels" else False}))
    inputs, targets = tokens()
    loss = model(inputs, targets, prediction_weights=WEIGHTS, prefix_weight=torch.tensor(0.3, dtype=torch.float64))
    expected = Reference(model).loss(inputs, targets, WEIGHTS, 0.3)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    params = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(params.values()))
    wanted = torch.autograd.grad(expected, list(params.values()), materialize_grads=True)
    for name, got, want in zip(params, found, wanted, strict=True):
        assert got.abs().max() > 0, name
        torch.testing.assert_close(
            got, want, rtol=1e-8, atol=1e-11 * float(want.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )
