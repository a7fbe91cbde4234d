"""State dicts: saving, loading, those of other optimizers, and the matching of saved parameters."""
