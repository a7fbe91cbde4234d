"""`quintic export`: write a trained model as a folder for other libraries."""

from quintic.commands.inputs import trained_model
from quintic.commands.options import export_options
from quintic.errors import ConfigError
from quintic.eval.export import export_hf
from quintic.model.gpt import GPT
from quintic.train.runs import find_run

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = export_options(arguments)
    trained = trained_model(options.runs_dir, options.run, "cpu", step=options.step)
    if not isinstance(trained.model, GPT):
        raise ConfigError(
            "a speedrun's model cannot be exported: `modeling_quintic.py`, which transformers loads, has the code of "
            "ordinary runs alone; use `quintic sample` and `quintic eval`, or export a run of `quintic train`"
        )
    out = options.out or find_run(options.runs_dir, options.run) / options.to
    print(export_hf(trained.model, trained.tokenizer, out))
    return 0
