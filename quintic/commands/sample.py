"""`quintic sample`: let a trained model write."""

from quintic.commands.inputs import trained_model
from quintic.commands.options import sample_options
from quintic.errors import ConfigError
from quintic.eval.generate import sample_text
from quintic.streams import say_waiting
from quintic.train.config import in_options

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = sample_options(arguments)
    trained = trained_model(options.runs_dir, options.run)
    count = len(options.prompts)
    say_waiting("Writing a sample" if count == 1 else f"Writing {count} samples")
    try:
        samples = sample_text(
            trained.model,
            trained.tokenizer,
            options.prompts,
            max_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
    except ValueError as error:
        raise ConfigError(in_options(error)) from None
    for sample in samples:
        print(f"{sample['prompt']}{sample['text']}\n")
    return 0
