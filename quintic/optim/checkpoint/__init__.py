"""State dicts: what is saved, what comes back, also of other optimizers, and which saved parameter is which."""
