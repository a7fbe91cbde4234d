"""`quintic export`: writes a trained model as a folder for other libraries."""

from quintic.commands.inputs import trained_model
from quintic.commands.options import ExportOptions
from quintic.eval.export import export_hf
from quintic.train.runs import find_run

__all__ = ["run"]


def run(options: ExportOptions) -> int:
    """Run the command; return its exit code."""
    trained = trained_model(options, "cpu")
    out = options.out or find_run(options.runs_dir, options.run, allow_speedrun=True) / options.to
    folder = export_hf(trained.model, trained.tokenizer, out)
    trained.say_origin()
    print(folder)
    return 0
