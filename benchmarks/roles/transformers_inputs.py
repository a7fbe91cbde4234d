"""Inputs of the models of transformers, by the names of their arguments."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH = 2, 16


def every_input(model: nn.Module) -> dict[str, Any]:
    """Return what a model needs, its main input, and the other kinds of data that it takes."""
    return _inputs(model, needed_only=False)


def placed_images(model: nn.Module) -> dict[str, Any]:
    """Return tokens with places for an image, and the image, whole or in patches with their grid.

    Raises:
        LookupError: the model takes no image in its tokens.
    """
    config: Any = model.config
    taken = inspect.signature(model.forward).parameters
    vision = getattr(config, "vision_config", config)
    grid = next((name for name in ("image_grid_thw", "grid_thw") if name in taken), None)
    if grid is not None:
        sides = (_find(vision, "temporal_patch_size") or 1, *2 * (_find(vision, "patch_size") or 14,))
        merged = int(_find(vision, "spatial_merge_size", "merge_size") or 2)
        patches = torch.rand(
            4 * 4 * merged**2, int(_find(vision, "in_channels", "in_chans", "num_channels") or 3), *sides
        )
        found = {grid: torch.tensor([[1, 4 * merged, 4 * merged]])}
        places = 16
        found["pixel_values" if "pixel_values" in taken else next(iter(taken))] = patches.flatten(1)
    elif "pixel_values" in taken and "input_ids" in taken:
        side = _image_size(config)[0] // int(_find(vision, "patch_size") or 14)
        places = (
            _find(config, "image_seq_length", "mm_tokens_per_image", "image_seq_len", "num_image_tokens") or side**2
        )
        found = {"pixel_values": _pixels(model, config)[:1]}
    else:
        raise LookupError("takes no image in its tokens")
    if "input_ids" in taken:
        token = _find(config, "image_token_id", "image_token_index")
        if token is None:
            raise LookupError("has no token of images")
        ids = torch.ones(1, LENGTH + int(places), dtype=torch.long)
        ids[0, 4 : 4 + int(places)] = int(token)
        found |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in taken:
            found["mm_token_type_ids"] = (ids == int(token)).long()
    return found


def needed_inputs(model: nn.Module) -> dict[str, Any]:
    """Return what a model cannot do without, and its main input."""
    return _inputs(model, needed_only=True)


_DATA = (
    "pixel_values",
    "input_features",
    "input_values",
    "decoder_input_ids",
    "bbox",
    "flattened_patches",
    "past_values",
)


def _inputs(model: nn.Module, *, needed_only: bool) -> dict[str, Any]:
    taken = inspect.signature(model.forward).parameters
    config: Any = model.config
    wanted = [
        name
        for name, one in taken.items()
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    if not wanted or not needed_only:
        main = getattr(model, "main_input_name", "input_ids")
        firsts = [name for name in (main, "input_ids", "pixel_values") if name in taken]
        wanted += firsts if not needed_only else firsts[:1]
    if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
        wanted.append("decoder_input_ids")
    if not needed_only:
        wanted += [name for name in _DATA if name in taken and (name != "decoder_input_ids" or "input_ids" in taken)]
    found = {name: _one(name, model, config) for name in dict.fromkeys(wanted)}
    if "input_ids" in found and "attention_mask" in taken:
        found["attention_mask"] = torch.ones(found["input_ids"].shape, dtype=torch.long)
    return {name: value for name, value in found.items() if value is not None}


def _find(config: Any, *names: str, depth: int = 0) -> Any:
    """Return the first of some values in a configuration, or in those that it holds."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    if depth < 3:
        for value in vars(config).values():
            if hasattr(value, "to_dict") and hasattr(value, "model_type"):
                found = _find(value, *names, depth=depth + 1)
                if found is not None:
                    return found
    return None


