"""`quintic train --preset speedrun`."""

from dataclasses import asdict, fields, replace

from quintic.speedrun.presets import FP8_FEATURES, SpeedrunOptions, preset, without
from quintic.speedrun.race import Race
from quintic.speedrun.run import train
from quintic.speedrun.shards import open_data
from quintic.train.config import BaseRunConfig, RunConfig
from quintic.train.distributed import Ranks, check_gpus
from quintic.train.hardware import choose_hardware, multiplies_fp8
from quintic.train.runs import run_folder

__all__ = ["speedrun"]


def speedrun(name: str, options: SpeedrunOptions, *, command: str, ranks: Ranks) -> None:
    """Run the race on all ranks, and print its result.

    Args:
        name: of the preset.
        options: those of the preset, with changes.
        command: the command line, for the log.
        ranks: the processes that train.
    """
    chosen = preset(name)
    track = ranks.agree(lambda: chosen.track.scaled(options.steps).validated(options.val_tokens))
    track = replace(track, eval_every=options.eval_every, pass_tokens=options.pass_tokens)
    model = ranks.agree(lambda: without(chosen.model, options.without))
    shared = {field.name: getattr(options, field.name) for field in fields(BaseRunConfig)}
    hardware = ranks.agree(lambda: choose_hardware(RunConfig(**shared)))
    ranks.agree(lambda: check_gpus(ranks, hardware.device))
    without_fp8 = (model.fp8_head or model.fp8_mlp) and not multiplies_fp8(hardware.device)
    if without_fp8:
        model = without(model, FP8_FEATURES)
    data = ranks.once_per_host(
        lambda: open_data(
            options.data,
            data_dir=options.data_dir,
            num_shards=options.shards,
            vocab_size=model.vocab_size,
            bos_id=model.bos_id,
            tokenizer=options.tokenizer,
        )
    )
    capture = options.capture and hardware.device.type == "cuda"
    race = ranks.agree(lambda: Race(track, model, data, hardware, ranks=ranks, seed=options.seed, capture=capture))
    run_dir = ranks.from_first(lambda: run_folder(options, name, {}))
    bits = "; nothing in 8 bits, for which it takes a GPU of compute capability 8.9" if without_fp8 else ""
    print(f"Computing on {ranks.size} x {hardware}{bits}; {track.steps:,} steps; run folder {run_dir}")
    facts = {"command": command, "config": {**asdict(options), "preset": name}}
    result = train(race, hardware, run_dir, facts=facts, warm_up=options.warm_up)
    per_byte = "" if result.bpb is None else f" ({result.bpb:.4f} bits per byte)"
    print(
        f"\nvalidation: {result.loss:.4f} nats per token{per_byte} after {result.seconds:.2f} s of training, "
        f"{1000 * result.seconds / track.steps:.2f} ms a step\nreport:     {run_dir / 'report.html'}"
    )
