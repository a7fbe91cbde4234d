"""Assigns an algorithm and a view to every parameter of a model: classification, the registry of model families."""
