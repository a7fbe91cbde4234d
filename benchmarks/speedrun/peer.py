"""The modded-nanogpt speedrun, mended to run here: https://github.com/KellerJordan/modded-nanogpt at commit f411b3d3.

Nothing of it is kept in this repository: its files are copied from a checkout and changed on the way. The changes are

- what PyTorch 2.11 needs: a tensor that one of its modules makes at first use is made before anything is compiled, and
  scales of 8-bit products that are slices get memory of their own, aligned as the product demands;
- FlashAttention-3, loaded from the Hub there, is `torch.nn.attention.varlen` here, with the same windows and scale;
- its tokenizer's vocabulary comes from a file;
- the length of the track, of its momentum's rise and fall, of the validation, and the seed are this benchmark's.
"""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from quintic.speedrun.stages import Track

FILES = ("train_gpt.py", "triton_kernels.py", "dc_triton_kernels.py")

# Shards come again and again, as ours do.
REPEATS = 60

# Stands for a package that gets FlashAttention from the Hub.
KERNELS = """
import inspect
import math
from types import SimpleNamespace

from torch.nn.attention.varlen import varlen_attn

TAKES_SCALE = "scale" in inspect.signature(varlen_attn).parameters


def attend(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size):
    assert causal
    options = {"window_size": tuple(window_size)}
    if TAKES_SCALE:
        options["scale"] = softmax_scale
    else:
        q = q * (softmax_scale * math.sqrt(q.shape[-1]))
    return varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def get_kernel(name, **options):
    return SimpleNamespace(flash_attn_interface=SimpleNamespace(flash_attn_varlen_func=attend))
"""

# Stands for the package that has GPT-2's vocabulary: bytes -> id.
TIKTOKEN = """
import json
from pathlib import Path
from types import SimpleNamespace

TOKENS = json.loads((Path(__file__).parent / "vocabulary.json").read_text("utf-8"))
RANKS = {bytes.fromhex(token): number for number, token in enumerate(TOKENS) if token}


def get_encoding(name):
    return SimpleNamespace(_mergeable_ranks=RANKS)
"""


def write_peer(
    checkout: Path,
    folder: Path,
    *,
    shards: Path,
    vocabulary: Iterable[bytes],
    track: Track,
    seed: int,
) -> None:
    """Write the mended script and what it reads into a folder, from which torchrun starts `train_gpt.py`.

    Args:
        checkout: of modded-nanogpt.
        folder: empty.
        shards: folder with *train*.bin and *val*.bin.
        vocabulary: bytes of each token, none for special ones.
        track: ours, whose lengths the peer gets.
        seed: of its weights.

    Raises:
        ValueError: a line to be changed is not where it was, so the checkout is of another version.
    """
    for name in FILES:
        shutil.copy(checkout / name, folder / name)
    _change(
        folder / "triton_kernels.py", {r"scale_a=activation_scale,": "scale_a=torch.cat([activation_scale] * 2)[:1],"}
    )
    _change(folder / "triton_kernels.py", {r"scale_b=W2_scale,": "scale_b=torch.cat([W2_scale] * 2)[:1],"})
    begin = f"\ntorch.manual_seed({seed})\nimport triton_kernels\ntriton_kernels._get_dummy_f32(device)\n"
    rise, fall = track.momentum_rise_steps, track.momentum_fall_steps
    _change(
        folder / "train_gpt.py",
        {
            r"torch\.cuda\.set_device\(device\)\n": r"\g<0>" + begin,
            r"(num_scheduled_iterations: int = )\d+": rf"\g<1>{track.scheduled_steps}",
            r"(num_extension_iterations: int = )\d+": rf"\g<1>{track.extension_steps}",
            r"(val_tokens: int = )\d+": rf"\g<1>{track.validation_tokens}",
            r"(val_batch_size: int = )[\d* ]+": rf"\g<1>{8 * track.validation_chunk} ",
            r"(val_loss_every: int = )\d+": rf"\g<1>{track.eval_every}",
            r"muon_warmup_steps=\d+, muon_cooldown_steps=\d+": f"muon_warmup_steps={rise}, muon_cooldown_steps={fall}",
        },
    )
    (folder / "kernels.py").write_text(KERNELS, encoding="utf-8")
    (folder / "tiktoken.py").write_text(TIKTOKEN, encoding="utf-8")
    (folder / "vocabulary.json").write_text(json.dumps([token.hex() for token in vocabulary]), encoding="utf-8")
    data = folder / "data" / "fineweb10B"
    data.mkdir(parents=True)
    train, validation = sorted(shards.glob("*train*.bin")), sorted(shards.glob("*val*.bin"))
    for number in range(REPEATS):  # its warm-up may read more of it than is scored
        (data / f"fineweb_val_{number:06d}.bin").symlink_to(validation[0].resolve())
    for number, path in enumerate(train * REPEATS, 1):
        (data / f"fineweb_train_{number:06d}.bin").symlink_to(path.resolve())


def _change(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text("utf-8")
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        if count != 1:
            raise ValueError(f"{path.name}: {pattern!r} is there {count} times, not once; check out commit f411b3d3")
    path.write_text(text, encoding="utf-8")
