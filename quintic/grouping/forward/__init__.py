"""Finds the role of each weight of a model by one forward pass on tensors without data."""