def _image_size(config: Any) -> tuple[int, int]:
    for kind in ("vision_config", "backbone_config", "image_config"):
        part = getattr(config, kind, None)
        if part is not None and getattr(part, "image_size", None) is not None:
            config = part
            break
    size = _find(config, "image_size", "input_size", "img_size") or 224
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def _one(name: str, model: nn.Module, config: Any) -> Any:
    ids = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if name in ("input_ids", "decoder_input_ids", "inputs", "qformer_input_ids", "audio_input_ids"):
        if "MultipleChoice" in type(model).__name__:
            return ids.view(BATCH, 1, LENGTH).repeat(1, 2, 1)
        return ids
    if name.startswith("pixel_values") and name != "pixel_values_videos":
        return _pixels(model, config)
    if name == "pixel_values_videos":
        frames = _find(config, "num_frames", "frames_per_clip") or 8
        return torch.rand(1, int(frames), 3, *_image_size(config))
    if name == "pixel_mask":
        return torch.ones(BATCH, *_image_size(config), dtype=torch.long)
    if name == "bbox":
        return torch.ones(BATCH, LENGTH, 4, dtype=torch.long)
    if name == "input_features":
        return _features(model, config)
    if name == "input_values":
        return _waves(model, config)
    if name == "flattened_patches":
        return torch.rand(BATCH, LENGTH, int(_find(config, "patch_embed_hidden_size") or 768) + 2)
    if name in (
        "hidden_states",
        "inputs_embeds",
        "latents",
        "context_hidden_states",
        "query_embeds",
        "encoder_hidden_states",
    ):
        return torch.rand(BATCH, LENGTH, int(_find(config, "hidden_size", "d_model", "embed_dim")))
    if name == "past_values":
        return _series(config)
    if name == "past_observed_mask":
        return torch.ones_like(_series(config), dtype=torch.bool)
    if name in ("past_time_features",):
        return torch.rand(BATCH, _series(config).shape[1], int(getattr(config, "num_time_features", 1) or 1))
    if name.endswith("attention_mask") or name.endswith("_mask"):
        return torch.ones(BATCH, LENGTH, dtype=torch.long)
    if name in ("grid_thw", "image_grid_thw", "video_grid_thw"):
        return torch.tensor([[1, 4, 4]])
    if name.endswith("_ids"):
        return ids
    return None


def _pixels(model: nn.Module, config: Any) -> Tensor:
    height, width = _image_size(config)
    vision = getattr(config, "vision_config", config)
    channels = int(_find(vision, "num_channels", "in_channels", "in_chans", "num_input_channels") or 3)
    kind = type(model).__name__
    video = ("VideoMAE", "Vivit", "Timesformer", "VJEPA2")
    if any(word in kind for word in video):
        return torch.rand(1, int(_find(config, "num_frames", "frames_per_clip") or 8), channels, height, width)
    if any(word in kind for word in ("Idefics", "SmolVLM", "Mllama", "Llava", "Flamingo", "Aria")):
        return (
            torch.rand(1, 1, channels, height, width)
            if "LlavaFor" not in kind
            else torch.rand(1, channels, height, width)
        )
    return torch.rand(BATCH, channels, height, width)


def _features(model: nn.Module, config: Any) -> Tensor:
    bins = int(
        _find(
            config,
            "num_mel_bins",
            "feature_size",
            "n_mels",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "input_dim",
            "num_mel_channels",
        )
        or 80
    )
    kind = type(model).__name__
    if "Whisper" in kind or "Qwen2Audio" in kind or "Voxtral" in kind:
        return torch.rand(BATCH, bins, 2 * int(_find(config, "max_source_positions") or 1500))
    if "Clap" in kind:
        return torch.rand(BATCH, 1, 1001, 64)
    return torch.rand(BATCH, 128, bins)


def _waves(model: nn.Module, config: Any) -> Tensor:
    kind = type(model).__name__
    if "AST" in kind or "ASTModel" in kind:
        return torch.rand(BATCH, int(getattr(config, "max_length", 1024)), int(getattr(config, "num_mel_bins", 128)))
    if any(word in kind for word in ("Encodec", "Dac", "Mimi", "XCodec", "Xcodec", "DAC", "Codec", "Tokenizer")):
        return torch.rand(BATCH, int(getattr(config, "audio_channels", 1) or 1), 6400)
    if "SpeechT5" in kind and "SpeechToText" not in kind:
        return torch.ones(BATCH, LENGTH, dtype=torch.long)
    return torch.rand(BATCH, 6400)


def _series(config: Any) -> Tensor:
    length = int(_find(config, "context_length") or 32)
    lags = getattr(config, "lags_sequence", None)
    if lags:
        length += max(lags)
    channels = int(_find(config, "num_input_channels", "input_size") or 1)
    return torch.rand(BATCH, length) if channels == 1 and lags else torch.rand(BATCH, length, channels)
