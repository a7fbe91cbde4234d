"""`Race`: a speedrun's model, optimizer and text, with methods to warm up, step, evaluate and save."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintic.data.loader import Batch
from quintic.data.tokenizer import Tokenizer
from quintic.errors import ConfigError, DataError
from quintic.eval.score import bits_per_byte
from quintic.kernels.graphs import CapturedPasses
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT
from quintic.model.speedrun_layers import bigram_hashes
from quintic.speedrun.recipe import build_optimizer, set_rates
from quintic.speedrun.shards import RaceData, prefixes, vocabulary_of
from quintic.speedrun.stages import ADAMW_EVERY, StepSettings, Track
from quintic.speedrun.stream import chunk_stream, validation_batches
from quintic.train.checkpoint import save_checkpoint
from quintic.train.distributed import SINGLE_PROCESS, Ranks
from quintic.train.hardware import Hardware, machine_facts
from quintic.train.source import code_facts

__all__ = ["Race", "bytes_of_targets", "score_batches"]


class Race:
    """A run's model, optimizer and text. All ranks must call its methods, in the same order.

    The hardware's `dtype` is that of matrices, tables and activations; `capture` replays passes as CUDA graphs.

    Raises:
        ConfigError: the model needs a vocabulary, and there is no tokenizer.
        DataError: the number of ranks does not divide the chunks of a batch, or there is too little validation text.
    """

    def __init__(
        self,
        track: Track,
        config: SpeedrunConfig,
        data: RaceData,
        hardware: Hardware,
        *,
        ranks: Ranks = SINGLE_PROCESS,
        seed: int = 0,
        capture: bool = False,
    ) -> None:
        if track.chunks % ranks.size:
            raise DataError(
                f"{ranks.size} ranks do not divide the {track.chunks} chunks of a batch; start a number that does"
            )
        self.track, self.data, self.ranks = track, data, ranks
        self.hardware, self.device = hardware, hardware.device
        self.stream = chunk_stream(data, track, itertools.count(), ranks=ranks, device=self.device)
        self.validation = validation_batches(data, track.validation_tokens, track.validation_chunk, ranks=ranks)
        with torch.device("meta"):
            model = SpeedrunGPT(config, attention=hardware.attention, dtype=hardware.dtype)
        self.model = model.to_empty(device=self.device)
        self.model.init_weights(seed)
        stages = map(track.at, track.starts)
        longest = max(one.batch_tokens // ranks.size // track.passes(one, ranks.size) for one in stages)
        longest = max(longest, track.validation_chunk)
        # Allocate the rotary tables for the longest pass now: graphs need them to keep their memory.
        self.model.rotary.tables(2 * longest, self.model.qk_bank.dtype)
        if config.prefix_tokens:
            if data.tokenizer is None:
                raise ConfigError(
                    "--tokenizer: needed for the feature prefix-tokens; give a tokenizer.json, a folder with GPT-2's "
                    "two files, or gpt2, or leave the feature out (--without prefix-tokens)"
                )
            found = prefixes(vocabulary_of(data.tokenizer, data.bos_id))
            self.model.prefixes[: len(found)] = torch.tensor(found)
        if hardware.compile:
            self.model.compile_trunk()
        self.model.inputs.adds_to_gradients = True
        self.optimizer = build_optimizer(self.model, ranks=ranks.size)
        self.passes = CapturedPasses(self._make_pass) if capture else None
        self._token_bytes = bytes_of_targets(self.model, data.tokenizer)
        self._announced = self.model.names_by_role()["bigram"] if ranks.size > 1 else []
        # Copied to the device now, before the clock starts.
        weights = [track.at(number).loss_weights for number in range(track.steps)]
        self._loss_weights = [torch.tensor(each, dtype=torch.float32, device=self.device) for each in weights]

    def _set_windows(self, settings: StepSettings) -> None:
        if self.model.rotary.windows != settings.windows:  # a call recomputes the rotary tables
            is_last = settings.windows[1] == self.track.final_long_window
            self.model.rotary.set_windows(*settings.windows, stretch=not is_last)

    def train_step(self, number: int, stream: Iterator[Batch]) -> tuple[Tensor, int]:
        """Make one optimizer step, without waiting for the GPU.

        Returns:
            (this rank's total loss divided by the tokens of the whole batch, on the device; the text's epoch)
        """
        settings = self.track.at(number)
        self._set_windows(settings)
        loss = torch.zeros((), device=self.device)
        for left in reversed(range(self.track.passes(settings, self.ranks.size))):
            batch = next(stream)
            for name in self._announced:
                rows, _ = bigram_hashes(batch.inputs, self.model.config)  # known before the backward pass
                self.optimizer.announce_rows(name, rows, more=left > 0)
            loss += (self.passes or self._make_pass)(
                batch.inputs,
                batch.targets,
                batch.document_starts,
                self._loss_weights[number],
                kind=(settings.windows, settings.document_tokens),
            )
        set_rates(self.optimizer, settings)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.passes is None)
        if settings.unties and self.model.config.tied:
            self.optimizer.untie(*self.model.names_by_role()["embedding"])
        return loss / settings.batch_tokens, batch.epoch

    def _make_pass(
        self, inputs: Tensor, targets: Tensor, starts: Tensor, weights: Tensor, *, kind: tuple[tuple[int, int], int]
    ) -> Tensor:
        """Run a forward and backward pass, and return the loss summed over its tokens.

        `kind` has the windows, which are set already, and the tokens of the longest document.
        """
        nats: Tensor = self.model(
            inputs, targets, document_starts=starts, loss_weights=weights, longest_document=kind[1]
        )
        # After averaging over ranks, the gradient is that of the batch's total loss / chunks, on any number of ranks. A
        # mean over tokens would be so small that AdamW's eps counted.
        (nats / (self.track.chunks // self.ranks.size)).backward()
        return nats.detach()

    @torch.no_grad()
    def evaluate(self, number: int, *, batches: int | None = None) -> tuple[float, float | None]:
        """Score the validation text, or only some batches of each rank, with the windows of a step.

        Returns:
            (nats per token, bits per byte or None), the same on all ranks.
        """
        self._set_windows(self.track.at(number))
        self.model.eval()
        sums = score_batches(self.model, self.validation[:batches], self._token_bytes)
        self.model.train()
        nats, num_bytes = self.ranks.total(sums).tolist()
        tokens = len(self.validation[:batches]) * self.track.validation_chunk * self.ranks.size
        return nats / tokens, bits_per_byte(nats, num_bytes) if num_bytes else None

    def warm_up(self) -> None:
        """Compile all code by making the first steps of every stage on a separate stream of text.

        Afterwards weights, optimizer and random state are restored, in the same memory.
        """
        weights, state = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        first, untie = {*self.track.starts}, self.track.untie_step
        if untie - untie % ADAMW_EVERY not in first and untie not in first and untie < self.track.steps:
            first.add(untie - 1)
        steps = [start + number for start in sorted(first) for number in range(ADAMW_EVERY)]
        devices = [self.device] if self.device.type == "cuda" else []
        stream = chunk_stream(self.data, self.track, itertools.cycle(steps), ranks=self.ranks, device=self.device)
        with torch.random.fork_rng(devices=devices), closing(stream):
            for number in steps:
                self.train_step(number, stream)
                if number in self.track.starts:
                    self.evaluate(number, batches=1)
            self.evaluate(self.track.steps, batches=1)
        self.model.zero_grad(set_to_none=self.passes is None)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # graphs use a separate pool, so memory of the eager passes is free

    def save(self, run_dir: Path, step: int) -> None:
        """Save the model after `step` steps: weights, windows, sizes, and the validation text for `quintic eval`.

        Rank 0, which has the whole weights, writes a checkpoint without optimizer state. None is ever deleted.

        Raises:
            CheckpointError: the disk is full or not writable; no half-written folder remains.
        """
        track = self.track
        state = {
            "speedrun": asdict(self.model.config),
            "dtype": str(self.hardware.dtype).removeprefix("torch."),
            "document_tokens": max(stage.document_tokens for stage in track.stages),
            "validation": str(self.data.validation.resolve()),
            "validation_tokens": track.validation_tokens,
            "validation_chunk": track.validation_chunk,
        }
        save = partial(save_checkpoint, run_dir, step=step, model=self.model, optimizer=None, state=state)
        self.ranks.from_rank0(lambda: save(keep=track.steps + 1))

    def facts(self) -> dict[str, Any]:
        """Return the fields of the log's `run` record."""
        parameters = sum(param.numel() for param in self.model.parameters())
        return {
            "machine": machine_facts(self.hardware),
            "ranks": self.ranks.size,
            **code_facts(),
            "model": {"parameters": parameters, **asdict(self.model.config)},
            "data": {"source": self.data.source, "shards": len(self.data.train)},
            "track": asdict(self.track),
            "total_steps": self.track.steps,
        }

    def close(self) -> None:
        """Stop the stream and free the captured graphs."""
        self.stream.close()
        if self.passes is not None:
            self.passes.close()


def bytes_of_targets(model: SpeedrunGPT, tokenizer: Tokenizer | None) -> Tensor:
    """Return the number of bytes of each token, (vocab_size,) int64 on the model's device; 0 without a tokenizer.

    The model's vocabulary is padded beyond the tokenizer's; padding and the token that starts documents have 0 bytes.
    """
    lengths = torch.zeros(model.config.vocab_size, dtype=torch.int64, device=model.head.device)
    if tokenizer is not None:
        lengths[: tokenizer.vocab_size] = torch.from_numpy(tokenizer.token_bytes())
        lengths[model.config.bos_id] = 0
    return lengths


@torch.no_grad()
def score_batches(model: SpeedrunGPT, batches: Sequence[Batch], token_bytes: Tensor) -> Tensor:
    """Return [sum of losses in nats, number of bytes] of a text, (2,) float64 on the CPU.

    The model is in evaluation mode, with its windows set; `token_bytes` is from `bytes_of_targets`.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=token_bytes.device)
    for batch in (one.to(token_bytes.device, starts=True) for one in batches):
        sums[0] += model(batch.inputs, batch.targets, document_starts=batch.document_starts)
        sums[1] += token_bytes[batch.targets].sum()
    return sums.cpu()
