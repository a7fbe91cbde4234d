"""Saved state: what comes back, also of other optimizers."""
