"""The command line: `quintic train | compare | prepare | sample | eval | report | plan`.

How options are read is in `train/options.py`. Every mistake a user can mend ends as one line on standard error and
exit code 2; Ctrl-C, SIGTERM and SIGHUP during training save the run and exit with 130. Imports happen inside the
commands, so that `quintic --help` answers at once.
"""

import errno
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quintic.errors import ConfigError, QuinticError
from quintic.streams import complete_streams, drop_output

if TYPE_CHECKING:
    from quintic.data.dataset import Dataset
    from quintic.model.gpt import GPT
    from quintic.train.config import Config, DataConfig
    from quintic.train.loop import Result
    from quintic.train.options import Start

__all__ = ["main"]

# What the system refuses for reasons that lie with the disk and its permissions, not with this program.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})

_USAGE = """\
usage: quintic COMMAND [OPTIONS]

Train a GPT with the Muon optimizer, on a laptop or a GPU.

commands:
  train      prepare data if needed, train, evaluate, sample and write a report
  compare    train the same model with AdamW and with Muon, and draw both curves in one report
  prepare    only turn text into tokens
  sample     let a trained model write
  eval       score a trained model in bits per byte
  report     write report.html of a run again
  plan       show what the optimizer does to each kind of weight, without training

`quintic COMMAND --help` lists the options of a command with their defaults.
"""


# Comparing less with its checksums takes about a second at most, unless the disk is slow.
_LONG_CHECK_BYTES = 1 << 30

