"""`Trainer`: one run's model, optimizer and data, with methods to step, evaluate, sample and save.

`loop.py` decides when these happen; `recipe.py` sets the rates of a step. Batches are (rows, seq_len) tokens on each
rank; a step accumulates the gradients of `micro_steps` of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quintic
from quintic.data.dataset import Dataset
from quintic.data.loader import Batch, Loader, validation_rows
from quintic.errors import CheckpointError
from quintic.eval.baselines import reference_scores
from quintic.eval.core import CoreScore, core_score, core_sums
from quintic.eval.core_tasks import load_core
from quintic.eval.generate import GENERAL_PROMPTS, default_prompts, sample_text
from quintic.eval.score import Score, bits_per_byte, document_groups, document_sums, score_from_sums
from quintic.kernels.attention.attention import needs_document_starts
from quintic.kernels.graphs import CapturedPasses
from quintic.model.fp8 import fp8_lines
from quintic.model.gpt import GPT
from quintic.optim.layout.layouts import local_tensor
from quintic.train.checkpoint import Background, load_model_weights, read_state, restore_optimizer, save_checkpoint
from quintic.train.config import Config
from quintic.train.distributed import SINGLE_PROCESS, Parallelism, Ranks, micro_batch_rows
from quintic.train.hardware import Hardware, Stopwatch, compile_seconds, machine_facts, matrix_rate, peak_memory_bytes
from quintic.train.metrics import LossWatch, RmsMeter
from quintic.train.recipe import apply_schedule, build_model, build_optimizer, model_config
from quintic.train.saved_config import repeat_command, to_dict, with_options
from quintic.train.schedule import is_due, reading_lines, scale_of
from quintic.train.source import code_facts

__all__ = ["Trainer", "captures"]


def captures(config: Config, hardware: Hardware, parallelism: Parallelism) -> bool:
    """Return whether passes are replayed as CUDA graphs, see `--capture`."""
    # Other attentions make a mask of each batch's documents, and other layouts communicate within a pass.
    can = needs_document_starts(hardware.attention) and parallelism.kind in (None, "sharded")
    return config.run.capture and can and hardware.device.type == "cuda"


def _make_pass(model: Callable[..., Tensor], micro_steps: int, *batch: Tensor, kind: None = None) -> Tensor:
    """Run a forward and backward pass of (rows, seq_len) inputs and targets with their starts, and return its loss."""
    inputs, targets, starts = batch
    loss = model(inputs, targets, document_starts=starts)
    (loss / micro_steps).backward()
    return loss.detach()


class Trainer:
    """A run's model, optimizer, data and counters. All ranks must call the same methods, in the same order.

    Raises:
        QuinticError: sizes do not fit each other or the text.
    """

    def __init__(
        self, config: Config, dataset: Dataset, run_dir: Path, hardware: Hardware, ranks: Ranks = SINGLE_PROCESS
    ) -> None:
        self.config, self.dataset, self.run_dir, self.hardware = config, dataset, run_dir, hardware
        self.ranks, self.background = ranks, Background(ranks)
        self.parallelism = Parallelism(config.run.parallel, ranks, shard_ranks=config.run.shard_ranks)
        ranks.run_on_all(self._begin)
        # From here on ranks wait for each other.
        self.wrapped = self.parallelism.wrapped(self.model)
        # Graphs must not hold the trainer: only then is their memory freed with the last reference to it.
        self._make_pass = partial(_make_pass, self.wrapped, self.micro_steps)
        self.passes = CapturedPasses(self._make_pass) if captures(config, hardware, self.parallelism) else None
        self.optimizer = build_optimizer(self.model, self.config, comms=self.parallelism.comms)
        self.rms = RmsMeter(self.model, mean_gradient=self.parallelism.mean_gradient)
        self.watch = LossWatch()
        self.compiled_before = 0.0
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.score: Score | None = None
        """Score of the current weights; None if they have not been evaluated."""

    def _begin(self) -> None:
        """Make the model and open the text, which may fail on one rank alone."""
        config, dataset, hardware, seq_len = self.config, self.dataset, self.hardware, self.config.model.seq_len
        sizes = model_config(config, vocab_size=dataset.vocab_size, bos_id=dataset.bos_id)
        self.model: GPT = build_model(
            sizes,
            device=hardware.device,
            dtype=hardware.dtype,
            attention=hardware.attention,
            seed=config.run.seed,
            weights=config.optim.weights,
            parallelism=self.parallelism,
        )
        self.fp8_layers = {} if hardware.fp8 is None else self.model.use_fp8(hardware.fp8)
        if hardware.compile:
            self.model.compile_parts()
        # Batch and length follow from the model's size where the options leave them open.
        self.scale = scale_of(config, sizes)
        self.config = config = with_options(config, batch_tokens=self.scale.batch_tokens)
        data_ranks = self.parallelism.data_size
        self.rows = micro_batch_rows(config, data_ranks)
        """Rows of one forward and backward pass on each rank."""
        self.loader = Loader(
            dataset,
            "train",
            rows=self.rows,
            seq_len=seq_len,
            rank=self.parallelism.data_rank,
            world_size=data_ranks,
            seed=config.run.seed,
            device=hardware.device,
        )
        self.validation = list(
            validation_rows(dataset, rows=config.schedule.rows, seq_len=seq_len, max_tokens=config.run.eval_tokens)
        )
        self.total = self.scale.steps
        self.micro_steps = self.scale.batch_tokens // (self.rows * seq_len * data_ranks)
        self.suite = None if config.run.core is None else load_core(config.run.core)
        self.token_bytes = torch.as_tensor(dataset.tokenizer.token_bytes(), device=hardware.device)
        self.matrix_rate = matrix_rate(hardware)

    @cached_property
    def flops_per_token(self) -> int:
        """Floating-point operations per token; read only after the rows of lookup layers were allocated or restored."""
        return self.model.flops_per_token()

    def restore(self, checkpoint: Path) -> None:
        """Restore the state that a checkpoint saved.

        Raises:
            CheckpointError: the checkpoint belongs to another model or to other text.
        """
        state = read_state(checkpoint)
        if state["dataset"]["key"] != self.dataset.key:
            raise CheckpointError(
                f"{checkpoint}: was trained on other text ({state['dataset']['path']}) than --data "
                f"{self.config.data.data} gives now ({self.dataset.path}); restore that text, or start a new run"
            )
        self._restore_weights(checkpoint, state)
        self.loader.load_state_dict(state["loader"])
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self.score = None if state["score"] is None else Score(**state["score"])
        self.compiled_before = state["compile_seconds"]

    def roll_back(self, checkpoint: Path) -> None:
        """Restore only weights, optimizer and step from a checkpoint of this run; data position and counters go on."""
        rollbacks = self.watch.rollbacks
        self._restore_weights(checkpoint, read_state(checkpoint))
        self.watch.rollbacks = rollbacks + 1
        self.score = None

    def _restore_weights(self, checkpoint: Path, state: dict[str, Any]) -> None:
        load_model_weights(checkpoint, self.model)
        restore_optimizer(checkpoint, self.optimizer)
        self.step = state["step"]
        self.watch = LossWatch(**state["watch"])

    def save(self) -> None:
        """Copy the run's state and write it in the background; raises CheckpointError if the previous save failed."""
        state = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "score": None if self.score is None else vars(self.score),
            "loader": self.loader.state_dict(),
            "config": to_dict(self.config),
            "dataset": self.dataset.summary(),
            "watch": dict(vars(self.watch)),
            "compile_seconds": self._compile_seconds(),
        }
        save_checkpoint(
            self.run_dir,
            step=self.step,
            model=self.model,
            optimizer=self.optimizer,
            state=state,
            keep=self.config.run.keep,
            ranks=self.ranks,
            background=self.background,
        )

    def has_finite_weights(self) -> bool:
        """Return whether every weight is finite, on all ranks; waits for the device."""
        weights = [local_tensor(param.detach()) for param in self.model.parameters()]
        return not self.ranks.any(not torch.stack([weight.isfinite().all() for weight in weights]).all())

    def train_step(self) -> dict[str, Any]:
        """Make one optimizer step and return its record."""
        settings = apply_schedule(self.optimizer, self.config, self.step, self.total)
        stopwatch = Stopwatch(self.hardware.device)
        stopwatch.mark()
        loss = torch.zeros((), device=self.hardware.device)
        num_bytes = torch.zeros((), dtype=torch.int64, device=self.hardware.device)
        for micro_step in range(1, self.micro_steps + 1):
            batch = next(self.loader)
            stopwatch.mark()
            with self.parallelism.micro_step(self.wrapped, last=micro_step == self.micro_steps):
                micro_loss = (self.passes or self._make_pass)(batch.inputs, batch.targets, self._starts(batch))
            loss += micro_loss / self.micro_steps
            num_bytes += self.token_bytes[batch.targets].sum()
            stopwatch.mark()
            self.loader.prepare_next()  # while the device is busy
        stopwatch.mark()
        # Spike check and update.
        measured = is_due(self.step + 1, self.config.run.rms_every)
        grad_rms = self.rms.before() if measured else {}
        stopwatch.mark()
        skips, sigmas = self.config.optim.on_spike == "skip", self.config.optim.spike_sigmas
        spike = norm = None
        if skips:
            total = self.parallelism.total(loss.double().cpu())
            spike = self.watch.add(float(total) / self.parallelism.data_size, sigmas)
        if spike is None:
            if self.config.optim.clip_norm is not None:
                norm = quintic.clip_grad_norm_(self.optimizer, self.config.optim.clip_norm, scope="all")
            self.optimizer.step()
        stopwatch.mark()
        update_rms = self.rms.after() if measured else {}
        self.optimizer.zero_grad(set_to_none=self.passes is None)
        # Counters, times and record. Asking for the times waits for the device, for the first time in the step.
        self.step, self.score = self.step + 1, None
        batch_tokens = self.scale.batch_tokens
        self.tokens += batch_tokens
        # Each micro-step is a wait for data and a pass; one more wait, the gradients' sizes and the update follow.
        *passes, _, stepping = stopwatch.seconds()
        times = {"data": sum(passes[::2]), "forward_backward": sum(passes[1::2]), "optimizer": stepping}
        elapsed = sum(times.values())
        self.seconds += elapsed
        rate = self.matrix_rate * self.ranks.size
        sums = self.parallelism.total(torch.stack([loss.double(), num_bytes.double()]).cpu())
        nats, text_bytes = float(sums[0]) / self.parallelism.data_size, int(sums[1])
        if not skips:
            spike = self.watch.add(nats, sigmas)
        record = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "loss": nats,
            "bpb": bits_per_byte(nats * batch_tokens, max(1, text_bytes)),
            **settings,
            **({} if norm is None else {"grad_norm": float(norm)}),
            "smoothed_loss": self.watch.smoothed,
            "least_loss": self.watch.least,
            "epoch": batch.epoch,
            "flops": float(self.flops_per_token * self.tokens),
            "tokens_per_second": batch_tokens / elapsed,
            "mfu": self.flops_per_token * batch_tokens / elapsed / rate,
            "peak_memory_bytes": peak_memory_bytes(self.hardware.device, self.passes),
            "times_ms": {name: 1000 * value for name, value in times.items()},
        }
        if spike is not None:
            record |= {"spike": spike, "on_spike": self.config.optim.on_spike}
        if measured:
            record |= {"grad_rms": grad_rms, "update_rms": update_rms, "grad_norm": self.rms.grad_norm}
        return record

    def evaluate(self) -> dict[str, Any]:
        """Score the validation text and return the log's record."""
        batches = [replace(batch, document_starts=self._starts(batch)) for batch in self._own_batches()]
        sums = document_sums(
            self.wrapped,
            batches,
            self.dataset.tokenizer.token_bytes(),
            self.hardware.device,
            num_documents=self.dataset.split("val").num_documents,
        )
        sums = self.parallelism.total(sums.cpu())
        self.score = score_from_sums(sums)
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "loss": self.score.loss,
            "bpb": self.score.bpb,
            "bpb_stderr": self.score.bpb_stderr,
            "peak_memory_bytes": peak_memory_bytes(self.hardware.device, self.passes),
            **(document_groups(sums) if self.step == self.total else {}),
        }

    def answer_core(self) -> CoreScore:
        """Answer the tasks of CORE; all ranks must call it, and all get the same score. Needs `--core`."""
        assert self.suite is not None
        with torch.compiler.set_stance("force_eager"):  # the shape changes with every batch
            sums = core_sums(
                self.model,
                self.dataset.tokenizer,
                self.suite,
                self.hardware.device,
                max_tokens=self.model.config.seq_len,
                max_items=self.config.run.core_items,
                rows=self.rows,
                rank=self.parallelism.data_rank,
                world_size=self.parallelism.data_size,
            )
        return core_score(self.suite, self.parallelism.total(sums.cpu()))

    def sample(self) -> list[dict[str, str]]:
        """Return samples from the current weights."""
        prompts = self.config.run.prompts or default_prompts(self.config.data.data)
        with torch.compiler.set_stance("force_eager"):  # the shape changes with every token
            return sample_text(
                self.model,
                self.dataset.tokenizer,
                prompts,
                max_tokens=self.config.run.sample_tokens,
                temperature=0.0 if prompts == GENERAL_PROMPTS else 0.8,  # those prompts ask for facts
                seed=self.config.run.seed,
            )

    def finish(self) -> dict[str, Any]:
        """Return the final record without what `summarize_log` adds. Call `evaluate` first."""
        assert self.score is not None
        return {
            "step": self.step,
            "loss": self.score.loss,
            "bpb": self.score.bpb,
            "seconds": self.seconds,
            "baselines": self.ranks.from_rank0(lambda: reference_scores(self.dataset, self.validation)),
            "smoothed_loss": self.watch.smoothed,
            "least_loss": self.watch.least,
            "epochs": self.loader.epochs,
            "flops": float(self.flops_per_token * self.tokens),
            "compile_seconds": self._compile_seconds(),
        }

    def _compile_seconds(self) -> float:
        return self.compiled_before + (compile_seconds() if self.hardware.compile else 0.0)

    def describe(self) -> list[str]:
        """Describe text and plan in lines for the user."""
        summary = self.dataset.summary()
        optimizer = {"muon": "Muon", "adamw": "AdamW"}[self.config.optim.optimizer]
        passes, *warnings = reading_lines(self.total * self.scale.batch_tokens, summary["train_tokens"])
        return [
            f"Text: {summary['source']}, {summary['train_bytes'] / 1e6:.1f} MB to train on, "
            f"{summary['train_tokens'] / 1e6:.2f}M tokens of a {self.dataset.vocab_size:,}-token vocabulary",
            f"Plan: {passes} with {optimizer}; run folder {self.run_dir}",
            *warnings,
            *fp8_lines(self.fp8_layers),
        ]

    def facts(self) -> dict[str, Any]:
        """Return the fields of the log's `run` record."""
        parameters = self.model.num_parameters()
        return {
            "config": to_dict(self.config),
            "machine": {**machine_facts(self.hardware), "matrix_flops_per_second": self.matrix_rate},
            **code_facts(),
            "repeat": repeat_command(self.config, steps=self.total, **self.hardware.options()),
            "model": {
                "parameters": sum(parameters.values()),
                "matrix_parameters": parameters["blocks"],
                "flops_per_token": self.flops_per_token,
                "width": self.model.config.width,
                "heads": self.model.config.num_heads,
                **({"fp8_layers": fp8_lines(self.fp8_layers)} if self.fp8_layers else {}),
                **{f"parameters_{name}": count for name, count in parameters.items()},
            },
            "data": self.dataset.summary(),
            "total_steps": self.total,
            "ranks": self.ranks.size,
        }

    def _own_batches(self) -> list[Batch]:
        """Return this rank's validation batches, the same number on all ranks.

        Ranks with one batch less get a copy of the first with document starts as targets, which the score ignores.
        """
        rank, data_ranks = self.parallelism.data_rank, self.parallelism.data_size
        own = self.validation[rank::data_ranks]
        if len(own) < -(-len(self.validation) // data_ranks):
            first = self.validation[0]
            own.append(replace(first, targets=torch.full_like(first.targets, self.dataset.bos_id)))
        return own

    def _starts(self, batch: Batch) -> Tensor:
        """Return a batch's document starts, on the device if the attention reads them there."""
        # Each number of starts has a graph of its own.
        starts = (batch if self.passes is None else batch.padded()).document_starts
        if needs_document_starts(self.hardware.attention):
            starts = starts.to(self.hardware.device, non_blocking=True)
            # Their number changes with every batch, so compile once for any number.
            torch._dynamo.maybe_mark_dynamic(starts, 0)
        return starts
