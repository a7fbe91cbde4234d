"""State of other optimizers, imported into a `quintic.Muon`, and its state for PyTorch's optimizers."""

from quintic.interchange.exporting import export_torch_state
from quintic.interchange.importing import SecondMoments, Source, import_state, import_torch_state

__all__ = ["SecondMoments", "Source", "export_torch_state", "import_state", "import_torch_state"]
