"""Reads what the weights of a model are from one forward pass on tensors without data."""
