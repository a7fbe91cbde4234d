"""Triton kernels of an optimizer step besides products: momentum, weights, AdamW, sums of squares, neuron factors."""
