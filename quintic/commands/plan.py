"""`quintic plan`: prints sizes, length, rates and memory of a training run, and the plan of its optimizer.

With `--model` it plans the optimizer's step for another model on any number of ranks instead (`quintic.simulate`).
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from quintic.commands.inputs import duration_lines
from quintic.commands.options import Start
from quintic.data.dataset import MANIFEST_NAME, Dataset
from quintic.data.hub import download
from quintic.data.tokenizer import Tokenizer
from quintic.durable import json_object
from quintic.kernels.attention.attention import needs_document_starts
from quintic.limits import option_of
from quintic.model.gpt import GPT
from quintic.optim.muon import Muon
from quintic.optim.state.placement import state_bytes
from quintic.simulate.memory import Parts, Settings, cheapest, gib, memory_table, memory_text, peak, setups_of
from quintic.simulate.options import SimulationOptions, size_in_bytes
from quintic.simulate.planned_models import is_on_hub
from quintic.simulate.table import simulation_text
from quintic.streams import say
from quintic.tables import output_width, with_name
from quintic.train.config import Config, DataConfig
from quintic.train.hardware import choose_hardware
from quintic.train.recipe import build_optimizer, empty_model, model_config, scale_lines
from quintic.train.runs import check_new_run
from quintic.train.saved_config import with_options
from quintic.train.schedule import reading_lines, scale_of

__all__ = ["run", "training_memory"]

_GPT2_VOCABULARY = 50_257

# Compiled? -> (values per token, layer and channel; values per token and channel once) that the forward pass keeps for
# the backward pass. Without compiling, counted in float32; compiled, from the peaks of depths 6 and 12 on an H200.
_KEPT = {False: (21, 4), True: (16, 8)}
# On a GPU, logits and their gradients exist in chunks of this size; on a CPU they are negligible.
_LOSS_CHUNK_BYTES = 2**28

# Options of a run that save memory, with their cost, from the cheapest to the costliest.
_SAVINGS: tuple[tuple[Settings, str], ...] = (
    ({"weights": "mantissa"}, "time"),
    ({"state_dtype": "bf16"}, "loss"),
    ({"state_dtype": "int8"}, "loss"),
    ({"weights": "8bit"}, "loss"),
)


def run(options: Start | SimulationOptions) -> int:
    """Run the command; return its exit code."""
    if isinstance(options, SimulationOptions):
        if is_on_hub(options.model):
            # Fetch the file first: if the Hub does not answer, this fails at once, transformers after minutes.
            download(options.model, "config.json", repo_type="model")
        print(simulation_text(options) if options.memory is None else memory_text(options))
        return 0
    config = options.config
    if options.resumed is None and options.given.get("run") is not None:
        check_new_run(config)  # else the user might take this for the plan of an existing run of that name
    on_gpu = options.preset in ("gpu-small", "gpu") or (torch.cuda.is_available() and config.run.device != "cpu")
    # The model on the meta device and its optimizer; nothing below allocates weights.
    dtype, why = _dtype(config, on_gpu)
    vocab_size, origin = planned_vocabulary(config.data)
    sizes = model_config(config, vocab_size=vocab_size, bos_id=0)

    def built(settings: Settings) -> tuple[GPT, Muon, int]:
        """Return model, optimizer and rows of the run with other values of some options."""
        other = with_options(config, **settings)
        model = empty_model(sizes, dtype=dtype, attention="sdpa", weights=other.optim.weights)
        return model, build_optimizer(model, other, on_gpu=on_gpu), other.schedule.rows

    model, optimizer, _ = built({})
    for note in options.notes:
        say(note)
    say(f"Vocabulary: {vocab_size:,} tokens, {origin}")
    say("\n".join(scale_lines(config, vocab_size=vocab_size)))
    scale = scale_of(config, sizes)
    if (text := prepared_text(config.data)) is not None:
        passes, *warnings = reading_lines(scale.steps * scale.batch_tokens, text.split("train").num_tokens)
        say("\n".join([f"Reading: {passes} as it was prepared in {text.path}", *warnings]))
    if torch.cuda.is_available() or not on_gpu or config.run.device == "cpu":  # else speed cannot be measured
        for line in duration_lines(config, sizes, choose_hardware(config.run)):
            say(line)
    # Precision and memory, then a line for each group, then the optimizer's plan.
    more_bits = {"float32": 0, "mantissa": 16, "8bit": 8}[config.optim.weights]
    weights = f"bfloat16 ({more_bits} more bits of each in the state)" if more_bits else "float32"
    say(f"Precision: {str(dtype).removeprefix('torch.')} activations{why}, {weights} weights")
    compiled = on_gpu if config.run.compile is None else config.run.compile
    attention = config.run.attention
    can_capture = dtype == torch.bfloat16 and (attention == "auto" or needs_document_starts(attention))
    captured = on_gpu and config.run.capture and can_capture

    def needs(settings: Settings) -> Parts:
        return training_memory(*built(settings), on_gpu=on_gpu, compiled=compiled, captured=captured)

    memory = needs({})
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items())
    last = (
        "graphs, which keep the activations, are estimated"
        if captured
        else "activations are estimated; only the larger one of the last two is needed at a time"
    )
    say(f"Memory: about {peak(memory) / 2**30:.2f} GiB ({parts}); the first three are exact, {last}\n")
    if (given := options.given.get("memory")) is not None:
        parameters = sum(param.numel() for param in model.parameters())
        say(f"{cheapest_options(config.schedule.rows, size_in_bytes(given), parameters, needs)}\n")
    for group in optimizer.param_groups:
        parameters = sum(param.numel() for param in group["params"])
        unit = "parameter " if parameters == 1 else "parameters"
        more = f" (+{len(group['params']) - 1})" if len(group["params"]) > 1 else ""
        line = f"{group['name']:16} {group['algorithm']:6} lr {group['lr']:<8.5g} {parameters:>12,} {unit}  "
        print(with_name(line, group["param_names"][0], more, output_width()))
    print(f"\n{optimizer.plan()}")
    return 0


def prepared_text(data: DataConfig) -> Dataset | None:
    """Return the newest prepared text that fits a run's options; None if no text fits."""
    settings: dict[str, float | str | None] = {"val_frac": data.val_frac, "max_bytes": data.max_bytes}
    if data.tokenizer is None:
        settings |= {"vocab_size": data.vocab_size, "tokenizer": None}
    elif Path(data.tokenizer).expanduser().exists():
        settings |= {"vocab_size": None, "tokenizer": Tokenizer.load(data.tokenizer).fingerprint()}
    else:  # a name such as gpt2, which has not been downloaded
        return None
    source = {"spec": data.data, "text_field": data.text_field, "val_data": data.val_data}
    manifests = data.data_dir.glob(f"*/{MANIFEST_NAME}")
    for path in sorted(manifests, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        # A folder of another tool, or a damaged manifest, lacks something.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            manifest = json_object(path)
            if settings.items() <= manifest["settings"].items() and source.items() <= manifest["source"].items():
                return Dataset.open(path.parent)
    return None


def planned_vocabulary(data: DataConfig) -> tuple[int, str]:
    """Return the size of the vocabulary that a run would have, and a phrase that tells where the number comes from.

    Downloads and prepares nothing: without a tokenizer file or prepared text it assumes `--vocab-size`.

    Raises:
        DataError: `--tokenizer` is not a tokenizer.
    """
    if data.tokenizer == "gpt2" and not Path("gpt2").exists():
        return _GPT2_VOCABULARY, "as gpt2 has (not downloaded)"
    if data.tokenizer is not None:
        return Tokenizer.load(data.tokenizer).vocab_size, f"read from {data.tokenizer}"
    if (text := prepared_text(data)) is not None:
        return text.vocab_size, f"read from {text.path}"
    return data.vocab_size, "assumed from --vocab-size: the text is not prepared yet, and a short text gives fewer"


def training_memory(
    model: GPT, optimizer: Muon, rows: int, *, on_gpu: bool, compiled: bool = False, captured: bool = False
) -> dict[str, int]:
    """Return the bytes that training needs on one device, by purpose; the model may be on the meta device.

    `weights`, `gradients` and `state` are exact; `activations`, of a pass over `rows`, is an estimate, within 10 %
    where it was measured; `step` is temporary memory of the optimizer's step. The last two never exist together, unless
    passes are captured: then activations are called `graphs`.
    """
    weights = sum(param.numel() * param.element_size() for param in model.parameters())
    state = sum(state_bytes(param, group) for group in optimizer._plans.current_groups() for param in group.params)
    # Activations, and with a narrower compute dtype the copies of the matrices in it.
    size = torch.empty((), dtype=model.compute_dtype).element_size()
    tokens = rows * model.config.seq_len
    per_layer, once = _KEPT[compiled]
    kept = tokens * model.config.width * size * (per_layer * model.config.depth + once)
    copies = model.config.matrix_weights() * size if size < 4 else 0
    return {
        "weights": weights,
        "gradients": weights,
        "state": state,
        "graphs" if captured else "activations": kept + copies + (_LOSS_CHUNK_BYTES if on_gpu else 0),
        "step": optimizer.plan().peak_workspace_bytes,
    }


def cheapest_options(rows: int, memory: int, parameters: int, needs: Callable[[Settings], Parts]) -> str:
    """Return a table of the memory of a run with more and more options that save some, and the cheapest that fit.

    `memory` is the device's, in bytes, and `needs` returns the run's with some options.
    """

    def name(settings: Settings) -> str:
        return " ".join(f"{option_of(name)} {value}" for name, value in settings.items())

    # Fewer rows at a time, in more passes: divisors, so that the batch is still a multiple.
    fewer = [some for some in range(rows - 1, 0, -1) if rows % some == 0]
    savings: list[tuple[Settings, str]] = []
    for settings, cost in (*_SAVINGS, *(({"rows": some}, "time") for some in fewer)):
        # Some values of other options exclude bfloat16 state, as the configuration or the optimizer says.
        with contextlib.suppress(ValueError):
            needs(settings)
            savings.append((settings, cost))
    setups = setups_of(savings, needs)
    lines = [
        f"Into {gib(memory)} GiB; the table has GiB, each line with the options above it:\n",
        memory_table(setups, memory, parameters, "these options", name),
    ]
    best = cheapest(setups, needs, memory)
    if best is None:
        return "\n".join([*lines, "\nNone of these fits: a smaller --depth or --seq-len needs less."])
    options = name(best.settings) or "these options"
    return "\n".join([*lines, f"\nCheapest that fits, with {gib(peak(best.parts))} GiB: {options}"])


def _dtype(config: Config, on_gpu: bool) -> tuple[torch.dtype, str]:
    """Return the activations' dtype, and the reason for it if `--dtype` is auto."""
    if config.run.dtype != "auto":
        return (torch.bfloat16 if config.run.dtype == "bfloat16" else torch.float32), ""
    if on_gpu and not torch.cuda.is_available():
        return torch.bfloat16, " (as on GPUs since 2020)"
    return choose_hardware(config.run).dtype, " (fastest here)"