# Its number everywhere; Windows has no such signal, but the same exit code serves there.
_SIGPIPE = 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for input to be mended, 130 after Ctrl-C.

    141 says, as for other programs, that the reader of the output went away.
    """
    complete_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a reader that went away is an exception like any other
        return code
    except QuinticError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        return _fail(f"the package {error.name!r} is missing: install the harness with pip install 'quintic[train]'")
    except KeyboardInterrupt:
        print("\nquintic: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        drop_output()
        return 128 + _SIGPIPE
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        place = f"{error.filename}: " if error.filename is not None else ""
        code = _fail(f"{place}{error.strerror}; free some space, or choose another --runs-dir or --data-dir")
        try:
            sys.stdout.flush()
        except OSError:  # it was the output that could not be written
            drop_output()
        return code


def _run(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "compare": _compare,
        "prepare": _prepare,
        "sample": _sample,
        "eval": _eval,
        "report": _report,
        "plan": _plan,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        import quintic

        print(f"quintic {quintic.__version__}")
        return 0
    command = commands.get(arguments[0])
    if command is None:
        import difflib

        nearest = difflib.get_close_matches(arguments[0], commands, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(commands)}"
        raise ConfigError(f"unknown command {arguments[0]!r}: {hint}")
    _check_single_process()
    try:
        return command(arguments[1:])
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)


def _train(arguments: list[str]) -> int:
    from quintic.train.loop import Interrupted, train
    from quintic.train.runs import check_new_run, create_run, discard_unstarted

    start = _training_options(arguments, "train")
    config, run_dir = start.config, start.resumed
    _check_options(config)
    if run_dir is None:
        check_new_run(config)
    dataset = _prepared(config.data)
    if run_dir is None:
        # Text first: a source that cannot be used leaves no run behind.
        _check_text(config, dataset)
        run_dir = create_run(config)
    command = shlex.join(["quintic", "train", *arguments])
    try:
        result = train(config, dataset, run_dir, resume=start.resumed is not None, command=command)
    except Interrupted as stop:
        runs_dir = "" if config.run.runs_dir == Path("runs") else f" --runs-dir {shlex.quote(str(config.run.runs_dir))}"
        print(f"\n{stop}; continue with: quintic train --resume --run {run_dir.name}{runs_dir}")
        return 130
    except BaseException:
        if start.resumed is None:
            discard_unstarted(run_dir)
        raise
    _print_result(result)
    return 0


def _compare(arguments: list[str]) -> int:
    from quintic.train.compare import compare
    from quintic.train.loop import Interrupted

    start = _training_options(arguments, "compare")
    if start.resumed is not None:
        raise ConfigError("--resume: a comparison is trained from the beginning; use quintic train --resume")
    _check_options(start.config)
    dataset = _prepared(start.config.data)
    _check_text(start.config, dataset)
    try:
        print(compare(start.config, dataset, command=shlex.join(["quintic", "compare", *arguments])))
    except Interrupted as stop:
        print(f"\n{stop}; a comparison cannot be continued: start it again")
        return 130
    return 0


def _prepare(arguments: list[str]) -> int:
    from quintic.train.config import DataConfig
    from quintic.train.options import parse

    options = parse(DataConfig, arguments, "prepare", "Turn text into tokens.")
    # Asked whether the data is whole, the answer is no good when it was made anew first.
    dataset = _prepared(options, repair=not options.verify)
    summary = dataset.summary()
    for split in ("train", "val"):
        documents, tokens, size = (summary[f"{split}_{what}"] for what in ("documents", "tokens", "bytes"))
        print(
            f"{split:5}  {documents:>9,} documents  {tokens:>13,} tokens  {size / 1e6:>9.2f} MB  "
            f"{size / tokens:.2f} bytes per token"
        )
    print(f"ready: {dataset.path}")
    return 0


def _sample(arguments: list[str]) -> int:
    from quintic.eval.generate import sample_text
    from quintic.train.config import check_prompts
    from quintic.train.options import SampleOptions, parse

    options = parse(SampleOptions, arguments, "sample", "Let a trained model write.")
    if options.tokens < 1:
        raise ConfigError(f"--tokens {options.tokens}: must be at least 1")
    check_prompts(options.prompts)
    model, dataset, _ = _trained(options.runs_dir, options.run)
    try:
        samples = sample_text(
            model,
            dataset.tokenizer,
            options.prompts,
            max_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
    except ValueError as error:
        # The library speaks of its argument, the user of the option.
        raise ConfigError("--" + str(error).replace("_", "-").replace("=", " ", 1)) from None
    for sample in samples:
        print(f"{sample['prompt']}{sample['text']}\n")
    return 0


def _eval(arguments: list[str]) -> int:
    import dataclasses

    from quintic.data.loader import validation_rows
    from quintic.data.shards import SplitName
    from quintic.eval.reference import reference_scores
    from quintic.eval.score import score
    from quintic.train.options import EvalOptions, parse

    options = parse(EvalOptions, arguments, "eval", "Score a trained model in bits per byte.")
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError(f"--tokens {options.tokens}: must be at least 1")
    model, trained_on, config = _trained(options.runs_dir, options.run, options.device)
    _verify(trained_on, again=options.verify)  # its training text makes the bigram model
    dataset = trained_on
    splits: tuple[SplitName, ...] = ("val",)
    if options.data is not None:
        tokenizer = str(trained_on.path / "tokenizer.json")
        data = dataclasses.replace(config.data, data=options.data, tokenizer=tokenizer, verify=options.verify)
        dataset = _prepared(data)
        splits = ("train", "val")
    batches = validation_rows(
        dataset, rows=config.schedule.rows, seq_len=config.model.seq_len, max_tokens=options.tokens, splits=splits
    )
    result = score(model, batches, dataset.tokenizer.token_bytes(), model.head.weight.device)
    reference = reference_scores(trained_on, batches)
    print(f"{result.bpb:.4f} bits per byte ({result.loss:.4f} nats per token) over {result.num_bytes:,} bytes of text")
    print(f"for comparison: xz -9 {reference['xz_bpb']:.4f}, byte-bigram model {reference['bigram_bpb']:.4f}")
    return 0


def _report(arguments: list[str]) -> int:
    from quintic.train.options import ReportOptions, parse
    from quintic.train.report import write_report
    from quintic.train.runs import find_run

    options = parse(ReportOptions, arguments, "report", "Write report.html of a run again.")
    print(write_report(find_run(options.runs_dir, options.run)))
    return 0


def _plan(arguments: list[str]) -> int:
    from quintic.train.options import RehearsalOptions, asks_for_rehearsal, parse

    if asks_for_rehearsal(arguments):
        from quintic.train.rehearse import rehearsal_text

        description = "Show what the optimizer of any model does on any number of GPUs, without them."
        print(rehearsal_text(parse(RehearsalOptions, arguments, "plan", description)))
        return 0

    import torch

    from quintic.model.gpt import GPT
    from quintic.train.recipe import build_optimizer, model_config, total_steps

    start = _training_options(arguments, "plan")
    config = start.config
    with torch.device("meta"):
        model = GPT(model_config(config, vocab_size=config.data.vocab_size, bos_id=0))
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        parameters = sum(param.numel() for param in group["params"])
        names = f"{group['param_names'][0]}" + (f" (+{len(group['params']) - 1})" if len(group["params"]) > 1 else "")
        print(f"{group['name']:17} {group['algorithm']:6} lr {group['lr']:<9.5g} {parameters:>13,} parameters  {names}")
    print(f"\n{optimizer.plan()}\n")
    steps = total_steps(config, model)
    tokens = steps * config.schedule.batch_tokens
    print(
        f"{sum(model.num_parameters().values()):,} parameters; {steps:,} steps of {config.schedule.batch_tokens:,} "
        f"tokens, {tokens * model.flops_per_token():.3g} floating-point operations"
    )
    return 0


# -- pieces shared by the commands ------------------------------------------------------------------------------------


def _training_options(arguments: list[str], command: str) -> "Start":
    from quintic.train.options import training_options

    descriptions = {
        "train": "Train a GPT: prepare data if needed, train, evaluate, sample, write a report.",
        "compare": "Train the same GPT with AdamW and with Muon and compare their curves.",
        "plan": "Show what the optimizer does to each kind of weight, without training. For another model, on any "
        "number of GPUs: quintic plan --model NAME --help.",
    }
    extra = "The defaults suit the machine: a small model on a CPU, depth 12 on a GPU."
    return training_options(arguments, command=command, description=f"{descriptions[command]}\n\n{extra}")


def _prepared(data: "DataConfig", *, repair: bool = True) -> "Dataset":
    from quintic.data.shards import prepare

    shown = ""
    words = {
        "survey": "reading the text",
        "tokenizer": "making a tokenizer from it",
        "tokens": "turning it into tokens",
    }

    def progress(stage: str, done: int, total: int | None) -> None:
        nonlocal shown
        if stage != shown and stage in words:
            print(f"Preparing data: {words[stage]} ...", flush=True)
        shown = stage

    dataset = prepare(
        data.data,
        data_dir=data.data_dir,
        vocab_size=data.vocab_size,
        tokenizer=data.tokenizer,
        val_frac=data.val_frac,
        max_bytes=data.max_bytes,
        repair=repair,
        progress=progress,
    )
    _verify(dataset, again=data.verify)
    return dataset


def _verify(dataset: "Dataset", *, again: bool) -> None:
    def begin(num_bytes: int) -> None:
        if num_bytes >= _LONG_CHECK_BYTES:
            print(f"Checking data: {num_bytes / 1e9:.1f} GB of {dataset.path} ...", flush=True)

    dataset.verify(once=not again, begin=begin)


def _check_options(config: "Config") -> None:
    """Find what would stop a run whatever its text is, before any text is prepared."""
    from quintic.train.hardware import choose_hardware
    from quintic.train.loop import check_trackers
    from quintic.train.recipe import model_config

    choose_hardware(config.run)
    check_trackers(config.run)
    model_config(config, vocab_size=config.data.vocab_size, bos_id=0)


def _check_text(config: "Config", dataset: "Dataset") -> None:
    """Find whether there is text for a batch before the run's folder is made."""
    from quintic.data.loader import Loader, validation_rows

    rows, seq_len = config.schedule.rows, config.model.seq_len
    Loader(dataset, "train", rows=rows, seq_len=seq_len).close()
    validation_rows(dataset, rows=rows, seq_len=seq_len, max_tokens=rows * seq_len)


