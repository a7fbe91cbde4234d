"""The model classes of transformers, from configurations of their defaults with fewer layers and narrower ones.

Default configurations fit together, which arbitrary small numbers do not: widths are divided by the same number, counts
of heads stay. A class that cannot be built so is built with its default widths.
"""

import functools
import importlib
from typing import Any

from torch import nn

from benchmarks.roles.compare import Attempt
from benchmarks.roles.transformers_inputs import every_input, needed_inputs, placed_images

DIVISOR = 8
NUM_LAYERS = 2
NUM_LAYERS_OF_MIXED = 8
VOCABULARY = 1009
CLASSES_OF_A_FAMILY = 3

_NEEDED = {"num_experts_per_tok": 2, "moe_topk": 2, "vocab_size": VOCABULARY, "prediction_length": 8}
"""Values for what has no default and is needed."""

_DOES_NOT_FIT = "^build|shape|size|divisible|match|dimension|expected|same|broadcast|group|index|layer|split"

_WIDTHS = (
    "hidden",
    "dim",
    "width",
    "d_model",
    "d_ff",
    "d_kv",
    "d_inner",
    "ffn",
    "intermediate",
    "n_embd",
    "embed",
    "channels",
    "inner",
    "d_embed",
    "filters",
    "lora_rank",
    "n_inner",
    "planes",
)
_NO_WIDTHS = (
    "num_",
    "n_layer",
    "layers",
    "vocab",
    "position",
    "max_",
    "patch",
    "prob",
    "drop",
    "act",
    "in_chan",
    "scale",
    "mel",
    "input_",
    "groups",
    "kernel",
    "index",
    "image",
    "_id",
    "out_features",
    "n_head",
    "rope",
    "bins",
    "block",
    "window",
    "depth",
    "text_embed_dim_",
    "state",
)
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
    "num_attention_layers",
    "num_block_layers",
    "block_depth",
    "num_hidden_groups_",
    "text_layers",
    "vision_layers",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
    "num_blocks",
    "decoder_depth",
    "prediction_layers",
)


def families() -> dict[str, str]:
    """Return {class: family}, some classes of each model type that the automatic classes know."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    naming = importlib.import_module("transformers.models.auto.configuration_auto")
    of_family: dict[str, list[str]] = {}
    for title, mapping in vars(auto).items():
        if not title.endswith("MAPPING_NAMES") or title.startswith("CONFIG"):
            continue
        for model_type, names in mapping.items():
            known = of_family.setdefault(naming.model_type_to_module_name(model_type), [])
            known += [name for name in ([names] if isinstance(names, str) else names) if name not in known]
    found: dict[str, str] = {}
    for family, names in sorted(of_family.items()):
        for name in names[:CLASSES_OF_A_FAMILY]:
            found.setdefault(name, family)
    return found


def attempts(name: str) -> list[Attempt]:
    """Return ways to build and call a class: small or with default widths, with all inputs or those that it needs."""
    kind = getattr(importlib.import_module("transformers"), name)
    sizes = (
        ("narrow", DIVISOR, True, ""),
        ("narrow, all layers", DIVISOR, False, _DOES_NOT_FIT),
        ("default widths", 1, True, _DOES_NOT_FIT),
    )
    return [
        Attempt(f"{what}, {inputs.__name__}", functools.partial(_build, kind, divisor, is_shallow), inputs, after=after)
        for what, divisor, is_shallow, after in sizes
        for inputs in (placed_images, every_input, needed_inputs)
    ]


def _build(kind: Any, divisor: int, is_shallow: bool) -> nn.Module:
    initialization = importlib.import_module("transformers.initialization")
    config = smaller(kind.config_class, divisor, is_shallow=is_shallow)
    with initialization.no_init_weights(), WithoutValues():
        model: nn.Module = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
    # Without it, classifiers of sequences refuse several of them.
    for part in (model.config, getattr(model.config, "text_config", None)):
        if part is not None and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    return model.eval()


def smaller(config_class: Any, divisor: int, *, is_shallow: bool = True) -> Any:
    """Return a configuration with fewer layers, a small vocabulary, and widths divided by a number."""
    config = config_class(**_changes(config_class(), divisor, is_shallow))
    text, vision = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    if text is not None and getattr(vision, "out_hidden_size", None) is not None:
        vision.out_hidden_size = text.hidden_size  # the defaults of some do not fit each other
    return config


def _changes(config: Any, divisor: int, is_shallow: bool, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments that make a configuration smaller, with those of the ones in it."""
    changed: dict[str, Any] = dict(given or {})
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    kinds = values.get("layer_types") or values.get("layers_block_type") or ()
    is_mixed = len(set(map(str, kinds))) > 1 or any("_period" in key or "_interval" in key for key in values)
    layers = NUM_LAYERS_OF_MIXED if is_mixed else NUM_LAYERS
    for key, value in values.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            changed[key] = _nested(value, divisor, is_shallow)
        elif key in _LAYERS and isinstance(value, int):
            changed[key] = min(value, layers) if is_shallow else value
        elif value is None and key in _NEEDED:
            changed[key] = _NEEDED[key]
        elif key == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            changed[key] = {**value, "mrope_section": [max(1, one // divisor) for one in value["mrope_section"]]}
        elif key == "vocab_size" and isinstance(value, int) and value > VOCABULARY:
            changed[key] = VOCABULARY
        elif divisor > 1 and _is_width(key):
            smaller_value = _divided(value, divisor)
            if smaller_value != value:
                changed[key] = smaller_value
    vocabulary = changed.get("vocab_size", values.get("vocab_size"))
    if isinstance(vocabulary, int):
        for key, value in values.items():
            if key.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= vocabulary:
                changed[key] = value % 97 + 900
            elif key.endswith("_token_id") and isinstance(value, list):
                changed[key] = [one if one < vocabulary else one % 97 + 900 for one in value]
    return changed


def _nested(config: Any, divisor: int, is_shallow: bool) -> Any:
    """Return a smaller copy of a configuration that another one holds, with the values that it was given."""
    kind = type(config)
    try:
        usual = vars(kind())
    except Exception:  # some have values without a default
        usual = {}
    lists = ("layer_types", "layers_block_type", "mlp_layer_types")
    given = {
        key: value
        for key, value in vars(config).items()
        if not key.startswith("_") and (key not in lists or not is_shallow) and key in usual and usual[key] != value
    }
    return kind(**_changes(config, divisor, is_shallow, given))


def _is_width(key: str) -> bool:
    return any(word in key for word in _WIDTHS) and not any(word in key for word in _NO_WIDTHS)


def _divided(value: Any, divisor: int) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_divided(one, divisor) for one in value)
    is_fit = isinstance(value, int) and not isinstance(value, bool) and value >= 64 and value % (divisor * 2) == 0
    return value // divisor if is_fit else value


class WithoutValues:
    """Leave the memory of new weights as it is, which costs nothing; nobody reads it."""

    def __enter__(self) -> None:
        self.kept = {name: getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and name[0] != "_"}
        for name in self.kept:
            setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)

    def __exit__(self, *error: object) -> None:
        for name, function in self.kept.items():
            setattr(nn.init, name, function)
