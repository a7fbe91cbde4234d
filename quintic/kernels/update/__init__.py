"""Triton kernels of an optimizer step besides products: momentum, weights, AdamW, NorMuon's neuron factors."""
