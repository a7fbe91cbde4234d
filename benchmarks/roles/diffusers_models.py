"""The models of diffusers, with the defaults of their classes but fewer layers and heads, and without data."""

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.roles.compare import Attempt
from benchmarks.roles.transformers_models import WithoutValues

LAYERS = 2
TEXT = 8
PICTURES = ("image", "packed", "video", "frames", "one frame", "sound")
"""Ways to hold data: channels first, positions by channels, channels before frames or after them, a wave."""

_TEXT_WIDTHS = (
    "caption_channels",
    "joint_attention_dim",
    "cross_attention_dim",
    "text_embed_dim",
    "text_dim",
    "caption_dim",
    "caption_projection_dim",
    "text_hidden_dim",
    "encoder_hid_dim",
    "txt_in_dim",
    "cap_feat_dim",
    "context_in_dim",
    "in_text_dim",
    "text_in_dim",
    "text_hidden_size",
    "cond_token_dim",
    "prompt_embed_dim",
    "text_states_dim",
    "cap_dim",
)
_OPTIONAL = (
    "encoder_hidden_states",
    "timestep",
    "pooled_projections",
    "img_ids",
    "txt_ids",
    "class_labels",
    "encoder_attention_mask",
    "attention_mask",
    "num_frames",
    "height",
    "width",
    "img_shapes",
    "encoder_hidden_states_mask",
    "added_cond_kwargs",
    "padding_mask",
    "image_embeds",
)
_MAYBE_NOT = (
    "attention_mask",
    "encoder_attention_mask",
    "added_cond_kwargs",
    "class_labels",
    "encoder_hidden_states_mask",
)


def families() -> dict[str, str]:
    """Return {class: module}."""
    library = importlib.import_module("diffusers")
    found = {}
    for name in sorted(dir(library)):
        try:
            kind = getattr(library, name)
        except Exception:  # needs a package that is not there
            continue
        if inspect.isclass(kind) and issubclass(kind, library.ModelMixin) and ".models." in kind.__module__:
            found[name] = kind.__module__.split(".")[-1]
    return found


def attempts(name: str) -> list[Attempt]:
    """Return ways to build and call a class."""
    kind = getattr(importlib.import_module("diffusers"), name)
    return [
        Attempt(
            f"{what}, {picture}{'' if with_masks else ', without masks'}",
            functools.partial(_build, kind, narrow=narrow),
            functools.partial(_inputs, picture=picture, with_masks=with_masks),
        )
        for what, narrow in (("fewer heads", True), ("default widths", False))
        for with_masks in (True, False)
        for picture in PICTURES
    ]


def _build(kind: Any, *, narrow: bool) -> nn.Module:
    changed: dict[str, Any] = {}
    for key, one in inspect.signature(kind.__init__).parameters.items():
        if (
            ("layers" in key or key in ("depth", "num_blocks"))
            and isinstance(one.default, int)
            and one.default > LAYERS
        ):
            changed[key] = LAYERS
        if narrow and key == "num_attention_heads" and isinstance(one.default, int) and one.default % 4 == 0:
            changed[key] = one.default // 4
    try:
        with torch.device("meta"):
            model: nn.Module = kind(**changed)
    except Exception:
        with WithoutValues():
            model = kind(**changed)
    return model.eval()


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def _inputs(model: Any, *, picture: str, with_masks: bool) -> dict[str, Any]:
    config = model.config
    is_autoencoder = "Autoencoder" in type(model).__name__ or "VAE" in type(model).__name__
    names = ("in_channels",) if is_autoencoder else ("in_channels", "latent_channels", "in_dim", "num_channels")
    channels = _first(config, names, 3 if is_autoencoder else 4)
    size = 64 if is_autoencoder else 16
    latents = {
        "image": torch.rand(1, channels, size, size),
        "packed": torch.rand(1, 16, channels),
        "video": torch.rand(1, channels, 5, size, size),
        "frames": torch.rand(1, 5, channels, size, size),
        "one frame": torch.rand(1, channels, 1, size, size),
        "sound": torch.rand(1, _first(config, ("audio_channels", "in_channels"), 1), 7680),
    }[picture]
    found: dict[str, Any] = {}
    for name, one in inspect.signature(model.forward).parameters.items():
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            continue
        is_needed = one.default is one.empty
        if is_needed or name in _OPTIONAL or (name == "guidance" and config.get("guidance_embeds")):
            if not is_needed and name in _MAYBE_NOT and not with_masks:
                continue
            value = _one(name, config, latents)
            if value is not None:
                found[name] = value
    return found


def _one(name: str, config: Any, latents: Tensor) -> Any:
    text, length = _first(config, _TEXT_WIDTHS, 768), _first(config, ("max_text_seq_length",), TEXT)
    axes = len(config.get("axes_dims_rope") or config.get("axes_dim") or (1, 1, 1))
    pooled = _first(config, ("pooled_projection_dim", "pooled_embed_dim", "pooled_text_dim"), 768)
    values: dict[str, Any] = {
        **dict.fromkeys(("hidden_states", "sample", "latents", "x", "z"), latents),
        **dict.fromkeys(("encoder_hidden_states", "text_hidden_states", "cap_feats"), torch.rand(1, length, text)),
        "encoder_hidden_states_t5": torch.rand(1, length, text),
        **dict.fromkeys(
            ("timestep", "timesteps", "t", "r_timestep", "guidance", "timestep_r", "timestep_ratio"),
            torch.tensor([1.0]),
        ),
        **dict.fromkeys(("pooled_projections", "pooled_embeds"), torch.rand(1, pooled)),
        "img_ids": torch.zeros(16, axes),
        "txt_ids": torch.zeros(TEXT, axes),
        **dict.fromkeys(
            ("encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask"),
            torch.ones(1, TEXT, dtype=torch.long),
        ),
        "class_labels": torch.tensor([1]) if config.get("num_embeds_ada_norm") else None,
        "added_cond_kwargs": {"resolution": torch.rand(1, 2), "aspect_ratio": torch.rand(1, 1)},
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.rand(1, 2)),
        "controlnet_cond": torch.rand(1, 3, 8 * latents.shape[-2], 8 * latents.shape[-1])
        if config.get("conditioning_embedding_out_channels")
        else latents,
        **dict.fromkeys(("context_latents", "latent_cond", "controls_latents", "control_hidden_states"), latents),
        "padding_mask": torch.zeros(1, 1, *latents.shape[-2:]),
        "image_embeds": torch.rand(1, TEXT, _first(config, ("image_embed_dim", "image_proj_dim"), 768)),
        "img_shapes": [(1, 4, 4)],
        "num_frames": 1,
        "height": 4,
        "width": 4,
        "conditioning_scale": 1.0,
        "proj_embedding": torch.rand(1, _first(config, ("embedding_dim",), 768)),
        "added_time_ids": torch.rand(1, 3),
        "fps": torch.tensor([8]),
        "image_latents": latents,
        "global_hidden_states": torch.rand(1, 1, _first(config, ("global_states_input_dim",), 768)),
        "input_ids": torch.ones(1, TEXT, dtype=torch.long),
    }
    return values.get(name)
