"""`export_hf` writes a trained model as a folder that the transformers library can load.

transformers has a class for nanochat's models of 2025, which lack value embeddings, residual scales, smear and backout.
Quintic's models have these, so the folder contains its own code, `modeling_quintic.py` and copies of its imports, and
is loaded with `trust_remote_code=True`. Exporting does not need transformers.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object, new_folder, save_tensors
from quintic.errors import ConfigError
from quintic.eval.row_models import BatchedSpeedrun, LanguageModel
from quintic.model import functions, speedrun_layers, speedrun_sizes
from quintic.model.gpt import GPT
from quintic.model.layers import QK_GAIN
from quintic.model.sizes import GATE_CHANNELS, VARIANTS

__all__ = ["export_hf"]


def export_hf(model: LanguageModel, tokenizer: Tokenizer, folder: str | Path) -> Path:
    """Write weights (`safetensors`), configuration, tokenizer and code for transformers, and return the folder.

    Weights keep their dtypes. The exported tokenizer gives the same tokens; it puts the token that starts a document
    first, except with `add_special_tokens=False`. That token also ends generation and serves as padding.

    Args:
        model: the model, on any device.
        tokenizer: the model's tokenizer.
        folder: folder to write; an earlier export is replaced, by one rename.

    Raises:
        ConfigError: the folder holds something other than an export.
        OSError: the folder cannot be written; nothing was changed.
    """
    folder = Path(folder)
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and json_object(folder / "config.json").get("model_type") not in ("quintic", "quintic_speedrun"):
        raise ConfigError(f"--out {folder}: holds something other than an export; name a new folder")
    if isinstance(model, BatchedSpeedrun):
        code, name, (state, sizes) = "modeling_speedrun", "QuinticSpeedrun", _speedrun_content(model)
        modules = [functions, speedrun_layers, speedrun_sizes]
    else:
        code, name, (state, sizes) = "modeling_quintic", "Quintic", _gpt_content(model)
        modules = [functions]
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), model.config.bos_id)
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "auto_map": {"AutoConfig": f"{code}.{name}Config", "AutoModelForCausalLM": f"{code}.{name}ForCausalLM"},
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
        **sizes,
        **ends,
        "tie_word_embeddings": False,
    }
    files = {
        "config.json": config,
        # The code of the speedrun's model has no key/value cache.
        "generation_config.json": ends | {"use_cache": not isinstance(model, BatchedSpeedrun)},
        **_tokenizer_files(tokenizer, sizes["max_position_embeddings"]),
    }
    # Written beside the old folder, which is replaced when all files are there.
    with new_folder(folder, discard_old=True) as unfinished:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_tensors(state, unfinished / "model.safetensors")
        for file, content in files.items():
            (unfinished / file).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for source in (Path(__file__).with_name(f"{code}.py"), *(Path(str(module.__file__)) for module in modules)):
            text = source.read_text(encoding="utf-8")
            (unfinished / source.name).write_text(text.replace("from quintic.model.", "from ."), encoding="utf-8")
    return folder


def _gpt_content(model: GPT) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a GPT's weights, and its sizes as `QuinticConfig` names them."""
    config, state = model.config, model.state_dict()
    # A buffer for counting operations, which the exported code does not have.
    state.pop("lookup_mean_rows", None)
    return state, {
        "model_type": "quintic",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.depth,
        "hidden_size": config.width,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.seq_len,
        "windows": list(config.windows),
        "value_embedding_layers": [layer for layer in range(config.depth) if config.has_value_embedding(layer)],
        "backout_layer": config.depth // 2,
        "gate_channels": min(GATE_CHANNELS, config.width),
        "smear_channels": model.smear_gate.in_features,
        "value_gate_gain": VARIANTS[config.variant].value_gate_gain,
        "qk_gain": QK_GAIN,
        "softcap": config.softcap,
        "rotary_base": config.rotary_base,
        "lookup_layers": list(config.l3_layers),
        "lookup_rows": config.l3_embeddings,
        "lookup_d_up": config.l3_d_up or 4 * config.width,
        "lookup_tied": config.l3_tied,
    }


def _speedrun_content(exported: BatchedSpeedrun) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a speedrun's model as its exported code names them, and its sizes and features.

    Tables and head are exported without the rows that pad the vocabulary.
    """
    model, sizes, vocab = exported.model, exported.config, exported.vocab_size
    state = {
        name.removeprefix("inputs."): tensor
        for name, tensor in model.state_dict().items()
        if name != "prefixes" and not name.startswith("rotary.")
    }
    state["embedding.weight"] = state.pop("embedding")[:vocab].clone()
    state["head.weight"] = state.pop("head").mT[:vocab].clone()
    if sizes.value_embeddings:
        for number, table in enumerate(state.pop("value_embeddings").split(sizes.vocab_size)):
            state[f"value_embeddings.{number}.weight"] = table[:vocab].clone()
    assert model.rotary.windows is not None
    return state, {
        "model_type": "quintic_speedrun",
        "vocab_size": vocab,
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.width,
        "head_dim": sizes.head_dim,
        "num_attention_heads": sizes.num_heads,
        "max_position_embeddings": exported.seq_len,
        "windows": list(model.rotary.windows),
        "frequencies": model.rotary.frequencies.tolist(),
        "query_scale": model.rotary.query_scale.item(),
        "features": dataclasses.asdict(sizes),
        "use_cache": False,
    }


def _tokenizer_files(tokenizer: Tokenizer, seq_len: int) -> dict[str, dict[str, Any]]:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_str(tokenizer.definition)
    bos = backend.id_to_token(tokenizer.bos_id)
    special = [(bos, tokenizer.bos_id)]
    backend.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": bos,
        "padding_side": "left",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        # The name of a special token in a text is plain text.
        "split_special_tokens": True,
    }
    return {"tokenizer.json": json.loads(backend.to_str()), "tokenizer_config.json": settings}
