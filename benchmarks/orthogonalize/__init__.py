"""Orthogonalisation alone."""
