"""Kernels of an orthogonalisation: scaling matrices to one norm, and products of batches of matrices."""
