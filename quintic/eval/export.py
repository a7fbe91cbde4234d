"""A trained model as a folder that other libraries load: `export_hf` for transformers, and what builds on it.

transformers has a class for nanochat's models of 2025, which lack value embeddings, residual scales, smear and backout.
Ours have them all, so the folder brings its own code, `modeling_quintic.py`, and is loaded with
`trust_remote_code=True`. Nothing here needs transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object, new_folder, save_tensors
from quintic.errors import ConfigError
from quintic.model.gpt import GPT
from quintic.model.layers import GATE_CHANNELS, QK_GAIN

__all__ = ["export_hf"]

_CODE = Path(__file__).with_name("modeling_quintic.py")


def export_hf(model: GPT, tokenizer: Tokenizer, folder: str | Path) -> Path:
    """Write weights (`safetensors`), configuration, tokenizer and code that transformers loads.

    Weights keep their names and dtypes. The tokenizer gives the tokens of ours, and puts the token that starts a
    document first unless asked not to (`add_special_tokens=False`); that token also ends generation and pads.

    Args:
        model: on any device.
        tokenizer: the model's.
        folder: where to; an earlier export there is replaced, by one rename.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder holds something else.
        OSError: it cannot be written; nothing was changed.
    """
    folder = Path(folder)
    _check_folder(folder)
    with new_folder(folder, discard_old=True) as unfinished:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        state.pop("lookup_mean_rows", None)  # for counting operations, not for making them
        save_tensors(state, unfinished / "model.safetensors")
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), model.config.bos_id)
        files = {"config.json": _config(model, ends), "generation_config.json": ends}
        for name, content in (files | _tokenizer_files(tokenizer, model.config.seq_len)).items():
            (unfinished / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.copyfile(_CODE, unfinished / _CODE.name)
    return folder


def _check_folder(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if json_object(folder / "config.json").get("model_type") != "quintic":
        raise ConfigError(f"--out {folder}: holds something other than an export; name a new folder")


def _config(model: GPT, ends: dict[str, int]) -> dict[str, Any]:
    config = model.config
    return {
        "architectures": ["QuinticForCausalLM"],
        "model_type": "quintic",
        "auto_map": {
            "AutoConfig": "modeling_quintic.QuinticConfig",
            "AutoModelForCausalLM": "modeling_quintic.QuinticForCausalLM",
        },
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.depth,
        "hidden_size": config.width,
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.seq_len,
        "windows": list(config.windows),
        "value_embedding_layers": [layer for layer in range(config.depth) if config.has_value_embedding(layer)],
        "backout_layer": config.depth // 2,
        "gate_channels": min(GATE_CHANNELS, config.width),
        "smear_channels": model.smear_gate.in_features,
        "qk_gain": QK_GAIN,
        "softcap": config.softcap,
        "rotary_base": config.rotary_base,
        "lookup_layers": list(config.l3_layers),
        "lookup_rows": config.l3_embeddings,
        "lookup_d_up": config.l3_d_up or 4 * config.width,
        "lookup_tied": config.l3_tied,
        **ends,
        "tie_word_embeddings": False,
    }


def _tokenizer_files(tokenizer: Tokenizer, seq_len: int) -> dict[str, dict[str, Any]]:
    definition = json.loads(tokenizer.definition)
    bos = next(token["content"] for token in definition["added_tokens"] if token["id"] == tokenizer.bos_id)
    start: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
    texts: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, texts[0]],
        "pair": [start, *texts],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": bos,
        "padding_side": "left",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text that spells out a special token is text
    }
    return {"tokenizer.json": definition, "tokenizer_config.json": settings}
