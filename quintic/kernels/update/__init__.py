"""Momentum, weights, AdamW, neuron factors: the element-wise passes of a step."""
