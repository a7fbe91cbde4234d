"""Orthogonalisation: methods, coefficients, products."""