def _trained(
    runs_dir: Path, run: str | None, device: Literal["auto", "cpu", "cuda"] = "auto"
) -> "tuple[GPT, Dataset, Config]":
    """Return the model of a run with the weights of its newest good checkpoint, its data and its configuration."""
    import dataclasses

    from quintic.data.dataset import Dataset
    from quintic.train.checkpoint import load_model_weights, newest_checkpoint
    from quintic.train.config import load_config
    from quintic.train.hardware import choose_hardware
    from quintic.train.recipe import build_model, model_config
    from quintic.train.runs import CONFIG_FILE, find_run

    run_dir = find_run(runs_dir, run)
    config = load_config(run_dir / CONFIG_FILE)
    checkpoint = newest_checkpoint(run_dir, message=lambda text: print(text, file=sys.stderr))
    dataset = Dataset.open(checkpoint.state()["dataset"]["path"])
    # The precision of the training run, so that scores agree; not its attention, which may need another device.
    hardware = choose_hardware(dataclasses.replace(config.run, device=device, attention="auto"))
    sizes = model_config(config, vocab_size=dataset.vocab_size, bos_id=dataset.bos_id)
    model = build_model(
        sizes, device=hardware.device, dtype=hardware.dtype, attention=hardware.attention, seed=config.run.seed
    )
    load_model_weights(checkpoint, model)
    return model.eval(), dataset, config


def _print_result(result: "Result") -> None:
    for sample in result.samples:
        text = f"{sample['prompt']}{sample['text']}".rstrip()
        print(f"\n--- sample {'-' * 49}\n{text}")
    print(
        f"\nvalidation: {result.score.bpb:.4f} bits per byte after {result.seconds / 60:.1f} minutes of training "
        f"(xz -9 needs {result.baselines['xz_bpb']:.3f} for the same text, a byte-bigram model "
        f"{result.baselines['bigram_bpb']:.3f}; lower is better)"
    )
    print(f"report:     {result.report}")


def _check_single_process() -> None:
    text = os.environ.get("WORLD_SIZE", "").strip()
    try:
        size = int(text or "1")
    except ValueError:
        raise ConfigError(f"WORLD_SIZE {text!r} is not a number: unset it; this version trains on one device") from None
    if size > 1:
        raise ConfigError("this version trains on one device: start it without torchrun (WORLD_SIZE is above 1)")


def _fail(message: str) -> int:
    print(f"quintic: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
